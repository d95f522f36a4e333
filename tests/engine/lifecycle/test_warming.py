"""A start serves first and warms beside: hottest first, in its bounds, ended by `close`, and no row older than a delta."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import tierstore
from tests.engine import scenes
from tests.engine.scenes import eventually
from tests.engine.test_store import folded
from tierstore import kernels
from tierstore.config import Settings
from tierstore.engine.data import reading_order
from tierstore.engine.data.table_view import TableView
from tierstore.engine.lifecycle import warm as warming
from tierstore.engine.placements.local.start import Starter
from tierstore.engine.versions import hot_keys
from tierstore.engine.versions.version import Version
from tierstore.errors import StorageError
from tierstore.formats import files
from tierstore.formats.files import FileSystem
from tierstore.tiers.disk import sealed
from tierstore.types import Tier

pytestmark = pytest.mark.usefixtures("quick_loads")

BATCH = 16


@pytest.fixture
def root(open_store: Callable[..., tierstore.Store], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data directory whose version 1 was served and ended cleanly; items 400 to 499 were hot. Returns the model's."""
    monkeypatch.setattr(warming, "SHORT_BATCH", BATCH)
    monkeypatch.setattr(reading_order, "PIECE", 2 * BATCH)
    store = open_store()
    store.load_snapshot(scenes.write_snapshot(tmp_path))
    ctr = store.model("ctr")
    for _ in range(4):
        ctr.lookup("item_id", np.arange(400, 500))
    ctr.lookup("item_id", np.arange(600, 700))
    ctr.lookup("user_id", np.arange(100))
    store.close()
    return tmp_path / "data/models/ctr"


def resident(store: tierstore.Store, table: str = "item") -> set[int]:
    with store.model("ctr").view() as view:
        host = view.open_version.tables[table].host
        return set(host.hot_keys(100_000).tolist())


def sources(store: tierstore.Store, keys: np.ndarray) -> list[int]:
    """By which tier each item is answered."""
    with store.model("ctr").view() as view:
        out, state = np.empty((len(keys), 8), np.float32), np.zeros(len(keys), np.uint8)
        view.table("item").lookup(keys, out, state)
        return state.tolist()


# --- serving first


def test_a_start_serves_before_it_is_warm_and_says_how_far_it_is(open_store, root):
    store = open_store(warm_rate=1)
    row = store.model("ctr").lookup("item_id", [5])
    assert row[0, 0] == scenes.vector("item", 0, 5)[0]
    how_far = store.status()["warming"]
    assert 0 <= how_far["done"] <= BATCH
    assert how_far["total"] >= 300
    assert store.warm_share() == how_far["done"] / how_far["total"]
    entry = store.status()["models"]["ctr"]["versions"][0]
    assert entry["warming"]["total"] == how_far["total"]


def test_once_it_is_warm_what_was_hot_is_in_memory(open_store, root):
    store = scenes.warmed(open_store())
    assert store.warm_share() == 1
    assert store.status()["models"]["ctr"]["versions"][0]["warming"] is None
    assert {*range(400, 500), *range(600, 700)} <= resident(store)
    assert set(range(100)) <= resident(store, "user")


def test_the_hottest_come_first_and_the_rate_is_a_bound(open_store, root):
    store = open_store(warm_rate=BATCH)  # a batch a second
    eventually(lambda: bool(resident(store)), "the first batch")
    assert resident(store) <= set(range(400, 500))
    assert len(resident(store)) <= 2 * BATCH


def test_keys_are_read_as_their_rows_lie_stretch_by_stretch(open_store, root, monkeypatch):
    """A stretch is as long as all hotter ones together, or a piece."""
    saved, read, warm = np.load(root / "1/hot/item.npy"), [], TableView.warm

    def noted(view, keys, tier):
        if view.table.spec.name == "item":
            read.append(keys.copy())
        warm(view, keys, tier)

    monkeypatch.setattr(TableView, "warm", noted)
    scenes.warmed(open_store())
    keys, begin = np.concatenate(read), 0
    while begin < len(saved):
        stretch = slice(begin, min(len(saved), begin + max(2 * BATCH, begin)))
        np.testing.assert_array_equal(keys[stretch], np.sort(saved[stretch]))
        begin = stretch.stop
    assert begin > 4 * BATCH


