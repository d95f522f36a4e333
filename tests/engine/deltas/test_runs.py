"""Deltas that a source hands over together: flushed side by side, published once, and otherwise what single ones promise."""

from __future__ import annotations

import io
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tierstore
from tests.collisions import pair
from tests.engine import scenes
from tests.engine.test_store import folded
from tests.engine.test_torn import Before, CutOff
from tests.formats.disks import FailingDisk
from tierstore.engine.data.overlay import OverlayTable
from tierstore.engine.deltas import apply, log
from tierstore.engine.serving import publisher
from tierstore.engine.serving.publisher import Publisher
from tierstore.errors import DeltaError, SequenceGap
from tierstore.formats import files
from tierstore.kernels import overlay_index
from tierstore.types import KeyType, StorageDtype, TableSpec

pytestmark = pytest.mark.usefixtures("quick_loads")

OpenStore = Callable[..., tierstore.Store]
KEYS = np.array([*range(60), 1000, 5000])
UNFOLDED: dict[str, Any] = {"fold_grace_s": 60.0}


@cache  # an event time is in it
def delta(seq: int) -> bytes:
    """Changes 1 to 3 of each delta's keys and 1000 again and again, and deletes one."""
    keys = [seq, 2 * seq, 1000]
    return scenes.delta(
        seq, {table: (keys, scenes.vectors(table, seq, keys)) for table in ("item", "user")}, {"item": [seq + 1]}
    )


def run_of(seqs: Iterable[int]) -> list[Any]:
    return [(seq, delta(seq), {"source": "here", "at": seq}) for seq in seqs]


def rows(store: tierstore.Store) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    got: dict[str, Any] = store.model("ctr").lookup_many({"item_id": KEYS, "user_id": KEYS}, return_found=True)
    return got


def assert_rows(store: tierstore.Store, last: int, where: str = "") -> None:
    """The rows of deltas 1 to `last`, as the deltas themselves say."""
    for table in ("item", "user"):
        expected = {key: scenes.vector(table, 0, key) for key in KEYS.tolist() if key < scenes.ROWS[table]}
        for seq in range(1, last + 1):
            if table == "item":
                expected.pop(seq + 1, None)
            # a delta's later rows win: its deletes are written after its upserts
            for key in {seq, 2 * seq, 1000} - ({seq + 1} if table == "item" else set()):
                expected[key] = scenes.vector(table, seq, key)
        got, found = rows(store)[f"{table}_id"]
        assert found.tolist() == [key in expected for key in KEYS.tolist()], where
        for key, row in zip(KEYS.tolist(), got, strict=True):
            np.testing.assert_array_equal(row, expected.get(key, np.zeros(scenes.DIM[table])), err_msg=where)


def last_of(store: tierstore.Store) -> int:
    return int(store.status()["models"]["ctr"]["log"]["last"])


