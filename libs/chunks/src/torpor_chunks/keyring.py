"""Each tenant's keys: kept in the store, wrapped under a master key; without that key its packs are noise."""

import os
from collections import OrderedDict
from threading import Lock
from typing import Final

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from torpor_chunks.master_keys import MasterKeys
from torpor_chunks.objects import ObjectExists, ObjectMissing, Objects
from torpor_chunks.port import KeyUnusable
from torpor_chunks.sealing import KEY_BYTES, derived

FORMAT: Final = 1
NONCE_BYTES: Final = 12
TENANTS_KEPT: Final = 1024


class WrappedKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tenant's key, sealed by a master key."""

    version: int
    master: int
    nonce: bytes
    wrapped: bytes


class Keyring(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The object `tenants/<tenant>/keyring`, JSON."""

    format: int
    tenant_id: str
    keys: list[WrappedKey]


class TenantKeys:
    """A tenant's keys by version; new packs are put under the newest, old ones stay readable."""

    def __init__(self, secrets: dict[int, bytes]) -> None:
        self._secrets = secrets
        self.newest = max(secrets)

    def secret(self, version: int) -> bytes | None:
        """What the keys of packs are derived from."""
        return self._secrets.get(version)

    def naming(self, version: int) -> bytes:
        """The key under which pieces are named by their content; nobody without it can tell what a name stands for."""
        return derived(self._secrets[version], b"", f"torpor piece {FORMAT}")


def path_of(tenant_id: str) -> str:
    """Where a tenant's keyring is."""
    return f"tenants/{tenant_id}/keyring"


class Keyrings:
    """Reads and makes keyrings; remembers those it has read."""

    def __init__(self, objects: Objects, masters: MasterKeys) -> None:
        self._objects = objects
        self._masters = masters
        self._known: OrderedDict[str, TenantKeys] = OrderedDict()
        self._lock = Lock()

    def of(self, tenant_id: str, version: int | None = None) -> TenantKeys:
        """A tenant's keys, made when it has none; read again when `version` is not among those remembered."""
        with self._lock:
            known = self._known.get(tenant_id)
            if known is not None and (version is None or known.secret(version) is not None):
                self._known.move_to_end(tenant_id)
                return known
        found = self._unwrapped(tenant_id, self._read_or_make(tenant_id))
        with self._lock:
            self._known[tenant_id] = found
            while len(self._known) > TENANTS_KEPT:
                self._known.popitem(last=False)
        return found

    def rotate(self, tenant_id: str) -> int:
        """Give a tenant a new key for packs to come; its version. Only for who holds the store's `exclusive`.

        The next checkpoint of each lineage is then stored in full: nothing new depends on the old key.
        """
        ring = self._read_or_make(tenant_id)
        version = max(key.version for key in ring.keys) + 1
        self._write(msgspec.structs.replace(ring, keys=[*ring.keys, self._new_key(tenant_id, version)]))
        return version

    def rewrap(self, tenant_id: str) -> None:
        """Wrap a tenant's keys under the newest master key, so that older ones can be given up; as `rotate`."""
        ring = self._read_or_make(tenant_id)
        keys = [self._wrapped(tenant_id, key.version, self._unwrap(tenant_id, key)) for key in ring.keys]
        self._write(msgspec.structs.replace(ring, keys=keys))

    def _write(self, ring: Keyring) -> None:
        self._objects.put(path_of(ring.tenant_id), msgspec.json.encode(ring))
        with self._lock:
            self._known.pop(ring.tenant_id, None)

    def _read_or_make(self, tenant_id: str) -> Keyring:
        try:
            return self._read(tenant_id)
        except ObjectMissing:
            ring = Keyring(format=FORMAT, tenant_id=tenant_id, keys=[self._new_key(tenant_id, 1)])
        try:
            self._objects.put(path_of(tenant_id), msgspec.json.encode(ring), create=True)
        except ObjectExists:
            return self._read(tenant_id)
        return ring

    def _read(self, tenant_id: str) -> Keyring:
        path = path_of(tenant_id)
        data, _ = self._objects.tail(path, 1 << 20)
        try:
            ring = msgspec.json.decode(data, type=Keyring)
        except msgspec.DecodeError as error:
            raise KeyUnusable(f"{path} cannot be read ({error}); restore it from a backup of the store") from error
        if ring.format != FORMAT or ring.tenant_id != tenant_id or not ring.keys:
            raise KeyUnusable(f"{path} is not the keyring of {tenant_id!r} in format {FORMAT}")
        return ring

    def _unwrapped(self, tenant_id: str, ring: Keyring) -> TenantKeys:
        return TenantKeys({key.version: self._unwrap(tenant_id, key) for key in ring.keys})

    def _unwrap(self, tenant_id: str, key: WrappedKey) -> bytes:
        cipher = AESGCM(self._masters.key(key.master))
        try:
            return cipher.decrypt(key.nonce, key.wrapped, _about(tenant_id, key.version))
        except (InvalidTag, ValueError) as error:
            raise KeyUnusable(
                f"key {key.version} of {tenant_id!r} was wrapped under another master key {key.master}, or is damaged; "
                "give every process that uses this store the same key file (TORPOR_CHUNKS_KEY_FILE)"
            ) from error

    def _new_key(self, tenant_id: str, version: int) -> WrappedKey:
        return self._wrapped(tenant_id, version, os.urandom(KEY_BYTES))

    def _wrapped(self, tenant_id: str, version: int, secret: bytes) -> WrappedKey:
        master, nonce = self._masters.newest, os.urandom(NONCE_BYTES)
        wrapped = AESGCM(self._masters.key(master)).encrypt(nonce, secret, _about(tenant_id, version))
        return WrappedKey(version=version, master=master, nonce=nonce, wrapped=wrapped)


def _about(tenant_id: str, version: int) -> bytes:
    return f"torpor key {FORMAT} {tenant_id} {version}".encode()