def test_look_ups_do_without_kernels_that_other_processes_compile(open_store, root, monkeypatch):
    monkeypatch.setattr(kernels, "awaited", True)
    store, keys = open_store(), np.arange(400, 440)
    ctr = store.model("ctr")
    rows, bags = ctr.lookup("item_id", keys), ctr.lookup_bags("clicked", keys, [0, 7, 7, 30])
    np.testing.assert_array_equal(rows[:, 0], [scenes.vector("item", 0, key)[0] for key in keys])
    assert not resident(store)
    assert store.status()["warming"]["done"] == 0
    monkeypatch.setattr(kernels, "awaited", False)
    scenes.warmed(store)
    assert set(keys.tolist()) <= resident(store)
    np.testing.assert_array_equal(ctr.lookup("item_id", keys), rows)
    np.testing.assert_array_equal(ctr.lookup_bags("clicked", keys, [0, 7, 7, 30]), bags)


def test_tables_are_warmed_side_by_side(open_store, root):
    store = open_store()
    with store.model("ctr").view() as view:
        warm_up = warming.WarmUp(view.open_version, store.model("ctr").publisher)
        while not warm_up.over:
            assert warm_up.step(view, BATCH)
            shares = [warmup.done / warmup.total for warmup in warm_up._warmups]
            assert max(shares) - min(shares) <= BATCH / min(warmup.total for warmup in warm_up._warmups)
        assert warm_up.step(view, BATCH) == 0


def test_closing_ends_a_warm_up_and_keeps_what_was_saved_before(open_store, root):
    saved, others = (root / "1/hot/item.npy").read_bytes(), set(threading.enumerate())
    store = open_store(warm_rate=1)
    store.close()
    assert "tierstore-warmer" not in [thread.name for thread in set(threading.enumerate()) - others]
    assert (root / "1/hot/item.npy").read_bytes() == saved


def test_closing_does_not_wait_until_the_keys_of_a_long_stretch_are_in_order(open_store, root, monkeypatch, caplog):
    choosing, go_on, calls = threading.Event(), threading.Event(), []

    def held_up():
        calls.append(1)
        choosing.set()
        assert go_on.wait(30)

    monkeypatch.setattr(warming, "yield_if_background", held_up)
    monkeypatch.setattr(reading_order, "_STEP", 1)
    store = open_store()
    assert choosing.wait(30)
    closing = threading.Thread(target=store.close)
    closing.start()
    eventually(store.shared.warmer._stopping.is_set, "the warm-up is to end")
    go_on.set()
    closing.join(30)
    assert not closing.is_alive()
    assert len(calls) == 1
    assert not caplog.records


def test_a_switch_warms_all_that_was_hot(open_store, root, tmp_path):
    store = scenes.warmed(open_store())
    before = resident(store)
    store.load_snapshot(scenes.write_snapshot(tmp_path, 2))
    assert store.model("ctr").active_version == 2
    assert before <= resident(store)


def test_a_version_that_is_left_is_warmed_no_more(open_store, root, tmp_path):
    store = open_store(warm_rate=BATCH)
    store.load_snapshot(scenes.write_snapshot(tmp_path, 2))
    eventually(lambda: store.warming() is None, "nothing is left to warm")
    assert store.model("ctr").state.retiring.wait_closed(1, 30)


def test_what_the_disk_does_not_give_ends_no_warm_up(open_store, root, monkeypatch):
    read, failed = sealed.SealedTier.get, []

    def failing(self, table_id, keys, rows, state):
        if threading.current_thread().name == "tierstore-warmer" and not failed:
            failed.append(1)
            raise StorageError("injected failure")
        read(self, table_id, keys, rows, state)

    monkeypatch.setattr(sealed.SealedTier, "get", failing)
    store = scenes.warmed(open_store())
    assert failed
    assert len(resident(store)) > 100


