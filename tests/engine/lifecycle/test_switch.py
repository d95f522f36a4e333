"""Switcher versions under load: whole answers, no failed request, nothing lost, and everything given back."""

from __future__ import annotations

import faulthandler
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import tierstore
from tests.counts import few_or_many
from tests.engine import scenes
from tests.engine.test_store import folded
from tierstore.engine import store as store_module
from tierstore.engine.deltas.replay import MOST_STALLS
from tierstore.engine.lifecycle.opening import SWITCH_LAG
from tierstore.errors import Closed, Conflict, NotFound, SnapshotError, TierstoreError
from tierstore.ingest import load_plan
from tierstore.threads import NEVER_S
from tierstore.types import Progress

pytestmark = pytest.mark.usefixtures("quick_loads")

BASE = np.arange(0, 500, 7)  # rows that only a snapshot changes: they carry the version
STREAMED = np.arange(100_000, 100_016)  # rows that every delta rewrites: they carry the seq
DEADLINE_S = 60.0


def snapshot(root: Path, version: int, delta_seq: int = 0, *, rows: int = 500, dim: int = 8) -> Path:
    """What a trainer would export after `delta_seq`."""
    where = root / f"at-{version}"
    with tierstore.SnapshotWriter(where, model="ctr", version=version, delta_seq=delta_seq) as writer:
        for table in ("user", "item"):
            keys = np.concatenate([np.arange(rows), STREAMED])
            stamps = np.concatenate([np.full(rows, version), np.full(len(STREAMED), delta_seq)])
            writer.table(table, dim=dim).write(keys, np.repeat(stamps.astype(np.float32)[:, None], dim, axis=1))
            writer.feature(f"{table}_id", table=table)
    return where


def streamed(seq: int, dim: int = 8) -> bytes:
    rows = np.full((len(STREAMED), dim), seq, np.float32)
    return scenes.delta(seq, {"user": (STREAMED, rows), "item": (STREAMED, rows)})


def stamps(store: tierstore.Store) -> tuple[set, set]:
    """The versions and the seqs that one request sees over both tables."""
    both = store.model("ctr").lookup_many({"user_id": [*BASE, *STREAMED], "item_id": [*BASE, *STREAMED]})
    rows = np.concatenate(list(both.values()), axis=1)
    return {*rows[: len(BASE)].ravel().tolist()}, {*rows[len(BASE) :].ravel().tolist()}


class Crew:
    """Threads that run until they are told to stop; the first thing that goes wrong in one is kept."""

    def __init__(self) -> None:
        self.stop, self.wrong = threading.Event(), []
        self._threads: list[threading.Thread] = []

    def run(self, work: Callable[[], None], times: int | None = None) -> None:
        def loop() -> None:
            done = 0
            try:
                while not self.stop.is_set() and (times is None or done < times):
                    work()
                    done += 1
            except BaseException as error:  # noqa: BLE001
                self.wrong.append(repr(error))
                self.stop.set()

        self._threads.append(threading.Thread(target=loop, daemon=True))
        self._threads[-1].start()

    def join(self) -> None:
        until = time.monotonic() + DEADLINE_S
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            faulthandler.dump_traceback(all_threads=True)
            pytest.fail("threads are stuck")
        assert self.wrong == []

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.stop.set()
        if kind is None:
            self.join()


class Stream:
    """A producer: each delta rewrites the streamed rows of both tables. `acknowledged` is the newest seq that is in.

    It pauses after each, or on a slow machine a load would never catch up.
    """

    def __init__(self, store: tierstore.Store) -> None:
        self._store, self.acknowledged = store, 0

    def send(self) -> None:
        assert self._store.apply_delta(streamed(self.acknowledged + 1)).applied
        self.acknowledged += 1
        time.sleep(0.005)


def until(store: tierstore.Store, condition: Callable[[], bool]) -> None:
    """Wait for something that the model's threads tell about."""
    changed = store.model("ctr").publisher.changed
    with changed:
        assert changed.wait_for(condition, timeout=20)


def open_versions(store: tierstore.Store) -> list[int]:
    return sorted(user.number for user in store.shared.host_budget.users)


