"""Signed heads of the log as C2SP checkpoints: who signs, what the text looks like, and how anybody verifies it.

Formats, to the byte: c2sp.org/signed-note (the envelope, keys and key ids) and c2sp.org/tlog-checkpoint (the text).
The log's origin is its key's name. Only Ed25519 signatures, algorithm byte 0x01, are made and counted.
"""

import base64
import binascii
import os
import re
from contextlib import suppress
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from torpor_contracts.errors import TorporError
from torpor_eventlog.failures import LogUnusable
from torpor_eventlog.port import Head

if TYPE_CHECKING:  # imported where it is used: it is large, and most services never sign or verify
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

NOTE_CHARS_MAX: Final = 64 * 1024
"""The longest note that is looked at."""

SIGNATURES_MAX: Final = 100

_ED25519: Final = b"\x01"
_PRIVATE: Final = "PRIVATE+KEY+"
_KEY_ID_BYTES: Final = 4
_SEED_BYTES: Final = 32
_SIGNATURE_BYTES: Final = 64
_ROOT_BYTES: Final = 32
_NAME: Final = re.compile(r"[^\s+]{1,255}")
_SIZE: Final = re.compile(r"0|[1-9][0-9]{0,18}")
_SIGNATURE_LINE: Final = re.compile(r"\u2014 ([^\s+]+) ([A-Za-z0-9+/]+={0,2})")
_SECRET_MODE: Final = 0o600
_OTHERS: Final = 0o077


class NoteRefused(TorporError):  # noqa: N818  (a finding, as the errors of `torpor_contracts` are named)
    """The text is no note that this key has signed, or no checkpoint; `str(error)` says which."""


class SignedSizeAndRoot(NamedTuple):
    """What a checkpoint says: the log's first `size` rows have this Merkle root."""

    size: int
    root: bytes


class VerifierKey:
    """The public half: a name, and a key that makes its signatures checkable by anybody."""

    def __init__(self, name: str, public: bytes) -> None:
        if _NAME.fullmatch(name) is None:
            raise NoteRefused(f"{name[:80]!r} is no key name: no spaces, no plus, at most 255 characters")
        if len(public) != _SEED_BYTES:
            raise NoteRefused(f"an Ed25519 public key has {_SEED_BYTES} bytes, not {len(public)}")
        self.name = name
        self.public = public
        self.key_id = sha256(name.encode() + b"\n" + _ED25519 + public).digest()[:_KEY_ID_BYTES]

    @classmethod
    def parse(cls, text: str) -> "VerifierKey":
        """The key that `str(key)` wrote: `<name>+<key id in hex>+<base64 of 0x01 and the public key>`."""
        name, key_id, encoded = _three_parts(text.strip())
        key = cls(name, encoded)
        if key_id != key.key_id.hex():
            raise NoteRefused(f"the id {key_id!r} does not belong to the key {name!r}: the text was changed")
        return key

    def __str__(self) -> str:
        return f"{self.name}+{self.key_id.hex()}+{_base64(_ED25519 + self.public)}"

    def open(self, note: str) -> str:
        """The note's text; raises `NoteRefused` unless this key has signed it. Signatures of other keys are ignored."""
        text, signatures = _split(note)
        own = [rest for name, key_id, rest in signatures if (name, key_id) == (self.name, self.key_id)]
        if len(own) != 1:
            raise NoteRefused(f"the note has {len(own)} signatures of {self.name}+{self.key_id.hex()}; it needs one")
        if not self._signed(text.encode(), own[0]):
            raise NoteRefused(f"the signature of {self.name} does not fit the note: the note was changed")
        return text

    def open_checkpoint(self, note: str) -> SignedSizeAndRoot:
        """What the checkpoint says; raises `NoteRefused` unless this key has signed it for its own log."""
        return _read_checkpoint(self.open(note), self.name)

    def _signed(self, message: bytes, signature: bytes) -> bool:
        from cryptography.exceptions import InvalidSignature  # noqa: PLC0415

        if len(signature) != _SIGNATURE_BYTES:
            return False
        try:
            self._checker.verify(signature, message)
        except InvalidSignature:
            return False
        return True

    @cached_property
    def _checker(self) -> "Ed25519PublicKey":
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey  # noqa: PLC0415

        return Ed25519PublicKey.from_public_bytes(self.public)


