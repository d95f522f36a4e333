"""Strings of keys that a version keeps: what export, `hot` and `explain` make of them, and what happens without them."""

from __future__ import annotations

import errno
import io
import json
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pytest

import tierstore
from tests.collisions import digest, pair
from tests.engine import scenes
from tests.formats.disks import FailingDisk
from tests.predict.onnx_models import linear
from tierstore.engine.data import disk_room
from tierstore.engine.operations import backup
from tierstore.engine.operations.restore import restore
from tierstore.errors import Corruption, InvalidInput, SnapshotError, TierstoreError
from tierstore.formats import files
from tierstore.formats.snapshot.reader import open_snapshot
from tierstore.ingest import strings
from tierstore.ingest.tasks import SortStrings
from tierstore.tiers.disk.strings_file import OpenStrings, StringsFile

pytestmark = pytest.mark.usefixtures("quick_loads")

OPTIONS = {"host_budget": "4MiB", "load_workers": 1, "disk_threads": 2}
BASE = {f"word-{i}": float(i % 500) for i in range(3000)} | {"w" * 9000: 7.0, "é": 8.0}
CHANGED: dict[str, float | None] = {f"word-{i}": 1000.0 + i for i in range(0, 400, 7)}
NEW: dict[str, float | None] = {"": 9.0, "n" * 130: 10.0, "n" * 40_000: 11.0, "日本": 12.0, "new": 13.0}
GONE: dict[str, float | None] = dict.fromkeys(["word-1", "word-700", "é"])
FIRST = {**CHANGED, **NEW, **GONE}
SECOND: dict[str, float | None] = {"word-1": 21.0, "newer": 22.0, "new": 23.0, "word-2": None, "n" * 130: None}
Values = Mapping[str, float | None]


def vectors(values: Iterable[float | None]) -> np.ndarray:
    column = np.array([0.0 if value is None else value for value in values], np.float32)
    return np.repeat(column[:, None], 4, axis=1)


def snapshot(root: Path, version: int = 1, values: Values = BASE, *, delta_seq: int = 0, ttl: bool = False) -> Path:
    """A table `word` of string keys, read by row and in bags, and a table `item` of integers; a dense part over both."""
    where = root / f"snapshot-{version}"
    with tierstore.SnapshotWriter(where, model="ctr", version=version, delta_seq=delta_seq) as writer:
        expiring = {"ttl_s": "30d", "time_column": "at"} if ttl else {}
        word = writer.table("word", dim=4, dtype="float16", key="string", rows_per_shard=1100, **expiring)
        times = np.full(len(values), scenes.time.time(), np.int64) if ttl else None
        word.write(list(values), vectors(values.values()), times)
        writer.table("item", dim=4).write(np.arange(100), vectors(range(100)))
        writer.feature("word", table="word")
        writer.feature("item", table="item")
        writer.feature("bag", table="word", combiner="sum", padding_key="word-3")
        writer.warmup("word", ["word-9", "nobody", "word-5", "word-1"])
        writer.dense(linear({"word": [1.0, 2, 3, 4], "item": [0.5, 0, 0, 1]}))
    return where


def delta(seq: int, values: Values) -> bytes:
    """Upserts, and deletes where the value is None."""
    buffer = io.BytesIO()
    with tierstore.DeltaWriter(buffer, model="ctr", seq=seq, event_time=scenes.time.time()) as writer:
        if kept := [text for text, value in values.items() if value is not None]:
            writer.upsert("word", kept, vectors(values[text] for text in kept))
        if gone := [text for text, value in values.items() if value is None]:
            writer.delete("word", gone)
    return buffer.getvalue()


def folded(store: tierstore.Store) -> None:
    scenes.eventually(lambda: store.status()["models"]["ctr"]["overlays"] == 0, "everything is folded")


def there(*changes: Values, base: Values = BASE) -> dict[str, float]:
    """What is there after these deltas."""
    merged = dict(base)
    for change in changes:
        merged |= change
    return {text: value for text, value in merged.items() if value is not None}


