"""What a log reports when it cannot be opened; while it runs, trouble with the database is always `Transient`."""

from torpor_contracts.errors import Rejected


class LogUnusable(Rejected):
    """The log cannot be opened as it is; `code` is stable, `advice` says what to do. Nothing was changed."""
