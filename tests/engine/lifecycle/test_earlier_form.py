"""A data directory from before there was one document a model is converted, wherever that is cut off."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tierstore
from tests.engine import scenes
from tests.engine.test_faults import PowerCut
from tests.formats.disks import FailingDisk
from tierstore.engine.lifecycle import directory_format
from tierstore.engine.serving.document import read_document
from tierstore.errors import DiskFull, NotReady, TierstoreError
from tierstore.formats import files
from tierstore.formats.names import DataDirectory, ModelDirectory

pytestmark = pytest.mark.usefixtures("quick_loads")
SMALL = {"user": 8, "item": 12}
OLD = ("CURRENT", "routes.json", "undone.json", "log/base.json")


def as_earlier(root: Path, *, checked: bool = True) -> None:
    """Write a model's directory as releases with several files did, and those before checksums."""
    of = json.loads((root / "state.json").read_text())

    def write(name: str, document: dict[str, Any]) -> None:
        files.publish_record(root / name, document) if checked else files.publish_json(root / name, document)

    if of["active"] is not None:
        text = files.checked_number(of["active"]) if checked else str(of["active"]).encode()
        (root / "CURRENT").write_bytes(text)
    if of["canary"] or of["labels"]:
        write("routes.json", {"format": 1, **{name: of[name] for name in ("active", "canary", "labels")}})
    if of["undone"]["rollbacks"] or of["undone"]["lines"]:
        write("undone.json", {"format": 1, **of["undone"]})
    if of["log_start"] is not None:
        write("log/base.json", {"start": of["log_start"]})
    for names, file in (("loads", "LOADING"), ("dense_accepted", "ASKED")):
        for version, value in of[names].items():
            line = of["undone"]["lines"].get(version)
            (root / (version + (f".{line}" if line else "")) / file).write_bytes(
                files.checked_number(value) if file == "ASKED" else value.encode()
            )
    (root / "state.json").unlink()


def directory_as_earlier(data: Path, **options: Any) -> None:
    for root in (data / "models").iterdir():
        as_earlier(root, **options)
    files.publish_record(data / "format.json", {"format": 1})


def load(store: tierstore.Store, root: Path, version: int, model: str = "ctr", *, activate: bool = True) -> None:
    where = scenes.write_snapshot(root, version, stamp=version + 8, rows=SMALL, model=model)
    store.load_snapshot(where, activate=activate)


def full(store: tierstore.Store, root: Path) -> None:
    """Versions 1 and 2, 2 in its line 1 without delta 3, 3 as a canary, with a label; and another model."""
    for version in (1, 2):
        load(store, root, version)
    load(store, root, 1, model="other")
    for seq in (1, 2, 3):
        store.apply_delta(scenes.stamped(seq, {"item": [seq]}))
    store.rollback("ctr", to_seq=2)
    load(store, root, 3, activate=False)
    store.canary("ctr", 3, 0.25)
    store.label("ctr", "best", 3)


def check(store: tierstore.Store) -> None:
    ctr = store.model("ctr")
    assert (ctr.problem, ctr.versions, ctr.served.versions, ctr.served.share) == (None, [1, 2, 3], (2, 3), 0.25)
    assert ctr.served.labels == {"best": 3}
    for seq, stamp in ((1, 1), (2, 2), (3, 10)):
        assert ctr.lookup("item_id", [seq], version=2)[0].tolist() == scenes.vector("item", stamp, seq).tolist()
    assert store.model("other").lookup("item_id", [1])[0].tolist() == scenes.vector("item", 9, 1).tolist()


@pytest.fixture
def earlier(open_store: Callable[..., tierstore.Store], tmp_path: Path) -> Path:
    """The data directory in the earlier form."""
    store = open_store(keep_versions=9)
    full(store, tmp_path)
    check(store)
    store.close()
    directory_as_earlier(tmp_path / "data")
    return tmp_path / "data"


def test_it_serves_what_it_served_and_knows_the_order_by_number(open_store, earlier: Path) -> None:
    store = open_store(keep_versions=9)
    check(store)
    assert store.verify().ok
    left = [path.name for name in OLD for path in (earlier / "models").glob(f"*/{name}")]
    assert left == []
    assert json.loads((earlier / "format.json").read_text())["format"] == 2
    assert "to_convert" not in json.loads((earlier / "format.json").read_text())
    store.apply_delta(scenes.stamped(4, {"item": [4]}))
    assert store.rollback("ctr") == 1
    ctr = store.model("ctr")
    assert ctr.lookup("item_id", [3])[0].tolist() == scenes.vector("item", 9, 3).tolist(), "delta 3 is undone here too"
    store.close()
    assert open_store(keep_versions=9).model("ctr").active_version == 1