def exported_keys(where: Path) -> list[str]:
    """The keys in the shards of an export, read by Arrow."""
    manifest = json.loads((where / "snapshot.json").read_text())
    (table,) = [of for of in manifest["tables"] if of["name"] == "word"]
    columns = [pa.ipc.open_file(where / shard["path"]).read_all()["key"] for shard in table["shards"]]
    return [key for column in columns for key in column.to_pylist()]


def answers(store: tierstore.Store, keys: list[str]) -> list[np.ndarray]:
    """Rows, found, bags and scores."""
    ctr = store.model("ctr")
    rows, found = ctr.lookup("word", keys, return_found=True)
    bags = ctr.lookup_bags("bag", keys, np.arange(0, len(keys), 3))
    score = ctr.predict({"word": keys[:50], "item": np.arange(50)})
    return [rows, found, bags, *score.values()] if isinstance(score, dict) else [rows, found, bags, score]


def check_export(store: tierstore.Store, root: Path, expected: Mapping[str, float]) -> None:
    """An export has exactly these keys, and another store that loads it answers the same, and can export it again."""
    store.export("ctr", root / "out")
    assert sorted(exported_keys(root / "out")) == sorted(expected)
    keys = [*expected, *(text for text in {**BASE, **FIRST, **SECOND} if text not in expected), "never"]
    with tierstore.open(root / "other", **OPTIONS) as other:
        other.load_snapshot(root / "out")
        for ours, theirs in zip(answers(store, keys), answers(other, keys), strict=True):
            np.testing.assert_array_equal(ours, theirs)
        rows, found = other.model("ctr").lookup("word", keys, return_found=True)
        assert found.tolist() == [text in expected for text in keys]
        np.testing.assert_array_equal(rows, vectors(expected.get(text, 0.0) for text in keys))
        assert other.verify().problems == ()
        other.export("ctr", root / "again")
    assert exported_keys(root / "again") == exported_keys(root / "out")


# --- export


@pytest.mark.parametrize(("base", "ttl"), [("sealed", False), ("rocksdb", False), ("sealed", True)])
def test_an_export_has_the_string_keys_of_snapshot_and_deltas(open_store, tmp_path, base, ttl):
    """Changed, new and deleted keys, of deltas that are folded and of some that are not."""
    store = open_store(base=base)
    store.load_snapshot(snapshot(tmp_path, ttl=ttl))
    store.apply_delta(delta(1, FIRST))
    folded(store)
    with store.model("ctr").view():  # what comes now is not folded
        store.apply_delta(delta(2, SECOND))
        check_export(store, tmp_path, there(FIRST, SECOND))
    folded(store)
    assert store.verify().problems == ()
    assert np.load(tmp_path / "out/warmup/word.npy").tolist() == [b"word-9", b"word-5", b"word-1"]
    store.close()


def test_strings_of_merged_overlays_stay_with_their_rows(open_store, tmp_path):
    store = open_store(fold_grace_s=60)
    store.load_snapshot(snapshot(tmp_path))
    changes: list[dict[str, float | None]] = [
        {f"word-{i}": 50.0 + i + seq, f"delta-{seq}-{i}": float(seq), f"delta-{seq - 2}-{i}": None}
        for seq in range(1, 9)
        for i in (seq, 2 * seq)
    ]
    for seq, change in enumerate(changes, 1):
        store.apply_delta(delta(seq, change))
    check_export(store, tmp_path, there(*changes))


def test_strings_come_back_with_a_start_and_with_a_replay(open_store, tmp_path):
    store = open_store(fold_grace_s=60)
    store.load_snapshot(snapshot(tmp_path))
    store.apply_delta(delta(1, FIRST))
    store.close()
    store = open_store(fold_grace_s=0.0)
    store.apply_delta(delta(2, SECOND))
    folded(store)
    store.close()
    check_export(open_store(), tmp_path, there(FIRST, SECOND))


def test_a_rollback_to_a_delta_has_the_strings_of_then(open_store, tmp_path):
    store = open_store()
    store.load_snapshot(snapshot(tmp_path))
    store.apply_delta(delta(1, FIRST))
    folded(store)
    store.apply_delta(delta(2, SECOND))
    folded(store)
    store.rollback("ctr", to_seq=1)
    check_export(store, tmp_path, there(FIRST))


