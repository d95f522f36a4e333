"""Requests in parts: every row has its destination, once, and no bag is split."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.client.fake_service import answers
from tierstore.client import wire
from tierstore.client.inputs import Bags, Batch, Plain
from tierstore.client.splitting import JoinedOutputs, Split, split_lookup, split_predict

sizes = st.lists(st.integers(0, 9), min_size=1, max_size=20)


def answered(split: Split, late: bool) -> dict[str, np.ndarray]:
    """What a service would answer to the parts, gathered; the last part's answer comes first if `late`."""
    joined = JoinedOutputs(split)
    for number in sorted(range(len(split.parts)), reverse=late):
        part = split.parts[number]
        tensors = {
            tensor.name: np.frombuffer(tensor.data, {"INT64": np.int64, "FP32": np.float32}[tensor.datatype])
            for tensor in part.inputs
        }
        for name, array in answers(tensors, [output.name for output in part.outputs]).items():
            destination = joined.destination(number, name, array.shape, array.dtype)
            if destination is not None:
                destination[...] = array
    assert joined.misfit is None
    return joined.arrays


def bags_of(lengths: list[int], weighted: bool) -> Batch:
    n = sum(lengths)
    weights = np.arange(n) / 2 if weighted else None
    return Batch.of("bag", np.arange(n), np.cumsum([0, *lengths])[:-1], weights)


def whole_of(split: Split) -> dict[str, np.ndarray]:
    (part,) = split.parts
    tensors = {
        tensor.name: np.frombuffer(tensor.data, {"INT64": np.int64, "FP32": np.float32}[tensor.datatype])
        for tensor in part.inputs
    }
    return answers(tensors, [output.name for output in part.outputs])


def same(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> None:
    assert left.keys() == right.keys()
    for name, array in left.items():
        np.testing.assert_allclose(array, right[name], rtol=1e-6)
        assert array.dtype == right[name].dtype


@given(sizes, st.integers(0, 60), st.integers(0, 3), st.integers(1, 30), st.booleans(), st.booleans())
def test_look_ups_in_shards_are_those_in_one(
    lengths: list[int], keys: int, users: int, limit: int, weighted: bool, late: bool
) -> None:
    batches = [Batch.of("user", np.arange(users)), Batch.of("f", np.arange(keys)), bags_of(lengths, weighted)]
    outputs = {b.feature: [wire.Output(b.feature, {}), wire.Output(f"{b.feature}.found", {})] for b in batches}
    split = split_lookup(batches, outputs, limit)
    whole = whole_of(split_lookup(batches, outputs, None))
    if len(split.parts) == 1:
        same(whole_of(split), whole)
        return
    same(answered(split, late), whole)
    longest = max([limit, *lengths])
    for part in split.parts:
        names = [tensor.name for tensor in part.inputs]
        assert len(names) == len(set(names))
        assert sum(tensor.shape[0] for tensor in part.inputs if "." not in tensor.name) <= longest


@given(sizes, st.integers(1, 30), st.booleans(), st.booleans())
def test_predictions_in_shards_are_those_in_one(lengths: list[int], limit: int, weighted: bool, late: bool) -> None:
    n = len(lengths)
    given = [
        Plain("f", np.arange(n), (n,)),
        Bags(bags_of(lengths, weighted)),
        Plain("user", np.array([3]), (1,)),
        Plain("hour", np.arange(n, dtype=np.float32), (n,)),
        Plain("scale", np.array([2], np.float32), (1,), items=False),
    ]
    outputs = [wire.Output(name, {}) for name in ("score", "f", "bag", "bag.found", "user", "user.found")]
    split = split_predict(given, outputs, limit)
    whole = whole_of(split_predict(given, outputs, None))
    assert len(split.parts) == -(-n // limit)
    same(whole_of(split) if len(split.parts) == 1 else answered(split, late), whole)


def test_what_does_not_go_together_is_noted_and_not_put_together() -> None:
    split = split_predict([Plain("f", np.arange(4), (4,))], [], 2)
    for shape in ((3, 2), (), (1,)):
        joined = JoinedOutputs(split)
        assert joined.destination(0, "f", shape, np.dtype(np.float32)) is None
        assert joined.misfit == "f"
    for shape, dtype in (((2, 3), np.float32), ((2, 2), np.float16)):
        joined = JoinedOutputs(split)
        assert joined.destination(0, "f", (2, 2), np.dtype(np.float32)) is not None
        assert joined.destination(1, "f", shape, np.dtype(dtype)) is None
        assert joined.misfit == "f"
