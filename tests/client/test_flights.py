"""When calls are repeated, hedged and given up, by a clock that the test turns."""

from __future__ import annotations

import pytest

from tierstore.client.flights import Attempt, Call, Flight, Group, Outgoing, Policy, RetryBudget
from tierstore.client.replies import Reply
from tierstore.errors import DeadlineExceeded, InvalidInput, Overloaded, TierstoreError, Unreachable


def call(*, repeat: bool = True, timeout_s: float = 10.0, hedge_after_s: float | None = None) -> Call:
    return Call("GET", "/x", timeout_s, lambda _: Outgoing("", []), repeat=repeat, hedge_after_s=hedge_after_s)


def answer(attempt: Attempt, status: int = 200, **headers: str) -> None:
    attempt.reply.start(status, {name.replace("_", "-"): value for name, value in headers.items()}, 0)


def flying(
    budget: RetryBudget | None = None, policy: Policy | None = None, **options: float | bool | None
) -> tuple[Flight, Attempt]:
    flight = Flight(call(**options), policy or Policy(), budget or RetryBudget(10, 0.1), 100.0)  # type: ignore[arg-type]
    assert flight.due(100.0)
    return flight, flight.start(100.0)


def test_waits_double_and_are_drawn_from_the_whole_of_their_length() -> None:
    policy = Policy(retries=5, backoff_s=1.0, backoff_most_s=4.0)
    waits: list[list[float]] = [[] for _ in range(5)]
    for _ in range(200):
        flight, attempt = flying(policy=policy, timeout_s=1e6)
        now = 100.0
        for number in range(5):
            flight.failed(attempt, Unreachable("reset"), now)
            waits[number].append(flight.wake_at() - now)
            assert not flight.due(flight.wake_at() - 1e-9)
            now = flight.wake_at()
            attempt = flight.start(now)
        flight.failed(attempt, Unreachable("reset"), now)
        assert isinstance(flight.error, Unreachable)
    for most, seen in zip([1, 2, 4, 4, 4], waits, strict=True):
        assert 0 <= min(seen) < 0.2 * most
        assert 0.8 * most < max(seen) <= most


def test_no_repeat_comes_before_the_service_said_so() -> None:
    for _ in range(50):
        flight, attempt = flying()
        answer(attempt, 503, retry_after="3")
        flight.answered(attempt, 100.0)
        assert 103.0 <= flight.wake_at() <= 103.05


def test_a_repeat_that_would_miss_the_deadline_is_not_waited_for() -> None:
    flight, attempt = flying(timeout_s=2.0)
    answer(attempt, 429, retry_after="3")
    flight.answered(attempt, 100.0)
    assert isinstance(flight.error, Overloaded)


@pytest.mark.parametrize("error", [Unreachable("reset"), InvalidInput("what came is not HTTP")])
def test_what_may_not_be_repeated_fails_at_once(error: TierstoreError) -> None:
    flight, attempt = flying(repeat=isinstance(error, InvalidInput))
    flight.failed(attempt, error, 100.0)
    assert flight.error is error


def test_an_old_connection_that_was_closed_is_replaced_once_and_for_free() -> None:
    budget = RetryBudget(1, 0.0)
    flight, attempt = flying(budget, Policy(retries=0))
    flight.failed(attempt, Unreachable("reset"), 100.0, stale=True)
    assert flight.due(100.0)
    attempt = flight.start(100.0)
    assert attempt.fresh
    assert budget.left == 1
    flight.failed(attempt, Unreachable("reset"), 100.0, stale=True)
    assert isinstance(flight.error, Unreachable)


def test_a_budget_is_emptied_by_repeats_and_filled_by_calls() -> None:
    budget = RetryBudget(2, 0.5)
    for expected in (True, True, False):
        assert budget.take() is expected
    budget.add()
    assert not budget.take()
    budget.add()
    assert budget.take()
    for _ in range(100):
        budget.add()
    assert budget.left == 2
    assert (budget.taken, budget.refused) == (3, 2)


