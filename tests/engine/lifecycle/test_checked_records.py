"""All that a start reads back has a checksum: what was changed on the disk is named, and is not served."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

import tierstore
from tests.engine import scenes
from tests.engine.lifecycle.test_start import SMALL, item, loaded
from tests.engine.test_store import folded
from tierstore.engine.lifecycle import earlier_form
from tierstore.engine.serving.document import SavedRoutes, StateDocument, read_document
from tierstore.engine.serving.order import ServingOrder
from tierstore.engine.serving.undone import Undone
from tierstore.engine.versions.info import VersionInfo
from tierstore.errors import Corruption, NotReady, SnapshotError, TierstoreError
from tierstore.formats.files import read_json, read_number
from tierstore.formats.names import ModelDirectory
from tierstore.types import Partitions

pytestmark = pytest.mark.usefixtures("quick_loads")


def with_default(store: tierstore.Store, root: Path, *versions: int) -> Path:
    default = [0.5] * scenes.DIM["user"]
    for version in versions:
        where = scenes.write_snapshot(root, version, stamp=version, rows=SMALL)
        manifest = json.loads((where / "snapshot.json").read_text())
        manifest["tables"][0]["default"] = default
        (where / "snapshot.json").write_text(json.dumps(manifest))
        store.load_snapshot(where)
    return root / "data/models/ctr"


def change(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


@pytest.mark.parametrize("version", [1, 2])
def test_a_changed_digit_of_a_default_is_found_and_the_version_does_not_serve(open_store, tmp_path, version):
    store = open_store()
    root = with_default(store, tmp_path, 1, 2)
    change(root / f"{version}/version.json", "0.5", "0.6")
    (problem,) = store.verify().problems
    assert f"version {version}" in problem
    assert "checksum" in problem
    store.close()
    store = open_store()
    assert list(store.model("ctr").catalogue.damaged) == [version]
    assert "checksum" in store.verify().problems[0]
    if version == 1:
        assert item(store, 1) == scenes.vector("item", 2, 1)[0]
        return
    with pytest.raises(NotReady, match="checksum"):
        item(store, 1)
    store.activate("ctr", 1)
    assert item(store, 1) == scenes.vector("item", 1, 1)[0]


def test_no_byte_of_a_record_can_be_changed_unseen(open_store, tmp_path):
    store = open_store()
    root = with_default(store, tmp_path, 1)
    store.canary("ctr", loaded_beside(store, tmp_path), 0.25)
    store.close()
    for name in ("1/version.json", "state.json", "log.end"):
        path = root / name
        whole = path.read_bytes()
        read = read_json if name.endswith("json") else read_number
        good = read(path)
        for at in range(len(whole)):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
            try:
                got = read(path)
            except TierstoreError:
                continue
            noticed = isinstance(got, str) and not got.isdigit()
            assert got == good or noticed, f"{name}, byte {at}"  # the same: white space
        path.write_bytes(whole)


def loaded_beside(store: tierstore.Store, root: Path) -> int:
    store.load_snapshot(scenes.write_snapshot(root, 2, stamp=2, rows=SMALL), activate=False)
    return 2


def test_a_changed_digit_of_the_document_does_not_serve_another_version(open_store, tmp_path):
    store = open_store()
    root = loaded(store, tmp_path, 1, 2)
    store.close()
    change(root / "state.json", '"active": 2', '"active": 1')
    store = open_store()
    with pytest.raises(NotReady, match=r"state\.json does not match its checksum"):
        item(store, 1)
    assert any("state.json" in problem for problem in store.verify().problems)
    store.close()
    change(root / "state.json", '"active": 1', '"active": 2')
    assert open_store().verify().ok


def test_a_document_that_was_changed_below_a_store_is_reported_and_written_again(open_store, tmp_path):
    store = open_store()
    root = loaded(store, tmp_path, 1, 2)
    before = (root / "state.json").read_bytes()
    store.rollback("ctr")
    after = (root / "state.json").read_bytes()
    (root / "state.json").write_bytes(before)
    assert any("state.json" in problem for problem in store.verify().problems)
    store.label("ctr", "best", 1)
    assert store.verify().ok
    assert read_document(ModelDirectory(root), "ctr").serial == json.loads(after)["serial"] + 1


def test_a_document_of_another_model_is_refused(open_store, tmp_path):
    store = open_store()
    root = loaded(store, tmp_path, 1)
    other = loaded(store, tmp_path, 1, model="other")
    store.close()
    shutil.copy(other / "state.json", root / "state.json")
    store = open_store()
    with pytest.raises(NotReady, match="of model 'other', expected 'ctr'"):
        item(store, 1)


def test_the_end_of_the_log_is_of_one_length_whatever_its_number(open_store, tmp_path):
    """It is written in place: a power failure must not leave the one's digits at the other's length."""
    store = open_store()
    path = loaded(store, tmp_path, 1) / "log.end"
    sizes = set()
    for seq in range(1, 12):
        store.apply_delta(scenes.stamped(seq, {"item": [seq]}))
        assert int(read_number(path)) == seq
        sizes.add(path.stat().st_size)
    assert len(sizes) == 1


def test_a_changed_dense_part_is_found(open_store, tmp_path):
    store = open_store()
    graph = scenes.some_dense()
    store.load_snapshot(scenes.write_snapshot(tmp_path, 1, rows=SMALL, dense=graph))
    store.load_snapshot(scenes.write_snapshot(tmp_path, 2, rows=SMALL, dense=graph))
    assert store.verify().ok
    store.apply_delta(scenes.delta(1, dense=graph + b""))
    folded(store)
    assert store.verify().ok
    store.close()
    path = tmp_path / "data/models/ctr/2/dense.onnx"
    path.write_bytes(graph[:-1] + bytes([graph[-1] ^ 1]))
    store = open_store()
    assert any("dense.onnx does not match its checksum" in problem for problem in store.verify().problems)
    if store.model("ctr").dense.kept == "kept":  # the extra is installed
        assert "dense.onnx does not match" in store.model("ctr").problem
        store.activate("ctr", 1)
        assert store.model("ctr").ready


# --- the end of the log


@pytest.mark.parametrize("lost", [1, 2, 4])
def test_the_newest_entries_are_missed_when_they_are_gone(open_store, tmp_path, lost):
    store = open_store(fold_grace_s=60)
    log = loaded(store, tmp_path, 1) / "log"
    for seq in range(1, 5):
        store.apply_delta(scenes.stamped(seq, {"item": [seq]}))
    store.close()
    gone = sorted(log.glob("*.arrow"))[-lost:]
    kept = {path: path.read_bytes() for path in gone}
    for path in gone:
        path.unlink()
    store = open_store(fold_grace_s=60)
    why = "delta 4 is missing, at its end" if lost == 1 else f"deltas {5 - lost} to 4 are missing, at its end"
    with pytest.raises(NotReady, match=why):
        item(store, 1)
    for seq in (4, 5):
        with pytest.raises(NotReady):
            store.apply_delta(scenes.stamped(seq, {"item": [9]}))
    assert any(why in problem for problem in store.verify().problems)
    with pytest.raises(SnapshotError, match=why):
        store.load_snapshot(scenes.write_snapshot(tmp_path, 2, delta_seq=3, rows=SMALL))
    store.close()
    for path, content in kept.items():
        path.write_bytes(content)
    store = open_store()
    assert [item(store, seq) for seq in (3, 4)] == [scenes.vector("item", seq, seq)[0] for seq in (3, 4)]
    assert store.model("ctr").problem is None
    store.apply_delta(scenes.stamped(5, {"item": [5]}))


def test_a_version_that_holds_what_the_end_of_the_log_lacks_serves_and_goes_on(open_store, tmp_path):
    store = open_store()
    log = loaded(store, tmp_path, 1) / "log"
    for seq in (1, 2):
        store.apply_delta(scenes.stamped(seq, {"item": [seq]}))
    folded(store)
    store.close()
    sorted(log.glob("*.arrow"))[-1].unlink()
    store = open_store()
    assert item(store, 2) == scenes.vector("item", 2, 2)[0]
    assert "delta 2 is missing" in store.model("ctr").problem
    assert store.apply_delta(scenes.stamped(3, {"item": [3]})).applied


def test_an_end_of_the_log_that_is_damaged_or_gone_says_nothing_wrong(open_store, tmp_path):
    store = open_store()
    root = loaded(store, tmp_path, 1)
    store.apply_delta(scenes.stamped(1, {"item": [1]}))
    store.close()
    for content in (b"", b"7", b"7 0000000000000000\n", b"\xff\xff"):
        (root / "log.end").write_bytes(content)
        store = open_store()
        if content != b"7":
            assert item(store, 1) == scenes.vector("item", 1, 1)[0]
        store.close()


def test_a_log_that_begins_anew_ends_anew(open_store, tmp_path):
    store = open_store()
    root = loaded(store, tmp_path, 1)
    store.load_snapshot(scenes.write_snapshot(tmp_path, 2, stamp=2, delta_seq=10, rows=SMALL))
    assert int(read_number(root / "log.end")) == 10
    store.close()
    store = open_store()
    assert store.model("ctr").problem is None
    store.apply_delta(scenes.stamped(11, {"item": [1]}))


GOLDEN = Path(__file__).parents[3] / "schema/golden/data-records"


@pytest.mark.parametrize("kind", ["checked", "unchecked", "document"])
def test_golden_records_are_read(kind, tmp_path):
    shutil.copytree(GOLDEN / kind, tmp_path / "ctr")
    where = ModelDirectory(tmp_path / "ctr")
    earlier_form.convert(where, "ctr")
    assert read_document(where, "ctr") == StateDocument(
        serial=12 if kind == "document" else 0,
        versions=(1, 4) if kind == "document" else (1,),
        routes=SavedRoutes(1, 2, 0.25, {"best": 1}),
        order=ServingOrder(((5, "withdrawn"), (3, "replaced"), (4, "rollback")) if kind == "document" else ()),
        undone=Undone().as_of(7, 9).with_line(4, 1) if kind == "document" else Undone(),
        log_start=0,
        loads={6: "0123456789abcdef0123456789abcdef"} if kind == "document" else {},
        accepted={4: 6} if kind == "document" else {},
    )
    info = VersionInfo(where.version(1))
    assert (info.number, info.base, info.heads) == (1, "sealed", {})
    assert info.tables["user"]["default"] == [73.5, 73.5, 73.5, 73.5]
    assert read_number(where.log_end) == {"checked": "2", "unchecked": None, "document": f"{9:020d}"}[kind]


def test_a_golden_record_of_some_partitions_is_read(tmp_path):
    info = VersionInfo(ModelDirectory(GOLDEN / "partitions").version(1))
    assert (info.number, info.base, info.partitions) == (1, "sealed", Partitions(8, ((2, 3), (6, 6))))
    assert {name: (table["id"], table["rows"]) for name, table in info.tables.items()} == {
        "user": (1, 9),
        "item": (2, 15),
    }
    shutil.copytree(GOLDEN / "partitions", tmp_path / "ctr")
    where = ModelDirectory(tmp_path / "ctr").version(1)
    change(where.record, '"count": 8', '"count": 9')
    with pytest.raises(Corruption, match="does not match its checksum"):
        VersionInfo(where)


def test_a_golden_record_that_was_changed_is_not(tmp_path):
    shutil.copytree(GOLDEN / "document", tmp_path / "ctr")
    where = ModelDirectory(tmp_path / "ctr")
    change(where.version(1).record, "73.5", "73.6")
    change(where.state, "0.25", "0.75")
    for read in (lambda: read_document(where, "ctr"), lambda: VersionInfo(where.version(1))):
        with pytest.raises(Corruption, match="does not match its checksum"):
            read()


@pytest.mark.parametrize("lost", ["dense.onnx", "dense.cvr.onnx", "dense.late.onnx"])
def test_a_version_that_lost_a_dense_part_is_named_and_not_served_without_it(open_store, tmp_path, lost):
    """Requests would be answered with rows in place of scores. The last one was brought by a delta."""
    graph, settings = scenes.some_dense(), {"keep_versions": 5}
    store = open_store(**settings)
    store.load_snapshot(scenes.write_snapshot(tmp_path, 1, rows=SMALL, dense=graph, heads={"cvr": graph}))
    store.apply_delta(scenes.delta(1, heads={"late": graph, "gone": graph}))
    store.apply_delta(scenes.delta(2, heads={"gone": None}))
    folded(store)
    store.load_snapshot(scenes.write_snapshot(tmp_path, 2, rows=SMALL, delta_seq=2))
    store.close()
    path = tmp_path / "data/models/ctr/1" / lost
    content = path.read_bytes()
    path.unlink()
    store = open_store(**settings)
    assert re.search(rf"version 1: .*{lost} is missing", "\n".join(store.verify().problems))
    with pytest.raises(TierstoreError):
        store.rollback("ctr")
    assert store.model("ctr").active_version == 2
    store.close()
    path.write_bytes(content)
    store = open_store(**settings)
    assert (store.verify().problems, store.rollback("ctr")) == ((), 1)
    assert sorted(store.status()["models"]["ctr"]["heads"]) == ["cvr", "late"]
