"""Real machines of images that are asked for by name."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.support.drivers import bounded, code_of, run_program
from tests.support.qemu import QemuKit, need_qemu
from torpor_contracts.session import MachineSpec
from torpor_vm_host.images.builder import NAMES
from torpor_vm_host.images.library import cache_home, default_library
from torpor_vm_host.images.naming import Named, Names


@pytest.fixture
def kit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[QemuKit]:
    """A host with a cache of its own, in which are the user's built images and templates and nothing has a name."""
    need_qemu()
    users = cache_home()
    (tmp_path / "cache/images").mkdir(parents=True)
    for folder in (users / "images").glob("default-*"):
        (tmp_path / "cache/images" / folder.name).symlink_to(folder)
    (users / "templates").mkdir(exist_ok=True)
    (tmp_path / "cache/templates").symlink_to(users / "templates")
    monkeypatch.setenv("TORPOR_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "host").mkdir()
    made = QemuKit(tmp_path / "host")
    yield made
    made.clean_up()


def test_a_name_given_to_an_image_starts_machines_of_it_at_once(kit: QemuKit) -> None:
    async def scenario() -> None:
        library, driver = default_library(), kit.driver()
        spec = kit.spec(machine=MachineSpec(image="mine"))
        assert await code_of(driver.start(spec, None)) == "image-unknown"
        image = library.find("default")
        assert image is not None
        Names(library.cache / NAMES).give("mine", Named(folder=image.folder.name, recipe="/mine/recipe.toml"))
        await driver.start(spec, None)
        _, taking = await run_program(driver, spec.vm_id, "cat", "/etc/os-release")
        assert image.info.suite.encode() in taking.stdout
        await driver.destroy(spec.vm_id)

    bounded(scenario)


def test_an_image_that_is_not_built_is_refused_with_what_to_do(
    kit: QemuKit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipes = tmp_path / "recipes"
    for name, text in {"default": 'packages = ["python3"]', "other": 'base = "default"'}.items():
        (recipes / name).mkdir(parents=True)
        (recipes / name / "recipe.toml").write_text(f'name = "{name}"\n{text}\n')
    driver = kit.driver()
    monkeypatch.setenv("TORPOR_IMAGES_DIR", str(recipes))
    unbuilt = kit.driver()

    async def scenario() -> None:
        assert await code_of(unbuilt.start(kit.spec(machine=MachineSpec(image="other")), None)) == "image-not-built"
        spec = kit.spec(machine=msgspec.structs.replace(MachineSpec(), disk_mib=100))
        assert await code_of(driver.start(spec, None)) == "machine-refused"

    bounded(scenario)
