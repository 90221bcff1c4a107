from hypothesis import given
from hypothesis import strategies as st

from torpor.embedded.restarting import RestartRule, RestartState

RULE = RestartRule(first_s=0.5, longest_s=4.0, attempts_max=5, steady_s=30.0)


def test_back_off_doubles_up_to_its_limit_and_then_ends() -> None:
    state, pauses = RestartState(), []
    for _ in range(5):
        state = state.after_end(RULE, ran_s=1.0, now_s=100.0)
        assert state.due_at_s is not None
        pauses.append(state.due_at_s - 100.0)
    assert pauses == [0.5, 1.0, 2.0, 4.0, 4.0]
    assert state.after_end(RULE, ran_s=1.0, now_s=100.0).due_at_s is None


def test_a_process_that_ran_well_starts_the_count_anew() -> None:
    worn = RestartState(failures=5, due_at_s=1.0)
    assert worn.after_end(RULE, ran_s=31.0, now_s=0.0) == RestartState(1, 0.5)


@given(st.lists(st.floats(0, 29), min_size=6, max_size=20))
def test_short_lives_in_a_row_always_come_to_an_end(lives: list[float]) -> None:
    state = RestartState()
    for ran_s in lives:
        state = state.after_end(RULE, ran_s, now_s=0.0)
    assert state.due_at_s is None
