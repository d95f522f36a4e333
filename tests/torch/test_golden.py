"""What a module scores goes with its snapshot, and a version that answers otherwise is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="PyTorch is not installed: make trainers")
pytest.importorskip("onnxscript", reason="onnxscript is not installed: make trainers")
pytest.importorskip("onnxruntime", reason="needs the extra `dense`")

import torch

import tierstore
from tests.torch.test_export import ITEMS, USERS, Net, inputs
from tierstore.errors import SnapshotError
from tierstore.formats.snapshot.golden import read_example
from tierstore.formats.snapshot.reader import open_snapshot
from tierstore.torch import write_snapshot


def written(where: Path, net: Any = None, **options: Any) -> Path:
    torch.manual_seed(0)
    write_snapshot(where, net or Net(), inputs(), model="ctr", version=1, **options)
    return where


def report(tmp_path: Path, where: Path) -> dict[str, Any]:
    with tierstore.open(tmp_path / "data", host_budget="4MiB", load_workers=1) as store:
        store.load_snapshot(where)
        found: dict[str, Any] = store.status()["models"]["ctr"]["versions"][0]["golden"]
        return found


@pytest.mark.parametrize("dtype", ["float32", "int8", "int4", "bfloat16"])
def test_a_module_is_held_to_its_scores_as_its_rows_are_stored(tmp_path: Path, dtype: str) -> None:
    net = Net()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    found = report(tmp_path, written(tmp_path / "s", net, dtype=dtype))
    assert found["held"] == found["examples"] > 16
    assert found["largest_difference"] < 1e-3
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items()), "the module is unchanged"


def test_examples_have_the_power_to_notice(tmp_path: Path) -> None:
    where = written(tmp_path / "s")
    examples = [read_example(path, file=entry.path) for entry, path in open_snapshot(where).golden_paths()]
    features = open_snapshot(where).manifest.feature_specs()
    scores = np.concatenate(
        [np.ravel(of) for one in examples for name, of in one.expected.items() if name not in features]
    )
    assert len(set(np.round(scores, 6).tolist())) > 32, "outputs that are not all equal"
    named = set(inputs()["item_id"].tolist())
    drawn = {key for one in examples if "item_id" in one.inputs for key in np.ravel(one.inputs["item_id"]).tolist()}
    assert len(drawn - named) > 30, "rows that the example did not name"
    assert any(not 0 <= key < ITEMS for key in drawn), "a key that the table does not hold"
    assert any(len(one.inputs["clicked"][0]) == 0 for one in examples if "clicked" in one.inputs), "an empty bag"


def test_without_them_a_snapshot_has_none(tmp_path: Path) -> None:
    assert open_snapshot(written(tmp_path / "s", golden=False)).golden_index() is None


def test_tables_alone_are_compared_by_their_rows(tmp_path: Path) -> None:
    found = report(tmp_path, written(tmp_path / "s", dense=False))
    assert found["held"] == found["examples"] > 16


def test_another_graph_than_the_modules_is_refused(tmp_path: Path) -> None:
    where = written(tmp_path / "s")
    other = written(tmp_path / "other", torch_net(1))
    (where / "dense.onnx").write_bytes((other / "dense.onnx").read_bytes())
    with pytest.raises(SnapshotError, match="golden example 0: output"):
        report(tmp_path, where)


def torch_net(seed: int) -> Net:
    torch.manual_seed(seed)
    return Net()


def test_rows_that_were_changed_after_it_are_refused(tmp_path: Path) -> None:
    where = written(tmp_path / "s")
    other = written(tmp_path / "other", torch_net(1))
    shard = open_snapshot(where).manifest.table("item").shards[0].path
    document = (where / "snapshot.json").read_text()
    theirs = open_snapshot(other).manifest.table("item").shards[0]
    (where / shard).write_bytes((other / theirs.path).read_bytes())
    ours = open_snapshot(where).manifest.table("item").shards[0]
    (where / "snapshot.json").write_text(document.replace(str(ours.xxh3), str(theirs.xxh3)))
    with pytest.raises(SnapshotError, match="the rows of feature 'item_id'"):
        report(tmp_path, where)


def test_keys_of_the_users_own(tmp_path: Path) -> None:
    keys = {"item": np.array([f"item-{i}" for i in range(ITEMS)]), "user_rows": np.arange(USERS) * 7 + 3}
    found = report(tmp_path, written(tmp_path / "s", keys=keys))
    assert found["held"] == found["examples"]