@pytest.mark.counted
def test_readers_see_one_version_and_every_acknowledged_delta_through_switches(open_store, tmp_path):
    store = open_store(keep_versions=9)
    store.load_snapshot(snapshot(tmp_path, 1))
    ctr, stream, looked_up, newest = store.model("ctr"), Stream(store), [0] * 4, few_or_many(2, 4)

    def read(number: int) -> None:
        floor = stream.acknowledged
        if looked_up[number] % 2:
            versions, seqs = stamps(store)
        else:
            with ctr.view() as view:
                rows = [view.lookup(name, [*BASE, *STREAMED]) for name in ("user_id", "item_id", "user_id")]
                versions = {*np.concatenate([of[: len(BASE)] for of in rows]).ravel().tolist()}
                seqs = {*np.concatenate([of[len(BASE) :] for of in rows]).ravel().tolist()}
                assert versions == {view.version}
                assert seqs == {view.seq}
        assert len(versions) == 1, versions
        assert len(seqs) == 1, seqs
        assert min(seqs) >= floor, "stale after an acknowledgement"
        looked_up[number] += 1

    with Crew() as crew:
        for number in range(4):
            crew.run(lambda number=number: read(number))
        crew.run(stream.send)
        for version in range(2, newest + 1):
            behind = max(0, stream.acknowledged - 5)
            store.load_snapshot(snapshot(tmp_path, version, behind))
            assert store.rollback("ctr") == version - 1
            store.activate("ctr", version)
            store.drop("ctr", version - 1)
        assert not crew.stop.is_set(), crew.wrong
    assert all(looked_up)
    assert stream.acknowledged > 10
    assert stamps(store) == ({float(newest)}, {float(stream.acknowledged)})
    assert ctr.versions == [newest]
    assert store.verify().ok


def test_what_is_replaced_gives_its_memory_back_and_what_is_dropped_its_disk(open_store, tmp_path, monkeypatch):
    monkeypatch.setattr(
        load_plan, "SMALL_BYTES", 1 << 30
    )  # what loads hold is counted too, and no process starts for each
    store = open_store(host_budget="128MiB", keep_versions=9)
    budget = store.shared.host_budget
    sizes = []
    for version in range(1, 7):
        store.load_snapshot(snapshot(tmp_path, version, rows=20_000, dim=128))
        until(store, lambda: not store.model("ctr").state.retiring)
        store.model("ctr").lookup("item_id", np.arange(20_000))
        store.model("ctr").lookup("user_id", np.arange(20_000))
        assert open_versions(store) == [version]
        scenes.eventually(lambda: budget.used == min(budget.total, budget.users[0].host_need_bytes), "it has its share")
        sizes.append(resident_bytes())
    assert store.status()["models"]["ctr"]["tables"]["item"]["tier_bytes"]["host"] > 8 << 20
    assert sizes[-1] - sizes[1] < 40 << 20  # each version holds more than 20 MB
    for version in range(1, 6):
        where = tmp_path / f"data/models/ctr/{version}"
        assert where.is_dir()
        store.drop("ctr", version)
        assert not where.exists()
    assert sum(path.stat().st_size for path in (tmp_path / "data").rglob("*") if path.is_file()) < 40 << 20
    store.deactivate("ctr")
    until(store, lambda: not store.model("ctr").state.retiring)
    assert budget.used == 0


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.parametrize("behind", [0, 7])
def test_a_load_while_deltas_stream_in_ends_with_all_of_them(open_store, tmp_path, behind):
    store = open_store()
    store.load_snapshot(snapshot(tmp_path, 1))
    stream, phases = Stream(store), set()
    for _ in range(10):
        stream.send()

    def send(step: Progress) -> None:
        phases.add(step.phase)
        for _ in range(12 if step.phase == "switch" else 3):  # more than a switch leaves for its last catch-up
            stream.send()

    store.load_snapshot(snapshot(tmp_path, 2, 10 - behind), progress=send)
    assert {"ingest", "catch up", "switch"} <= phases
    assert stamps(store) == ({2.0}, {float(stream.acknowledged)})
    assert store.status()["models"]["ctr"]["watermark"] == stream.acknowledged
    stream.send()
    store.rollback("ctr")
    assert stamps(store) == ({1.0}, {float(stream.acknowledged)})


def test_a_load_ends_though_deltas_come_as_fast_as_it_catches_up(open_store, tmp_path):
    store = open_store()
    store.load_snapshot(snapshot(tmp_path, 1))
    stream, rounds = Stream(store), 0
    for _ in range(SWITCH_LAG + 1):
        stream.send()

    def send(step: Progress) -> None:
        nonlocal rounds
        if step.phase == "catch up" and rounds < 40:  # else a load that does not end would keep the test from it
            rounds += 1
            for _ in range(SWITCH_LAG + 1):
                stream.send()

    store.load_snapshot(snapshot(tmp_path, 2), progress=send)
    assert MOST_STALLS <= rounds < 40
    assert stamps(store) == ({2.0}, {float(stream.acknowledged)})


