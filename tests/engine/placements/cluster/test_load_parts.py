"""Loads into a real cluster part by part: on little disk, by several nodes, by one that is killed and starts again."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tierstore
from tests.engine import scenes
from tests.engine.placements.cluster.scenes import OpenNode, check, has_version, member
from tests.mounts import ROOT, needs_mounts
from tests.redis_cluster import RedisCluster, end_with_parent
from tierstore.engine.placements.cluster import shared_load, target
from tierstore.engine.placements.cluster.shared_load import SharedLoad
from tierstore.engine.placements.cluster.target import ClusterTarget
from tierstore.engine.store import Store
from tierstore.formats import files

pytestmark = pytest.mark.usefixtures("quick_loads")

Late = tuple[ThreadPoolExecutor, threading.Event, threading.Event]  # the thread; it waits; let it go on
ROWS = {"user": 20_000, "item": 60_000}
PARTS = 8

# Loads a snapshot. Dies once more than so many rows are in the cluster; fails if it has to wait for another node, unless
# it may; if it pauses, it says that it writes its first rows, and goes on once it hears a line.
PROGRAM = """
import os, signal, sys
import tierstore

data, url, source, dies_at, waits, pauses = sys.argv[1:]

def progress(step):
    global pauses
    if step.phase == "upload" and step.done > int(dies_at):
        os.kill(os.getpid(), signal.SIGKILL)
    if step.phase == "upload" and pauses == "yes":
        pauses = "no"
        print("writes", flush=True)
        sys.stdin.readline()
    if step.phase == "await other nodes" and waits == "no":
        raise RuntimeError("waits for another node")

with tierstore.open(data, remote=url, host_budget="4MiB", load_workers=1, disk_threads=2) as store:
    store.load_snapshot(source, progress=progress)
"""


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return scenes.write_snapshot(tmp_path_factory.mktemp("source"), rows=ROWS, default="mean")


@pytest.fixture(scope="module")
def built(snapshot: Path, quick_loads: None) -> Path:
    """The snapshot, built in partitions."""
    out = snapshot.parent / "built"
    tierstore.build_snapshot(snapshot, out, partitions=PARTS, load_workers=1)
    return out


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """(thread, part) of each part that was written to its end."""
    parts: list[tuple[str, int]] = []
    write_part = ClusterTarget._write_part

    def write(self: ClusterTarget, writer: Any, part: int, *words: Any) -> None:
        write_part(self, writer, part, *words)
        parts.append((threading.current_thread().name, part))

    monkeypatch.setattr(ClusterTarget, "_write_part", write)
    return parts


def check_all(store: Store) -> None:
    """Every row, the rows' number, and the default of a key that is not there, against what the snapshot was made of."""
    for table, rows in ROWS.items():
        check(store, table, range(rows), 0)
        vectors = scenes.vectors(table, 0, range(rows)).astype(np.float64)
        absent = store.model("ctr").lookup(f"{table}_id", [10**9])
        np.testing.assert_allclose(absent[0], vectors.mean(axis=0), rtol=1e-6)
        assert store.status()["models"]["ctr"]["tables"][table]["rows"] == rows


def test_a_snapshot_that_is_larger_than_its_disk_budget_is_loaded_in_parts(
    open_node: OpenNode, tmp_path: Path, snapshot: Path, written: list[tuple[str, int]]
) -> None:
    most, budget = 0, 1 << 20
    whole = sum(rows * (4 * scenes.DIM[table] + 8) for table, rows in ROWS.items())
    assert whole > 2 * budget

    def progress(_: object) -> None:
        nonlocal most
        most = max(most, files.tree_bytes(tmp_path / "a"))

    store = open_node(load_disk=budget)
    before = files.tree_bytes(tmp_path / "a")
    store.load_snapshot(snapshot, progress=progress)
    parts = [part for _, part in written]
    assert parts == [*range(len(parts))]
    assert len(parts) > 2
    assert most - before <= budget
    check_all(store)
    check_all(open_node("b"))


def test_a_part_that_does_not_fit_is_refused_and_the_load_goes_on_where_there_is_room(
    open_node: OpenNode, built: Path, written: list[tuple[str, int]]
) -> None:
    with pytest.raises(tierstore.errors.StorageError, match=r"a part of this load needs .*load_disk"):
        open_node("a", load_disk="64KiB").load_snapshot(built)
    assert not written
    store = open_node("b")
    store.load_snapshot(built)
    assert [part for _, part in written] == [*range(PARTS)]
    check_all(store)


