"""Remembers answers by request id for a while, so that a repeated request is answered and not carried out again."""

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Final

from torpor_contracts.errors import Rejected

KEPT_MAX: Final = 2_048


class Answers:
    """Answers that were given or are being made. A failure is not kept: a repeat tries again."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, tuple[bytes, asyncio.Future[bytes]]] = OrderedDict()

    async def once(self, key: str, request: bytes, work: Callable[[], Awaitable[bytes]]) -> bytes:
        """The answer to the request, made by `work` unless it was or is being made; `Rejected` for another request."""
        digest = hashlib.sha256(request).digest()
        known = self._kept.get(key)
        if known is not None:
            if known[0] != digest:
                raise Rejected("request-id-reused", "another request had this id", "give every request its own id")
            return await asyncio.shield(known[1])
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._kept[key] = digest, answer
        while len(self._kept) > KEPT_MAX:
            self._kept.popitem(last=False)
        try:
            answer.set_result(await work())
        except BaseException as error:
            self._kept.pop(key, None)
            if isinstance(error, Exception):
                answer.set_exception(error)
                answer.exception()  # whoever waits besides us is told; if nobody does, that is no bug
            else:
                answer.cancel()
            raise
        return answer.result()
