"""Rows of several features that are looked up in one step: they are those that each look-up by itself answers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.engine import scenes
from tests.predict import onnx_models as om
from tierstore import Store
from tierstore.engine.reads.view import View
from tierstore.errors import InvalidInput
from tierstore.kernels.codec import address_of
from tierstore.lookup import plans
from tierstore.lookup import table_rows as kernel

pytestmark = pytest.mark.usefixtures("quick_loads")

FEATURES = ("clicked", "item_id", "user_id")


def same(kind: int) -> bytes:
    """A graph that answers the rows that it reads."""
    nodes = [om.node("Identity", name, f"{name}_rows") for name in FEATURES]
    dims = {"user_id": 4, "item_id": 8, "clicked": 8}
    return om.build(
        nodes,
        {name: (kind, [f"n_{name}", dims[name]]) for name in dims},
        {f"{name}_rows": (kind, [f"n_{name}", dims[name]]) for name in FEATURES},
    )


def keys_of(seed: int) -> dict[str, np.ndarray]:
    """Keys of every feature, another number of each; some are absent, some padding, some not in memory."""
    draw = np.random.default_rng(seed)
    sizes = draw.integers(0, 300, len(FEATURES))
    return {name: draw.integers(0, 1200, n) for name, n in zip(FEATURES, sizes, strict=True)}


@pytest.mark.parametrize(("kind", "dtype"), [(om.FLOAT, "float32"), (om.HALF, "float16")])
@pytest.mark.parametrize("folds", [True, False])
def test_rows_are_those_of_each_look_up_by_itself(
    open_store: Callable[..., Store], tmp_path: Path, kind: int, dtype: str, folds: bool
) -> None:
    store = open_store(host_budget="300KiB", fold_grace_s=0 if folds else 3600)
    store.load_snapshot(scenes.write_snapshot(tmp_path, dense=same(kind)))
    model = store.model("ctr")
    for seq in range(4):
        if seq:
            store.apply_delta(scenes.stamped(seq, {"user": range(seq, 600, 7), "item": range(seq, 1200, 5)}))
        asked = keys_of(seq)
        with model.view() as view:
            answer = view.predict(asked)
            for name, keys in asked.items():
                offsets = np.arange(len(keys))
                rows = (
                    view.lookup_bags(name, keys, offsets, dtype=dtype)
                    if name == "clicked"
                    else view.lookup(name, keys, dtype=dtype)
                )
                if name == "clicked":
                    np.testing.assert_array_equal(answer[f"{name}_rows"][keys == 0], 0)
                np.testing.assert_array_equal(answer[f"{name}_rows"], rows, name)


def test_keys_are_counted_by_the_tier_that_answered_them(store: Store, tmp_path: Path) -> None:
    store.load_snapshot(scenes.write_snapshot(tmp_path, dense=same(om.FLOAT)))
    model = store.model("ctr")
    asked = keys_of(1)

    def counted(ask: Callable[[View], object]) -> dict[str, int]:
        with model.view() as view:
            tables = view.open_version.tables
            before = {name: table.counts.as_dict() for name, table in tables.items()}
            ask(view)
            return {
                f"{name} {tier}": keys - before[name][tier]
                for name, table in tables.items()
                for tier, keys in table.counts.as_dict().items()
            }

    def apart(view: View) -> None:
        for name, keys in asked.items():
            view.begin(name, keys).finish()

    counted(apart)  # what is not in memory comes there
    assert counted(lambda view: view.predict(asked)) == counted(apart)


def test_one_wrong_key_type_is_told(store: Store, tmp_path: Path) -> None:
    store.load_snapshot(scenes.write_snapshot(tmp_path, dense=same(om.FLOAT)))
    with pytest.raises(InvalidInput, match="expected int64 keys"):
        store.model("ctr").predict({"user_id": [1], "item_id": ["a"], "clicked": [2]})


def test_sizes_that_do_not_fit_change_nothing() -> None:
    table = plans.TABLE.make(dim=4)
    parts = kernel.PART.make(table=address_of(table))
    states, out = np.full(2, 7, np.uint8), np.full(32, 7, np.uint8)
    for rows, at in ((3, 0), (2, 16), (-1, 0), (2, -16)):
        assert kernel.gather(address_of(parts), 1, np.array([[rows, at]]), np.zeros(2, np.int64), states, out) == -1
    assert (states == 7).all()
    assert (out == 7).all()
