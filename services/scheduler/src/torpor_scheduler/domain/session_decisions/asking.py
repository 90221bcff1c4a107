"""What a client may ask for: every limit is checked here, before anything is recorded."""

import re
from collections.abc import Iterable
from typing import Final

from torpor_contracts.errors import Rejected
from torpor_contracts.ids import RESERVED_PREFIXES, SYSTEM_TENANT, CheckpointId, is_token
from torpor_contracts.session import CreateSession, ExecSession, MachineSpec, RetryRule
from torpor_contracts.session_branches import CheckpointSession, ForkSession
from torpor_scheduler.domain.session_decisions.context import Addressee, Limits

IMAGE: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,127}")
ENVIRONMENT_NAME: Final = re.compile(r"[^=\0]+")
REASON_MAX: Final = 1_000


def check_addressee(addressee: Addressee) -> None:
    """The id of a new session must be a token that no other kind of thing may have."""
    if not is_token(addressee.session_id) or addressee.session_id.startswith(RESERVED_PREFIXES):
        raise Rejected(
            "illegal-session-id",
            f"{addressee.session_id!r} cannot be a session's id",
            f"use up to 63 of a-z, 0-9 and '-', not beginning with '-' or any of {', '.join(RESERVED_PREFIXES)}",
        )
    if addressee.tenant_id == SYSTEM_TENANT:
        raise Rejected(
            "illegal-tenant", "the tenant 'system' has no sessions", "create the session under a customer's tenant"
        )


def check_session(command: CreateSession, limits: Limits) -> None:
    """The machine, the idle time, the retry rule and the metadata must be within limits."""
    _check_machine(command.machine, limits)
    idle_after_s = command.idle_after_s
    if idle_after_s is not None and not limits.idle_after_s_min <= idle_after_s <= limits.idle_after_s_max:
        raise Rejected(
            "illegal-idle-time",
            f"idle_after_s is {idle_after_s:g}",
            f"give {limits.idle_after_s_min:g} to {limits.idle_after_s_max:g} seconds, or null for never",
        )
    _check_retry(command.start_retry, limits)
    check_metadata(command.metadata, limits)


def check_program(command: ExecSession, limits: Limits) -> None:
    """The program must be runnable text of bounded size."""
    program = command.program
    if not is_token(command.exec_id):
        raise Rejected(
            "illegal-exec-id", f"{command.exec_id!r} cannot be an exec id", "use up to 63 of a-z, 0-9 and '-'"
        )
    if not program.argv or not program.argv[0]:
        raise Rejected("illegal-program", "argv names no program", "give the program as the first item of argv")
    if any(not ENVIRONMENT_NAME.fullmatch(name) for name in program.env):
        raise Rejected("illegal-program", "env has an empty name, or one with '='", "correct the names in env")
    texts = (*program.argv, *program.env.values(), program.cwd or "", program.user or "")
    if any("\0" in text for text in texts):
        raise Rejected("illegal-program", "the program's text holds a NUL character", "leave NUL out, or use stdin")
    if not 0 < program.timeout_s <= limits.exec_timeout_s_max:
        raise Rejected(
            "illegal-timeout",
            f"timeout_s is {program.timeout_s:g}",
            f"give more than 0 and at most {limits.exec_timeout_s_max:g} seconds",
        )
    if _bytes_of((*texts, *program.env, program.stdin)) > limits.program_bytes_max:
        raise Rejected(
            "program-too-large",
            f"argv, env and stdin together exceed {limits.program_bytes_max} bytes",
            "write large input to a file in the session, and let the program read it",
        )


def check_checkpoint(command: CheckpointSession, limits: Limits) -> None:
    """The id must be one that only checkpoints have, and the label a short text."""
    if command.checkpoint_id is not None:
        check_checkpoint_id(command.checkpoint_id)
    if len(command.label) > limits.label_max:
        raise Rejected(
            "label-too-large", f"the label has {len(command.label)} characters", f"give at most {limits.label_max}"
        )


def check_checkpoint_id(checkpoint_id: CheckpointId) -> None:
    """The id of a checkpoint is a token that begins with `ckp-`."""
    if not is_token(checkpoint_id) or not checkpoint_id.startswith("ckp-"):
        raise Rejected(
            "illegal-checkpoint-id",
            f"{checkpoint_id[:80]!r} cannot be a checkpoint's id",
            "use up to 63 of a-z, 0-9 and '-', beginning with 'ckp-'",
        )


def check_fork(command: ForkSession, addressee: Addressee, limits: Limits) -> None:
    """The new sessions have ids of their own, not too many, and begin in one place."""
    wanted = command.session_ids
    if not 1 <= len(wanted) <= limits.forks_max:
        raise Rejected(
            "illegal-fork", f"{len(wanted) or command.count} sessions are wanted", f"ask for 1 to {limits.forks_max}"
        )
    if len(set(wanted)) != len(wanted) or addressee.session_id in wanted:
        raise Rejected("illegal-fork", "two sessions would have the same id", "name each new session once")
    for session_id in wanted:
        check_addressee(Addressee(session_id=session_id, tenant_id=addressee.tenant_id))
    if command.checkpoint_id is not None:
        check_checkpoint_id(command.checkpoint_id)
        if command.source != "auto":
            raise Rejected(
                "illegal-fork", "a checkpoint and a source are given", "give one of checkpoint_id and source"
            )
    if command.metadata is not None:
        check_metadata(command.metadata, limits)


def check_reason(reason: str) -> None:
    """A reason is a short text for people."""
    if len(reason) > REASON_MAX:
        raise Rejected("reason-too-long", f"the reason has {len(reason)} characters", f"give at most {REASON_MAX}")


def _check_machine(machine: MachineSpec, limits: Limits) -> None:
    bounds = (
        ("vcpus", machine.vcpus, 1, limits.vcpus_max),
        ("memory_mib", machine.memory_mib, limits.memory_mib_min, limits.memory_mib_max),
        ("disk_mib", machine.disk_mib, 1, limits.disk_mib_max),
    )
    for name, value, least, most in bounds:
        if not least <= value <= most:
            raise Rejected("illegal-machine", f"{name} is {value}", f"give {least} to {most}")
    if not IMAGE.fullmatch(machine.image):
        raise Rejected("illegal-machine", "the image's name is not one", "use up to 128 of a-z, 0-9, '.', '_' and '-'")


def _check_retry(rule: RetryRule, limits: Limits) -> None:
    bounds = (
        ("attempts_max", rule.attempts_max, 1, limits.attempts_max),
        ("backoff_s", rule.backoff_s, limits.backoff_s_min, limits.backoff_s_max),
        ("backoff_s_max", rule.backoff_s_max, rule.backoff_s, limits.backoff_s_max),
        ("deadline_s", rule.deadline_s, rule.backoff_s, limits.deadline_s_max),
    )
    for name, value, least, most in bounds:
        if not least <= value <= most:
            raise Rejected("illegal-retry-rule", f"start_retry.{name} is {value:g}", f"give {least:g} to {most:g}")


def check_metadata(metadata: dict[str, str], limits: Limits) -> None:
    """Metadata is a few short texts."""
    size_bytes = _bytes_of((*metadata, *metadata.values()))
    if len(metadata) > limits.metadata_keys_max or size_bytes > limits.metadata_bytes_max:
        raise Rejected(
            "metadata-too-large",
            "the metadata has too many keys or bytes",
            f"give at most {limits.metadata_keys_max} keys and {limits.metadata_bytes_max} bytes in all",
        )


def _bytes_of(texts: Iterable[str]) -> int:
    return sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)
