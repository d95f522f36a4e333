"""Nodes with some partitions of the keys: together they answer as one store would, and each refuses the keys of the others."""

from __future__ import annotations

import io
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import tierstore
from tests.collisions import digest, family
from tests.engine import scenes
from tests.engine.test_store import folded
from tierstore.engine.operations.sampled_digests import sampled_digests
from tierstore.errors import ConfigError, LoadCancelled, SnapshotError, StorageError, WrongPartition
from tierstore.formats.keys import partition_of
from tierstore.types import Partitions, Progress

COUNT = 64
OWN = ["0-15/64", "16-31/64", "32-47/64", "48-63/64"]
OPTIONS = {"host_budget": "4MiB", "load_workers": 1, "disk_threads": 2, "fold_grace_s": 0.0}
KEYS = np.arange(-300, 4200)
TWINS, MORE_TWINS = family(3), family(3, "b")
WORDS = [*TWINS, *MORE_TWINS, *(f"w{i}" for i in range(400)), *(f"new{i}" for i in range(40))]


def write(where: Path, version: int, delta_seq: int = 0, twins: list[str] = TWINS) -> Path:
    """Tables with several shards; some of the keys and words above are not in it."""
    rng = np.random.default_rng(version)
    with tierstore.SnapshotWriter(where, model="ctr", version=version, delta_seq=delta_seq) as writer:
        keys = rng.permutation(4000)
        rows = (keys[:, None] * 4 + np.arange(4) + version).astype(np.float32)
        writer.table("item", dim=4, default="mean", rows_per_shard=1500).write(keys, rows)
        words = [*twins, *WORDS[6:406]]
        writer.table("word", dim=2, key="string").write(words, rng.standard_normal((len(words), 2), np.float32))
        writer.table("few", dim=1).write([5], np.ones((1, 1), np.float32))
        writer.feature("item", table="item")
        writer.feature("bag", table="item", combiner="mean", padding_key=-1)
        writer.feature("word", table="word")
        writer.feature("few", table="few")
        writer.warmup("item", np.arange(500))
        writer.request({"item": np.arange(3)})
    return where


def partitions_of(keys: object) -> np.ndarray:
    codes = keys if isinstance(keys, np.ndarray) else np.array([digest(word) for word in keys], np.int64)  # type: ignore[attr-defined]
    return partition_of(codes, COUNT)


@dataclass
class Nodes:
    """Four nodes, and the store that has every key."""

    root: Path
    nodes: list[tierstore.Store]
    one: tierstore.Store

    @property
    def all(self) -> list[tierstore.Store]:
        return [*self.nodes, self.one]

    def load(self, source: Path, whole: Path) -> None:
        for node in self.nodes:
            node.load_snapshot(source)
        self.one.load_snapshot(whole)

    def apply(self, data: bytes) -> None:
        for store in self.all:
            assert store.apply_delta(data).applied

    def check(self) -> None:
        """Each key is answered by the node that has it as by the one, and refused by the others."""
        for feature, keys in (("item", KEYS), ("word", np.array(WORDS, object)), ("few", KEYS[:400])):
            wanted, there = self.one.model("ctr").lookup(feature, keys, return_found=True)
            home = partitions_of(keys if feature != "word" else list(keys)) // 16
            for number, node in enumerate(self.nodes):
                ctr = node.model("ctr")
                rows, found = ctr.lookup(feature, keys[home == number], return_found=True)
                np.testing.assert_array_equal(rows, wanted[home == number])
                np.testing.assert_array_equal(found, there[home == number])
                with pytest.raises(WrongPartition, match=rf"of 64: it has partitions {number * 16}-{number * 16 + 15}"):
                    ctr.lookup(feature, keys)
        for store in self.all:
            assert store.verify().ok
        assert len({store.status()["models"]["ctr"]["watermark"] for store in self.all}) == 1

    def check_folded(self) -> None:
        """The same, and the rows of each table add up."""
        for store in self.all:
            folded(store)
        self.check()
        tables = [store.status()["models"]["ctr"]["tables"] for store in self.all]
        for name in ("item", "word", "few"):
            rows = [table[name]["rows"] for table in tables]
            assert sum(rows[:-1]) == rows[-1]


Open = Callable[..., Nodes]


@pytest.fixture
def open_nodes(tmp_path: Path) -> Iterator[Open]:
    """Opens them in tmp_path/0 to 3 and tmp_path/one, closed and opened again if they are open."""
    with ExitStack() as stack:

        def open_(**settings: object) -> Nodes:
            stack.close()
            nodes = [
                stack.enter_context(tierstore.open(tmp_path / str(i), partition=own, **OPTIONS, **settings))
                for i, own in enumerate(OWN)
            ]
            one = stack.enter_context(tierstore.open(tmp_path / "one", **OPTIONS, **settings))
            return Nodes(tmp_path, nodes, one)

        yield open_


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("snapshot") / "s", 7)