def test_a_view_that_is_held_keeps_its_version_until_it_is_left(open_store, tmp_path):
    store = open_store(keep_versions=9)
    store.load_snapshot(snapshot(tmp_path, 1))
    ctr, stream = store.model("ctr"), Stream(store)
    stream.send()
    with ctr.view() as old:
        for version in (2, 3):
            store.load_snapshot(snapshot(tmp_path, version))
            stream.send()
        until(store, lambda: open_versions(store) == [1, 3])
        folded(store)  # of the version that serves, deltas are folded
        for _ in range(2):
            np.testing.assert_array_equal(old.lookup("item_id", BASE), np.full((len(BASE), 8), 1))
            np.testing.assert_array_equal(old.lookup("user_id", STREAMED), np.full((len(STREAMED), 8), 1))
        assert stamps(store) == ({3.0}, {3.0})
    until(store, lambda: open_versions(store) == [3])
    store.activate("ctr", 1)
    assert stamps(store) == ({1.0}, {3.0})


def test_a_fold_waits_for_readers_beneath_it_and_takes_no_later_delta_in(open_store, tmp_path):
    store = open_store()
    store.load_snapshot(snapshot(tmp_path, 1))
    ctr, stream = store.model("ctr"), Stream(store)
    ctr.housekeeping.stop()  # its part is played here
    stream.send()
    with ctr.view() as slow:
        stream.send()
        scenes.eventually(lambda: ctr.folder.fold_due() == NEVER_S, "it waits for the reader alone")
        for _ in range(3):
            stream.send()
        assert ctr.folder.fold_due() == NEVER_S
        assert {*slow.lookup("item_id", STREAMED).ravel().tolist()} == {1.0}
    assert ctr.folder.fold_due() == 0
    with ctr.view() as view:
        assert (view.open_version.watermark, view.seq, len(view.overlays)) == (2, 5, 1)
    assert stamps(store) == ({1.0}, {5.0})


def test_a_slow_reader_of_one_version_holds_nothing_else_back(open_store, tmp_path):
    """An overlay has been picked to be folded and waits for a reader beneath it, when the version is replaced."""
    store = open_store(fold_grace_s=0.1, keep_versions=9)
    store.load_snapshot(snapshot(tmp_path, 1))
    ctr, stream = store.model("ctr"), Stream(store)
    stream.send()
    with ctr.view() as slow:
        stream.send()  # merges into the overlay that is about to be folded, which `slow` does not have
        scenes.eventually(lambda: ctr.state.live.folding is not None, "its overlay is picked")
        store.load_snapshot(snapshot(tmp_path, 2))
        store.load_snapshot(snapshot(tmp_path, 3))
        until(store, lambda: open_versions(store) == [1, 3])
        stream.send()
        folded(store)
        store.drop("ctr", 2)
        assert {*slow.lookup("item_id", STREAMED).ravel().tolist()} == {1.0}
    assert stamps(store) == ({3.0}, {3.0})


@pytest.mark.thorough
def test_loads_switches_and_drops_at_once_end_in_order_or_in_a_clear_conflict(open_store, tmp_path):
    store = open_store(keep_versions=99)
    store.load_snapshot(snapshot(tmp_path, 1))
    ctr, stream = store.model("ctr"), Stream(store)
    sources = {version: snapshot(tmp_path, version) for version in range(2, 10)}
    refused: list[TierstoreError] = []

    def attempt(verb: Callable[[], object]) -> None:
        try:
            verb()
        except (Conflict, NotFound) as error:
            refused.append(error)

    def random_verbs(seed: int) -> Callable[[], None]:
        rng = np.random.default_rng(seed)

        def act() -> None:
            version = int(rng.integers(1, 10))
            verb = rng.choice(["load", "load", "keep", "activate", "activate", "rollback", "drop"])
            if verb in ("load", "keep"):
                attempt(lambda: store.load_snapshot(sources.get(version, sources[2]), activate=verb == "load"))
            elif verb == "rollback":
                attempt(lambda: store.rollback("ctr"))
            else:
                attempt(lambda: getattr(store, verb)("ctr", version))

        return act

    def read() -> None:
        floor = stream.acknowledged
        versions, seqs = stamps(store)
        assert len(versions) == len(seqs) == 1
        assert min(seqs) >= floor

    def look_around() -> None:
        report = store.verify()
        assert report.ok, report.problems
        states = [entry["state"] for entry in store.status()["models"]["ctr"]["versions"]]
        assert states.count("active") <= 1

    crew = Crew()
    for seed in range(3):
        crew.run(random_verbs(seed), times=8)
    for work in (read, look_around, stream.send):
        crew.run(work, times=40)
    crew.join()
    assert any("active" in str(error) or "there already" in str(error) for error in refused)
    folded(store)
    until(store, lambda: not ctr.state.retiring)
    assert stamps(store) == ({float(ctr.active_version)}, {float(stream.acknowledged)})
    assert open_versions(store) == [ctr.active_version]
    on_disk = {path.name for path in (tmp_path / "data/models/ctr").iterdir()} - {"state.json", "log", "log.end"}
    assert on_disk == {str(version) for version in ctr.versions}


