"""The options that every command takes, and opening a connection by them."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

from cyclopts import Parameter

from torpor.embedded.layout import DataDir

if TYPE_CHECKING:
    from torpor.client.api import Connecting
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

    def connect(self, role: "Role" = "tenant") -> "Connecting":
        """A connection to the whole meant."""
        from torpor.client.api import connect  # noqa: PLC0415  (the SDK is what a command's start costs)

        return connect(data_dir=self.data_dir, role=role)


DEFAULTS: Final = Common()
"""What holds when no option was given."""
