"""Opens the chunk store that a URL names, as every process that uses it does."""

from pathlib import Path
from typing import Any

from torpor_chunks.master_keys import make_master_keys, read_master_keys
from torpor_chunks.object_storage import open_objects
from torpor_chunks.objects import Objects
from torpor_chunks.offload import Offload, in_thread
from torpor_chunks.pack_cache import CachedObjects
from torpor_chunks.store import PackStore


def open_store(
    url: str,
    key_file: Path,
    *,
    cache: Path | None = None,
    cache_bytes: int = 0,
    offload: Offload = in_thread,
    **options: Any,
) -> PackStore:
    """The store at a URL (see `open_objects`); raises a `ChunkError` that says what to correct.

    Beside a local directory the key file is made when there is none. A store that hosts share needs one that they
    share too, so there it must be given. `cache` keeps copies of a remote store's packs, `cache_bytes` of them.
    """
    stored = open_objects(url, **options)
    masters = read_master_keys(key_file) if stored.directory is None else make_master_keys(key_file)
    objects: Objects = stored
    if stored.directory is None and cache is not None and cache_bytes > 0:
        objects = CachedObjects(stored, cache, cache_bytes)
    return PackStore(objects, masters, offload)
