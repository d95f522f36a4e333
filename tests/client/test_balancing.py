"""Which node an attempt goes to, by a clock that the test sets."""

from __future__ import annotations

from collections import Counter

import pytest

from tierstore.client.attempts import Attempt, CallGroup, NodeCall, Outgoing, RetryBudget
from tierstore.client.balancing import LACK_S, PAUSE_S, Balancer
from tierstore.client.base import parse_addresses
from tierstore.client.settings import RetryPolicy
from tierstore.errors import InvalidInput, NotFound, NotReady, Unreachable

NOW = 100.0


def group(
    balancer: Balancer, *, calls: int = 1, retries: int = 3, budget: float = 10.0, **options: object
) -> CallGroup:
    call = NodeCall("GET", "/x", 1e6, lambda _: Outgoing("", []), **({"repeat": True} | options))  # type: ignore[arg-type]
    policy = RetryPolicy(retries=retries, backoff_s=1.0)
    return CallGroup([call] * calls, policy, RetryBudget(budget, 0.0), NOW, balancer)


def answer(one: CallGroup, attempt: Attempt, status: int, now: float = NOW, **headers: str) -> None:
    attempt.reply.start(status, {name.replace("_", "-"): value for name, value in headers.items()}, 0)
    one.answered(attempt, now)


def next_of(one: CallGroup, now: float = NOW) -> Attempt:
    attempt = one.next(now)
    assert attempt is not None
    return attempt


def test_requests_go_to_the_least_busy_node_and_in_turn_among_equals() -> None:
    balancer = Balancer(3)
    assert Counter(balancer.choose("/x", NOW) for _ in range(30)) == {0: 10, 1: 10, 2: 10}
    balancer.started(0)
    balancer.started(2)
    assert {balancer.choose("/x", NOW) for _ in range(5)} == {1}
    balancer.ended(0)
    balancer.ended(2)
    assert {balancer.choose("/x", NOW) for _ in range(6)} == {0, 1, 2}


def test_all_parts_of_a_request_go_to_one_node() -> None:
    one = group(Balancer(3), calls=3)
    assert len({next_of(one).node for _ in range(3)}) == 1


def test_the_next_attempt_goes_to_another_node_at_once() -> None:
    balancer = Balancer(3)
    one = group(balancer)
    nodes = []
    for _ in range(3):
        attempt = next_of(one)
        nodes.append(attempt.node)
        one.failed(attempt, Unreachable("refused"), NOW)
    assert sorted(nodes) == [0, 1, 2]
    assert one.next(NOW) is None, "all have failed: now it waits"
    assert one.wake_at() > NOW
    answer(one, next_of(one, NOW + 10), 200, NOW + 10)
    assert one.ended()


def test_failing_over_is_paid_from_the_budget() -> None:
    one = group(Balancer(3), budget=1.0)
    for _ in range(2):
        one.failed(next_of(one), Unreachable("refused"), NOW)
    assert one.ended()
    with pytest.raises(Unreachable):
        one.replies()


def test_a_node_that_fails_is_skipped_for_a_pause_that_doubles_and_one_attempt_tries_it() -> None:
    balancer, now = Balancer(2), NOW
    for number in range(12):
        balancer.failed(0, now)
        balancer.failed(0, now)  # what fails at the same time does not count
        pause = min(PAUSE_S[0] * 2**number, PAUSE_S[1])
        assert balancer.pauses(now) == [pytest.approx(pause), 0.0]
        assert {balancer.choose("/x", now + 0.99 * pause) for _ in range(4)} == {1}
        now += pause + 1e-6
        balancer.started(1)  # so the other one is the less busy
        assert [balancer.choose("/x", now) for _ in range(4)] == [0, 1, 1, 1]
        balancer.ended(1)
    balancer.answered(0, "/x", now)
    assert balancer.pauses(now) == [0.0, 0.0]
    balancer.failed(0, now)
    assert balancer.pauses(now)[0] == pytest.approx(PAUSE_S[0]), "the pause begins again"


def test_where_all_nodes_fail_the_one_whose_pause_ends_first_is_tried() -> None:
    balancer = Balancer(2)
    balancer.failed(1, NOW)
    balancer.failed(0, NOW + 0.1)
    assert {balancer.choose("/x", NOW + 0.2) for _ in range(4)} == {1}


def test_an_overloaded_node_is_skipped_until_it_says() -> None:
    balancer = Balancer(2)
    one = group(balancer)
    first = next_of(one)
    answer(one, first, 503, retry_after="7")
    assert balancer.pauses(NOW)[first.node] == pytest.approx(7.0)
    second = next_of(one)
    assert second.node != first.node
    answer(one, second, 503, retry_after="7")
    assert one.next(NOW) is None
    assert one.wake_at() >= NOW + 7, "nobody is asked before the time"


