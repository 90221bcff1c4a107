"""Signed notes and checkpoints: the published vectors to the byte, and what is refused."""

import stat
from pathlib import Path
from typing import Final

import pytest

from torpor_eventlog.failures import LogUnusable
from torpor_eventlog.merkle import EMPTY_ROOT
from torpor_eventlog.notes import NoteRefused, SigningKey, VerifierKey
from torpor_eventlog.port import Head

# Published vectors: the example of c2sp.org/signed-note, and those of golang.org/x/mod/sumdb/note.
C2SP_KEY: Final = "example.com/foo+530d903a+AekyeRrm56hApGFkyQR4ZCbV54Id2LKaANYcrnKv3U2k"
C2SP_NOTE: Final = (
    "This is an example message.\n\n\u2014 example.com/foo "
    "Uw2QOkn8srV1yJGh2VYRlL1Tnagv1YEq6TfXppzi2ONncAlTgK7Ztg1ERYNZXsYjOBH3mFXmRKuwHjG1Yu72IneyaQM=\n"
)
GO_PRIVATE: Final = "PRIVATE+KEY+PeterNeumann+c74f20a3+AYEKFALVFGyNhPJEMzD1QIDr+Y7hfZx09iUvxdXHKDFz"
GO_PUBLIC: Final = "PeterNeumann+c74f20a3+ARpc2QcUPDhMQegwxbzhKqiBfsVkmqq/LDE4izWy10TW"
GO_TEXT: Final = "If you think cryptography is the answer to your problem,\nthen you don't know what your problem is.\n"
GO_SIGNATURE: Final = (
    "\u2014 PeterNeumann x08go/ZJkuBS9UG/SffcvIAQxVBtiFupLLr8pAcElZInNIuGUgYN1FFYC2pZSNXgKvqfqdngotpRZb6KE6RyyBwJnAM=\n"
)
ANOTHER_SIGNATURE: Final = (
    "\u2014 EnochRoot rwz+eBzmZa0SO3NbfRGzPCpDckykFXSdeX+MNtCOXm2/5n2tiOHp+vAF1aGrQ5ovTG01oOTGwnWLox33WWd1RvMc+QQ=\n"
)

NAME: Final = "torpor.example/log"
HEAD: Final = Head(position=7, digest=bytes(32), root=bytes(range(32)))


@pytest.fixture
def key() -> SigningKey:
    return SigningKey(NAME, bytes(range(32)))


def test_the_published_note_of_the_specification_opens() -> None:
    verifier = VerifierKey.parse(C2SP_KEY)
    assert str(verifier) == C2SP_KEY
    assert verifier.open(C2SP_NOTE) == "This is an example message.\n"


def test_the_published_key_signs_to_the_byte() -> None:
    signer = SigningKey.parse(GO_PRIVATE)
    assert str(signer.verifier) == GO_PUBLIC
    assert signer.sign(GO_TEXT) == GO_TEXT + "\n" + GO_SIGNATURE


def test_signatures_of_other_keys_are_ignored() -> None:
    note = GO_TEXT + "\n" + ANOTHER_SIGNATURE + GO_SIGNATURE
    assert VerifierKey.parse(GO_PUBLIC).open(note) == GO_TEXT


def test_a_checkpoint_says_origin_size_and_root(key: SigningKey) -> None:
    note = key.sign_checkpoint(HEAD)
    assert note.startswith(f"{NAME}\n7\nAAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=\n\n\u2014 {NAME} ")
    assert key.verifier.open_checkpoint(note) == (7, HEAD.root)


def test_the_head_of_an_empty_log_can_be_signed(key: SigningKey) -> None:
    note = key.sign_checkpoint(Head(position=0, digest=bytes(32), root=EMPTY_ROOT))
    assert key.verifier.open_checkpoint(note) == (0, EMPTY_ROOT)


def test_the_public_key_alone_verifies(key: SigningKey) -> None:
    public = VerifierKey.parse(str(key.verifier))
    assert public.open_checkpoint(key.sign_checkpoint(HEAD)).size == HEAD.position


def test_every_changed_character_is_found(key: SigningKey) -> None:
    note = key.sign_checkpoint(HEAD)
    for at, character in enumerate(note):
        for other in {"8", "Q", "R", "S", "T", "=", "\n", chr(ord(character) ^ 1)} - {character}:
            with pytest.raises(NoteRefused):
                key.verifier.open_checkpoint(note[:at] + other + note[at + 1 :])


