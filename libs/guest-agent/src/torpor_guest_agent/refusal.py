"""What the agent answers when it does not do what it was asked: a stable code, and the reason in words."""

import errno
from typing import Final

CODES: Final = {
    errno.ENOENT: "not-found",
    errno.ENOTDIR: "not-a-directory",
    errno.EISDIR: "is-a-directory",
    errno.EEXIST: "exists",
    errno.EACCES: "not-permitted",
    errno.EPERM: "not-permitted",
    errno.ENOSPC: "disk-full",
    errno.EDQUOT: "disk-full",
    errno.ENOTEMPTY: "not-empty",
    errno.ELOOP: "too-many-links",
    errno.ENAMETOOLONG: "name-too-long",
    errno.EROFS: "read-only",
    errno.EXDEV: "other-file-system",
    errno.ENOMEM: "out-of-memory",
    errno.EAGAIN: "too-many-processes",
}


class Refused(Exception):  # noqa: N818  (an answer to the host, not a failure of ours)
    """The host asked for something that cannot be; `code` is for programs."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def refusal(error: OSError) -> Refused:
    """The refusal that says what the operating system said."""
    return Refused(CODES.get(error.errno or 0, "io-error"), str(error))
