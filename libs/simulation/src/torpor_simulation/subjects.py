"""Subject patterns with `*` and `>`, as a NATS server matches them."""

from functools import lru_cache


@lru_cache(maxsize=65536)
def split(subject: str) -> tuple[str, ...]:
    """A subject's tokens."""
    return tuple(subject.split("."))


def matches(pattern: tuple[str, ...], tokens: tuple[str, ...]) -> bool:
    """Whether a subject matches a pattern: `*` stands for one token, a last `>` for one or more."""
    if pattern[-1] == ">":
        head = pattern[:-1]
        if len(tokens) < len(pattern):
            return False
    else:
        head = pattern
        if len(tokens) != len(pattern):
            return False
    return all(wanted in ("*", token) for wanted, token in zip(head, tokens, strict=False))