def test_every_missing_or_doubled_character_is_found(key: SigningKey) -> None:
    note = key.sign_checkpoint(HEAD)
    for at in range(len(note)):
        for changed in (note[:at] + note[at + 1 :], note[:at] + note[at] + note[at:]):
            if changed == note:
                continue
            with pytest.raises(NoteRefused):
                key.verifier.open_checkpoint(changed)


def test_another_key_of_the_same_name_is_refused(key: SigningKey) -> None:
    other = SigningKey(NAME, bytes(32))
    with pytest.raises(NoteRefused, match="0 signatures"):
        key.verifier.open_checkpoint(other.sign_checkpoint(HEAD))


def test_a_key_cannot_speak_for_another_log(key: SigningKey) -> None:
    foreign = key.sign("other.example/log\n7\nAAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=\n")
    with pytest.raises(NoteRefused, match="no checkpoint of"):
        key.verifier.open_checkpoint(foreign)


@pytest.mark.parametrize(
    "text",
    [
        f"{NAME}\n07\nAAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=\n",
        f"{NAME}\n-7\nAAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=\n",
        f"{NAME}\n7\n",
        f"{NAME}\n7\nAAAA\n",
        f"{NAME}\n7\nno base64!\n",
        f"{NAME}\n7\nAAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=\n\nextension\n",
        "\n7\nAAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=\n",
    ],
)
def test_what_is_signed_but_no_checkpoint_is_refused(key: SigningKey, text: str) -> None:
    with pytest.raises(NoteRefused):
        key.verifier.open_checkpoint(key.sign(text))


@pytest.mark.parametrize(
    "note", ["", "\n\n", "no signature\n", "text\n\nno signature line\n", "a\x07\n\n" + GO_SIGNATURE]
)
def test_what_is_no_note_is_refused(key: SigningKey, note: str) -> None:
    with pytest.raises(NoteRefused):
        key.verifier.open(note)


def test_a_note_without_end_is_refused(key: SigningKey) -> None:
    with pytest.raises(NoteRefused, match="characters"):
        key.verifier.open("x" * 100_000 + "\n\n" + GO_SIGNATURE)


@pytest.mark.parametrize("name", ["", "two words", "a+b", "tab\tbed", "thin\u2009space", "x" * 256])
def test_names_that_would_break_the_format_are_refused(name: str) -> None:
    with pytest.raises(NoteRefused, match="no key name"):
        SigningKey.generate(name)


@pytest.mark.parametrize(
    "text",
    ["", "name", "name+12345678", "name+12345678+AAAA", GO_PUBLIC.replace("c74f", "c74e"), GO_PUBLIC[:-4], "a+b+!"],
)
def test_a_changed_public_key_is_refused(text: str) -> None:
    with pytest.raises(NoteRefused):
        VerifierKey.parse(text)


def test_a_key_is_kept_for_its_user_only(tmp_path: Path) -> None:
    path = tmp_path / "log.key"
    key = SigningKey.load_or_generate(path, NAME)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert str(SigningKey.load_or_generate(path, "another name is not asked").verifier) == str(key.verifier)
    assert [found.name for found in tmp_path.iterdir()] == ["log.key"]


def test_a_key_is_never_written_over(tmp_path: Path, key: SigningKey) -> None:
    key.save(tmp_path / "log.key")
    with pytest.raises(FileExistsError):
        SigningKey.generate(NAME).save(tmp_path / "log.key")
    assert str(SigningKey.load(tmp_path / "log.key").verifier) == str(key.verifier)


def test_a_key_that_others_may_read_is_refused_with_what_to_do(tmp_path: Path, key: SigningKey) -> None:
    path = tmp_path / "log.key"
    key.save(path)
    path.chmod(0o640)
    with pytest.raises(LogUnusable, match="chmod 600") as refused:
        SigningKey.load(path)
    assert refused.value.code == "signing-key-exposed"


@pytest.mark.parametrize("text", ["", "no key", GO_PRIVATE[:-8], GO_PRIVATE.replace("c74f", "c74e")])
def test_a_file_that_is_no_key_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "log.key"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(LogUnusable) as refused:
        SigningKey.load(path)
    assert refused.value.code == "signing-key-illegal"


def test_a_missing_key_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LogUnusable) as refused:
        SigningKey.load(tmp_path / "none.key")
    assert refused.value.code == "signing-key-unreadable"
