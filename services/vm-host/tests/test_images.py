"""Guest images: recipes and what is wrong with them, the cache, names, and builds that fail, race or are killed."""

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import torpor_guest_agent
from tests.support.image_tools import ImageTools
from torpor_contracts.errors import Rejected
from torpor_vm_host.images.builder import DEFAULT, Image, ImageLibrary
from torpor_vm_host.images.distribution import find_distribution
from torpor_vm_host.images.library import meant
from torpor_vm_host.images.listing import listed

pytestmark = pytest.mark.skipif(
    not all(shutil.which(tool) for tool in ("mke2fs", "dpkg-deb")), reason="needs e2fsprogs and dpkg"
)
AGENT = Path(torpor_guest_agent.__file__).parent
BASE = 'name = "default"\npackages = ["python3"]\ndisk_mib = 64\n'
MINE = 'name = "mine"\nbase = "default"\ndisk_mib = 64\n'
WHILE = "in ext2 filesystem while populating file system"
MANY = 40
BUILD = """
import sys
from pathlib import Path
from torpor_vm_host.images.builder import ImageLibrary
recipes, cache, agent, recipe = map(Path, sys.argv[1:])
ImageLibrary(recipes, cache, agent).build(recipe, lambda step: print(step, flush=True))
"""


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ImageTools:
    made = ImageTools(tmp_path / "tools")
    monkeypatch.setenv("PATH", made.path)
    return made


@pytest.fixture
def library(tmp_path: Path, tools: ImageTools) -> ImageLibrary:
    (tmp_path / "recipes/default").mkdir(parents=True)
    (tmp_path / "recipes/default/recipe.toml").write_text(BASE)
    return ImageLibrary(tmp_path / "recipes", tmp_path / "cache", AGENT)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/a file").write_text("hello")
    path = tmp_path / "mine/recipe.toml"
    path.write_text(MINE)
    return path


def build(library: ImageLibrary, recipe: str | Path = "default") -> Image:
    return library.build(recipe, lambda _: None)


def refused(library: ImageLibrary, recipe: str | Path) -> Rejected:
    with pytest.raises(Rejected) as refusal:
        build(library, recipe)
    assert refusal.value.advice
    left = {path.name for path in library.cache.glob("*")} if library.cache.exists() else set()
    assert left <= {".lock"}, "nothing half-built is left"
    return refusal.value


def content(image: Image, path: str) -> str:
    said = subprocess.run(
        ["debugfs", "-R", f'cat "{path}"', image.rootfs], capture_output=True, text=True, check=True, timeout=20
    )
    return said.stdout


def test_an_image_is_built_once(library: ImageLibrary, tools: ImageTools) -> None:
    told: list[str] = []
    image = library.build("default", told.append)
    assert told[0].startswith("image default: ")
    assert "ready" in told[-1]
    assert all(path.stat().st_mode & 0o222 == 0 for path in (image.kernel, image.initrd, image.rootfs))
    told.clear()
    assert library.build("default", told.append) == image
    assert (told, tools.count, library.built()) == ([], 1, [image.info])


def test_it_has_the_files_and_what_the_commands_made(library: ImageLibrary, recipe: Path) -> None:
    recipe.write_text(
        MINE
        + """commands = ["echo 'it''s done' > etc/done"]
[[files]]
source = "a file"
target = "/opt/my tools/it's a file"
mode = "0755"
"""
    )
    image = build(library, recipe)
    assert content(image, "/etc/done") == "its done\n"
    assert content(image, "/opt/my tools/it's a file") == "hello"


def test_a_change_of_anything_makes_another_image(library: ImageLibrary, recipe: Path, tools: ImageTools) -> None:
    recipe.write_text(MINE + '[[files]]\nsource = "a file"\ntarget = "/a"\n')
    keys = [build(library, recipe).info.key]
    (recipe.parent / "a file").write_text("other")
    keys.append(build(library, recipe).info.key)
    recipe.write_text(recipe.read_text().replace("/a", "/b"))
    keys.append(build(library, recipe).info.key)
    below = library.recipe_named("default")
    below.write_text(BASE + 'commands = ["true"]\n')
    keys.append(build(library, recipe).info.key)
    assert (len(set(keys)), tools.count, len(library.built())) == (4, 4, 4)
    below.write_text(BASE)
    assert build(library, recipe).info.key == keys[2]
    assert tools.count == 4


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (MINE + "packges = []\n", "packges"),
        (MINE + "packages = 3\n", "packages"),
        (MINE + 'packages = ["a b; rm -rf /"]\n', "a b; rm -rf /"),
        (MINE + "disk_mib = \n", "Invalid value"),
        ("packages = []\n", "name"),
        ('name = "../mine"\nbase = "default"\n', "../mine"),
        ('name = "mine"\npackages = ["bash"]\n', "python3"),
        ('name = "mine"\nbase = "defautl"\n', "defautl"),
        ('name = "mine"\nbase = "default"\ndisk_mib = 1\n', "disk_mib"),
        ('name = "default"\nbase = "default"\n', "default"),
        (MINE + '[[files]]\nsource = "none"\ntarget = "/a"\n', "none"),
        (MINE + '[[files]]\nsource = "../../../etc/passwd"\ntarget = "/a"\n', "passwd"),
        (MINE + '[[files]]\nsource = "a file"\ntarget = "a"\n', "target 'a'"),
        (MINE + '[[files]]\nsource = "a file"\ntarget = "/../a"\n', "/../a"),
        (MINE + '[[files]]\nsource = "a file"\ntarget = "/a"\nmode = "rwx"\n', "rwx"),
        (MINE + 'commands = ["a\\u0000b"]\n', "commands"),
    ],
)
def test_a_malformed_recipe_is_refused_and_says_what_is_wrong(
    library: ImageLibrary, recipe: Path, tools: ImageTools, text: str, said: str
) -> None:
    recipe.write_text(text)
    refusal = refused(library, recipe)
    assert refusal.code == "malformed-recipe"
    assert said in refusal.message
    assert tools.count == 0