def test_a_backup_has_the_strings(open_store, tmp_path):
    store = open_store()
    store.load_snapshot(snapshot(tmp_path))
    store.apply_delta(delta(1, FIRST))
    folded(store)
    store.backup("ctr", tmp_path / "backup")
    store.close()
    restore(tmp_path / "backup", tmp_path / "restored")
    with tierstore.open(tmp_path / "restored", **OPTIONS) as other:
        check_export(other, tmp_path, there(FIRST))


def test_the_next_backup_does_not_read_the_strings_again(open_store, tmp_path, monkeypatch):
    store = open_store()
    store.load_snapshot(snapshot(tmp_path))
    read: list[str] = []
    entry_of = backup.entry_of
    monkeypatch.setattr(backup, "entry_of", lambda path, name: read.append(path.suffix) or entry_of(path, name))
    store.backup("ctr", tmp_path / "backup")
    assert ".strings" in read
    read.clear()
    store.backup("ctr", tmp_path / "backup")
    assert ".strings" not in read


def test_a_node_with_some_partitions_has_their_strings(open_store, tmp_path):
    store = open_store(partition="0-1/4")
    store.load_snapshot(snapshot(tmp_path))
    from tierstore.formats.keys import as_codes, partition_of
    from tierstore.types import KeyType

    keys = np.array(list(BASE), object)
    mine = partition_of(as_codes(keys, KeyType.STRING), 4) < 2
    store.export("ctr", tmp_path / "out")
    assert sorted(exported_keys(tmp_path / "out")) == sorted(keys[mine])


# --- keys that share a hash


def test_keys_that_share_a_hash_are_exported_each_with_its_row(open_store, tmp_path):
    """A pair of the snapshot; a pair of one delta, of which the snapshot has one: the row that this one leaves is not exported."""
    (a, b), (c, d) = pair(0), pair(1)
    base = {a: 1.0, b: 2.0, c: 3.0, **{f"plain-{i}": 4.0 for i in range(200)}}
    changed: dict[str, float | None] = {c: 30.0, d: 31.0, a: 10.0}
    store = open_store()
    store.load_snapshot(snapshot(tmp_path, values=base))
    store.apply_delta(delta(1, changed))
    folded(store)
    assert store.verify().problems == ()
    expected = there(changed, base=base)
    store.export("ctr", tmp_path / "out")
    assert sorted(exported_keys(tmp_path / "out")) == sorted(expected)
    with tierstore.open(tmp_path / "other", **OPTIONS) as other:
        other.load_snapshot(tmp_path / "out")
        rows, found = other.model("ctr").lookup("word", list(expected), return_found=True)
        assert found.all()
        np.testing.assert_array_equal(rows, vectors(expected.values()))


def test_explain_names_the_other_key_whose_row_is_answered(open_store, tmp_path):
    a, b = pair(0)
    store = open_store()
    store.load_snapshot(snapshot(tmp_path, values={a: 1.0, "plain": 2.0}))
    with store.model("ctr").view():  # so that the delta is not folded
        store.apply_delta(delta(1, {"new": 3.0}))
        entries = store.explain("ctr", "word", [b, a, "plain", "new", "nobody"])["keys"]
    assert [entry["string"] for entry in entries] == [a, a, "plain", "new", None]
    assert [repr(a) in entry["why"] for entry in entries] == [True, False, False, False, False]


# --- hot keys


def test_hot_keys_are_shown_as_strings(open_store, tmp_path):
    """Of the snapshot and of a delta; the hash of a key that has no row."""
    store = open_store()
    store.load_snapshot(snapshot(tmp_path))
    store.apply_delta(delta(1, {"new": 13.0, "": 9.0}))
    folded(store)
    store.shared.sampler.close()  # this test takes its turns
    asked = ["word-7", "new", "", "nobody"]
    for _ in range(3):  # by turns it samples for trials, and for counts of keys
        store.shared.sampler.step(0.0)
        store.model("ctr").lookup("word", asked)
    store.shared.sampler.step(0.0)
    shown = {entry["key"] for entry in store.model("ctr").cache("word", 10)["hottest"]}
    assert shown == {*asked[:3], f"{digest('nobody') % 2**64:016x}"}


# --- without strings