@pytest.mark.parametrize("value", ["999999999", "inf", "nan"])
def test_no_node_is_skipped_for_longer_than_the_longest_pause(value: str) -> None:
    balancer = Balancer(2)
    one = group(balancer)
    first = next_of(one)
    answer(one, first, 503, retry_after=value)
    assert balancer.pauses(NOW)[first.node] <= PAUSE_S[1]
    assert first.node in {balancer.choose("/x", NOW + PAUSE_S[1]) for _ in range(2)}


def test_what_a_node_lacks_is_asked_of_the_others_without_a_retry() -> None:
    balancer = Balancer(3)
    one = group(balancer, retries=0, budget=0.0)
    first = next_of(one)
    answer(one, first, 404)
    second = next_of(one)
    assert second.node != first.node
    answer(one, second, 200)
    one.replies()
    for _ in range(6):
        assert balancer.choose("/x", NOW) != first.node, "for that path it is skipped"
    assert first.node in {balancer.choose("/y", NOW) for _ in range(6)}
    assert first.node in {balancer.choose("/x", NOW + LACK_S + 1) for _ in range(6)}


def test_what_no_node_has_is_not_found_after_each_was_asked_once() -> None:
    balancer = Balancer(3)
    one = group(balancer)
    nodes = []
    while (attempt := one.next(NOW)) is not None:
        nodes.append(attempt.node)
        answer(one, attempt, 404)
    assert sorted(nodes) == [0, 1, 2]
    with pytest.raises(NotFound):
        one.replies()
    again = group(balancer)
    answer(again, next_of(again), 404)
    assert again.ended(), "for a while one node is asked"


def test_what_is_not_ready_at_one_node_is_asked_of_each() -> None:
    one = group(Balancer(3), retries=0, budget=0.0)
    nodes = []
    while (attempt := one.next(NOW)) is not None:
        nodes.append(attempt.node)
        answer(one, attempt, 400, retry_after="1")
    assert sorted(nodes) == [0, 1, 2]
    with pytest.raises(NotReady):
        one.replies()


def test_a_refusal_is_checked_with_one_more_node_and_a_change_with_none() -> None:
    balancer = Balancer(3)
    one = group(balancer)
    answer(one, next_of(one), 400)
    answer(one, next_of(one), 400)
    with pytest.raises(InvalidInput):
        one.replies()
    change = group(balancer, repeat=False)
    answer(change, next_of(change), 404)
    with pytest.raises(NotFound):
        change.replies()


def test_a_node_that_is_silent_while_others_would_answer_has_failed() -> None:
    balancer = Balancer(2)
    one = CallGroup(
        [NodeCall("GET", "/x", 1.0, lambda _: Outgoing("", []))], RetryPolicy(), RetryBudget(10, 0), NOW, balancer
    )
    node = next_of(one).node
    one.expire(NOW + 2)
    assert balancer.pauses(NOW + 2)[node] > 0
    balancer.answered(node, "/x", NOW + 3)
    slow = CallGroup(
        [NodeCall("GET", "/x", 1.0, lambda _: Outgoing("", []))] * 2,
        RetryPolicy(),
        RetryBudget(10, 0),
        NOW + 4,
        balancer,
    )
    attempts = [next_of(slow, NOW + 4) for _ in range(2)]
    answer(slow, attempts[0], 200, NOW + 4.5)
    slow.expire(NOW + 6)
    assert balancer.pauses(NOW + 6) == [0.0, 0.0], "it answered another request meanwhile"


def test_a_node_that_says_the_time_is_over_has_failed_only_if_it_answered_nobody() -> None:
    balancer = Balancer(2)
    one = group(balancer, calls=2)
    first, second = next_of(one), next_of(one)
    answer(one, first, 200, NOW + 1)
    answer(one, second, 504, NOW + 2)
    assert balancer.pauses(NOW + 2) == [0.0, 0.0], "it was the request's own time"
    third = next_of(one, NOW + 2)
    assert third.node != second.node
    answer(one, third, 504, NOW + 3)
    assert balancer.pauses(NOW + 3)[third.node] > 0


def test_a_copy_goes_to_another_node() -> None:
    one = group(Balancer(2), hedge_after_s=1.0)
    first = next_of(one)
    assert next_of(one, NOW + 2).node != first.node


def test_one_node_is_never_skipped() -> None:
    balancer = Balancer(1)
    one = group(balancer, retries=0)
    answer(one, next_of(one), 503)
    with pytest.raises(NotReady):
        one.replies()
    assert balancer.pauses(NOW) == [0.0]


@pytest.mark.parametrize("urls", ["http://a:1, http://b:2", ["http://a:1", "http://b:2"], ("http://a:1", "http://b:2")])
def test_addresses_are_a_list_or_separated_by_commas(urls: str | list[str]) -> None:
    assert [address.url for address in parse_addresses(urls)] == ["http://a:1", "http://b:2"]


@pytest.mark.parametrize(
    ("urls", "reason"), [([], "at least one"), ("http://a,http://a/", "each node once"), (",", "url")]
)
def test_addresses_that_make_no_sense_are_refused(urls: str | list[str], reason: str) -> None:
    with pytest.raises(InvalidInput, match=reason):
        parse_addresses(urls)