def test_a_run_is_there_with_one_flush_of_the_folder_and_one_publication(
    tmp_path: Path, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(**UNFOLDED)
    store.load_snapshot(scenes.write_snapshot(tmp_path))
    flushed, published = Counter[str](), []

    class Counting(files.FileSystem):
        def fsync_dir(self, path: Path) -> None:
            flushed[path.name] += 1
            super().fsync_dir(path)

    publish = Publisher.publish

    def noted(self: Publisher, served: Any) -> None:
        published.extend(view.seq for view in served.views)
        publish(self, served)

    monkeypatch.setattr(Publisher, "publish", noted)
    with files.use(Counting()):
        assert store.apply_run("ctr", run_of(range(1, 9))) == 8
    assert (flushed["log"], published) == (1, [8])
    assert_rows(store, 8)
    assert [store.apply_delta(delta(seq)).applied for seq in range(1, 10)] == [False] * 8 + [True]
    origin = store.model("ctr").log.newest_origin("here")
    assert origin is not None
    assert origin["at"] == 8
    with open(tmp_path / "data/audit/deltas.jsonl") as lines:
        assert [f'"seq": {seq}}}' in line for seq, line in enumerate(lines, 1)] == [True] * 9
    store.close()
    store = open_store(fold_grace_s=0.0)
    assert_rows(store, 9)
    folded(store)
    assert_rows(store, 9)
    assert store.verify().ok


def test_what_cannot_be_taken_in_ends_the_run_and_says_why_by_itself(tmp_path: Path, open_store: OpenStore) -> None:
    store = open_store(**UNFOLDED)
    store.load_snapshot(scenes.write_snapshot(tmp_path))
    wide = scenes.delta(3, {"item": ([1], np.zeros((1, 3), np.float32))})
    for broken, error in ((wide, DeltaError), (b"no delta", DeltaError), (delta(4), DeltaError)):
        run = [*run_of([last_of(store) + 1, last_of(store) + 2]), (last_of(store) + 3, broken, None)]
        begin = last_of(store)
        assert store.apply_run("ctr", [*run, *run_of([begin + 4])]) == 2
        assert last_of(store) == begin + 2
        assert store.apply_run("ctr", [run[2], *run_of([begin + 4])]) == 0
        with pytest.raises(error):
            store.apply_delta(broken, model="ctr", seq=begin + 3)
        assert_rows(store, begin + 2)
    last = last_of(store)
    assert store.apply_run("ctr", run_of([last, last + 1])) == 0, "one that is held"
    assert store.apply_run("ctr", run_of([last + 2, last + 3])) == 0, "a gap"
    assert store.apply_run("ctr", run_of([last + 1, last + 3])) == 1, "a gap within"
    with pytest.raises(SequenceGap):
        store.apply_delta(delta(last + 3))
    assert store.shared.decoding.used == 0
    assert store.shared.overlay_budget.used == store.model("ctr").state.live.current.overlay_bytes


def test_keys_that_collide_across_a_run_stay_apart(tmp_path: Path, open_store: OpenStore) -> None:
    """Two strings with one hash, brought by two deltas of one run."""
    one, other = pair(0)
    with tierstore.SnapshotWriter(tmp_path / "s", model="words", version=1) as writer:
        writer.table("word", dim=2, key="string").write(["w"], np.ones((1, 2), np.float32))
        writer.feature("word", table="word")
    run: list[Any] = []
    for seq, words in enumerate(([one], [one, other], [other, "w"]), 1):
        buffer = io.BytesIO()
        with tierstore.DeltaWriter(buffer, model="words", seq=seq) as delta:
            delta.upsert(
                "word", words, np.full((len(words), 2), [[10.0 * seq + n] for n in range(2)][: len(words)], np.float32)
            )
        run.append((seq, buffer.getvalue(), None))
    store = open_store(**UNFOLDED)
    store.load_snapshot(tmp_path / "s")
    assert store.apply_run("words", run) == 3
    got = store.model("words").lookup("word", [one, other, "w"])
    np.testing.assert_array_equal(got[:, 0], [20.0, 30.0, 31.0])


@pytest.mark.parametrize("reopen", [False, True], ids=["goes on", "reopens"])
def test_whichever_file_operation_of_a_run_fails_none_of_it_counts_and_a_second_try_works(
    tmp_path: Path, open_store: OpenStore, reopen: bool
) -> None:
    store = open_store(**UNFOLDED)
    store.load_snapshot(scenes.write_snapshot(tmp_path))
    for fail_at in range(100):
        last = last_of(store)
        run, disk = run_of(range(last + 1, last + 4)), FailingDisk(fail_at)
        with files.use(disk):
            applied = store.apply_run("ctr", run)
        if applied == 0:
            if reopen:
                store.close()
                store = open_store(**UNFOLDED)
            assert last_of(store) == last, f"operation {fail_at} failed"
            assert_rows(store, last, f"operation {fail_at} failed")
            assert store.model("ctr").log.digest(last + 1) is None, "so other content may come under that seq"
            assert store.apply_run("ctr", run) == 3
        assert last_of(store) == last + 3
        assert_rows(store, last + 3)
        if disk.operations <= fail_at:
            break
    assert fail_at >= 10
    assert store.verify().ok
    assert not list((tmp_path / "data/models/ctr/log").glob(".tmp-*"))


def names_that_power_may_leave(names: list[str]) -> list[tuple[str, ...]]:
    """Any of the names of a run, as nothing says in which order they reach the drive."""
    return [some for count in range(len(names) + 1) for some in combinations(names, count)]


def test_whichever_names_of_a_run_power_leaves_the_start_holds_a_whole_part_of_it(
    tmp_path: Path, open_store: OpenStore
) -> None:
    """A flush of the folder is what makes names durable. Until then each may be there or not, the last before the first."""
    store = open_store(**UNFOLDED)
    store.load_snapshot(scenes.write_snapshot(tmp_path))
    for seq in (1, 2):
        store.apply_delta(delta(seq))
    where = tmp_path / "data/models/ctr"
    end = (where / "log.end").read_bytes()
    before = {path.name for path in (where / "log").iterdir()}
    assert store.apply_run("ctr", run_of(range(3, 7))) == 4
    store.close()
    (where / "log.end").write_bytes(end)  # which is written once they count
    new = sorted({path.name for path in (where / "log").iterdir()} - before)
    kept = tmp_path / "kept"
    shutil.copytree(tmp_path / "data", kept)
    for left in names_that_power_may_leave(new):
        shutil.rmtree(tmp_path / "data")
        shutil.copytree(kept, tmp_path / "data")
        for name in set(new) - set(left):
            (where / "log" / name).unlink()
        store = open_store(**UNFOLDED)
        whole = next((number for number, name in enumerate(new) if name not in left), len(new))
        said = f"{left} of {new} were left"
        assert store.status()["models"]["ctr"]["problem"] is None, said
        assert last_of(store) == 2 + whole, said
        assert_rows(store, 2 + whole, said)
        assert store.apply_run("ctr", run_of(range(3 + whole, 9))) == 6 - whole, said
        assert_rows(store, 8, said)
        assert store.verify().ok, said
        store.close()


def test_a_delta_of_a_run_that_was_acknowledged_and_is_gone_is_a_loss(tmp_path: Path, open_store: OpenStore) -> None:
    store = open_store(**UNFOLDED)
    store.load_snapshot(scenes.write_snapshot(tmp_path))
    assert store.apply_run("ctr", run_of(range(1, 5))) == 4
    store.close()
    next((tmp_path / "data/models/ctr/log").glob("*03-*")).unlink()
    store = open_store(**UNFOLDED)
    assert "delta 3 is missing" in str(store.status()["models"]["ctr"]["problem"])


def test_a_loss_within_a_run_stays_a_loss_where_the_end_of_the_log_is_not_known(
    tmp_path: Path, open_store: OpenStore
) -> None:
    store = open_store(**UNFOLDED)
    store.load_snapshot(scenes.write_snapshot(tmp_path))
    store.apply_delta(delta(1))
    assert store.apply_run("ctr", run_of(range(2, 6))) == 4
    store.close()
    where = tmp_path / "data/models/ctr"
    (where / "log.end").write_bytes(b"rubbish")
    lost = next((where / "log").glob("*03-*"))
    kept = lost.read_bytes()
    lost.unlink()
    store = open_store(**UNFOLDED)
    assert "delta 3 is missing" in str(store.status()["models"]["ctr"]["problem"])
    store.close()
    lost.write_bytes(kept)
    store = open_store(**UNFOLDED)
    assert last_of(store) == 5, "nothing behind it was removed"
    assert_rows(store, 5)


def test_all_that_a_run_publishes_is_ready_for_look_ups(tmp_path: Path, open_store: OpenStore) -> None:
    """Also below the newest: a small delta is not merged with a large one before it."""
    store = open_store(**UNFOLDED)
    store.load_snapshot(scenes.write_snapshot(tmp_path))
    many = list(range(900))
    large = scenes.delta(1, {"item": (many, scenes.vectors("item", 1, many))})
    assert store.apply_run("ctr", [(1, large, None), (2, delta(2), None)]) == 2
    view = store.model("ctr").publisher.current
    assert len(view.overlays) == 2
    assert all(table._made for overlay in view.overlays for table in overlay.tables.values())


def test_two_threads_that_make_an_overlay_ready_get_the_same_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a view has is an address: the other one would be freed while it is read."""
    both = threading.Barrier(2)
    build = overlay_index.build

    def at_once(keys: Any) -> Any:
        both.wait(30)
        return build(keys)

    monkeypatch.setattr(overlay_index, "build", at_once)
    spec = TableSpec("item", KeyType.INT64, 8, StorageDtype.FLOAT16)
    table = OverlayTable(spec, np.arange(50), np.zeros((50, 16), np.uint8), np.zeros(50, np.bool_))
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(lambda _: table.prepare(), range(2))
    assert first is second is table.prepare()


def test_a_run_that_was_cut_off_between_two_lines_is_there_whole_or_can_be_sent_again(
    tmp_path: Path, open_store: OpenStore
) -> None:
    store = open_store(**UNFOLDED, overlay_budget="64MiB")
    store.load_snapshot(scenes.write_snapshot(tmp_path))
    begun = cut_off = logged = 0
    for n in range(3000):
        first = 3 * begun + 1
        run, begun = run_of(range(first, first + 3)), begun + 1
        where = None
        try:
            with Before(n, apply, log, publisher) as cut:
                store.apply_run("ctr", run)
        except CutOff as error:
            where = str(error)
        held = last_of(store)
        assert held in ((first + 2,) if where is None else (first - 1, first + 2)), (
            f"{where}: none of it counts, or all"
        )
        if where is not None:
            assert_rows(store, held, where)
            cut_off, logged = cut_off + 1, logged + (held > first)
            if held < first:
                assert store.apply_run("ctr", run) == 3, where
        assert last_of(store) == first + 2
        if cut.ended:
            break
    assert cut.ended
    assert cut_off - logged > 20
    assert logged > 5
    assert_rows(store, 3 * begun)
    store.close()
    store = open_store(**UNFOLDED)
    assert_rows(store, 3 * begun)
    assert store.verify().ok
