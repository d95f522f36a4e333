"""What is answered and refused is the same over every protocol: rows, bags, datatypes, versions, labels, a canary."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import permutations
from typing import Any

import numpy as np
import pytest

from tests.engine.quick_build import in_process
from tests.service.callers import BAD, UNKNOWN, Caller, OurClient, Refused, over_all
from tests.service.conftest import GRPC, eventually, settings_for
from tests.service.fake_store import DEFAULT, ITEMS, USERS, VERSION
from tests.service.scenes import KEYS, delta, items, rows, write_snapshot
from tierstore.engine.store import Store
from tierstore.service.server import ServerThread

SHIFT = 1000.0  # of the canary's values
FOUND = np.array([int(key) in ITEMS for key in KEYS])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerThread]:
    """The model `ctr`, and its canary for half of those who do not say which version they want."""
    root = tmp_path_factory.mktemp("answers")
    with in_process(), Store(settings_for(root, grpc_port=GRPC, keep_versions=2)) as store:
        store.load_snapshot(write_snapshot(root))
        store.load_snapshot(write_snapshot(root, model="split"))
        store.load_snapshot(write_snapshot(root, VERSION + 1, model="split", shift=SHIFT), activate=False)
        store.load_snapshot(write_snapshot(root, 1, model="changing"))
        store.load_snapshot(write_snapshot(root, 2, model="changing", shift=SHIFT), activate=False)
        store.canary("split", VERSION + 1, share=0.5)
        store.label("split", "spring", VERSION + 1)
        with ServerThread(store) as server:
            eventually(lambda: server.service.reactors_state == "running", "the reactors")
            yield server


def words(*keys: str) -> np.ndarray:
    return np.array(keys, object)


def users(keys: np.ndarray) -> np.ndarray:
    return rows("user", [USERS.get(key, 0.0) for key in keys])


def check(caller: Caller, inputs: dict[str, Any], expected: dict[str, np.ndarray], outputs: list[str] | None = None, *, rtol: float = 0, **how: Any) -> None:  # fmt: skip
    """Ask again and again: the first request of a structure is planned by Python, and compiled threads answer those after it."""
    for _ in range(3):
        answer = caller.ask("ctr", inputs, outputs, **how)
        assert answer.version in (None, VERSION)
        got = dict(zip(expected, answer.values(), strict=True)) if answer.keys() == {""} else dict(answer)
        assert [*got] == [*expected] if outputs and "order" not in caller.lacks else got.keys() == expected.keys()
        for name, array in expected.items():
            if array.size or "empty shapes" not in caller.lacks:
                assert (got[name].dtype, got[name].shape) == (array.dtype, array.shape), name
            np.testing.assert_allclose(got[name].reshape(array.shape), array, rtol, err_msg=name)


@over_all()
def test_rows_in_the_order_of_the_keys(caller: Caller) -> None:
    check(caller, {"item_id": KEYS}, {"item_id": items(KEYS)})
    fields = np.frombuffer(b"\x3a\x08" * 32, np.int64)  # the tag and length of a raw tensor in a message
    check(caller, {"item_id": fields}, {"item_id": items(fields)})
    big = np.array([1 << 63, 5, (1 << 64) - 1], np.uint64)
    check(caller, {"big": big}, {"big": rows("big", [9.0, 5.0, 0.0])})
    names = words("u3", "", "λ", "u3", "missing", "u49")
    check(caller, {"user": names}, {"user": users(names)})


@over_all()
def test_every_feature_that_is_given_is_answered(caller: Caller) -> None:
    pairs, names = KEYS.reshape(4, 2), words("u1", "λ", "nobody", "")
    big = np.array([5, 6, 1 << 63, 5], np.uint64)
    inputs = {"item_id": pairs, "user": names, "big": big}
    check(caller, inputs, {"item_id": items(pairs), "user": users(names), "big": rows("big", [5, 0, 9, 5])})


@over_all("lengths that differ")
def test_features_may_have_different_numbers_of_keys(caller: Caller) -> None:
    names = words("u1", "nobody")
    check(caller, {"item_id": KEYS, "user": names}, {"item_id": items(KEYS), "user": users(names)})


@over_all()
def test_found_tells_rows_from_defaults_and_has_the_shape_of_the_keys(caller: Caller) -> None:
    keys, found = KEYS.reshape(2, 4), FOUND.reshape(2, 4)
    expected = {"item_id.found": found, "item_id": items(keys)}
    check(caller, {"item_id": keys}, expected, ["item_id.found", "item_id"])
    check(caller, {"clicked": keys}, {"clicked.found": found}, ["clicked.found"])
    names = words("u1", "missing")
    check(caller, {"user": names}, {"user.found": np.array([True, False])}, ["user.found"])


@over_all()
def test_outputs_are_those_that_are_named(caller: Caller) -> None:
    odd = KEYS[:3].reshape(1, 3)  # three bytes of `found` leave what follows them unaligned
    expected = {"item_id.found": np.ones((1, 3), bool), "clicked": items(odd).mean(1), "item_id": items(odd), "clicked.found": np.ones((1, 3), bool)}  # fmt: skip
    expected["clicked.found"][0] = expected["item_id.found"][0] = FOUND[:3]
    check(caller, {"item_id": odd, "clicked": odd}, expected, [*expected], rtol=1e-6)


@over_all()
def test_rows_may_be_half_floats(caller: Caller) -> None:
    keys = KEYS[[0, 1, 2, 3]]  # those whose values have no more digits
    check(caller, {"item_id": keys}, {"item_id": items(keys).astype(np.float16)}, half=True)


@over_all()
def test_rows_of_a_batch_are_pooled(caller: Caller) -> None:
    keys = np.array([[1, 2, 3], [4, 100, 6]])
    check(caller, {"clicked": keys}, {"clicked": items(keys).mean(1)}, rtol=1e-6)


@over_all()
def test_ragged_bags_and_their_weights(caller: Caller) -> None:
    keys, offsets = np.array([1, 2, 3, 4]), np.array([0, 3, 3])
    weights = np.array([1, 2, 1, 5], np.float32)
    plain = np.stack([items(keys[:3]).mean(0), np.zeros(4, np.float32), items(keys[3:])[0]])
    check(caller, {"clicked": keys, "clicked.offsets": offsets}, {"clicked": plain}, rtol=1e-6)
    plain[0] = np.average(items(keys[:3]), axis=0, weights=weights[:3])
    inputs = {"clicked.weights": weights, "clicked": keys, "clicked.offsets": offsets}
    check(caller, inputs, {"clicked": plain}, rtol=1e-6)
    pairs, factors = keys.reshape(2, 2), np.array([[1, 3], [1, 1]], np.float32)
    expected = np.stack([items(pair).T @ factor / factor.sum() for pair, factor in zip(pairs, factors, strict=True)])
    check(caller, {"clicked": pairs, "clicked.weights": factors}, {"clicked": expected.astype(np.float32)}, rtol=1e-6)


@over_all()
def test_flat_keys_without_offsets_are_bags_of_one(caller: Caller) -> None:
    check(caller, {"clicked": KEYS}, {"clicked": items(KEYS)})
    weights = np.array([0, *[3] * 7], np.float32)
    expected = items(KEYS) * (weights > 0)[:, None]
    check(caller, {"clicked": KEYS, "clicked.weights": weights}, {"clicked": expected}, rtol=1e-6)


@over_all()
def test_empty_requests_have_empty_answers(caller: Caller) -> None:
    for shape in ((3, 0),) if "no rows" in caller.lacks else ((3, 0), (0,), (0, 3)):
        for feature, lead in (("item_id", shape), ("clicked", shape[:1])):
            check(caller, {feature: np.empty(shape, np.int64)}, {feature: np.zeros((*lead, 4), np.float32)})


@over_all("combiner")
@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
def test_a_request_may_name_the_combiner(caller: Caller, combiner: str) -> None:
    keys = np.array([[1, 2, 3], [4, 100, 6]])
    total = items(keys).sum(1)
    expected = {"sum": total, "mean": total / 3, "sqrtn": total / np.sqrt(np.float32(3))}[combiner]
    for names in (["clicked"], ["clicked", "item_id"]):
        check(caller, dict.fromkeys(names, keys), dict.fromkeys(names, expected), combiner=combiner, rtol=1e-6)


@over_all()
def test_a_large_answer_comes_whole(caller: Caller) -> None:
    keys = np.arange(20_000) % 120
    check(caller, {"item_id": keys}, {"item_id": items(keys)})


@over_all()
def test_the_order_of_inputs_means_nothing(caller: Caller) -> None:
    inputs = {
        "item_id": np.arange(3),
        "clicked": np.arange(4),
        "clicked.offsets": np.array([0, 1, 3]),
        "clicked.weights": np.ones(4, np.float32),
        "user": words("u1", "u2", "λ"),
        "big": np.array([5, 6, 5], np.uint64),
    }
    first = caller.ask("ctr", inputs)
    assert first.keys() == {"item_id", "clicked", "user", "big"}
    for order in [*permutations(inputs)][::60]:
        answer = caller.ask("ctr", {name: inputs[name] for name in order})
        assert answer.keys() == first.keys()
        assert all(np.array_equal(answer[name], first[name]) for name in first)


# --- versions, labels, a canary


@over_all()
def test_a_version_is_named_by_number_or_by_label(caller: Caller) -> None:
    keys = np.array([3, 5])
    for version, shift in ((VERSION, 0), (VERSION + 1, SHIFT), ("stable", 0), ("canary", SHIFT), ("spring", SHIFT)):
        (answer,) = (found := caller.ask("split", {"item_id": keys}, version=version)).values()
        np.testing.assert_array_equal(answer, rows("item", [3 + shift, 5 + shift]))
        assert found.version in (None, VERSION + bool(shift))
    for unknown, says in ((99, "99"), ("nobody", "no label")):
        with pytest.raises(Refused, match=says) as refused:
            caller.ask("split", {"item_id": keys}, version=unknown)
        assert refused.value.kind == UNKNOWN


@over_all()
def test_a_request_id_means_the_same_over_every_protocol(caller: Caller) -> None:
    model, seen = caller.server.service.store.model("split"), set()
    for name in (f"r{number}" for number in range(12)):
        with model.view(route=name) as view:
            shift = 0 if view.version == VERSION else SHIFT
        (answer,) = caller.ask("split", {"item_id": np.array([3])}, request_id=name).values()
        np.testing.assert_array_equal(answer, rows("item", [3 + shift]))
        seen.add(shift)
    assert seen == {0, SHIFT}


@over_all()
def test_deltas_and_switches_are_seen_by_every_request_after_them(caller: Caller) -> None:
    store, keys, answers = caller.server.service.store, np.array([5, 6, 7]), caller.server.service.reactors.answers
    for step in range(6):
        seq = store.status()["models"]["changing"]["watermark"] + 1
        store.apply_delta(delta(seq, {5: 100.0 + seq}, model="changing", delete=(6,)))
        for version in (2, 1) if step == 2 else (1,):
            if step == 2:
                store.activate("changing", version)
            answer = caller.ask("changing", {"item_id": keys}, ["item_id", "item_id.found"])
            expected = [100.0 + seq, DEFAULT, 7 + (SHIFT if version == 2 else 0)]
            np.testing.assert_array_equal(answer["item_id"], rows("item", expected))
            assert answer["item_id.found"].tolist() == [True, False, True]
            assert answer.version in (None, version)
    assert not caller.compiled or caller.server.service.reactors.answers - answers >= 2, (
        "they look at what is served too"
    )


# --- refusals

ONE = np.array([1])
TWO = {"clicked": np.array([1, 2])}


def refused(
    caller: Caller, inputs: dict[str, Any], says: str, outputs: list[str] | None = None, model: str = "ctr"
) -> str:
    """The kind of a refusal that `says` something."""
    with pytest.raises(Refused) as refusal:
        caller.ask(model, inputs, outputs)
    assert re.search(says, str(refusal.value)), refusal.value
    return refusal.value.kind


@over_all()
def test_what_is_wrong_is_said(caller: Caller) -> None:
    assert refused(caller, {"item_id": ONE}, "nobody", model="nobody") == UNKNOWN
    # a verb for look-ups is of a feature, which there is not
    assert refused(caller, {"nothing": ONE}, "'nothing'.*item_id") == (
        UNKNOWN if isinstance(caller, OurClient) else BAD
    )
    for inputs, outputs, says in (
        ({"item_id": ONE}, ["nothing"], "'nothing'|no dense part"),
        ({"user": ONE}, None, "string|BYTES"),
        ({"item_id": words("1")}, None, "BYTES|INT64|int64|holds str"),
        ({"big": -ONE}, None, "uint64|UINT64"),
        (TWO | {"clicked.weights": np.array([1, np.nan], np.float32)}, None, "NaN or infinite|not valid JSON"),
        (TWO | {"clicked.weights": np.array([1, np.inf], np.float32)}, None, "NaN or infinite|not valid JSON"),
    ):
        for _ in range(2):
            assert refused(caller, inputs, says, outputs) == BAD


@over_all("lengths that differ")
def test_offsets_and_weights_that_do_not_fit(caller: Caller) -> None:
    for offsets, says in (
        ([1, 2], "0 first|first offset is 0"),
        ([0, 3], "2 keys"),
        ([0, -1], "never de"),
        ([0, 2, 1], "never de"),
        ([0, 1 << 62], "2 keys"),
        ([], "no bag|no offsets|one bag"),
    ):
        assert refused(caller, TWO | {"clicked.offsets": np.array(offsets, np.int64)}, says) == BAD
    assert refused(caller, TWO | {"clicked.weights": np.ones(3, np.float32)}, "weight") == BAD


@over_all("loose tensors")
def test_tensors_that_do_not_belong_together(caller: Caller) -> None:
    one = np.ones(1, np.float32)
    for inputs, says in (
        ({}, "no inputs"),
        ({"item_id": ONE[None, None]}, "shape"),
        ({"clicked.offsets": ONE}, "needs the keys"),
        ({"item_id": ONE, "item_id.offsets": ONE}, "no combiner|unknown input"),
        ({"item_id": ONE, "item_id.weights": one}, "no combiner|unknown input"),
        ({"clicked": ONE[None], "clicked.offsets": 0 * ONE}, "flat"),
        ({"clicked": ONE, "clicked.offsets": 0 * ONE[None]}, r"\[bags\]"),
        ({"clicked": ONE[None], "clicked.weights": one}, "one a key"),
        ({"item_id.size": ONE}, "unknown input"),
    ):
        assert refused(caller, inputs, says) == BAD


@over_all("combiner")
def test_a_combiner_that_there_is_not(caller: Caller) -> None:
    with pytest.raises(Refused, match=r"'?sum'?, '?mean'? or '?sqrtn'?"):
        caller.ask("ctr", {"clicked": KEYS}, combiner="max")
