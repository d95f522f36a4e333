"""Which version a front serves, and whom it asks, by what nodes report."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from tierstore.engine.placements.upstream.choice import ModelDocument, ReportedModel, choose, ownership, problem_of


def node(
    active: int | None,
    versions: dict[int, int] | list[int],
    own: list[list[int]] | None = None,
    last: int = 0,
    count: int = 4,
    line: str = "a",
) -> ReportedModel:
    """`versions`: those that it can be asked for, with their seqs."""
    seqs = versions if isinstance(versions, dict) else dict.fromkeys(versions, last)
    document: dict[str, Any] = {
        "active": active,
        "log": [0, last],
        "versions": {str(number): {"line": line, "seq": seq} for number, seq in seqs.items()},
        "partitions": None if own is None else {"count": count, "own": own},
    }
    return ReportedModel.of(ModelDocument.model_validate_json(json.dumps(document)))


def halves(
    first: ReportedModel | None, second: ReportedModel | None, served: int | None
) -> tuple[int | None, int | None]:
    choice = choose([first, second], served, {})
    return choice.current, choice.wanted


def test_a_rollout_over_two_halves() -> None:
    low, high = [[0, 1]], [[2, 3]]
    assert halves(node(1, [1], low), node(1, [1], high), None) == (1, None)
    # version 2 is the canary everywhere, and active nowhere
    assert halves(node(1, [1, 2], low), node(1, [1, 2], high), 1) == (1, None)
    # one has switched, and holds version 1: 2 is made ready
    assert halves(node(2, [1, 2], low), node(1, [1, 2], high), 1) == (1, 2)
    # ... or does not hold it: then there is only version 2
    assert halves(node(2, [2], low), node(1, [1, 2], high), 1) == (2, None)
    # one that begins now serves what can be asked for everywhere, and was switched to somewhere
    assert halves(node(2, [2], low), node(1, [1, 2], high), None) == (2, None)
    # without a canary there is nothing whole: it stays
    assert halves(node(2, [2], low), node(1, [1], high), 1) == (1, None)
    assert halves(node(2, [1, 2], low), node(2, [1, 2], high), 1) == (2, None)


def test_a_node_that_does_not_answer_decides_nothing() -> None:
    assert halves(node(2, [2], [[0, 1]]), None, 1) == (2, None)
    assert halves(node(1, [1], [[0, 1]]), None, 1) == (1, None)
    # it comes back with version 1 alone: the front does not go back
    assert halves(node(2, [2], [[0, 1]]), node(1, [1], [[2, 3]]), 2) == (2, None)


def test_copies_are_left_for_the_new_version_when_the_last_has_switched() -> None:
    assert halves(node(2, [1, 2]), node(1, [1, 2]), 1) == (1, 2)
    assert halves(node(2, [2]), node(1, [1]), 1) == (1, 2)
    assert halves(node(2, [2]), node(2, [2]), 1) == (2, None)


def test_the_seq_is_the_lowest_that_every_partition_has() -> None:
    quarter = [node(1, {1: 5}, [[0, 0]], 7), node(1, {1: 6}, [[1, 3]], 9)]
    choice = choose(quarter, 1, {})
    assert (choice.seq, choice.marks[1]) == (7, 5)
    with_copy = [*quarter, node(1, {1: 8}, [[0, 0]], 8)]
    choice = choose(with_copy, 1, {})
    assert (choice.seq, choice.marks[1]) == (8, 6)
    assert choose([None, quarter[1]], 1, {}).seq == 9


def test_a_version_that_was_built_again_is_another_one() -> None:
    before, after = node(1, [1], [[0, 1]]), node(1, [1], [[2, 3]], line="b")
    choice = choose([before, after], 1, {1: "a"})
    assert choice.lines[1] == "a"
    assert choice.complete == frozenset()
    assert ownership([before, after], 1, "a").owns.tolist() == [[True, True, False, False], [False] * 4]
    both = [node(1, [1], [[0, 1]], line="b"), after]
    assert choose(both, 1, {1: "a"}).lines[1] == "b"


def test_a_node_with_everything_stands_beside_shares() -> None:
    states = [node(1, [1]), node(1, [1], [[2, 2]])]
    assert ownership(states, 1, "a").owns.tolist() == [[True] * 4, [False, False, True, False]]
    assert choose(states, 1, {}).complete == {1}


def test_what_makes_no_sense_is_said() -> None:
    assert problem_of([node(1, [1], [[0, 1]]), node(1, [1], [[0, 1]], count=8), None]) is not None
    assert problem_of([node(1, [1]), node(1, [1], [[0, 1]], count=8)]) is None


OF_MODEL = {"active": 1, "log": [0, 3], "versions": {"1": {"line": "a", "seq": 3}}, "partitions": None}


@pytest.mark.parametrize(
    "other",
    [
        {"partitions": {"count": 4, "own": [[0, 4]]}},
        {"partitions": {"count": "x", "own": []}},
        {"partitions": {"own": [[0, 1]]}},
        {"partitions": {"count": 4, "own": [[0, 1], [1, 2]]}},
        {"partitions": {"count": 1024, "own": [[0, 1023]] * 200_000}},
        {"partitions": {"count": float("inf"), "own": [[0, 1]]}},
        {"partitions": {"count": 1 << 70, "own": [[0, 1]]}},
        {"partitions": [[]]},
        {"active": [1]},
        {"active": -1},
        {"log": [0, 1 << 63]},
        {"log": [0]},
        {"versions": {"one": {"line": "a", "seq": 3}}},
        {"versions": {"1": {"line": "a", "seq": 1e300}}},
        {"versions": {"1": {"line": "a" * 1000, "seq": 3}}},
        {"versions": [1]},
    ],
)
def test_what_a_node_reports_in_another_form_is_refused(other: dict[str, Any]) -> None:
    assert ModelDocument.model_validate_json(json.dumps(OF_MODEL)).log == (0, 3)
    with pytest.raises(ValidationError):
        ModelDocument.model_validate_json(json.dumps(OF_MODEL | other))
