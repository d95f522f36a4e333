"""A node in front of others: real nodes over HTTP, each with all rows or with a share of the partitions."""

from __future__ import annotations

import contextlib
import shutil
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import httpx
import numpy as np
import pytest

import tierstore
from tests.engine import scenes
from tests.service.conftest import settings_for
from tests.service.upstream.scenes import (
    COUNT,
    KEYS,
    NO_CACHE,
    Scene,
    Upstream,
    await_watermark,
    check,
    of_share,
    watermark,
    write_snapshot,
)
from tierstore.access.roles import Role
from tierstore.access.tokens import TokenFile
from tierstore.engine.operations import fronts
from tierstore.engine.store import Store
from tierstore.errors import StorageError
from tierstore.service.server import ServerThread
from tierstore.service.sources.start import check_sources


def test_four_quarters_are_one_model(scene: Scene) -> None:
    scene.quarters()
    front = scene.front()
    for _ in range(2):  # from the nodes, then from memory
        check(front, "user", range(500), 0)
        check(front, "item", KEYS, 0)
    rows, found = front.model("ctr").lookup("item_id", [5, 99_999, -1], return_found=True)
    assert found.tolist() == [True, False, False]
    assert not rows[1:].any()
    lookups = front.status()["models"]["ctr"]["tables"]["item"]["lookup_keys"]
    assert lookups["remote"] > 0
    assert lookups["host"] > 0
    for seq in range(1, 4):
        scene.apply(scenes.stamped(seq, {"item": range(10 * seq), "user": [3]}, deletes={"item": [500 + seq]}))
    await_watermark(front, 3)
    check(front, "item", range(30), 3)
    check(front, "item", range(30, 500), 0)
    check(front, "user", [3], 3)
    _, found = front.model("ctr").lookup("item_id", [501, 502, 503, 504], return_found=True)
    assert found.tolist() == [False, False, False, True]
    scenes.eventually(lambda: front.status()["models"]["ctr"]["overlays"] == 0, "deltas are folded")
    check(front, "item", range(30), 3)
    again = scene.front()
    check(again, "item", range(30), 3)
    check(again, "item", range(504, 1000), 0)
    assert watermark(again) == 3


