"""When calls are repeated, hedged and given up, by a clock that the test sets."""

from __future__ import annotations

import pytest

from tierstore.client.attempts import Attempt, CallGroup, NodeCall, Outgoing, PendingCall, RetryBudget
from tierstore.client.replies import DocumentReply
from tierstore.client.settings import RetryPolicy
from tierstore.errors import DeadlineExceeded, InvalidInput, Overloaded, TierstoreError, Unreachable


def call(*, repeat: bool = True, timeout_s: float = 10.0, hedge_after_s: float | None = None) -> NodeCall:
    return NodeCall("GET", "/x", timeout_s, lambda _: Outgoing("", []), repeat=repeat, hedge_after_s=hedge_after_s)


def answer(attempt: Attempt, status: int = 200, **headers: str) -> None:
    attempt.reply.start(status, {name.replace("_", "-"): value for name, value in headers.items()}, 0)


def started(
    budget: RetryBudget | None = None, policy: RetryPolicy | None = None, **options: float | bool | None
) -> tuple[PendingCall, Attempt]:
    pending = PendingCall(call(**options), policy or RetryPolicy(), budget or RetryBudget(10, 0.1), 100.0)  # type: ignore[arg-type]
    assert pending.due(100.0)
    return pending, pending.start(100.0)


def test_waits_double_and_are_drawn_from_the_whole_of_their_length() -> None:
    policy = RetryPolicy(retries=5, backoff_s=1.0, backoff_limit_s=4.0)
    waits: list[list[float]] = [[] for _ in range(5)]
    for _ in range(200):
        pending, attempt = started(policy=policy, timeout_s=1e6)
        now = 100.0
        for number in range(5):
            pending.failed(attempt, Unreachable("reset"), now)
            waits[number].append(pending.wake_at() - now)
            assert not pending.due(pending.wake_at() - 1e-9)
            now = pending.wake_at()
            attempt = pending.start(now)
        pending.failed(attempt, Unreachable("reset"), now)
        assert isinstance(pending.error, Unreachable)
    for limit, seen in zip([1, 2, 4, 4, 4], waits, strict=True):
        assert 0 <= min(seen) < 0.2 * limit
        assert 0.8 * limit < max(seen) <= limit


def test_no_retry_starts_before_retry_after() -> None:
    for _ in range(50):
        pending, attempt = started()
        answer(attempt, 503, retry_after="3")
        pending.answered(attempt, 100.0)
        assert 103.0 <= pending.wake_at() <= 103.05


def test_a_repeat_that_would_miss_the_deadline_is_not_waited_for() -> None:
    pending, attempt = started(timeout_s=2.0)
    answer(attempt, 429, retry_after="3")
    pending.answered(attempt, 100.0)
    assert isinstance(pending.error, Overloaded)


@pytest.mark.parametrize("error", [Unreachable("reset"), InvalidInput("the answer is not HTTP")])
def test_what_may_not_be_repeated_fails_at_once(error: TierstoreError) -> None:
    pending, attempt = started(repeat=isinstance(error, InvalidInput))
    pending.failed(attempt, error, 100.0)
    assert pending.error is error


def test_a_reused_connection_that_was_closed_is_replaced_once_and_for_free() -> None:
    budget = RetryBudget(1, 0.0)
    pending, attempt = started(budget, RetryPolicy(retries=0))
    pending.failed(attempt, Unreachable("reset"), 100.0, stale=True)
    assert pending.due(100.0)
    attempt = pending.start(100.0)
    assert attempt.fresh
    assert budget.remaining == 1
    pending.failed(attempt, Unreachable("reset"), 100.0, stale=True)
    assert isinstance(pending.error, Unreachable)


def test_a_budget_is_emptied_by_repeats_and_filled_by_calls() -> None:
    budget = RetryBudget(2, 0.5)
    for expected in (True, True, False):
        assert budget.reserve() is expected
    budget.add()
    assert not budget.reserve()
    budget.add()
    assert budget.reserve()
    for _ in range(100):
        budget.add()
    assert budget.remaining == 2
    assert (budget.reserved, budget.refused) == (3, 2)


def test_a_deadline_ends_whatever_is_under_way() -> None:
    pending, attempt = started(timeout_s=2.0)
    assert pending.wake_at() == 102.0
    pending.expire(101.9)
    assert not pending.done
    pending.expire(102.0)
    assert isinstance(pending.error, DeadlineExceeded)
    assert attempt.dropped
    answer(attempt)
    pending.answered(attempt, 102.1)
    assert pending.reply is None


def test_of_two_copies_the_first_answer_counts_and_the_other_is_dropped() -> None:
    for winner in (0, 1):
        pending, first = started(hedge_after_s=1.0)
        assert pending.wake_at() == 101.0
        assert not pending.due(100.9)
        assert pending.due(101.0)
        copies = [first, pending.start(101.0)]
        assert not pending.due(105.0), "two copies, no more"
        answer(copies[winner])
        pending.answered(copies[winner], 101.5)
        assert pending.reply is copies[winner].reply
        assert copies[1 - winner].dropped


def test_a_copy_that_is_refused_does_not_end_the_other() -> None:
    pending, first = started(hedge_after_s=1.0)
    assert pending.due(101.0)
    copy = pending.start(101.0)
    answer(copy, 503, retry_after="0")
    pending.answered(copy, 101.1)
    assert not pending.done
    assert not first.dropped
    assert pending.wake_at() == 110.0
    answer(first)
    pending.answered(first, 102.0)
    assert pending.reply is first.reply


def test_copies_are_paid_from_the_budget() -> None:
    pending, _ = started(RetryBudget(0.5, 0.0), hedge_after_s=1.0)
    assert not pending.due(101.0)
    assert pending.wake_at() == 110.0


def test_only_one_copy_at_a_time_writes_into_the_callers_arrays() -> None:
    direct_writes: list[bool] = []

    def reply(direct: bool) -> DocumentReply:
        direct_writes.append(direct)
        return DocumentReply()

    one = NodeCall("GET", "/x", 10.0, lambda _: Outgoing("", []), reply, repeat=True, hedge_after_s=1.0)
    pending = PendingCall(one, RetryPolicy(backoff_s=0.0), RetryBudget(10, 0.1), 100.0)
    first = pending.start(100.0)
    assert pending.due(101.0)
    second = pending.start(101.0)
    pending.failed(first, Unreachable("reset"), 101.1)
    pending.failed(second, Unreachable("reset"), 101.2)
    pending.start(pending.wake_at())
    assert direct_writes == [True, False, True]


def test_a_group_starts_no_more_than_it_may_and_the_others_as_these_end() -> None:
    group = CallGroup([call() for _ in range(5)], RetryPolicy(parallel=2), RetryBudget(10, 0.1), 100.0)
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
    group = CallGroup([call(repeat=False), call()], RetryPolicy(), RetryBudget(10, 0.1), 100.0)
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
    group = CallGroup([call(), call()], RetryPolicy(), RetryBudget(10, 0.1), 100.0)
    first, second = group.next(100.0), group.next(100.0)
    assert first is not None
    assert second is not None
    group.postpone(second)
    assert group.starved
    assert group.next(100.0) is None
    assert group.wake_at() == 110.0
    group.resume(101.0)
    again = group.next(101.0)
    assert again is not None
    assert again.pending is second.pending
