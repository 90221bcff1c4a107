from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torpor_contracts.errors import Rejected
from torpor_contracts.ids import TOKEN
from torpor_messaging import subjects

TOKENS = st.from_regex(TOKEN, fullmatch=True)
TARGETS = st.lists(TOKENS, min_size=1, max_size=2).map(".".join)


@given(TOKENS, TOKENS, TOKENS, TARGETS)
def test_a_command_subject_gives_its_parts_again(tenant: str, service: str, type_: str, target: str) -> None:
    assert subjects.parse_command(subjects.command(tenant, service, type_, target)) == (tenant, service, type_, target)


@given(TOKENS, TOKENS, TOKENS)
def test_an_event_subject_gives_its_parts_again(tenant: str, type_: str, stream: str) -> None:
    assert subjects.parse_event(subjects.event(tenant, type_, stream)) == (tenant, type_, stream)


@given(TOKENS, TOKENS, TOKENS, TARGETS)
def test_a_due_timer_gives_its_parts_again(tenant: str, service: str, kind: str, target: str) -> None:
    assert subjects.parse_timer_due(subjects.timer_due(tenant, service, kind, target)) == (
        tenant,
        service,
        kind,
        target,
    )


@given(TOKENS, TOKENS, TOKENS, TOKENS | st.just(subjects.NO_TARGET))
def test_a_query_gives_its_parts_again(tenant: str, service: str, type_: str, target: str) -> None:
    assert subjects.parse_query(subjects.query(tenant, service, type_, target)) == (tenant, service, type_, target)


@given(TOKENS, TOKENS, TOKENS, TOKENS)
def test_an_observation_gives_its_parts_again(tenant: str, service: str, type_: str, id_: str) -> None:
    subject = subjects.observation(tenant, service, type_, id_)
    assert subjects.parse_observation(subject) == (tenant, service, type_, id_)


def test_the_version_of_a_tag_is_not_in_the_subject() -> None:
    assert subjects.command("default", "scheduler", "suspend-session.v1", "ses-1") == (
        "cmd.default.scheduler.suspend-session.ses-1"
    )
    assert subjects.event("default", "vm-started.v1", "vm-1") == "evt.default.vm-started.vm-1"
    assert subjects.relayed("default", "vm-started.v1", "vm-1") == "relay.default.vm-started.vm-1"


def test_filters_take_any_tenant_and_the_targets_named() -> None:
    assert subjects.command_filter("scheduler", "*") == "cmd.*.scheduler.*.*"
    assert subjects.command_filter("vm-host", "host-1.*") == "cmd.*.vm-host.*.host-1.*"
    assert subjects.timer_due_filter("scheduler") == "timer.due.*.scheduler.>"
    assert subjects.query_filter("scheduler", "session") == "qry.*.scheduler.session.*"


@pytest.mark.parametrize(
    "subject",
    [
        "",
        "cmd",
        "evt.default.scheduler.suspend-session.ses-1",
        "cmd.default.scheduler.suspend-session",
        "cmd.default.scheduler.suspend-session.a.b.c",
        "cmd..scheduler.suspend-session.ses-1",
        "cmd.Default.scheduler.suspend-session.ses-1",
        "cmd.default.scheduler.suspend-session.*",
        "cmd.default.scheduler.suspend-session.>",
        "cmd.default.scheduler.suspend-session.ses 1",
        "cmd.default.scheduler.suspend-session.ses-1\n",
        "cmd.default.scheduler.suspend-session.-ses",
        "cmd.default.scheduler.suspend-session." + "a" * 64,
        "cmd.default.scheduler.suspend-session.ségur",
    ],
)
def test_an_illegal_command_subject_is_refused_with_advice(subject: str) -> None:
    with pytest.raises(Rejected) as refused:
        subjects.parse_command(subject)
    assert refused.value.code == "illegal-subject"
    assert "a-z" in refused.value.advice


@pytest.mark.parametrize(
    ("build", "parts"),
    [
        (subjects.command, ("default", "scheduler", "suspend-session", "ses.1.2")),
        (subjects.command, ("default", "scheduler", "suspend-session", "")),
        (subjects.command, ("de.fault", "scheduler", "suspend-session", "ses-1")),
        (subjects.event, ("default", "vm-started.v1", "vm.1")),
        (subjects.relayed, ("default", "vm-started.v1", "*")),
        (subjects.output, ("default", "ses-1", ">")),
        (subjects.timer_set, ("default", "scheduler", "idle", "ses 1")),
        (subjects.dead, ("a.b",)),
        (subjects.query, ("default", "scheduler", "session", "--")),
        (subjects.observation, ("system", "vm-host", "heartbeat", "")),
        (subjects.command_filter, ("vm-host", "host-1.>")),
        (subjects.inbox_prefix, ("*",)),
    ],
)
def test_no_subject_is_built_of_illegal_tokens(build: Callable[..., Any], parts: tuple[str, ...]) -> None:
    with pytest.raises(Rejected) as refused:
        build(*parts)
    assert refused.value.code == "illegal-subject"


@pytest.mark.parametrize(
    "subject", ["timer.set.default.scheduler.idle.ses-1", "timer.due.default.scheduler.idle", "qry.default.a.b"]
)
def test_a_due_timer_and_a_query_are_refused_in_the_same_way(subject: str) -> None:
    parse = subjects.parse_timer_due if subject.startswith("timer") else subjects.parse_query
    with pytest.raises(Rejected) as refused:
        parse(subject)
    assert refused.value.code == "illegal-subject"


@pytest.mark.parametrize("subject", ["_INBOX.default.a", "_INBOX.default.svc-vm-host.AbC123.4"])
def test_replies_go_to_the_tenants_inboxes(subject: str) -> None:
    subjects.check_reply("default", subject)


@pytest.mark.parametrize(
    "subject",
    [
        "",
        "_INBOX.other.a",
        "_INBOX.default",
        "_INBOX.default.",
        "_INBOX.defaulted.a",
        "_INBOX.default.*",
        "_INBOX.default.>",
        "_INBOX.default.a..b",
        "_INBOX.default.a b",
        "_INBOX.default.a\r\nPUB x 0",
        "cmd.default.scheduler.terminate-session.ses-1",
        "$JS.API.STREAM.DELETE.EVENTS",
    ],
)
def test_and_nowhere_else(subject: str) -> None:
    with pytest.raises(Rejected) as refused:
        subjects.check_reply("default", subject)
    assert refused.value.code == "illegal-reply-subject"
    assert "_INBOX.default" in refused.value.advice