class Load:
    """Look-ups of random keys on several threads, each answer checked; `stop` returns how many there were."""

    def __init__(self, store: Store, stamps: set[int]) -> None:
        self.store, self.stamps = store, stamps
        self.count, self.errors, self.seen = 0, list[BaseException](), list[int]()
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(seed,)) for seed in range(2)]
        for thread in self._threads:
            thread.start()

    def _run(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        model = self.store.model("ctr")
        while not self._stopping.is_set():
            keys = {f"{table}_id": rng.integers(1, scenes.ROWS[table], 64) for table in ("item", "user")}
            try:
                with model.view() as view:
                    answers = {feature: view.lookup(feature, of, return_found=True) for feature, of in keys.items()}
                stamps = set()
                for feature, (rows, found) in answers.items():
                    assert found.all()
                    stamp = (rows[:, 0] - keys[feature] % 64) / 64
                    assert (rows == rows[:, :1]).all()
                    stamps |= set(stamp.astype(int).tolist())
                assert len(stamps) == 1, f"a mixed answer: {stamps}"
                assert stamps <= self.stamps
                self.seen += [stamp for stamp in stamps if self.seen[-1:] != [stamp]]
                self.count += 1
            except BaseException as error:  # noqa: BLE001 - raised where the load is stopped
                self.errors.append(error)
                return

    def stop(self) -> int:
        self._stopping.set()
        for thread in self._threads:
            thread.join(60)
        if self.errors:
            raise self.errors[0]
        return self.count


@pytest.mark.thorough
def test_a_rollout_node_by_node_is_one_step_at_the_front(scene: Scene) -> None:
    nodes = scene.quarters()
    front = scene.front(host_budget=NO_CACHE)
    assert front.model("ctr").active_version == 1
    load = Load(front, {0, 7})
    built = scene.root / "built"  # once; each node takes its folders of it
    tierstore.build_snapshot(write_snapshot(scene.root, 2, 7), built, partitions=COUNT)
    for node in nodes:
        node.store.load_snapshot(built, activate=False)
    for node in nodes:
        assert front.model("ctr").active_version == 1
        before = load.count
        node.store.activate("ctr", 2)
        if node is not nodes[-1]:
            scenes.eventually(lambda before=before: load.count > before + 20 or bool(load.errors), "more look-ups")
    scenes.eventually(lambda: front.model("ctr").active_version == 2 or bool(load.errors), "the front serves version 2")
    before = load.count
    scenes.eventually(lambda: load.count > before + 20 or bool(load.errors), "more look-ups")
    load.stop()
    assert front.status()["models"]["ctr"]["tables"]["item"]["lookup_keys"]["host"] == 0
    check(front, "item", KEYS, 7)
    check(front, "user", range(500), 7)
    for node in nodes:
        scenes.eventually(lambda node=node: not node.store.model("ctr").state.retiring, "version 1 is closed")
    for node in nodes:
        node.store.rollback("ctr")
    scenes.eventually(lambda: front.model("ctr").active_version == 1, "the front goes back")
    check(front, "item", KEYS, 0)


@pytest.mark.thorough
def test_deltas_are_seen_whole_while_rows_are_read(scene: Scene) -> None:
    scene.quarters()
    front = scene.front(host_budget=NO_CACHE)
    load = Load(front, set(range(16)))
    for seq in range(1, 13):
        scene.apply(scenes.stamped(seq, {"item": KEYS, "user": range(500)}))
        before = load.count
        scenes.eventually(lambda before=before: load.count > before + 3 or bool(load.errors), "more look-ups")
    await_watermark(front, 12)
    assert load.stop() > 30
    check(front, "item", KEYS, 12)


def test_the_front_follows_the_slowest_partition(scene: Scene) -> None:
    nodes = scene.quarters()
    front = scene.front()
    delta = scenes.stamped(1, {"item": KEYS})
    for node in nodes[:-1]:
        node.store.apply_delta(delta)
    check(front, "item", KEYS, 0)
    assert watermark(front) == 0
    nodes[-1].store.apply_delta(delta)
    await_watermark(front, 1)
    check(front, "item", KEYS, 1)


def no_held_views(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fronts, "LAG_S", 0.0)
    monkeypatch.setattr(fronts, "KEEP_S", 0.0)


def is_refused(front: Store, keys: np.ndarray) -> bool:
    """Whether rows that are newer than the front are refused; there are none of another seq in any case."""
    try:
        rows = front.model("ctr").lookup("item_id", keys)
    except tierstore.Overloaded:
        return True
    np.testing.assert_array_equal(rows, scenes.vectors("item", 0, keys))
    return False


def test_where_a_node_is_too_far_behind_rows_of_the_others_are_refused(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_held_views(monkeypatch)
    nodes = scene.quarters()
    front = scene.front(host_budget=NO_CACHE)
    for node in nodes[:-1]:
        node.store.apply_delta(scenes.stamped(1, {"item": KEYS}))
    ahead = np.setdiff1d(np.arange(1000), of_share(np.arange(1000), nodes[-1].own))
    scenes.eventually(lambda: is_refused(front, ahead), "the views before the delta are held no more")
    assert watermark(front) == 0
    check(front, "item", of_share(np.arange(1000), nodes[-1].own), 0)
    nodes[-1].store.apply_delta(scenes.stamped(1, {"item": KEYS}))
    await_watermark(front, 1)
    check(front, "item", KEYS, 1)


@pytest.mark.thorough
def test_a_front_whose_own_disk_is_full_answers_no_newer_rows(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    no_held_views(monkeypatch)
    scene.quarters()
    front = scene.front()
    in_memory, others = np.arange(500), np.arange(500, 1000)
    check(front, "item", in_memory, 0)

    def full(_: int) -> None:
        raise tierstore.errors.DiskFull("no room for a delta")

    room = front.model("ctr").state.room
    with monkeypatch.context() as patched:
        patched.setattr(room, "check_delta", full)
        for seq in (1, 2, 3):
            scene.apply(scenes.stamped(seq, {"item": KEYS}))
        asked = iter(others)  # each key once: an answer as of before puts it into memory, where it stays right
        scenes.eventually(
            lambda: is_refused(front, np.array([next(asked)])),
            "the views before the delta are held no more",
            pause_s=0.05,
        )
        check(front, "item", in_memory, 0)
        assert is_refused(front, np.arange(1000))
        upstream = lambda: front.status("ctr")["models"]["ctr"]["upstream"]  # noqa: E731
        scenes.eventually(lambda: "no room" in (upstream()["problem"] or ""), "it says why")
    await_watermark(front, 3)
    check(front, "item", KEYS, 3)


@pytest.mark.thorough
def test_a_node_that_is_gone_fails_its_keys_alone(scene: Scene) -> None:
    nodes = scene.quarters()
    refusing, defaulting = scene.front(), scene.front(remote_on_failure="default")
    cold = np.arange(32, 1000)  # the others are in memory from the start
    hers = of_share(cold, nodes[2].own)
    others = np.setdiff1d(cold, hers)
    nodes[2].stop()
    for store in (refusing, defaulting):
        check(store, "item", others, 0)
    with pytest.raises(tierstore.errors.RemoteUnavailable) as failed:
        refusing.model("ctr").lookup("item_id", np.arange(1000))
    assert sorted(failed.value.keys) == hers.tolist()
    assert f":{nodes[2].port}" in str(failed.value) or "no node that answers" in str(failed.value)
    rows, found = defaulting.model("ctr").lookup("item_id", hers, return_found=True)
    assert not found.any()
    assert not rows.any()
    scenes.eventually(
        lambda: refusing.status()["models"]["ctr"]["upstream"]["partitions"]["missing"] == [[4, 5]], "said"
    )
    nodes[2].start()
    scenes.eventually(lambda: refusing.status()["models"]["ctr"]["upstream"]["partitions"]["missing"] == [], "back")
    for store in (refusing, defaulting):
        scenes.eventually(
            lambda store=store: store.model("ctr").lookup("item_id", hers, return_found=True)[1].all(), ""
        )
        check(store, "item", KEYS, 0)


def test_rows_on_the_fronts_own_ssd_are_answered_without_the_nodes(scene: Scene) -> None:
    node = scene.node()
    node.load(1, 0)
    front = scene.front(host_budget=NO_CACHE, ssd_cache="1MiB")
    cache = front.placement.followed.ssd_cache  # type: ignore[attr-defined]
    check(front, "item", KEYS, 0)
    cache.drain()  # type: ignore[union-attr]
    for seq in range(1, 4):
        scene.apply(scenes.stamped(seq, {"item": range(10 * seq)}))
        await_watermark(front, seq)
        check(front, "item", range(10 * seq), seq)
        check(front, "item", range(10 * seq, 1000), 0)
    scenes.eventually(lambda: front.status("ctr")["models"]["ctr"]["overlays"] == 0, "the deltas are folded")
    check(front, "item", range(30), 3)
    cache.drain()  # type: ignore[union-attr]
    node.stop()
    check(front, "item", range(30), 3)
    check(front, "item", range(30, 1000), 0)
    table = front.status("ctr")["models"]["ctr"]["tables"]["item"]
    assert table["ssd_cache"]["hits"] == table["lookup_keys"]["disk"] > 4000 - 120
    with (
        ServerThread(front, settings_for(scene.root, data=front.settings.data, grpc_port="off")) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        metrics = http.get("/metrics").text
        assert f'tierstore_ssd_cache_hits_total{{model="ctr",table="item"}} {table["ssd_cache"]["hits"]}.0' in metrics
        assert "tierstore_ssd_cache_on 1.0" in metrics
        cache.file.switch_off(OSError("it is worn out"))  # type: ignore[union-attr]
        assert "tierstore_ssd_cache_on 0.0" in http.get("/metrics").text
        problems = {one["kind"]: one["text"] for one in http.get("/admin/models").json()["problems"]}
        assert problems.keys() == {"ssd_cache", "upstream"}, "the node has stopped"
        assert problems["ssd_cache"] == "the cache on SSD is off until the next start: it is worn out"


def test_copies_answer_for_each_other(scene: Scene) -> None:
    for _ in range(2):
        scene.node().load(1, 0)
    front = scene.front(host_budget=NO_CACHE)
    load = Load(front, {0, 5})
    scenes.eventually(lambda: load.count > 20 or bool(load.errors), "look-ups")
    scene.nodes[0].stop()
    before = load.count
    scenes.eventually(lambda: load.count > before + 50 or bool(load.errors), "more look-ups")
    scene.nodes[0].start()
    scenes.eventually(
        lambda: len(front.placement.watches) == 2 and all(w.answers for w in front.placement.watches), "it is back"
    )  # type: ignore[union-attr]
    for node in scene.nodes:
        node.load(2, 5)
    scenes.eventually(lambda: front.model("ctr").active_version == 2 or bool(load.errors), "the front serves version 2")
    load.stop()
    check(front, "item", KEYS, 5)


def loaded_anew(node: Upstream, stamp: int, **options: object) -> None:
    """The node comes back with another snapshot under the number 1."""
    node.stop()
    shutil.rmtree(node.data)
    node.start()
    node.load(1, stamp, **options)


@pytest.mark.parametrize("is_folded", [True, False])
def test_a_node_that_is_built_anew_and_gets_other_deltas_under_the_same_seqs_is_served_with_those(
    scene: Scene, is_folded: bool
) -> None:
    node, snapshot = scene.node(), write_snapshot(scene.root, 1, 0)
    node.store.load_snapshot(snapshot)
    front = scene.front()
    other = scene.front(host_budget=NO_CACHE)
    if not is_folded:
        for store in scene.fronts:
            rows = store.model("ctr").publisher.current.open_version.rows  # type: ignore[union-attr]
            rows.frozen = True
    node.store.apply_delta(scenes.stamped(1, {"item": KEYS}))
    node.store.apply_delta(scenes.stamped(2, {"item": range(500)}))
    for store in scene.fronts:
        await_watermark(store, 2)
        check(store, "item", range(500), 2)
        check(store, "item", range(500, 1000), 1)
        scenes.eventually(lambda: (store.status()["models"]["ctr"]["overlays"] == 0) == is_folded, "as it should be")  # noqa: B023
    node.stop()
    shutil.rmtree(node.data)
    node.start()
    node.store.load_snapshot(snapshot)
    rows = {"item": (KEYS, scenes.vectors("item", 7, KEYS))}
    node.store.apply_delta(scenes.delta(1, rows))
    node.store.apply_delta(scenes.delta(2, {"item": (range(20), scenes.vectors("item", 8, range(20)))}))
    for store in (front, other):
        scenes.eventually(lambda: answers(store, range(20), 8), "it has the delta of now")  # noqa: B023
        check(store, "item", range(20, 1000), 7)


def answers(front: Store, keys: range, stamp: int) -> bool:
    try:
        rows = front.model("ctr").lookup("item_id", np.array(keys))
    except tierstore.TierstoreError:
        return False
    return np.array_equal(rows, scenes.vectors("item", stamp, keys))


def test_two_contents_under_one_number_are_never_in_one_answer(scene: Scene) -> None:
    nodes = [scene.node(), scene.node()]
    for node in nodes:
        node.load(1, 0)
    front = scene.front(host_budget=NO_CACHE)
    load = Load(front, {0, 7})
    loaded_anew(nodes[0], 7)
    before = load.count
    scenes.eventually(lambda: load.count > before + 50 or bool(load.errors), "more look-ups")
    check(front, "item", KEYS, 0)
    loaded_anew(nodes[1], 7)

    def serves_the_new_one() -> bool:
        try:
            rows = front.model("ctr").lookup("item_id", [1])
        except tierstore.TierstoreError:
            return False
        return bool((rows == scenes.vectors("item", 7, [1])).all())

    with contextlib.suppress(tierstore.TierstoreError):  # while no node had the old one
        load.stop()
    scenes.eventually(serves_the_new_one, "the front serves what both nodes have")
    check(front, "item", KEYS, 7)
    assert set(load.seen) <= {0, 7}


def test_the_default_of_a_version_that_was_loaded_again_comes_with_its_rows(scene: Scene) -> None:
    node = scene.node()
    node.store.load_snapshot(scenes.write_snapshot(node.data, 1, stamp=1, default="mean"))
    front = scene.front()
    before = scenes.vectors("item", 1, KEYS).mean(0)
    np.testing.assert_allclose(front.model("ctr").lookup("item_id", [99_999])[0], before, rtol=1e-6)
    node.load(2, 1)
    scenes.eventually(lambda: front.model("ctr").active_version == 2, "the front serves version 2")
    scenes.eventually(lambda: not node.store.model("ctr").state.retiring, "version 1 is closed")
    node.store.drop("ctr", 1)
    shutil.rmtree(node.data / "ctr-1")
    node.store.load_snapshot(scenes.write_snapshot(node.data, 1, stamp=9, default="mean"))
    scenes.eventually(lambda: front.model("ctr").active_version == 1, "the front serves version 1 again")
    check(front, "item", KEYS, 9)
    mean = scenes.vectors("item", 9, KEYS).mean(0)
    np.testing.assert_allclose(front.model("ctr").lookup("item_id", [99_999])[0], mean, rtol=1e-6)


def serves(front: tierstore.Store, stamp: int, feature: str = "item_id") -> bool:
    try:
        rows = front.model("ctr").lookup(feature, [1])
    except tierstore.TierstoreError:  # until the front knows that the version was built again
        return False
    return bool((rows == scenes.vectors(feature.removesuffix("_id"), stamp, [1])).all())


def test_a_node_that_is_built_anew_under_one_number_brings_its_dtype_its_default_and_its_features(scene: Scene) -> None:
    node = scene.node()
    node.store.load_snapshot(scenes.write_snapshot(node.data, 1, stamp=1, dtype="float16"))
    front = scene.front()
    check(front, "item", KEYS, 1)
    assert (front.model("ctr").lookup("item_id", [99_999]) == 0).all()
    node.stop()
    shutil.rmtree(node.data)
    node.start()
    where = node.data / "anew"
    with tierstore.SnapshotWriter(where, model="ctr", version=1) as writer:
        for table in ("user", "item"):
            options = {"dim": scenes.DIM[table], "dtype": "bfloat16", "default": "mean"}
            writer.table(table, **options).write(np.arange(64), scenes.vectors(table, 0, range(64)))
            writer.feature(f"{table}_id", table=table)
        writer.feature("bought", table="item", combiner="sum")
    node.store.load_snapshot(where)
    scenes.eventually(lambda: serves(front, 0), "the front serves what the node has now")
    check(front, "item", range(64), 0)
    np.testing.assert_array_equal(front.model("ctr").lookup("item_id", [99_999])[0], np.full(scenes.DIM["item"], 31.5))
    model = front.status()["models"]["ctr"]
    assert {of["dtype"] for of in model["tables"].values()} == {"bfloat16"}
    assert front.model("ctr").lookup_bags("bought", [1, 2], [0]).tolist() == [[3.0] * scenes.DIM["item"]]
    with pytest.raises(tierstore.errors.NotFound, match="clicked"):
        front.model("ctr").lookup("clicked", [1])
    scene.apply(scenes.stamped(1, {"item": [7]}))
    await_watermark(front, 1)
    check(front, "item", [7], 1)


def test_a_version_that_goes_while_it_is_made_ready_is_a_failure_that_is_told_and_tried_again(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = scene.node()
    node.load(1, 0)
    front = scene.front()
    follower = front.placement.followed.by_name["ctr"].follower  # type: ignore[attr-defined]
    follow, failures = front.model("ctr").switcher.follow, list[object]()

    def goes(number: int, *arguments: object, **options: object) -> None:
        if not failures:
            failures.append(number)
            front.model("ctr").catalogue.forget(number)  # as where the other machines have lost its record for a while
            raise StorageError("its rows are gone")
        follow(number, *arguments, **options)  # type: ignore[arg-type]

    told: list[object] = []
    beat = follower.shared.beat
    monkeypatch.setattr(follower.shared, "beat", lambda of, report: told.append(report["failed"]) or beat(of, report))
    monkeypatch.setattr(front.model("ctr").switcher, "follow", goes)
    node.load(2, 7)
    scenes.eventually(lambda: front.model("ctr").active_version == 2, "the front serves version 2")
    assert failures == [2]
    assert any(of is not None and of["version"] == 2 and "rows are gone" in of["why"] for of in told), told  # type: ignore[index]
    check(front, "item", KEYS, 7)


def test_changes_are_refused_with_where_to_send_them(scene: Scene, tmp_path: Path) -> None:
    node = scene.node()
    node.load(1, 0)
    front = scene.front()
    snapshot = scenes.write_snapshot(tmp_path, 3)
    verbs: list[Callable[[], object]] = [
        lambda: front.load_snapshot(snapshot),
        lambda: front.apply_delta(scenes.stamped(1, {"item": [1]})),
        lambda: front.activate("ctr", 1),
        lambda: front.rollback("ctr"),
        lambda: front.rollback("ctr", to_seq=0),
        lambda: front.canary("ctr", 1),
        lambda: front.promote("ctr"),
        lambda: front.withdraw("ctr"),
        lambda: front.label("ctr", "a", 1),
        lambda: front.unlabel("ctr", "a"),
        lambda: front.deactivate("ctr"),
        lambda: front.drop("ctr", 1),
    ]
    for verb in verbs:
        with pytest.raises(tierstore.InvalidInput, match=f"tierstore rollout SNAPSHOT --nodes {node.url}"):
            verb()
    with pytest.raises(
        tierstore.InvalidInput, match=rf"not on this machine .* upstream \({node.url}\): export it there"
    ):
        front.export("ctr", tmp_path / "out")
    check(front, "item", KEYS, 0)


def test_a_front_serves_every_protocol(scene: Scene) -> None:
    scene.quarters()
    front = scene.front()
    with ServerThread(front, settings_for(scene.root, data=front.settings.data, grpc_port="off")) as server:
        with tierstore.Client(server.url) as client:
            keys = np.arange(1, 200)
            np.testing.assert_array_equal(client.lookup("ctr", "item_id", keys), scenes.vectors("item", 0, keys))
        with httpx.Client(base_url=server.url, timeout=60) as http:
            answer = http.post("/v1/models/ctr:predict", json={"inputs": {"item_id": [7, 8]}})
            assert answer.status_code == 200, answer.text
            refused = http.post("/admin/models/ctr/deltas", content=scenes.stamped(1, {"item": [1]}))
            assert refused.status_code == 400
            assert "send deltas to each of these nodes" in refused.text
            assert 'tierstore_lookup_keys_total{model="ctr",table="item",tier="remote"}' in http.get("/metrics").text


@pytest.mark.thorough
def test_a_delta_that_was_undone_upstream_is_undone_at_the_front(scene: Scene) -> None:
    nodes = scene.quarters()
    front = scene.front()
    for seq in (1, 2):
        scene.apply(scenes.stamped(seq, {"item": range(100)}))
    await_watermark(front, 2)
    scenes.eventually(lambda: front.status()["models"]["ctr"]["overlays"] == 0, "deltas are folded")
    check(front, "item", range(100), 2)
    for node in nodes:
        node.store.rollback("ctr", to_seq=1)

    def undone() -> bool:
        try:
            rows = front.model("ctr").lookup("item_id", np.arange(100))
        except tierstore.errors.StorageError:  # nodes of both lines are there for a moment
            return False
        return np.array_equal(rows, scenes.vectors("item", 1, range(100)))

    scenes.eventually(undone, "delta 2 is undone")
    check(front, "item", range(100, 1000), 0)
    scene.apply(scenes.stamped(3, {"item": [5]}))
    await_watermark(front, 3)
    check(front, "item", [5], 3)


@pytest.mark.thorough
def test_a_front_and_a_node_that_are_replaced(scene: Scene) -> None:
    nodes = scene.quarters()
    front = scene.front()
    scene.apply(scenes.stamped(1, {"item": range(50)}))
    await_watermark(front, 1)
    front.close()
    again = tierstore.open(scene.root / "front-0", upstream=front.settings.upstream, host_budget="4MiB")
    scene.fronts.append(again)
    check(again, "item", range(50), 1)
    old = nodes[1]
    old.stop()
    old.data = scene.root / "another"
    old.start()
    with pytest.raises(tierstore.errors.RemoteUnavailable):
        again.model("ctr").lookup("item_id", of_share(np.arange(100, 1000), old.own))
    old.load(1, 0)
    old.store.apply_delta(scenes.stamped(1, {"item": range(50)}))
    scenes.eventually(lambda: again.status()["models"]["ctr"]["upstream"]["partitions"]["missing"] == [], "it is back")
    check(again, "item", range(50, 1000), 0)
    scene.apply(scenes.stamped(2, {"item": KEYS}))
    await_watermark(again, 2)
    check(again, "item", KEYS, 2)


def test_a_node_that_hangs_is_left_for_its_copy(scene: Scene) -> None:
    scene.node().load(1, 0)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, and never answers
        scene.node().load(1, 0)
        front = scene.front()
        hanging = front.placement.nodes.nodes[1]  # type: ignore[attr-defined]
        hanging.address = hanging.address._replace(port=silent.getsockname()[1])
        for begin in range(100, 1000, 100):
            check(front, "item", range(begin, begin + 100), 0)


def test_a_token_is_needed_where_the_nodes_have_tokens(scene: Scene) -> None:
    node = scene.node()
    node.load(1, 0)
    _, secret = TokenFile(node.data / "tokens.json").create(Role.FRONT)
    node.stop()
    node.start()
    without, with_token = scene.front(), scene.front(upstream_token=secret)
    check(with_token, "item", KEYS, 0)
    assert without.models() == []
    (of_node,) = without.status()["upstream"]["nodes"].values()
    assert "401" in of_node["problem"]
    assert secret not in str(with_token.status())
    assert secret not in repr(with_token.settings)


def test_a_token_leaves_a_front_with_tls_alone(tmp_path: Path) -> None:
    addresses = "http://127.0.0.1:1,http://0.0.0.0:1"  # the second is no loopback address, and refuses at once
    with pytest.raises(
        tierstore.errors.ConfigError,
        match=r"upstream_token: it would cross the network in clear to http://0.0.0.0:1; use an https url, or upstream_allow_",
    ):
        tierstore.open(tmp_path, upstream=addresses, upstream_token="secret")
    for one in (
        {"upstream": addresses},
        {"upstream": "http://localhost:1,https://0.0.0.0:1", "upstream_token": "secret"},
        {"upstream": addresses, "upstream_token": "secret", "upstream_allow_insecure_token": True},
    ):
        with tierstore.open(tmp_path, **one, host_budget="4MiB") as front:
            assert front.models() == []


def test_a_front_is_no_node_to_be_in_front_of(scene: Scene) -> None:
    scene.node().load(1, 0)
    first = scene.front()
    with ServerThread(first, settings_for(scene.root, data=first.settings.data, grpc_port="off")) as server:
        second = tierstore.open(scene.root / "second", upstream=server.url, host_budget="4MiB")
        scene.fronts.append(second)
        assert second.models() == []
        (of_node,) = second.status()["upstream"]["nodes"].values()
        assert "name those in --upstream" in of_node["problem"]


def test_settings_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    with pytest.raises(tierstore.errors.ConfigError, match="remote and upstream"):
        tierstore.open(tmp_path / "a", upstream="http://127.0.0.1:1", remote="redis://127.0.0.1:1")
    for text in ("127.0.0.1:8000", "ftp://a:1", "http://a:x", "http://a:1/path", "http://u:p@a:1", "http://a:1,"):
        with pytest.raises(tierstore.errors.ConfigError, match="upstream"):
            tierstore.open(tmp_path / "b", upstream=text)
    with pytest.raises(tierstore.errors.ConfigError, match="expected addresses such as") as raised:
        tierstore.open(tmp_path / "b", upstream="http://a:1,http://user:hunter2@b:1")
    assert "hunter2" not in str(raised.value)
    (tmp_path / "w").mkdir()
    for other in ({"kafka": "b:9092", "kafka_topic": "t"}, {"watch": tmp_path / "w"}, {"watch_snapshots": [tmp_path]}):
        with pytest.raises(tierstore.errors.ConfigError, match=r"set .* on the nodes upstream"):
            check_sources(settings_for(tmp_path, upstream="http://127.0.0.1:1", **other))
    with tierstore.open(tmp_path / "c", host_budget="4MiB", load_workers=1) as local:
        local.load_snapshot(scenes.write_snapshot(tmp_path))
    with pytest.raises(tierstore.errors.ConfigError, match="with --upstream, use a data directory of its own"):
        tierstore.open(tmp_path / "c", upstream="http://127.0.0.1:1")


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/upstream/models", b"", 400),
        ("GET", "/upstream/models?front=a&serves=[]", b"", 400),
        ("GET", '/upstream/models?front=a&serves={"ctr":7}', b"", 400),
        ("GET", '/upstream/models?front=a&serves={"ctr":[1e999,1]}', b"", 400),
        ("GET", '/upstream/models?front=a&serves={"ctr":[1,-1e999]}', b"", 400),
        ("GET", '/upstream/models?front=a&serves={"ctr":[NaN,1]}', b"", 400),
        ("POST", "/upstream/models?front=a&serves={}", b"", 405),
        ("GET", "/upstream/nothing", b"", 404),
        ("GET", "/upstream/models/none/deltas?after=0&count=1", b"", 404),
        ("GET", "/upstream/models/ctr/deltas?after=x&count=1", b"", 400),
        ("GET", "/upstream/models/ctr/versions/1?line=other", b"", 404),
        ("GET", "/upstream/models/ctr/versions/1/files/..%2Fversion.json?line=other", b"", 404),
        ("POST", "/upstream/models/ctr/versions/1/tables/item/rows", b"short", 400),
        ("POST", "/upstream/models/ctr/versions/1/tables/item/rows", bytes(32), 404),
        ("POST", "/upstream/models/ctr/versions/1/tables/item/rows", bytes(48), 400),
        ("GET", "/upstream/models/ctr/versions/1/tables/item/rows", b"", 405),
    ],
)
def test_malformed_requests_are_refused(server: ServerThread, method: str, path: str, body: bytes, status: int) -> None:
    with httpx.Client(base_url=server.url, timeout=60) as http:
        answer = http.request(method, path, content=body)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]