@pytest.fixture(scope="module")
def built(snapshot: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("built") / "out"
    tierstore.build_snapshot(snapshot, out, partitions=COUNT, load_workers=1)
    return out


def delta(seq: int) -> bytes:
    """Changes, adds and deletes rows of all partitions; strings too, of which more and more share a hash."""
    rng = np.random.default_rng(seq)
    keys = rng.choice(np.arange(-200, 4200), 300, replace=False)  # so few that folds count rows exactly
    words = [*MORE_TWINS[: seq + 1], TWINS[0], *rng.choice(WORDS[6:], 60, replace=False)]
    buffer = io.BytesIO()
    with tierstore.DeltaWriter(buffer, model="ctr", seq=seq, event_time=0) as writer:
        writer.upsert("item", keys[:200], rng.standard_normal((200, 4)).astype(np.float32))
        writer.delete("item", keys[200:])
        writer.upsert("word", list(words), rng.standard_normal((len(words), 2)).astype(np.float32))
        writer.delete("word", ["w3", TWINS[1]])
    return buffer.getvalue()


@pytest.mark.thorough
@pytest.mark.parametrize(("source", "base"), [("built", "sealed"), ("snapshot", "sealed"), ("snapshot", "rocksdb")])
def test_four_nodes_together_are_one_store(
    open_nodes: Open, snapshot: Path, built: Path, tmp_path: Path, source: str, base: str
) -> None:
    nodes = open_nodes(base=base)
    nodes.load(built if source == "built" else snapshot, snapshot)
    nodes.check()
    with ExitStack() as stack:
        for store in nodes.all:  # a request that reads beneath them: nothing is folded
            stack.enter_context(store.model("ctr").view())
        nodes.apply(delta(1))
        nodes.apply(delta(2))
        nodes.check()
    nodes.check_folded()
    nodes = open_nodes(base=base)
    nodes.check_folded()
    nodes.apply(delta(3))
    second = write(tmp_path / "second", 8, 1)
    nodes.load(second, second)  # replays deltas 2 and 3
    nodes.check()
    for store in nodes.all:
        store.rollback("ctr")
    nodes.check()
    if base == "sealed":
        for store in nodes.all:
            store.rollback("ctr", to_seq=2)
        nodes.check()
    logs = [sorted(path.name for path in store.root.model("ctr").log.glob("*.arrow")) for store in nodes.all]
    assert logs == [logs[0]] * 5, "logs and seqs are the same everywhere"


def test_bags_and_warm_rows_and_what_is_exported(open_nodes: Open, built: Path, snapshot: Path, tmp_path: Path) -> None:
    nodes = open_nodes()
    nodes.load(built, snapshot)
    nodes.apply(delta(1))
    rows: list[int] = []
    for number, node in enumerate(nodes.nodes):
        mine = KEYS[partitions_of(KEYS) // 16 == number]
        ctr, one = node.model("ctr"), nodes.one.model("ctr")
        offsets = np.arange(0, len(mine), 7)
        np.testing.assert_array_equal(ctr.lookup_bags("bag", mine, offsets), one.lookup_bags("bag", mine, offsets))
        padded = np.append(mine[:20], -1)  # a padding key is on every node
        np.testing.assert_array_equal(ctr.lookup("bag", padded), one.lookup("bag", padded))
        other = KEYS[partitions_of(KEYS) // 16 != number][:1]
        with pytest.raises(WrongPartition):
            ctr.lookup_bags("bag", np.append(mine[:50], other), [0, 10])
        hot = np.load(node.root.model("ctr").version(7).warmup("item"))
        np.testing.assert_array_equal(hot, np.arange(500)[partitions_of(np.arange(500)) // 16 == number])
        picked = sampled_digests(ctr, None, None, 200)["tables"]["item"]
        assert picked["found"]
        assert sampled_digests(one, None, {"item": picked["keys"]}, 0)["tables"]["item"] == picked
    integers = tmp_path / "integers"
    with tierstore.SnapshotWriter(integers, model="int", version=1) as writer:
        keys = np.arange(5000)
        writer.table("item", dim=1).write(keys, keys[:, None].astype(np.float32))
    for number, node in enumerate(nodes.nodes):
        node.load_snapshot(integers)
        rows.append(node.export("int", tmp_path / f"export-{number}").rows)
    assert sum(rows) == 5000
    with tierstore.open(tmp_path / "again", **OPTIONS) as store:
        store.load_snapshot(tmp_path / "export-1")
        found = store.model("int").lookup("item", keys, return_found=True)[1]
        np.testing.assert_array_equal(found, partitions_of(keys) // 16 == 1)


def test_a_build_of_partitions_is_loaded_anywhere_and_its_records_say_what_they_have(
    open_nodes: Open, built: Path, snapshot: Path
) -> None:
    nodes = open_nodes()
    for store in nodes.all:
        store.load_snapshot(built)
    nodes.check()
    for store, own in zip(nodes.all, [[[0, 15]], [[16, 31]], [[32, 47]], [[48, 63]], [[0, 63]]], strict=True):
        status = store.status()["models"]["ctr"]
        assert status["partitions"] == status["versions"][0]["partitions"] == {"count": COUNT, "own": own}
        assert status["problem"] is None
        record = json.loads((store.root.model("ctr").version(7).record).read_text())
        assert record["format"] == 4
        assert record["partitions"] == {"count": COUNT, "own": own}
    with tierstore.open(nodes.root / "plain", **OPTIONS) as store:
        store.load_snapshot(snapshot)
        assert store.status()["models"]["ctr"]["partitions"] is None
        record = json.loads((store.root.model("ctr").version(7).record).read_text())
        assert record["format"] == 2, "of what earlier releases can read"
        for name, table in record["tables"].items():
            for other in nodes.nodes:
                own_record = json.loads((other.root.model("ctr").version(7).record).read_text())["tables"][name]
                assert own_record["default"] == table["default"], "the mean is over all partitions"


def test_of_a_version_that_was_built_whole_only_its_own_rows_are_copied(
    open_nodes: Open, tmp_path: Path, snapshot: Path
) -> None:
    plain = write(tmp_path / "plain", 9, twins=[])
    whole = tmp_path / "whole"
    tierstore.build_snapshot(plain, whole, load_workers=1)
    nodes = open_nodes()
    nodes.load(whole, plain)
    nodes.check()
    nodes.apply(delta(1))
    nodes.check_folded()
    # keys that share a hash may be under codes of other partitions there
    tierstore.build_snapshot(snapshot, tmp_path / "collide", load_workers=1)
    with pytest.raises(SnapshotError, match="--partitions 64"):
        nodes.nodes[0].load_snapshot(tmp_path / "collide")


def test_another_setting_than_the_versions_were_loaded_with_is_said_and_changes_no_answer(
    open_nodes: Open, built: Path, snapshot: Path, tmp_path: Path
) -> None:
    nodes = open_nodes()
    nodes.load(built, snapshot)
    for store in nodes.all:
        store.close()
    for setting, words in (("0-31/64", "asks for partitions 0-31/64"), (None, "asks for all keys")):
        with tierstore.open(tmp_path / "0", partition=setting, **OPTIONS) as store:
            status = store.status()["models"]["ctr"]
            assert status["partitions"] == {"count": COUNT, "own": [[0, 15]]}
            assert "version 7 has partitions 0-15/64" in status["problem"]
            assert words in status["problem"]
            store.apply_delta(delta(1 if setting else 2))
            with pytest.raises(WrongPartition):
                store.model("ctr").lookup("item", KEYS[partitions_of(KEYS) == 20])
    with tierstore.open(tmp_path / "one", partition="0-31/64", **OPTIONS) as store:
        assert "version 7 has all keys" in store.status()["models"]["ctr"]["problem"]
        assert store.model("ctr").lookup("item", KEYS).shape == (len(KEYS), 4)
        store.load_snapshot(write(tmp_path / "next", 8))
        status = store.status()["models"]["ctr"]
        assert (status["partitions"], status["problem"]) == ({"count": COUNT, "own": [[0, 31]]}, None)
    with pytest.raises(ConfigError, match="partition"):
        tierstore.open(tmp_path / "one", partition="0-15/64", remote="redis://localhost:1")


def test_what_does_not_fit_the_setting_is_refused(open_nodes: Open, built: Path, tmp_path: Path) -> None:
    store = open_nodes().nodes[1]
    with tierstore.open(tmp_path / "other", partition="0-7/32", **OPTIONS) as other:
        with pytest.raises(SnapshotError, match=r"64 partitions.*0-7/32.*--partitions 32"):
            other.load_snapshot(built)
        assert other.models() == []
    with pytest.raises(SnapshotError, match="load the directory above it"):
        store.load_snapshot(built / "partition-0016")
    own = shutil.copytree(
        built, tmp_path / "own", ignore=lambda _, names: {n for n in names if "partition-0031" < n < "q"}
    )
    store.load_snapshot(own)  # the others need not be there
    with pytest.raises(SnapshotError) as refused:
        open_nodes().nodes[2].load_snapshot(own)
    assert refused.value.file == "partition-0032/built.json"


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("partition-0017/built.json", lambda text: text.replace('"rows": ', '"rows": 1', 1)),
        ("partition-0017/built.json", lambda text: text.replace('"partition": 17', '"partition": 18')),
        ("partition-0017/built.json", lambda text: text.replace('"version": 7', '"version": 8')),
        ("partition-0017/built.json", lambda text: text[:-9]),
        ("partition-0016/warmup/item.npy", lambda text: text[:-1] + "x"),
        ("partition-0017/base-item-0017-0000.sealed", lambda text: text[:5000] + "!" + text[5001:]),
        ("partition-0017/base-item-0017-0000.sealed", lambda text: text[:-1]),
        ("partition-0017/base-item-0017-0000.sealed", None),
    ],
)
def test_a_damaged_partition_is_refused_by_its_name(
    open_nodes: Open, built: Path, tmp_path: Path, name: str, damage: Callable[[str], str] | None
) -> None:
    store = open_nodes().nodes[1]
    copy = shutil.copytree(built, tmp_path / "copy")
    if damage is None:
        (copy / name).unlink()
    else:
        (copy / name).write_bytes(damage((copy / name).read_bytes().decode("latin-1")).encode("latin-1"))
    with pytest.raises(SnapshotError) as refused:
        store.load_snapshot(copy)
    assert refused.value.file == name
    assert store.models() == []


@pytest.mark.parametrize("source", [pytest.param("built", marks=pytest.mark.thorough), "whole"])
def test_a_load_that_was_broken_off_goes_on(open_nodes: Open, built: Path, tmp_path: Path, source: str) -> None:
    plain = write(tmp_path / "plain", 7, twins=[])
    tierstore.build_snapshot(plain, tmp_path / "whole", load_workers=1)
    where = built if source == "built" else tmp_path / "whole"
    store = open_nodes().nodes[1]
    cancelled, first = threading.Event(), {}

    def cancel(step: Progress) -> None:
        if step.phase == "copy" and step.done > 0:
            cancelled.set()

    with pytest.raises(LoadCancelled):
        store.load_snapshot(where, progress=cancel, cancelled=cancelled)
    store.load_snapshot(where, progress=lambda step: first.setdefault(step.phase, step))
    assert first["check"].total > 0
    assert first["copy"].done > 0, "what was copied is not copied again"
    mine = KEYS[partitions_of(KEYS) // 16 == 1]
    found = store.model("ctr").lookup("item", mine, return_found=True)[1]
    np.testing.assert_array_equal(found, (mine >= 0) & (mine < 4000))
    assert store.verify().ok


def test_a_base_whose_files_are_not_those_of_its_partitions_is_damage(open_nodes: Open, built: Path) -> None:
    nodes = open_nodes()
    node = nodes.nodes[0]
    node.load_snapshot(built)
    base = node.root.model("ctr").version(7).db / "base"
    files = sorted(base.glob("base-item-*"))
    assert len(files) == 16
    node.close()
    shutil.copy(files[0], files[1])
    node = open_nodes().nodes[0]
    with pytest.raises(StorageError):
        node.activate("ctr", 7)


def test_ranges_of_partitions_as_text() -> None:
    for text, own in (("0-15/64", ((0, 15),)), ("40,0-15/64", ((0, 15), (40, 40))), ("0-3, 4-7/8", ((0, 7),))):
        partitions = Partitions.parse(text)
        assert partitions.own == own
        assert Partitions.parse(str(partitions)) == Partitions.of_document(partitions.document()) == partitions
        assert partitions.numbers == np.flatnonzero(partitions.is_own).tolist()
    assert Partitions.parse("0-7/8").are_all
    assert not Partitions.parse("0-6/8").are_all
    for wrong in ("0-15", "64", "16-0/64", "0-64/64", "a/64", "0-15/0", "0/2000", "", "-1/4", "1-2-3/8", "0-15/64/2"):
        with pytest.raises(ConfigError, match="partition"):
            tierstore.open("unused", partition=wrong)


def test_one_content_is_the_same_wherever_it_is_loaded_and_however_it_was_built(tmp_path: Path) -> None:
    snapshot = scenes.write_snapshot(tmp_path, 1, stamp=1)
    built, partitions = tmp_path / "built", tmp_path / "partitions"
    tierstore.build_snapshot(snapshot, built)
    tierstore.build_snapshot(snapshot, partitions, partitions=2)
    again = scenes.write_snapshot(tmp_path / "again", 1, stamp=1)
    other = scenes.write_snapshot(tmp_path / "other", 1, stamp=2)

    def content(source: Path, name: str, **settings: object) -> str:
        with tierstore.open(tmp_path / name, host_budget="4MiB", load_workers=1, **settings) as store:
            store.load_snapshot(source)
        return str(json.loads((tmp_path / name / "models/ctr/1/version.json").read_text())["content"])

    first = content(snapshot, "a")
    assert [
        content(built, "b"),
        content(partitions, "c", partition="0-1/2"),
        content(partitions, "d", partition="1-1/2"),
        content(snapshot, "e", partition="0-0/2"),
        content(again, "f"),
    ] == [first] * 5
    assert content(other, "g") != first
