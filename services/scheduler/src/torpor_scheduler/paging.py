"""Reads a view page by page, in key order, within a bound."""

from collections.abc import AsyncGenerator, Mapping
from typing import Any, Final

from torpor_eventlog.views_port import Table, ViewStore

PAGE: Final = 500
PAGES_MAX: Final = 200
"""A pass sees so many pages at most; the next pass sees what has changed."""


async def pages(
    views: ViewStore,
    table: Table,
    where: Mapping[str, str | int | None] | None = None,
    *,
    at_most: tuple[str, int] | None = None,
) -> AsyncGenerator[Any, None]:
    """The rows of `find`, one by one; each page is a read of its own, so that no transaction stays open meanwhile."""
    after: str | None = None
    for _ in range(PAGES_MAX):
        async with views.reading() as rows:
            page = await rows.find(table, where, at_most=at_most, after_key=after, limit=PAGE)
        for row in page:
            yield row
        if len(page) < PAGE:
            return
        after = getattr(page[-1], table.key)
