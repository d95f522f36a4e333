"""A dense part whose weights lie in files beside it, as PyTorch saves them, is taken whole, or refused by name."""

from __future__ import annotations

import io
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tierstore
from tests.predict import onnx_models as om
from tierstore.errors import DeltaError, InvalidInput, MissingExtra, SnapshotError
from tierstore.formats.delta.reader import read_delta
from tierstore.formats.onnx_file import read_onnx
from tierstore.formats.snapshot.reader import open_snapshot

pytestmark = pytest.mark.usefixtures("quick_loads")

WEIGHTS = np.arange(2048, dtype=np.float32).reshape(2, 1024)  # onnx leaves smaller ones where they are


def save(where: Path, times: float = 1.0) -> Path:
    """`model.onnx` and `model.onnx.data`: score = item_id @ weights."""
    import onnx

    graph = om.build(
        [om.node("MatMul", "item_id w", "score")],
        {"item_id": (om.FLOAT, ["n", 2])},
        {"score": (om.FLOAT, ["n", 1024])},
        {"w": WEIGHTS * np.float32(times)},
    )
    where.mkdir(parents=True, exist_ok=True)
    path = where / "model.onnx"
    onnx.save_model(onnx.load_from_string(graph), path, save_as_external_data=True, location="model.onnx.data")
    assert (where / "model.onnx.data").stat().st_size >= WEIGHTS.nbytes
    return path


def snapshot(root: Path, dense: Path) -> Path:
    with tierstore.SnapshotWriter(root, model="ctr", version=1) as writer:
        writer.table("item", dim=2).write([1, 2], np.eye(2))
        writer.feature("item_id", table="item")
        writer.dense(dense)
    return root


def test_writers_take_the_weights_in(open_store, tmp_path):
    root = snapshot(tmp_path / "s", save(tmp_path / "torch"))
    with tierstore.DeltaWriter(tmp_path / "1.arrow", model="ctr", seq=1) as delta:
        delta.dense(save(tmp_path / "later", times=2.0))
    shutil.rmtree(tmp_path / "torch")
    shutil.rmtree(tmp_path / "later")
    with open_store() as store:
        store.load_snapshot(root)
        assert np.array_equal(store.model("ctr").predict({"item_id": [2, 1]}), WEIGHTS[::-1])
        store.apply_delta(tmp_path / "1.arrow")
        assert np.array_equal(store.model("ctr").predict({"item_id": [2, 1]}), WEIGHTS[::-1] * 2)


def by_hand(root: Path, dense: Path) -> Path:
    """A snapshot into which the files were copied as they are."""
    snapshot(root, dense)
    for file in dense.parent.iterdir():
        shutil.copy(file, root / file.name)
    document = json.loads((root / "snapshot.json").read_text())
    document["dense"] = {"path": dense.name}
    (root / "snapshot.json").write_text(json.dumps(document))
    return root


def test_a_snapshot_may_hold_them_as_they_are(open_store, tmp_path):
    with open_store() as store:
        store.load_snapshot(by_hand(tmp_path / "s", save(tmp_path / "torch")))
        assert np.array_equal(store.model("ctr").predict({"item_id": [2, 1]}), WEIGHTS[::-1])
    shutil.rmtree(tmp_path / "s")
    with open_store() as store:
        assert np.array_equal(store.model("ctr").predict({"item_id": [2, 1]}), WEIGHTS[::-1])


def missing(root: Path) -> None:
    (root / "model.onnx.data").unlink()


def cut(root: Path) -> None:
    (root / "model.onnx.data").write_bytes(b"\0" * 100)


def link_out(root: Path) -> None:
    (root / "model.onnx.data").rename(root.parent / "outside")
    (root / "model.onnx.data").symlink_to(root.parent / "outside")


def lead_out(root: Path) -> None:
    content = (root / "model.onnx").read_bytes()
    (root / "model.onnx").write_bytes(content.replace(b"model.onnx.data", b"/etc/ssl/../pwd"))


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (missing, "the file of its weights 'w' is missing: 'model.onnx.data'"),
        (cut, "the weights 'w' end early: 'model.onnx.data' was cut"),
        (link_out, "the weights 'w' lie outside of s: 'model.onnx.data'"),
        (lead_out, "the weights 'w' lie outside of s: '/etc/ssl/../pwd'"),
    ],
)
def test_weights_that_are_not_all_inside_are_refused(open_store, tmp_path, spoil, reason):
    root = by_hand(tmp_path / "s", save(tmp_path / "torch"))
    spoil(root)
    with open_store() as store, pytest.raises(SnapshotError, match=f"model.onnx: {reason}"):
        store.load_snapshot(root)


def test_without_the_extra_they_are_refused_and_never_left_behind(tmp_path, monkeypatch: pytest.MonkeyPatch):
    path = save(tmp_path / "torch")
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(MissingExtra, match=r"the model's weights lie in files beside it; .*tierstore\[dense\]"):
        snapshot(tmp_path / "s", path)
    assert not (tmp_path / "s" / "snapshot.json").exists()


def test_files_that_cannot_be_read_are_named(tmp_path):
    delta = tierstore.DeltaWriter(io.BytesIO(), model="ctr", seq=1)
    with pytest.raises(DeltaError, match=r"dense: cannot read .*nope.onnx: No such file"):
        delta.dense(tmp_path / "nope.onnx")
    with pytest.raises(SnapshotError, match=r"dense: cannot read .*nope.onnx: No such file"):
        snapshot(tmp_path / "s", tmp_path / "nope.onnx")


@pytest.mark.parametrize("content", [b"onnx", b"\x0a\x08location\x12 and no model"])
def test_what_is_no_model_is_passed_on_as_it_is(tmp_path, content: Any):
    """Whoever runs it says what it is not."""
    (tmp_path / "m.onnx").write_bytes(content)
    delta = tierstore.DeltaWriter(io.BytesIO(), model="ctr", seq=1)
    delta.dense(str(tmp_path / "m.onnx"))
    assert read_delta(delta.to_bytes()).dense == {"": content}


def test_bytes_cannot_bring_files(open_store, tmp_path):
    """A delta is bytes: what lies beside it on the sender's machine is not there, and is never looked for here."""
    content = save(tmp_path / "torch").read_bytes()
    with tierstore.DeltaWriter(tmp_path / "1.arrow", model="ctr", seq=1) as delta:
        delta.dense(content)
    with open_store() as store:
        store.load_snapshot(snapshot(tmp_path / "s", tmp_path / "torch" / "model.onnx"))
        with pytest.raises(DeltaError, match="the weights 'w' lie in a file of their own; give the path of the model"):
            store.apply_delta(tmp_path / "1.arrow")
    with pytest.raises(InvalidInput, match="outside"):
        read_onnx(tmp_path / "torch" / "model.onnx", tmp_path / "torch" / "inner")


def test_room_for_side_files_counts_weights_beside_the_graph(tmp_path: Path) -> None:
    root = snapshot(tmp_path / "s", save(tmp_path / "torch"))
    dense = open_snapshot(root).dense_path()
    assert isinstance(dense, Path)
    shutil.copy(tmp_path / "torch/model.onnx.data", dense.parent / "model.onnx.data")
    shutil.copy(tmp_path / "torch/model.onnx", dense)
    found = open_snapshot(root)
    assert found.side_bytes() >= len(found.dense_model() or b"")
