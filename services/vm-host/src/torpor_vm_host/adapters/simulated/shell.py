"""Reads what a program's argv says: one command, or `sh -c` with `;`, `&&`, `>` and `>>`; it understands no more."""

from collections.abc import Iterator, Sequence
from typing import Final

from torpor_vm_host.adapters.simulated.machine import Step

SHELLS: Final = frozenset({"sh", "bash", "/bin/sh", "/bin/bash"})
_OPERATORS: Final = ("&&", ">>", ";", ">", "\n")
_NOT_UNDERSTOOD: Final = frozenset("|&<$`(){}*?[]!#~")
_SHELL_ARGS: Final = 3


class NotUnderstood(Exception):  # noqa: N818  (what the text is to us)
    """The text means something that the simulated shell does not know."""


def steps_of(argv: Sequence[str]) -> list[Step]:
    """The commands of a program in order; raises `NotUnderstood`."""
    if not argv:
        raise NotUnderstood("there is no command")
    if argv[0] not in SHELLS:
        return [Step(argv=list(argv))]
    if len(argv) != _SHELL_ARGS or argv[1] not in {"-c", "-lc"}:
        raise NotUnderstood(f"{argv[0]} is only known as `{argv[0]} -c TEXT`")
    return list(_parsed(list(_words(argv[2]))))


def _parsed(words: list[tuple[str, bool]]) -> Iterator[Step]:
    """Commands from words; the flag marks operators."""
    command: list[str] = []
    into: str | None = None
    appends = only_after_success = False
    rest = iter([*words, (";", True)])
    for word, is_operator in rest:
        if not is_operator:
            command.append(word)
        elif word in {">", ">>"}:
            target, is_operator_too = next(rest)
            if is_operator_too or into is not None:
                raise NotUnderstood(f"{word} needs one file name")
            into, appends = target, word == ">>"
        else:
            if command:
                yield Step(argv=command, only_after_success=only_after_success, into=into, appends=appends)
            elif into is not None or word == "&&":
                raise NotUnderstood(f"there is no command before {word!r}")
            command, into, appends, only_after_success = [], None, False, word == "&&"


def _words(text: str) -> Iterator[tuple[str, bool]]:
    word: list[str] | None = None
    position = 0
    while position < len(text):
        mark = text[position]
        operator = next((one for one in _OPERATORS if text.startswith(one, position)), None)
        if operator is not None or mark in " \t":
            if word is not None:
                yield "".join(word), False
                word = None
            if operator is not None:
                yield ";" if operator == "\n" else operator, True
            position += len(operator or mark)
            continue
        taken, position = _piece(text, position)
        word = [*(word or []), taken]
    if word is not None:
        yield "".join(word), False


def _piece(text: str, start: int) -> tuple[str, int]:
    """One character, escaped character or quoted run, and where the text goes on."""
    mark = text[start]
    if mark == "\\" and start + 1 < len(text):
        return text[start + 1], start + 2
    if mark in "'\"":
        end = text.find(mark, start + 1)
        quoted = text[start + 1 : end]
        if end < 0 or (mark == '"' and any(one in quoted for one in "$`\\")):
            raise NotUnderstood(f"the text in {mark} is not understood")
        return quoted, end + 1
    if mark in _NOT_UNDERSTOOD:
        raise NotUnderstood(f"{mark!r} is not understood")
    return mark, start + 1