def test_a_recipe_that_is_not_there_is_refused(library: ImageLibrary, tmp_path: Path) -> None:
    assert refused(library, tmp_path / "none.toml").code == "malformed-recipe"
    assert refused(library, tmp_path).code == "malformed-recipe"
    assert refused(library, "none").code == "unknown-image"
    assert "default" in refused(library, "none").advice


def test_recipes_on_each_other_without_end_are_refused(library: ImageLibrary) -> None:
    library.recipe_named("default").write_text('name = "default"\nbase = "default"\n')
    assert refused(library, "default").code == "malformed-recipe"


def test_a_package_that_nobody_knows_is_found_before_anything_is_fetched(
    library: ImageLibrary, recipe: Path, tools: ImageTools
) -> None:
    recipe.write_text(MINE + 'packages = ["jq", "no-such", "no-other"]\n')
    refusal = refused(library, recipe)
    assert (refusal.code, tools.count) == ("image-package-unknown", 0)
    assert "no-other, no-such" in refusal.message
    assert "jq" not in refusal.message


def test_a_command_that_fails_is_named_with_what_it_said(library: ImageLibrary, recipe: Path) -> None:
    recipe.write_text(MINE + 'commands = ["true", "echo about to; false; echo not reached", "true"]\n')
    refusal = refused(library, recipe)
    assert refusal.code == "image-command-failed"
    assert "command 2 of mine ended with 1" in refusal.message
    assert refusal.message.endswith("about to")


def test_a_file_that_cannot_be_put_in_place_is_named(library: ImageLibrary, recipe: Path) -> None:
    recipe.write_text(MINE + '[[files]]\nsource = "a file"\ntarget = "/etc"\n')
    refusal = refused(library, recipe)
    assert refusal.code == "image-file-failed"
    assert "a file cannot be put at /etc" in refusal.message


@pytest.mark.parametrize(
    ("said", "code"),
    [
        ("E: Unable to locate package foo\nE: apt-get failed: process exited with 100", "image-package-unknown"),
        ("E: Package 'foo' has no installation candidate", "image-package-unknown"),
        ("dpkg: error: failed to write to '/x': No space left on device\nE: run_chroot failed", "image-no-space"),
        ("Err:1 Could not resolve 'mirror'\nE: Failed to fetch x", "image-packages-unreachable"),
        (f"mke2fs: Could not allocate block {WHILE}\ntorpor: the file system cannot be made", "image-disk-too-small"),
        ("E: something new", "image-build-failed"),
    ],
)
def test_what_mmdebstrap_says_becomes_a_typed_error(
    library: ImageLibrary, tools: ImageTools, said: str, code: str
) -> None:
    tools.says.write_text(said + "\n")
    assert refused(library, "default").code == code
    tools.says.unlink()
    assert build(library).rootfs.is_file()


def test_lacking_tools_are_named_as_packages(library: ImageLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    refusal = refused(library, "default")
    assert refusal.code == "image-tools-missing"
    assert "apt-get install dpkg" not in refusal.advice
    assert {"mmdebstrap", "e2fsprogs"} <= set(refusal.message.replace(",", "").split())
    assert "doctor --fix" in refusal.advice


def test_a_full_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: ImageLibrary) -> None:
    tools = ImageTools(tmp_path / "large", busybox_bytes=2 * 2**20)
    monkeypatch.setenv("PATH", tools.path)
    library.cache.mkdir()
    mount = ["/bin/mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(library.cache)]
    if subprocess.run(mount, check=False, capture_output=True).returncode != 0:
        pytest.skip("mounting a small file system needs root")
    try:
        refusal = refused(library, "default")
        assert refusal.code == "image-no-space" or "No space left" in refusal.message, refusal
        assert library.built() == []
    finally:
        subprocess.run(["/bin/umount", library.cache], check=True)


def test_two_builders_at_once_build_once(library: ImageLibrary, tools: ImageTools) -> None:
    os.mkfifo(tools.hold)
    told: list[str] = []
    waiting = threading.Event()

    def tell(step: str) -> None:
        told.append(step)
        if "waiting for it" in step:
            waiting.set()

    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(library.build, "default", tell) for _ in range(2)]
        assert waiting.wait(20)
        tools.hold.write_text("go on\n")
        first, second = (one.result(timeout=20) for one in both)
    assert (first, tools.count) == (second, 1)