@pytest.mark.parametrize(("size", "why"), [("1KiB", "would have taken more than"), (0, "loaded with")])
def test_beyond_the_size_a_version_keeps_no_strings(open_store, tmp_path, size, why):
    store = open_store(string_keys_size=size)
    store.load_snapshot(snapshot(tmp_path))
    store.apply_delta(delta(1, FIRST))
    folded(store)
    assert not (tmp_path / "data/models/ctr/1/strings").exists()
    with pytest.raises(InvalidInput, match=f"table 'word' has string keys, .*{why} string_keys_size"):
        store.export("ctr", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert store.verify().problems == ()
    assert store.explain("ctr", "word", ["new"])["keys"][0]["string"] is None
    store.close()
    with open_store(string_keys_size="1GiB") as store:
        store.load_snapshot(snapshot(tmp_path, 2, there(FIRST), delta_seq=1))
        check_export(store, tmp_path, there(FIRST))


def test_a_version_of_an_earlier_release_goes_on_and_says_why_it_has_no_strings(open_store, tmp_path):
    store = open_store(string_keys_size=0)
    store.load_snapshot(snapshot(tmp_path))
    store.close()
    record = tmp_path / "data/models/ctr/1/version.json"
    document = json.loads(record.read_text())
    del document["xxh3"], document["tables"]["word"]["strings"]
    files.publish_record(record, document)
    store = open_store()
    store.apply_delta(delta(1, FIRST))
    folded(store)
    with pytest.raises(InvalidInput, match=r"an earlier release has loaded it.*load its snapshot again"):
        store.export("ctr", tmp_path / "out")
    assert store.model("ctr").lookup("word", ["new"]).tolist() == vectors([13.0]).tolist()
    assert store.verify().problems == ()


@pytest.mark.parametrize("damage", ["missing", "cut off", "a byte", "another file"])
def test_a_damaged_file_is_named_and_answers_go_on(open_store, tmp_path, damage):
    store = open_store()
    store.load_snapshot(snapshot(tmp_path))
    store.close()
    (path,) = (tmp_path / "data/models/ctr/1/strings").iterdir()
    content = bytearray(path.read_bytes())
    if damage == "missing":
        path.unlink()
    else:
        content[len(content) // 3] ^= 1
        path.write_bytes({"cut off": content[:-1], "a byte": content, "another file": bytes(len(content))}[damage])
    store = open_store()
    store.apply_delta(delta(1, FIRST))
    folded(store)
    with pytest.raises(Corruption, match=f"{path.name}.*load the version's snapshot again"):
        store.export("ctr", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (problem,) = store.verify().problems
    assert path.name in problem
    assert store.model("ctr").lookup("word", ["word-2", "new"]).tolist() == vectors([2.0, 13.0]).tolist()
    assert {type(entry["key"]) for entry in store.model("ctr").cache("word", 5)["hottest"]} <= {str}
    assert store.explain("ctr", "word", ["word-2"])["keys"][0]["found"]


def test_a_row_without_its_string_is_found_by_verify_and_by_export(open_store, tmp_path, monkeypatch):
    """As when an earlier release, which knows of no strings, has applied a delta."""
    store = open_store()
    store.load_snapshot(snapshot(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr("tierstore.engine.versions.version.encode_delta", _without_strings)
        store.apply_delta(delta(1, NEW))
        folded(store)
    with pytest.raises(Corruption, match=r"table 'word': .* have no string that is their key's"):
        store.export("ctr", tmp_path / "out")
    (problem,) = store.verify().problems
    assert "have no string" in problem


def _without_strings(*given: Any, with_strings: Any, **options: Any) -> Any:
    from tierstore.engine.data.overlay import encode_delta

    return encode_delta(*given, **options)


# --- what is cut off


def test_a_load_that_fails_at_any_file_operation_leaves_none_or_all_of_the_strings(open_store, tmp_path):
    store = open_store()
    where = snapshot(tmp_path, values={f"word-{i}": float(i) for i in range(300)})
    failed, at = 0, 0
    while True:
        disk = FailingDisk(at)
        try:
            with files.use(disk):
                store.load_snapshot(where)
        except TierstoreError:
            failed += 1
        if "ctr" in store.status()["models"] and store.model("ctr").versions:
            assert len(exported(store, tmp_path / f"out-{at}")) == 300
            if disk.operations <= at:
                break
            reset(store)
        at += 1
    assert failed > 10


def exported(store: tierstore.Store, where: Path) -> list[str]:
    model = store.model("ctr")
    if model.active_version is None:
        store.activate("ctr", next(iter(model.versions)))
    store.export("ctr", where)
    return exported_keys(where)


def reset(store: tierstore.Store) -> None:
    """Drop what is there."""
    numbers = list(store.model("ctr").versions)
    store.deactivate("ctr")
    for number in numbers:
        store.drop("ctr", number)


# --- files of a load


def sorted_by(tmp_path: Path, task: int, most_bytes: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What a task makes of a snapshot's string keys, with a file for every ten of them."""
    monkeypatch.setattr(strings, "_BATCH_ROWS", 10)
    (tmp_path / "strings").mkdir(exist_ok=True)
    wanted = SortStrings("word", task, [0], str(tmp_path / "strings"), 1, most_bytes)
    return strings.sort_strings(open_snapshot(tmp_path / "s"), wanted, lambda _: None)


def test_a_task_of_a_load_leaves_few_files_however_little_memory_it_has(tmp_path, monkeypatch):
    """Whoever looks for a string reads a block of each."""
    texts = [f"word-{i}" for i in range(200)]
    with tierstore.SnapshotWriter(tmp_path / "s", model="ctr", version=1) as writer:
        writer.table("word", dim=1, key="string").write(texts, np.zeros((200, 1), np.float32))
        writer.feature("word", table="word")
    made = sorted_by(tmp_path, 0, 1 << 30, monkeypatch)
    (file,) = (StringsFile(*of) for of in made.files)
    assert [path.name for path in (tmp_path / "strings").iterdir()] == [file.name]
    with OpenStrings(tmp_path / "strings" / file.name, file) as opened:
        found = [text for _, some in opened.all() for text in some.to_pylist()]
    assert found == sorted(texts, key=digest)
    other = sorted_by(tmp_path, 1, file.bytes + 10, monkeypatch)
    assert other.missing == "size", "the size is that of all tasks"
    assert [path.name for path in (tmp_path / "strings").iterdir()] == [file.name]


# --- a disk without room for them


class FullForStrings(files.FileSystem):
    """A disk that has no room left once rows are written."""

    def create(self, path: Path) -> BinaryIO:
        if ".strings" in path.name:
            raise OSError(errno.ENOSPC, "injected failure")
        return super().create(path)


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The free bytes that the file system reports, of 100 GiB."""
    state = SimpleNamespace(bytes=50 << 30)

    def statvfs(path: object) -> SimpleNamespace:
        return SimpleNamespace(f_bavail=state.bytes, f_bfree=state.bytes, f_frsize=1, f_blocks=100 << 30)

    monkeypatch.setattr(disk_room.os, "statvfs", statvfs)
    return state


@pytest.mark.parametrize("how", ["at the reserve", "when they are written"])
def test_a_load_without_room_for_the_strings_of_keys_keeps_the_rows(open_store, tmp_path, free, caplog, how):
    store = open_store(disk_reserve="256MiB")
    where = snapshot(tmp_path)
    with caplog.at_level(logging.WARNING):
        if how == "at the reserve":
            free.bytes = (256 << 20) + 8000
            store.load_snapshot(where)
        else:
            with files.use(FullForStrings()):
                store.load_snapshot(where)
    assert "table word: its string keys are not kept: the disk has no room for them" in caplog.text
    assert store.model("ctr").lookup("word", ["word-7"]).tolist() == vectors([7.0]).tolist()
    assert not (tmp_path / "data/models/ctr/1/strings").exists()
    (entry,) = store.status()["models"]["ctr"]["versions"]
    assert list(entry["hashes_only"]) == ["word"]
    assert "the disk had no room" in entry["hashes_only"]["word"]
    free.bytes = 50 << 30
    store.apply_delta(delta(1, FIRST))
    folded(store)
    with pytest.raises(InvalidInput, match=r"'word' has string keys, and the disk had no room for them.*load its snap"):
        store.export("ctr", tmp_path / "out")
    assert store.verify().problems == ()
    store.close()
    store = open_store(disk_reserve="256MiB")
    store.load_snapshot(snapshot(tmp_path, 2, there(FIRST), delta_seq=1))
    assert store.status()["models"]["ctr"]["versions"][1]["hashes_only"] == {}
    check_export(store, tmp_path, there(FIRST))


def test_side_files_find_the_room_that_strings_would_take(open_store, tmp_path, free):
    """Else a load would fail for want of what strings have taken."""
    store = open_store(disk_reserve="256MiB")
    where = snapshot(tmp_path)
    side = sum(path.stat().st_size for path in where.rglob("*") if path.suffix in (".onnx", ".npy", ".npz"))
    text = sum(len(key.encode()) for key in BASE)
    free.bytes = (256 << 20) + (8 << 20) + side + text + 8 * len(BASE) + 1000  # and what a helper has beside
    store.load_snapshot(where)
    assert store.status()["models"]["ctr"]["versions"][0]["hashes_only"] == {}
    free.bytes = (256 << 20) + text + 1000
    store.load_snapshot(snapshot(tmp_path, 2))
    assert list(store.status()["models"]["ctr"]["versions"][1]["hashes_only"]) == ["word"]


# --- built versions


TEXTS = {**{f"key {i}": float(i % 400) for i in range(2000)}, "": 1.0, "日本": 2.0, "k" * 70_000: 3.0}


@pytest.mark.parametrize("partitions", [1, 3, 6])
def test_a_built_version_carries_the_strings_of_its_keys(open_store, tmp_path, partitions):
    """Built elsewhere, loaded here, and exported: also after a delta, and from the six of them that are merged."""
    twins = dict.fromkeys(pair(0), 5.0)
    built = tmp_path / "built"
    tierstore.build_snapshot(snapshot(tmp_path, values=TEXTS | twins), built, partitions=partitions, load_workers=1)
    store = open_store()
    store.load_snapshot(built)
    check_export(store, tmp_path, TEXTS | twins)
    store.apply_delta(delta(1, FIRST))
    folded(store)
    store.export("ctr", tmp_path / "later")
    assert sorted(exported_keys(tmp_path / "later")) == sorted(there(FIRST, base=TEXTS | twins))
    count = len(list((tmp_path / "data/models/ctr/1/strings").iterdir()))
    assert count == (partitions if partitions <= 4 else 1)
    assert store.verify().problems == ()


def test_a_node_with_some_partitions_copies_their_strings_alone(open_store, tmp_path):
    """From folders of their own, from one folder, and from a build without partitions."""
    from tierstore.formats.keys import as_codes, partition_of
    from tierstore.types import KeyType

    keys = np.array(list(TEXTS), object)
    mine = sorted(keys[partition_of(as_codes(keys, KeyType.STRING), 3) < 2])
    where = snapshot(tmp_path, values=TEXTS)
    for number, partitions in enumerate((3, 1)):
        built = tmp_path / f"built-{partitions}"
        tierstore.build_snapshot(where, built, partitions=partitions, load_workers=1)
        with tierstore.open(tmp_path / f"data-{number}", partition="0-1/3", **OPTIONS) as store:
            store.load_snapshot(built)
            store.export("ctr", tmp_path / f"out-{number}")
        assert sorted(exported_keys(tmp_path / f"out-{number}")) == mine
    with tierstore.open(tmp_path / "data-2", **OPTIONS) as store:
        store.load_snapshot(tmp_path / "built-3/partition-0002")
        store.export("ctr", tmp_path / "out-2")
    assert sorted([*mine, *exported_keys(tmp_path / "out-2")]) == sorted(keys)


def test_an_export_that_is_built_is_exported_again(open_store, tmp_path):
    store = open_store()
    store.load_snapshot(snapshot(tmp_path))
    store.apply_delta(delta(1, FIRST))
    store.export("ctr", tmp_path / "built", partitions=2)
    with tierstore.open(tmp_path / "moved", **OPTIONS) as other:
        other.load_snapshot(tmp_path / "built")
        check_export(other, tmp_path, there(FIRST))


@pytest.mark.parametrize("at", ["the build", "the load", "the disk"])
def test_a_built_version_without_strings_serves_and_says_so(open_store, tmp_path, free, at):
    """As one of an earlier release; or where the store takes none, or has no room."""
    built = tmp_path / "built"
    size = 0 if at == "the build" else "1GiB"
    tierstore.build_snapshot(snapshot(tmp_path), built, load_workers=1, string_keys_size=size)
    assert (built / "strings").exists() == (at != "the build")
    store = open_store(string_keys_size="2KiB" if at == "the load" else "1GiB", disk_reserve="256MiB")
    if at == "the disk":
        free.bytes = (256 << 20) + 8000
    store.load_snapshot(built)
    assert store.model("ctr").lookup("word", ["word-7"]).tolist() == vectors([7.0]).tolist()
    why = {"the build": "from a built version", "the load": "more than string_keys_size", "the disk": "no room"}[at]
    assert why in store.status()["models"]["ctr"]["versions"][0]["hashes_only"]["word"]
    with pytest.raises(InvalidInput, match=why):
        store.export("ctr", tmp_path / "out")
    assert not (tmp_path / "data/models/ctr/1/strings").exists()


def test_each_table_says_why_its_own_strings_are_not_kept(open_store, tmp_path, free):
    """A larger string_keys_size does not help a table for which the disk has no room."""
    where, built = tmp_path / "snapshot", tmp_path / "built"
    with tierstore.SnapshotWriter(where, model="ctr", version=1) as writer:
        for name, count in (("long", 3000), ("short", 3)):
            rows = writer.table(name, dim=4, key="string")
            rows.write([f"{name}-{i}" for i in range(count)], vectors(range(count)))
            writer.feature(name, table=name)
    tierstore.build_snapshot(where, built, load_workers=1)
    free.bytes = (256 << 20) + 8000
    store = open_store(string_keys_size="2KiB", disk_reserve="256MiB")
    store.load_snapshot(built)
    why = store.status()["models"]["ctr"]["versions"][0]["hashes_only"]
    assert "more than string_keys_size" in why["long"]
    assert "no room" in why["short"]


def test_strings_that_are_copied_at_once_find_room_together(open_store, tmp_path, free):
    built = tmp_path / "built"
    tierstore.build_snapshot(snapshot(tmp_path, values=TEXTS), built, partitions=2, load_workers=1)
    side = sum(
        path.stat().st_size
        for path in (built / "partition-0000").rglob("*")
        if path.suffix in (".onnx", ".npy", ".npz")
    )
    sizes = [path.stat().st_size for path in built.rglob("*.strings")]
    assert len(sizes) == 2
    free.bytes = (256 << 20) + (8 << 20) + side + sum(sizes) - 1  # each of them would fit
    store = open_store(disk_reserve="256MiB")
    store.load_snapshot(built)
    assert "no room" in store.status()["models"]["ctr"]["versions"][0]["hashes_only"]["word"]


@pytest.mark.parametrize("damage", ["missing", "cut off", "a byte"])
def test_damaged_strings_of_a_built_version_are_refused_by_their_name(open_store, tmp_path, damage):
    built = tmp_path / "built"
    tierstore.build_snapshot(snapshot(tmp_path), built, load_workers=1)
    (path,) = (built / "strings/word").iterdir()
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 1
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(content[:-1] if damage == "cut off" else content)
    store = open_store()
    with pytest.raises(SnapshotError) as refused:
        store.load_snapshot(built)
    assert refused.value.file == f"strings/word/{path.name}"
    assert store.models() == []


def test_a_build_is_the_same_bytes_again(tmp_path):
    where = snapshot(tmp_path, values=TEXTS)
    made = []
    for name in ("one", "two"):
        tierstore.build_snapshot(where, tmp_path / name, partitions=2, load_workers=1)
        paths = sorted(path for path in (tmp_path / name).rglob("*") if path.is_file())
        made.append({path.relative_to(tmp_path / name).as_posix(): path.read_bytes() for path in paths})
    assert made[0] == made[1]
    assert [name for name in made[0] if name.endswith(".strings")] == [
        "partition-0000/strings/word/word-0000-0000.strings",
        "partition-0001/strings/word/word-0000-0000.strings",
    ]