def test_one_without_checksums_is_read(open_store, tmp_path: Path) -> None:
    store = open_store(keep_versions=9)
    full(store, tmp_path)
    store.close()
    directory_as_earlier(tmp_path / "data", checked=False)
    check(open_store(keep_versions=9))


@pytest.mark.parametrize(
    "disk_of", [lambda n, _: FailingDisk(n), lambda n, keep: PowerCut(n, keep)], ids=["fault", "cut"]
)
def test_wherever_the_conversion_is_cut_off_the_next_start_goes_on(
    earlier: Path, tmp_path: Path, disk_of: Callable[[int, Path], Any]
) -> None:
    shutil.copytree(earlier, tmp_path / "whole")
    shutil.copytree(earlier, tmp_path / "good")
    directory_format.check(DataDirectory(tmp_path / "good"))
    good = {name: read_document(ModelDirectory(tmp_path / "good/models" / name), name) for name in ("ctr", "other")}
    for n in range(200):
        data = tmp_path / "tried"
        shutil.copytree(tmp_path / "whole", data)
        disk = disk_of(n, tmp_path / f"keep-{n}")
        with files.use(disk), contextlib.suppress(TierstoreError):
            directory_format.check(DataDirectory(data))
        ended = disk.operations <= n
        if isinstance(disk, PowerCut):
            disk.apply(data)
        if json.loads((data / "format.json").read_text())["format"] == 1:
            assert not [*data.glob("models/*/state.json")], "an earlier release may go on with the old files"
        directory_format.check(DataDirectory(data))
        for name in good:
            assert read_document(ModelDirectory(data / "models" / name), name) == good[name]
        document = json.loads((data / "format.json").read_text())
        assert (document["format"], document.get("to_convert")) == (2, None)
        shutil.rmtree(data)
        if ended:
            return
    pytest.fail("never came to an end")


@pytest.mark.parametrize("name", OLD)
def test_a_damaged_file_keeps_one_model_from_serving_until_it_is_mended(open_store, earlier: Path, name: str) -> None:
    path = earlier / "models/ctr" / name
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"1", b"2", 1) if name != "CURRENT" else b"2 0000000000000000")
    for _ in range(2):
        store = open_store(keep_versions=9)
        assert store.model("other").ready
        if name == "routes.json":  # canary and labels were never more than that
            assert store.model("ctr").served.versions == (2,)
            return
        with pytest.raises(NotReady, match=r"state\.json is missing, beside version 3"):
            store.model("ctr").lookup("item_id", [1])
        assert path.exists()
        store.close()
    path.write_bytes(whole)
    check(open_store(keep_versions=9))


def test_on_a_full_disk_nothing_is_converted_and_an_earlier_release_can_go_on(
    open_store, earlier: Path, monkeypatch
) -> None:
    def is_full(*_: object, **__: object) -> None:
        raise DiskFull("the disk is full")

    before = {path: path.read_bytes() for path in (earlier / "models").rglob("*") if path.is_file()}
    with monkeypatch.context() as patch:
        patch.setattr(directory_format.files, "publish_record", is_full)
        with pytest.raises(DiskFull):
            open_store()
    assert {path: path.read_bytes() for path in (earlier / "models").rglob("*") if path.is_file()} == before
    check(open_store(keep_versions=9))


def test_a_model_that_lost_its_document_is_not_taken_for_one_of_an_earlier_release(open_store, tmp_path: Path) -> None:
    store = open_store()
    load(store, tmp_path, 1)
    store.close()
    (tmp_path / "data/models/ctr/state.json").unlink()
    (tmp_path / "data/models/ctr/CURRENT").write_text("1")  # as where a removal was cut off
    store = open_store()
    with pytest.raises(NotReady, match=r"state\.json is missing"):
        store.model("ctr").lookup("item_id", [1])


def test_a_format_file_that_is_gone_costs_nothing(open_store, earlier: Path) -> None:
    (earlier / "format.json").unlink()
    store = open_store(keep_versions=9)
    check(store)
    store.close()
    (earlier / "format.json").write_text("{")
    check(open_store(keep_versions=9))