def test_two_nodes_share_the_parts_of_a_load(
    open_node: OpenNode, built: Path, written: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    stores, both = [open_node(name) for name in "ab"], threading.Barrier(2, timeout=60)
    upload, first = ClusterTarget._upload, dict[int, bool]()

    def upload_beside(self: ClusterTarget, *words: Any) -> None:
        if first.setdefault(id(self), True):
            first[id(self)] = False
            both.wait()  # each has begun one before either ends
        upload(self, *words)

    monkeypatch.setattr(ClusterTarget, "_upload", upload_beside)
    with ThreadPoolExecutor(2) as threads:
        loads = [threads.submit(store.load_snapshot, built) for store in stores]
        assert [load.result(120) for load in loads] == [1, 1]
    assert sorted(part for _, part in written) == [*range(PARTS)]
    assert len({thread for thread, _ in written}) == 2
    for store in stores:
        assert has_version(store, 1)
        check_all(store)


def test_two_nodes_that_begin_a_load_in_the_same_moment_share_it(
    open_node: OpenNode, built: Path, written: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    stores, both = [open_node(name) for name in "ab"], threading.Barrier(2, timeout=60)
    begin, first = ClusterTarget._begin, dict[int, bool]()

    def begin_beside(self: ClusterTarget, *words: Any) -> bool:
        if first.setdefault(id(self), True):
            first[id(self)] = False
            both.wait()  # neither has seen that the other one begins
        return begin(self, *words)

    monkeypatch.setattr(ClusterTarget, "_begin", begin_beside)
    with ThreadPoolExecutor(2) as threads:
        loads = [threads.submit(store.load_snapshot, built) for store in stores]
        assert [load.result(120) for load in loads] == [1, 1]
    assert sorted(part for _, part in written) == [*range(PARTS)]
    for store in stores:
        check_all(store)


def test_a_part_that_another_node_has_ended_since_it_was_missing_is_not_written_again(
    open_node: OpenNode, built: Path, written: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = open_node("a"), open_node("b")
    claim_part, looked, go_on = SharedLoad.claim_part, threading.Event(), threading.Event()

    def claim_late(self: SharedLoad, part: int | str) -> bool:
        if threading.current_thread().name.startswith("late") and isinstance(part, int):
            looked.set()
            assert go_on.wait(60)
        return claim_part(self, part)

    monkeypatch.setattr(SharedLoad, "claim_part", claim_late)
    with ThreadPoolExecutor(1) as threads, ThreadPoolExecutor(1, thread_name_prefix="late") as late:
        other = late.submit(b.load_snapshot, built)
        assert looked.wait(60)
        load = threads.submit(a.load_snapshot, built)
        scenes.eventually(lambda: 0 in [part for _, part in written], "the first part is there", 60)
        go_on.set()
        assert [load.result(120), other.result(120)] == [1, 1]
    assert sorted(part for _, part in written) == [*range(PARTS)]
    check_all(b)


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[Late]:
    """A thread whose loads stop before their first part is written, for longer than a claim counts."""
    monkeypatch.setattr(shared_load, "CLAIM_S", 1.0)
    upload, began, go_on = ClusterTarget._upload, threading.Event(), threading.Event()

    def upload_late(self: ClusterTarget, *words: Any) -> None:
        if threading.current_thread().name.startswith("late"):
            began.set()
            assert go_on.wait(60)
        upload(self, *words)

    monkeypatch.setattr(ClusterTarget, "_upload", upload_late)
    with ThreadPoolExecutor(1, thread_name_prefix="late") as thread:
        yield thread, began, go_on
        go_on.set()


def test_a_node_that_was_late_with_a_part_goes_on_with_what_another_one_has_ended(
    open_node: OpenNode, built: Path, written: list[tuple[str, int]], late: Late
) -> None:
    a, b, (thread, began, go_on) = open_node("a"), open_node("b"), late
    load = thread.submit(b.load_snapshot, built)
    assert began.wait(60)
    assert a.load_snapshot(built, activate=False) == 1
    go_on.set()
    assert load.result(120) == 1
    assert sorted(part for _, part in written) == [*range(PARTS)]
    for store in (a, b):
        scenes.eventually(lambda store=store: has_version(store, 1), "it serves", 60)  # type: ignore[misc]
        check_all(store)


def test_a_node_that_was_late_does_not_take_another_snapshot_for_its_own(
    open_node: OpenNode, built: Path, tmp_path: Path, late: Late
) -> None:
    a, b, (thread, began, go_on) = open_node("a"), open_node("b"), late
    load = thread.submit(b.load_snapshot, built)
    assert began.wait(60)
    other = scenes.write_snapshot(tmp_path, stamp=3)

    def is_loaded() -> bool:
        with contextlib.suppress(tierstore.Conflict):  # until the claim of the late one is over
            return a.load_snapshot(other, activate=False) == 1
        return False

    scenes.eventually(is_loaded, "the other one is loaded", 60)
    go_on.set()
    with pytest.raises(tierstore.Conflict, match="version 1 of 'ctr'"):
        load.result(120)
    assert a.model("ctr").active_version is None
    a.activate("ctr", 1)
    np.testing.assert_array_equal(a.model("ctr").lookup("item_id", [5]), scenes.vectors("item", 3, range(5, 6)))


def test_a_node_that_was_late_is_told_that_its_version_was_dropped(
    open_node: OpenNode, built: Path, tmp_path: Path, late: Late
) -> None:
    a, b, (thread, began, go_on) = open_node("a"), open_node("b"), late
    a.load_snapshot(scenes.write_snapshot(tmp_path, stamp=3, version=7))
    load = thread.submit(b.load_snapshot, built)
    assert began.wait(60)

    def is_dropped() -> bool:
        with contextlib.suppress(tierstore.Conflict):  # until the claim of the late one is over
            a.drop("ctr", 1)
            return True
        return False

    scenes.eventually(is_dropped, "it is dropped", 60)
    go_on.set()
    with pytest.raises(tierstore.Conflict, match="dropped"):
        load.result(120)


def test_another_snapshot_under_the_same_number_is_refused_while_one_is_loaded(
    open_node: OpenNode, tmp_path: Path, built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = open_node("a"), open_node("b")
    upload, uploads, go_on = ClusterTarget._upload, threading.Event(), threading.Event()

    def wait(self: ClusterTarget, *words: Any) -> None:
        uploads.set()
        assert go_on.wait(60)
        upload(self, *words)

    monkeypatch.setattr(ClusterTarget, "_upload", wait)
    with ThreadPoolExecutor(1) as threads:
        load = threads.submit(a.load_snapshot, built)
        assert uploads.wait(60)
        with pytest.raises(tierstore.Conflict, match="is being loaded by another node"):
            b.load_snapshot(scenes.write_snapshot(tmp_path, stamp=3))
        go_on.set()
        assert load.result(120) == 1
    scenes.eventually(lambda: has_version(b, 1), "it serves what was loaded", 60)
    check_all(b)


def test_rows_that_a_server_has_lost_of_parts_that_are_done_are_written_again(
    open_node: OpenNode, built: Path, written: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, again = open_node(), []
    write = target._write

    def note(writer: Any, of: Any, short: Any, tags: int) -> None:
        again.append(short)
        write(writer, of, short, tags)

    monkeypatch.setattr(target, "_write", note)

    def progress(step: tierstore.Progress) -> None:
        if len(written) == PARTS // 2 and not lost:
            shared = member(store).shared
            tag = shared.versions()[1]["tags"][1]
            lost.append(shared._cluster.call("UNLINK", f"ts:{{{tag}}}:ctr:1:item"))

    lost: list[int] = []
    store.load_snapshot(built, progress=progress)
    assert lost == [1]
    assert [part for _, part in written] == [*range(PARTS), *range(PARTS)]
    assert {"item": [1]} in again
    check_all(store)


def test_a_partition_alone_is_no_version_of_a_cluster(open_node: OpenNode, built: Path) -> None:
    with pytest.raises(tierstore.SnapshotError, match=f"partition 3/{PARTS} alone"):
        open_node().load_snapshot(built / "partition-0003")


def test_a_bad_row_ends_the_load_of_every_node_and_leaves_nothing(
    open_node: OpenNode, tmp_path: Path, snapshot: Path
) -> None:
    copy = tmp_path / "bad"
    shutil.copytree(snapshot, copy)
    item = next((copy / "item").iterdir())
    item.write_bytes(item.read_bytes()[:-8])
    store = open_node(load_disk="1MiB")
    with pytest.raises(tierstore.SnapshotError):
        store.load_snapshot(copy)
    scenes.eventually(lambda: not store.models(), "the model is forgotten", 60)
    assert not [key for server in _masters(store) for key in server.keys("ts:*:ctr:*")]


def _masters(store: Store) -> list[Any]:
    client = store.placement.cluster.client  # type: ignore[attr-defined]
    return [client.get_redis_connection(node) for node in client.get_primaries()]


def test_a_node_is_recognized_after_a_restart_and_a_copy_of_its_directory_is_not(
    open_node: OpenNode, tmp_path: Path
) -> None:
    names = []
    for name in ("a", "a", "copy", "b"):
        if name == "copy":
            shutil.copytree(tmp_path / "a", tmp_path / "copy")
        store = open_node(name)
        names.append(store.placement._owner)  # type: ignore[attr-defined]
        store.close()
    assert names[0] == names[1]
    assert len(set(names)) == 3


# --- processes


Run = Callable[..., "subprocess.Popen[bytes]"]


def start(
    data: Path, url: str, source: Path, dies_at: int = 10**9, waits: bool = True, pauses: bool = False, within: int = 0
) -> Any:
    """The program as a process, in the mount namespace of the process `within`, if that is given."""
    words = [sys.executable, "-c", PROGRAM, data, url, source, dies_at]
    words += ["yes" if flag else "no" for flag in (waits, pauses)]
    inside = ["nsenter", "--mount", "--target", str(within)] if within else []
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [*inside, *map(str, words)],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=end_with_parent,
    )


def end(process: Any) -> int:
    _, errors = process.communicate(timeout=240)
    assert process.returncode in (0, -9), errors.decode()
    return int(process.returncode)


def test_a_node_that_was_killed_in_a_load_goes_on_at_once(
    open_node: OpenNode, cluster: RedisCluster, tmp_path: Path, built: Path
) -> None:
    source, total = built, sum(ROWS.values())
    assert end(start(tmp_path / "k", cluster.url, source, dies_at=total // 2)) == -9
    store = open_node("b")
    shared = member(store).open_load(1)
    done = shared.state()
    assert 0 < len(done.parts) < PARTS
    part = next(part for part in range(PARTS) if part not in done.parts)
    assert not shared.claim_part(part), "it has it still"
    assert end(start(tmp_path / "k", cluster.url, source, waits=False)) == 0
    scenes.eventually(lambda: has_version(store, 1), "the other node serves it", 60)
    check_all(store)


@contextmanager
def small_disks(*where: Path, nbytes: int) -> Iterator[int]:
    """A process in whose mount namespace each directory is a file system of so many bytes."""
    mounts = [f"mount -t tmpfs -o size={nbytes} none {path}" for path in where]
    for path in where:
        path.mkdir()
    command = [
        "unshare",
        "--mount",
        "--propagation",
        "private",
        "sh",
        "-c",
        " && ".join([*mounts, "echo ready && exec cat"]),
    ]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, preexec_fn=end_with_parent) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"ready\n"
        yield holder.pid
        holder.stdin.close()


@needs_mounts
def test_a_cluster_takes_a_version_that_no_disk_of_its_nodes_holds(
    open_node: OpenNode, cluster: RedisCluster, tmp_path: Path, built: Path
) -> None:
    disks = [tmp_path / name for name in ("n1", "n2")]
    nbytes = files.tree_bytes(built) // 3
    with small_disks(*disks, nbytes=nbytes) as within:
        assert end(start(disks[0], cluster.url, built, dies_at=sum(ROWS.values()) // 4, within=within)) == -9
        both = [start(disk, cluster.url, built, pauses=True, within=within) for disk in disks]
        for process in both:
            assert process.stdout.readline() == b"writes\n"
        for process in both:
            process.stdin.write(b"\n")
            process.stdin.flush()
        assert [end(process) for process in both] == [0, 0]
    check_all(open_node("c"))