def test_two_first_loads_of_a_model_of_which_one_fails(store, tmp_path, monkeypatch):
    """The one that fails must not take the model away beneath the other."""
    good, bad = scenes.write_snapshot(tmp_path, 1), scenes.write_snapshot(tmp_path, 2)
    next(bad.rglob("*item*/*")).unlink()
    inside, failed, load = threading.Event(), threading.Event(), store_module.load

    def slow_load(model, snap, *args, **options):
        if snap.manifest.version == 1:
            inside.set()
            assert failed.wait(20)
        return load(model, snap, *args, **options)

    monkeypatch.setattr(store_module, "load", slow_load)
    crew = Crew()
    crew.run(lambda: store.load_snapshot(good), times=1)
    assert inside.wait(20)
    with pytest.raises(SnapshotError):
        store.load_snapshot(bad)
    failed.set()
    crew.join()
    assert store.model("ctr").active_version == 1
    assert store.apply_delta(scenes.stamped(1, {"item": [1]})).applied


def test_a_load_that_the_store_is_closed_under_changes_nothing(open_store, tmp_path):
    store = open_store()
    store.load_snapshot(scenes.write_snapshot(tmp_path, 1))

    def close(step: Progress) -> None:
        if step.phase == "ingest":
            store.close()

    with pytest.raises(Closed):
        store.load_snapshot(scenes.write_snapshot(tmp_path, 2), progress=close)
    again = open_store()
    assert again.model("ctr").versions == [1]
    assert again.model("ctr").active_version == 1


def test_a_load_that_fails_takes_nothing_away_from_who_switches_to_its_version(open_store, tmp_path, monkeypatch):
    """A switch that waits for the one of the load may find the version complete, and serve it."""
    store = open_store()
    store.load_snapshot(scenes.write_snapshot(tmp_path, 1))
    ctr = store.model("ctr")
    forget = ctr.catalogue.forget
    came = []

    def activate() -> None:
        try:
            store.activate("ctr", 2)
        except NotFound as error:
            came.append(error)

    other = threading.Thread(target=activate)

    def late(number: int) -> None:
        other.join(0.5)  # as long as it takes, if it is let
        forget(number)

    def fail(step: Progress) -> None:
        if step.phase == "switch":
            other.start()
            raise ValueError("stop here")

    monkeypatch.setattr(ctr.catalogue, "forget", late)
    with pytest.raises(ValueError, match="stop here"):
        store.load_snapshot(scenes.write_snapshot(tmp_path, 2), progress=fail)
    other.join(20)
    assert ctr.active_version in ctr.versions
    assert (tmp_path / f"data/models/ctr/{ctr.active_version}/version.json").exists()
    assert ctr.active_version == (1 if came else 2)


@pytest.mark.parametrize("first", [True, False])
def test_a_load_that_its_store_was_closed_under_leaves_the_directory_to_who_has_it_now(open_store, tmp_path, first):
    store, version = open_store(), 1 if first else 2
    if not first:
        store.load_snapshot(scenes.write_snapshot(tmp_path, 1))
    source, opened = scenes.write_snapshot(tmp_path, version), []

    def yield_to_requests(step: Progress) -> None:
        if step.phase == "ingest" and not opened:
            store.close()
            opened.append(open_store())
            opened[0].load_snapshot(source)
            raise Closed("what the load finds out with its next step")

    with pytest.raises(Closed):
        store.load_snapshot(source, progress=yield_to_requests)
    assert opened[0].model("ctr").active_version == version
    assert (tmp_path / f"data/models/ctr/{version}/version.json").exists()
    assert (tmp_path / "data/models/ctr/state.json").exists()
