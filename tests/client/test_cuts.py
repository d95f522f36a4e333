"""Requests in shards: every row has its place, once, and no bag is cut."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tierstore.client import wire
from tierstore.client.batches import Batch
from tierstore.client.shards import Bags, Cut, Gather, Plain, cut_items, cut_lookup

from .fake_service import answers

sizes = st.lists(st.integers(0, 9), min_size=1, max_size=20)


def answered(cut: Cut, late: bool) -> dict[str, np.ndarray]:
    """What a service would answer to the shards, gathered; the last shard's answer comes first if `late`."""
    gather = Gather(cut)
    for number in sorted(range(len(cut.shards)), reverse=late):
        shard = cut.shards[number]
        tensors = {
            tensor.name: np.frombuffer(tensor.data, {"INT64": np.int64, "FP32": np.float32}[tensor.datatype])
            for tensor in shard.inputs
        }
        for name, array in answers(tensors, [output.name for output in shard.outputs]).items():
            place = gather.place(number, name, array.shape, array.dtype)
            if place is not None:
                place[...] = array
    assert gather.misfit is None
    return gather.arrays


def bags_of(lengths: list[int], weighted: bool) -> Batch:
    n = sum(lengths)
    weights = np.arange(n) / 2 if weighted else None
    return Batch.of("bag", np.arange(n), np.cumsum([0, *lengths])[:-1], weights)


def whole_of(cut: Cut) -> dict[str, np.ndarray]:
    (shard,) = cut.shards
    tensors = {
        tensor.name: np.frombuffer(tensor.data, {"INT64": np.int64, "FP32": np.float32}[tensor.datatype])
        for tensor in shard.inputs
    }
    return answers(tensors, [output.name for output in shard.outputs])


def same(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> None:
    assert left.keys() == right.keys()
    for name, array in left.items():
        np.testing.assert_allclose(array, right[name], rtol=1e-6)
        assert array.dtype == right[name].dtype


@given(sizes, st.integers(0, 60), st.integers(0, 3), st.integers(1, 30), st.booleans(), st.booleans())
def test_look_ups_in_shards_are_those_in_one(
    lengths: list[int], keys: int, users: int, most: int, weighted: bool, late: bool
) -> None:
    batches = [Batch.of("user", np.arange(users)), Batch.of("f", np.arange(keys)), bags_of(lengths, weighted)]
    outputs = {b.feature: [wire.Output(b.feature, {}), wire.Output(f"{b.feature}.found", {})] for b in batches}
    cut = cut_lookup(batches, outputs, most)
    whole = whole_of(cut_lookup(batches, outputs, None))
    if len(cut.shards) == 1:
        same(whole_of(cut), whole)
        return
    same(answered(cut, late), whole)
    longest = max([most, *lengths])
    for shard in cut.shards:
        names = [tensor.name for tensor in shard.inputs]
        assert len(names) == len(set(names))
        assert sum(tensor.shape[0] for tensor in shard.inputs if "." not in tensor.name) <= longest


@given(sizes, st.integers(1, 30), st.booleans(), st.booleans())
def test_predictions_in_shards_are_those_in_one(lengths: list[int], most: int, weighted: bool, late: bool) -> None:
    n = len(lengths)
    given = [
        Plain("f", np.arange(n), (n,)),
        Bags(bags_of(lengths, weighted)),
        Plain("user", np.array([3]), (1,)),
        Plain("hour", np.arange(n, dtype=np.float32), (n,)),
        Plain("scale", np.array([2], np.float32), (1,), items=False),
    ]
    outputs = [wire.Output(name, {}) for name in ("score", "f", "bag", "bag.found", "user", "user.found")]
    cut = cut_items(given, outputs, most)
    whole = whole_of(cut_items(given, outputs, None))
    assert len(cut.shards) == -(-n // most)
    same(whole_of(cut) if len(cut.shards) == 1 else answered(cut, late), whole)


def test_what_does_not_go_together_is_noted_and_not_put_together() -> None:
    cut = cut_items([Plain("f", np.arange(4), (4,))], [], 2)
    for shape in ((3, 2), (), (1,)):
        gather = Gather(cut)
        assert gather.place(0, "f", shape, np.dtype(np.float32)) is None
        assert gather.misfit == "f"
    for shape, dtype in (((2, 3), np.float32), ((2, 2), np.float16)):
        gather = Gather(cut)
        assert gather.place(0, "f", (2, 2), np.dtype(np.float32)) is not None
        assert gather.place(1, "f", shape, np.dtype(dtype)) is None
        assert gather.misfit == "f"