def test_an_error_that_nobody_expects_ends_neither_a_warm_up_nor_the_saving_of_hot_keys(open_store, root, monkeypatch):
    monkeypatch.setattr(Settings, "hot_keys_every_s", 0.01)
    raised = []

    def once(kind, name):
        work = getattr(kind, name)

        def failing(self, *args):
            if threading.current_thread().name == "tierstore-warmer" and name not in raised:
                raised.append(name)
                raise RuntimeError("injected failure")
            return work(self, *args)

        monkeypatch.setattr(kind, name, failing)

    once(warming.WarmUp, "step")
    once(Version, "save_hot_keys")
    store = scenes.warmed(open_store())
    assert store.warm_share() == 1.0
    assert len(resident(store)) > 100
    for _ in range(4):
        store.model("ctr").lookup("item_id", np.arange(800, 850))
    file = root / "1/hot/item.npy"
    eventually(lambda: set(range(800, 850)) <= set(np.load(file).tolist()), "they are saved all the same")
    assert sorted(raised) == ["save_hot_keys", "step"]


def test_a_disk_that_gives_nothing_ends_it(open_store, root, monkeypatch):
    def failing(self, table_id, keys, rows, state):
        raise StorageError("injected failure")

    monkeypatch.setattr(sealed.SealedTier, "get", failing)
    store = scenes.warmed(open_store())
    assert not resident(store)


@pytest.mark.parametrize("content", [b"", b"no numpy file", b"\x93NUMPY\x01\x00"])
def test_a_bad_file_of_hot_keys_is_passed_over(open_store, root, content):
    (root / "1/hot/item.npy").write_bytes(content)
    store = scenes.warmed(open_store())
    assert set(range(100)) <= resident(store, "user")
    assert set(range(32)) <= resident(store), "the snapshot's own"


# --- beside deltas


def test_a_key_in_an_overlay_is_left_out(open_store, root):
    store = open_store(warm_rate=1, fold_grace_s=60)
    store.apply_delta(scenes.stamped(1, {"item": range(400, 450)}))
    with store.model("ctr").view() as view:
        view.table("item").warm(np.arange(400, 500), Tier.HOST)
    assert resident(store) & set(range(400, 450)) <= set(range(400, 400 + BATCH)), "but for the first batch"
    assert set(range(450, 500)) <= resident(store)


def test_what_was_read_under_an_older_view_does_not_come_after_a_fold(open_store, root):
    """The fold waits for the view; were it not to, the floor would still keep the row out."""
    store = open_store(warm_rate=1)
    with store.model("ctr").view() as view:
        table = view.table("item")
    store.apply_delta(scenes.stamped(1, {"item": [999]}))
    folded(store)
    table.warm(np.array([999]), Tier.HOST)
    assert 999 not in resident(store)


def test_deltas_beside_a_warm_up_are_never_hidden(open_store, root):
    store = open_store(warm_rate=20_000, fold_grace_s=0.0)
    keys = np.arange(400, 500)
    for seq in range(1, 40):
        store.apply_delta(scenes.stamped(seq, {"item": keys}))
        rows = store.model("ctr").lookup("item_id", keys)
        np.testing.assert_array_equal(rows, scenes.vectors("item", seq, keys))
    scenes.warmed(store)
    folded(store)
    np.testing.assert_array_equal(store.model("ctr").lookup("item_id", keys), scenes.vectors("item", 39, keys))
    assert set(sources(store, keys)) <= {Tier.HOST, Tier.DISK}


# --- saving


def test_hot_keys_are_saved_from_time_to_time(open_store, root, monkeypatch):
    scenes.warmed(open_store()).close()
    monkeypatch.setattr(Settings, "hot_keys_every_s", 0.01)
    store = scenes.warmed(open_store())
    for _ in range(4):
        store.model("ctr").lookup("item_id", np.arange(800, 850))
    file = root / "1/hot/item.npy"
    eventually(lambda: set(range(800, 850)) <= set(np.load(file).tolist()), "they are in the file")


def test_what_is_not_warm_yet_is_not_saved(open_store, root):
    saved = (root / "1/hot/item.npy").read_bytes()
    store = open_store(warm_rate=1)
    store.shared.warmer.save_hot_keys()
    assert (root / "1/hot/item.npy").read_bytes() == saved