class SigningKey:
    """The private half; whoever holds it can speak for the log."""

    def __init__(self, name: str, seed: bytes) -> None:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey  # noqa: PLC0415

        if len(seed) != _SEED_BYTES:
            raise NoteRefused(f"an Ed25519 private key has {_SEED_BYTES} bytes, not {len(seed)}")
        self._seed = seed
        self._signer: Ed25519PrivateKey = Ed25519PrivateKey.from_private_bytes(seed)
        self.verifier = VerifierKey(name, self._signer.public_key().public_bytes_raw())

    @classmethod
    def generate(cls, name: str) -> "SigningKey":
        """A new key from the system's randomness; the name becomes the log's origin."""
        return cls(name, os.urandom(_SEED_BYTES))

    @classmethod
    def parse(cls, text: str) -> "SigningKey":
        """The key whose file holds `text`: `PRIVATE+KEY+<name>+<key id in hex>+<base64 of 0x01 and the seed>`."""
        name, key_id, seed = _three_parts(text.strip().removeprefix(_PRIVATE))
        key = cls(name, seed)
        if key_id != key.verifier.key_id.hex():
            raise NoteRefused(f"the id {key_id!r} does not belong to the key {name!r}: the text was changed")
        return key

    @classmethod
    def load(cls, path: Path) -> "SigningKey":
        """The key in the file that `save` wrote.

        Raises `LogUnusable` when it is not there, readable by others, or no key.
        """
        try:
            mode, text = path.stat().st_mode, path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise LogUnusable("signing-key-unreadable", str(error), "name the file that holds the log's key") from error
        if mode & _OTHERS:
            raise LogUnusable("signing-key-exposed", f"others may read the private key {path}", f"chmod 600 {path}")
        try:
            return cls.parse(text)
        except NoteRefused as error:
            raise LogUnusable("signing-key-illegal", f"{path}: {error}", "restore the key from a backup") from error

    @classmethod
    def load_or_generate(cls, path: Path, name: str) -> "SigningKey":
        """The key in the file; a new one with this name, saved there, when there is none yet."""
        if not path.exists():
            with suppress(FileExistsError):  # another process was faster; its key is the log's
                cls.generate(name).save(path)
        return cls.load(path)

    def save(self, path: Path) -> None:
        """Write the key to a new file that only this user can read; never over an existing one.

        The text appears under its name complete or not at all, whatever happens meanwhile.
        """
        text = f"{_PRIVATE}{self.verifier.name}+{self.verifier.key_id.hex()}+{_base64(_ED25519 + self._seed)}\n"
        unfinished = path.with_name(f".{path.name}.{os.getpid()}")
        descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, _SECRET_MODE)
        try:
            with open(descriptor, "wb") as file:  # noqa: PTH123  (a descriptor, not a path)
                file.write(text.encode())
                file.flush()
                os.fsync(file.fileno())
            os.link(unfinished, path)
        finally:
            unfinished.unlink()

    def sign(self, text: str) -> str:
        """The signed note of a text, which ends with a newline."""
        if not text.endswith("\n"):
            raise NoteRefused("a note's text ends with a newline")
        signature = self.verifier.key_id + self._signer.sign(text.encode())
        return f"{text}\n\u2014 {self.verifier.name} {_base64(signature)}\n"

    def sign_checkpoint(self, head: Head) -> str:
        """The signed note that says: the log's first `head.position` rows have the root `head.root`."""
        return self.sign(f"{self.verifier.name}\n{head.position}\n{_base64(head.root)}\n")


def _split(note: str) -> tuple[str, list[tuple[str, bytes, bytes]]]:
    """A note's text and its signatures: name, key id, signature. The text ends with the last empty line."""
    if len(note) > NOTE_CHARS_MAX:
        raise NoteRefused(f"the note has {len(note)} characters, over {NOTE_CHARS_MAX}")
    if any(ord(character) < ord(" ") and character != "\n" for character in note):
        raise NoteRefused("the note holds control characters")
    text, separator, block = note.rpartition("\n\n")
    lines = block.removesuffix("\n").split("\n")
    if not separator or not block.endswith("\n") or len(lines) > SIGNATURES_MAX:
        raise NoteRefused("the text is no signed note: text, an empty line, then one to a hundred signatures")
    signatures: list[tuple[str, bytes, bytes]] = []
    for line in lines:
        matched = _SIGNATURE_LINE.fullmatch(line)
        if matched is None:
            raise NoteRefused(f"{line[:80]!r} is no signature line")
        decoded = _from_base64(matched[2])
        if len(decoded) <= _KEY_ID_BYTES:
            raise NoteRefused(f"the signature of {matched[1]} is too short")
        signatures.append((matched[1], decoded[:_KEY_ID_BYTES], decoded[_KEY_ID_BYTES:]))
    return text + "\n", signatures


def _read_checkpoint(text: str, origin: str) -> SignedSizeAndRoot:
    lines = text.split("\n")
    if len(lines) < 4 or not all(lines[:-1]) or lines[0] != origin or _SIZE.fullmatch(lines[1]) is None:  # noqa: PLR2004
        raise NoteRefused(f"the note is no checkpoint of {origin}: origin, size and root, a line each")
    root = _from_base64(lines[2])
    if len(root) != _ROOT_BYTES:
        raise NoteRefused(f"the checkpoint's root has {len(root)} bytes, not {_ROOT_BYTES}")
    return SignedSizeAndRoot(int(lines[1]), root)


def _three_parts(text: str) -> tuple[str, str, bytes]:
    name, _, rest = text.partition("+")
    key_id, _, encoded = rest.partition("+")
    decoded = _from_base64(encoded)
    if decoded[:1] != _ED25519:
        raise NoteRefused("the text is no Ed25519 key: <name>+<key id>+<key in base64>")
    return name, key_id, decoded[1:]


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _from_base64(text: str) -> bytes:
    try:
        decoded = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise NoteRefused(f"{text[:80]!r} is no base64") from error
    if _base64(decoded) != text:  # bits that nothing reads: a changed character must not go unnoticed
        raise NoteRefused(f"{text[:80]!r} is not the base64 of what it holds")
    return decoded
