"""Nkeys of the users of a NATS server: seeds in files that only their owner reads."""

import os
from pathlib import Path
from typing import Final

import nkeys  # type: ignore[import-untyped]  # it ships no types

from torpor_contracts.errors import Rejected

_SEED_BYTES: Final = 32


def ensure_key(seed_file: Path) -> str:
    """The public key of the seed in a file; a new seed is put there (mode 0600) when there is none."""
    if not seed_file.exists():
        seed = nkeys.encode_seed(os.urandom(_SEED_BYTES), nkeys.PREFIX_BYTE_USER)
        fresh = seed_file.with_suffix(".new")
        fresh.unlink(missing_ok=True)
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(seed + b"\n")
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(seed_file)
    return public_key(seed_file)


def public_key(seed_file: Path) -> str:
    """The public key of the seed in a file."""
    try:
        pair = nkeys.from_seed(bytearray(seed_file.read_bytes().strip()))
        return str(pair.public_key.decode())
    except (nkeys.NkeysError, ValueError, OSError) as error:
        raise Rejected(
            "nats-credentials",
            f"{seed_file} holds no nkey seed: {str(error) or type(error).__name__}",
            "name a file with an nkey user seed (SU…), as torpor_messaging.nats_config makes them",
        ) from error