def test_a_deadline_ends_whatever_is_under_way() -> None:
    flight, attempt = flying(timeout_s=2.0)
    assert flight.wake_at() == 102.0
    flight.expire(101.9)
    assert not flight.done
    flight.expire(102.0)
    assert isinstance(flight.error, DeadlineExceeded)
    assert attempt.dropped
    answer(attempt)
    flight.answered(attempt, 102.1)
    assert flight.reply is None


def test_of_two_copies_the_first_answer_counts_and_the_other_is_dropped() -> None:
    for winner in (0, 1):
        flight, first = flying(hedge_after_s=1.0)
        assert flight.wake_at() == 101.0
        assert not flight.due(100.9)
        assert flight.due(101.0)
        copies = [first, flight.start(101.0)]
        assert not flight.due(105.0), "two copies, no more"
        answer(copies[winner])
        flight.answered(copies[winner], 101.5)
        assert flight.reply is copies[winner].reply
        assert copies[1 - winner].dropped


def test_a_copy_that_is_refused_leaves_the_other_alone() -> None:
    flight, first = flying(hedge_after_s=1.0)
    assert flight.due(101.0)
    copy = flight.start(101.0)
    answer(copy, 503, retry_after="0")
    flight.answered(copy, 101.1)
    assert not flight.done
    assert not first.dropped
    assert flight.wake_at() == 110.0
    answer(first)
    flight.answered(first, 102.0)
    assert flight.reply is first.reply


def test_copies_are_paid_from_the_budget() -> None:
    flight, _ = flying(RetryBudget(0.5, 0.0), hedge_after_s=1.0)
    assert not flight.due(101.0)
    assert flight.wake_at() == 110.0


def test_only_one_copy_at_a_time_writes_into_the_callers_arrays() -> None:
    asked: list[bool] = []

    def reply(direct: bool) -> Reply:
        asked.append(direct)
        return Reply()

    one = Call("GET", "/x", 10.0, lambda _: Outgoing("", []), reply, repeat=True, hedge_after_s=1.0)
    flight = Flight(one, Policy(backoff_s=0.0), RetryBudget(10, 0.1), 100.0)
    first = flight.start(100.0)
    assert flight.due(101.0)
    second = flight.start(101.0)
    flight.failed(first, Unreachable("reset"), 101.1)
    flight.failed(second, Unreachable("reset"), 101.2)
    flight.start(flight.wake_at())
    assert asked == [True, False, True]


def test_a_group_starts_no_more_than_it_may_and_the_rest_as_others_end() -> None:
    group = Group([call() for _ in range(5)], Policy(parallel=2), RetryBudget(10, 0.1), 100.0)
    running = [group.next(100.0), group.next(100.0)]
    assert group.next(100.0) is None
    assert group.wake_at() == 110.0
    for _ in range(3):
        done = running.pop(0)
        assert done is not None
        answer(done)
        group.answered(done, 101.0)
        running.append(group.next(101.0))
        assert running[-1] is not None
        assert group.next(101.0) is None
    for last in running:
        assert last is not None
        assert not group.ended()
        answer(last)
        group.answered(last, 102.0)
    assert group.ended()
    assert [reply.order for reply in group.replies()] == [1, 2, 3, 4, 5]


def test_the_first_that_fails_fails_the_group() -> None:
    group = Group([call(repeat=False), call()], Policy(), RetryBudget(10, 0.1), 100.0)
    first, second = group.next(100.0), group.next(100.0)
    assert first is not None
    assert second is not None
    group.failed(first, Unreachable("reset"), 100.0)
    assert group.ended()
    with pytest.raises(Unreachable):
        group.replies()
    group.abandon()
    assert second.dropped


def test_an_attempt_without_a_connection_waits_for_one() -> None:
    group = Group([call(), call()], Policy(), RetryBudget(10, 0.1), 100.0)
    first, second = group.next(100.0), group.next(100.0)
    assert first is not None
    assert second is not None
    group.put_back(second)
    assert group.starved
    assert group.next(100.0) is None
    assert group.wake_at() == 110.0
    group.resume(101.0)
    again = group.next(101.0)
    assert again is not None
    assert again.flight is second.flight
