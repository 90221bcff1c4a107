"""For programs inside a Torpor session: learn that the machine was restored, and become somebody new.

After a resume, a fork or a rollback the machine goes on in the middle of whatever it did. What a program keeps in
memory (random generators, caches, connections, a notion of "now") is then a copy shared with the past. The file
`/run/torpor/epoch` is replaced at every start and restore, before anybody outside sees the session running; it holds
JSON: `session_id`, `incarnation`, `epoch` (unique), `hostname`, `machine_id`, `since_ns`.

    import torpor_guest
    torpor_guest.on_epoch(lambda epoch: reconnect())   # called in a thread; Python's `random` is reseeded before
"""

import json
import os
import random
import threading
import time
from collections.abc import Callable
from typing import Any

EPOCH_FILE = os.environ.get("TORPOR_EPOCH_FILE", "/run/torpor/epoch")
POLL_S = 0.05


def current() -> dict[str, Any]:
    """The epoch this machine is in now."""
    with open(EPOCH_FILE, encoding="utf-8") as file:  # noqa: PTH123  (small and importable anywhere)
        epoch: dict[str, Any] = json.load(file)
    return epoch


def on_epoch(callback: Callable[[dict[str, Any]], None], *, reseed: bool = True) -> threading.Thread:
    """Call `callback` with each new epoch, from a daemon thread; `reseed` seeds Python's `random` anew before that."""
    known = current()["epoch"]

    def watch(known: str) -> None:
        while True:
            epoch = current()
            if epoch["epoch"] != known:
                known = epoch["epoch"]
                if reseed:
                    random.seed(os.urandom(32))
                callback(epoch)
            time.sleep(POLL_S)

    thread = threading.Thread(target=watch, args=(known,), name="torpor-epoch", daemon=True)
    thread.start()
    return thread