@pytest.fixture
def builder(library: ImageLibrary, tools: ImageTools, recipe: Path) -> Iterator["subprocess.Popen[str]"]:
    """A process in the middle of a build."""
    os.mkfifo(tools.hold)
    places = (recipe.parent.parent / "recipes", library.cache, AGENT, recipe)
    process = subprocess.Popen([sys.executable, "-c", BUILD, *places], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert any("running apt-get update" in line for line in process.stdout)
    yield process
    process.kill()
    process.communicate()


def test_a_killed_builder_leaves_nothing_that_counts_and_nothing_that_runs(
    library: ImageLibrary, tools: ImageTools, recipe: Path, builder: "subprocess.Popen[str]"
) -> None:
    assert list(library.cache.glob(".building-*"))
    builder.send_signal(signal.SIGKILL)
    builder.wait(20)
    assert (library.built(), library.find(recipe)) == ([], None)
    # Nobody reads the FIFO any more: the child of the killed one died with it.
    for _ in range(MANY):
        try:
            os.close(os.open(tools.hold, os.O_WRONLY | os.O_NONBLOCK))
        except OSError:
            break
        threading.Event().wait(0.25)
    else:
        pytest.fail("mmdebstrap runs on")
    tools.hold.unlink()
    image = build(library, recipe)
    assert {path.name for path in library.cache.iterdir()} == {".lock", "names", image.folder.name}


def test_a_damaged_image_is_built_anew(library: ImageLibrary) -> None:
    image = build(library)
    (image.folder / "image.json").unlink()
    (image.folder / "image.json").write_text("{")
    assert library.built() == []
    assert library.find("default") is None
    assert build(library).info.key == image.info.key


def test_an_image_of_a_file_can_be_asked_for_by_its_name(library: ImageLibrary, recipe: Path) -> None:
    with pytest.raises(Rejected, match="unknown-image"):
        library.to_start_from("mine", lambda _: None)
    first = build(library, recipe)
    assert library.to_start_from("mine", lambda _: None) == first
    before = library.version("mine")
    recipe.write_text(MINE + 'commands = ["echo 2 > etc/2"]\n')
    assert library.to_start_from("mine", lambda _: None) == first
    assert [(one.name, one.state) for one in listed(library)] == [("default", "not built"), ("mine", "changed")]
    second = build(library, "mine")
    assert second.info.key != first.info.key
    assert library.to_start_from("mine", lambda _: None) == second
    assert library.version("mine") != before
    assert [(one.name, one.state) for one in listed(library)] == [
        ("default", "not built"),
        ("mine", "ready"),
        ("mine", "superseded"),
    ]


def test_a_start_builds_the_default_image_and_no_other(
    library: ImageLibrary, tools: ImageTools, tmp_path: Path
) -> None:
    (tmp_path / "recipes/other").mkdir()
    other = tmp_path / "recipes/other/recipe.toml"
    other.write_text('name = "other"\nbase = "default"\n')
    with pytest.raises(Rejected, match=r"image-not-built.*torpor image build other"):
        library.to_start_from("other", lambda _: None)
    assert tools.count == 0
    library.to_start_from(DEFAULT, lambda _: None)
    assert tools.count == 1
    other.write_text('name = "else"\n')
    with pytest.raises(Rejected, match="name it as its folder"):
        library.find("other")
    assert {(one.name, one.state) for one in listed(library)} == {("default", "ready"), ("other", "unsound")}


@pytest.mark.parametrize("name", ["..", ".", "a/b", "", "A", "none", "a" * 100])
def test_an_unknown_name_is_refused_with_those_that_are_known(library: ImageLibrary, name: str) -> None:
    with pytest.raises(Rejected, match="known images: default") as refusal:
        library.to_start_from(name, lambda _: None)
    assert refusal.value.code == "unknown-image"


def test_what_a_user_means_by_a_recipe(tmp_path: Path) -> None:
    assert meant("default") == "default"
    assert meant("my.toml") == Path("my.toml")
    assert meant(str(tmp_path)) == tmp_path / "recipe.toml"
    assert meant("./mine") == Path("mine")


def test_the_distribution_is_that_of_the_machine(tmp_path: Path) -> None:
    release = tmp_path / "os-release"
    release.write_text('ID=ubuntu\nVERSION_CODENAME="noble"\n')
    found = find_distribution(release)
    assert (found.suite, found.kernel, found.modules_apart) == ("noble", "linux-image-virtual", True)
    for text in ("ID=fedora\n", "ID=debian\nPRETTY_NAME=sid\n"):
        release.write_text(text)
        with pytest.raises(Rejected, match="image-build-unsupported"):
            find_distribution(release)
    with pytest.raises(Rejected, match="image-build-unsupported"):
        find_distribution(tmp_path / "none")