def test_they_are_saved_part_by_part_hottest_first(open_store, root, monkeypatch):
    """Of a table that is listed in many parts, the file is as if it were one."""
    monkeypatch.setattr("tierstore.tiers.host.table._PART", 1)
    store = scenes.warmed(open_store(host_budget="16MiB"))
    ctr = store.model("ctr")
    ctr.lookup("item_id", np.arange(1000))
    for _ in range(4):
        ctr.lookup("item_id", np.arange(0, 1000, 10))
    with ctr.view() as view:
        host = view.open_version.tables["item"].host
        assert len(list(host.hot_keys_by_part())) > 4
        view.open_version.save_hot_keys()
        kept = np.load(root / "1/hot/item.npy")
        assert kept.dtype == np.int64
        assert sorted(kept) == sorted(host.hot_keys(10_000))
    assert set(kept[:50]) <= set(range(0, 1000, 10)) | set(range(400, 500))


def test_saving_gives_up_when_it_is_told_to(open_store, root):
    store = scenes.warmed(open_store())
    saved = (root / "1/hot/item.npy").read_bytes()
    with store.model("ctr").view() as view, pytest.raises(tierstore.TierstoreError, match="being closed"):
        view.open_version.save_hot_keys(lambda: True)
    assert (root / "1/hot/item.npy").read_bytes() == saved
    assert sorted(path.name for path in (root / "1/hot").iterdir()) == ["item.npy", "user.npy"]


def test_keys_in_the_file_are_mapped_where_they_are_many(tmp_path):
    parts = [[np.array([1]), np.arange(200_000)], [np.array([2])]]
    hot_keys.save_keys(tmp_path / "hot/keys.npy", parts)
    (keys,) = hot_keys.load_keys(tmp_path / "hot/keys.npy")
    assert isinstance(keys, np.memmap)
    assert keys[:3].tolist() == [1, 2, 0]
    assert [path.name for path in (tmp_path / "hot").iterdir()] == ["keys.npy"]


# --- the rest of a start


def test_models_start_side_by_side(open_store, root, tmp_path, monkeypatch):
    store = open_store()
    store.load_snapshot(scenes.write_snapshot(tmp_path, model="other"))
    store.close()
    both = threading.Barrier(2, timeout=30)
    start = Starter.start

    def together(starter):
        both.wait()
        start(starter)

    monkeypatch.setattr(Starter, "start", together)
    assert open_store().models() == ["ctr", "other"]


def test_leftovers_are_removed_once_it_serves(open_store, root):
    (root / "7/build").mkdir(parents=True)
    go_on = threading.Event()

    class Slow(FileSystem):
        def rmtree(self, path):
            assert go_on.wait(30)
            super().rmtree(path)

    with files.use(Slow()):
        store = open_store()
        assert store.model("ctr").lookup("item_id", [5])[0, 0] == scenes.vector("item", 0, 5)[0]
        assert any(path.name.startswith(".trash-7") for path in root.iterdir())
        go_on.set()
        scenes.swept(store)
    assert not any(path.name.startswith(".trash-") for path in root.iterdir())


def test_of_a_kept_version_only_the_records_are_read(open_store, root, tmp_path, monkeypatch):
    store = open_store()
    store.load_snapshot(scenes.write_snapshot(tmp_path, 2))
    store.apply_delta(scenes.stamped(1, {"item": [1]}))
    folded(store)
    store.close()
    opened = []
    tables = sealed._open_tables
    monkeypatch.setattr(sealed, "_open_tables", lambda path, record: opened.append(path) or tables(path, record))
    store = open_store()
    assert opened == [root / "2/db"]
    assert {info.number: info.watermark for info in store.model("ctr").catalogue.infos()} == {1: 0, 2: 1}
    store.rollback("ctr")
    assert store.model("ctr").lookup("item_id", [1])[0, 0] == scenes.vector("item", 1, 1)[0]


def test_at_a_start_each_model_gets_its_share_whoever_comes_first(open_store, root, tmp_path):
    store = open_store()
    store.load_snapshot(scenes.write_snapshot(tmp_path, model="other", rows={"user": 50, "item": 100}))
    store.close()
    store = open_store(host_budget="1MiB")
    budgets = {}
    for name in ("ctr", "other"):
        with store.model(name).view() as view:
            budgets[name] = view.open_version.host_reserved_bytes
    assert budgets["ctr"] / budgets["other"] == pytest.approx(
        sum(store.model("ctr").catalogue.infos()[0].host_needs())
        / sum(store.model("other").catalogue.infos()[0].host_needs()),
        rel=0.01,
    )
