"""The options that every command takes, and opening a connection by them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

from cyclopts import Parameter

from torpor.embedded.layout import DataDir
from torpor.embedded.warnings import recent_warnings
from torpor.errors import NotYet, Unavailable

if TYPE_CHECKING:
    from torpor.client.api import Torpor
    from torpor.client.discovery import Role


@Parameter(name="*")
@dataclass(frozen=True)
class Common:
    """Options of every command."""

    data_dir: Annotated[
        Path | None,
        Parameter(help="The whole's directory (TORPOR_DATA_DIR; by default torpor under the XDG state directory)."),
    ] = None
    json: Annotated[bool, Parameter(help="Answer in JSON, for programs.", negative=())] = False

    @property
    def data(self) -> DataDir:
        """The data directory meant."""
        return DataDir.choose(self.data_dir)

    @asynccontextmanager
    async def connect(self, role: "Role" = "tenant") -> AsyncIterator["Torpor"]:
        """A connection to the whole meant; when it does not answer, the error tells what its services warn of."""
        from torpor.client.api import connect  # noqa: PLC0415  (the SDK is what a command's start costs)

        try:
            async with connect(data_dir=self.data_dir, role=role) as t:
                yield t
        except (Unavailable, NotYet) as error:
            for service, warning in recent_warnings(self.data).items():
                error.add_note(f"{service} says: {warning}")
            raise


DEFAULTS: Final = Common()
"""What holds when no option was given."""
