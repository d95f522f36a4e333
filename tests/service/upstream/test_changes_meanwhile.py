"""A node in front of others, where something changes upstream while it makes a version ready."""

from __future__ import annotations

import shutil
import threading
from types import ModuleType
from typing import Any

import pytest

from tests.engine import scenes
from tests.service.upstream.scenes import KEYS, Scene, await_watermark, check
from tierstore.engine.operations.fronts import line_of
from tierstore.engine.placements.following import follower as following
from tierstore.engine.placements.following.follower import Follower
from tierstore.engine.placements.following.version_copies import VersionCopies
from tierstore.engine.placements.upstream.watch import Watch
from tierstore.engine.store import Store
from tierstore.engine.versions.info import VersionInfo
from tierstore.engine.versions.version import Version
from tierstore.errors import NotFound, StorageError


def follower_of(front: Store) -> Follower:
    return front.placement.followed.by_name["ctr"].follower  # type: ignore[attr-defined, no-any-return]


def problems(front: Store) -> str:
    return "; ".join(one["text"] for one in front.status()["problems"])


def is_undone(front: Store) -> bool:
    try:
        return bool((front.model("ctr").lookup("item_id", [1]) == 1).all())
    except StorageError:  # until the front knows that the version was built again
        return False


def test_a_version_that_is_built_again_while_the_front_opens_it_is_opened_anew(
    scene: Scene, heads: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = scene.node()
    node.store.load_snapshot(heads.snapshot(node.data))
    front = scene.front()
    follower, opener = follower_of(front), front.model("ctr").opener
    opens, goes_on, open_ = threading.Event(), threading.Event(), opener.open

    def slow(info: Any) -> Any:
        opens.set()
        assert goes_on.wait(60.0)
        return open_(info)

    monkeypatch.setattr(opener, "open", slow)
    node.store.load_snapshot(heads.snapshot(node.data, 2, 2), activate=False)
    node.store.apply_delta(scenes.delta(1, heads.rows(3), heads={"": heads.graph("", 3), "cvr": heads.graph("cvr", 3)}))
    node.store.activate("ctr", 2)
    assert opens.wait(60.0)
    before = follower.pointer.line
    node.store.rollback("ctr", to_seq=0)
    scenes.eventually(lambda: follower.pointer.line != before, "the front knows of it")
    goes_on.set()
    scenes.eventually(lambda: front.model("ctr").active_version == 2, "the front serves version 2")
    assert heads.every(front) == {"": (2, 2), "cvr": (2, 2), "ltv": (2, 2)}


def test_a_version_that_is_loaded_anew_between_its_record_and_its_files_is_copied_anew(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = scene.node()
    node.load(1, 0)
    front = scene.front()
    follower, update_dense = follower_of(front), VersionCopies.update_dense

    def late(self: VersionCopies, number: int) -> Any:
        if number == 2 and len(lines) == 1:
            node.store.activate("ctr", 1)
            scenes.eventually(lambda: not node.store.model("ctr").state.retiring, "version 2 is closed")
            node.store.drop("ctr", 2)
            shutil.rmtree(node.data / "ctr-2")
            node.store.load_snapshot(scenes.write_snapshot(node.data, 2, stamp=1, dtype="float16", default="mean"))
            before = lines[0]
            scenes.eventually(lambda: line_now(2) not in (None, before), "the front has heard of it")
            lines.append(str(line_now(2)))
        return update_dense(self, number)

    def line_now(number: int) -> str | None:
        state = follower.shared.states()[0]  # type: ignore[attr-defined]
        return None if state is None or number not in state.versions else state.versions[number].line

    lines: list[str] = []
    monkeypatch.setattr(VersionCopies, "update_dense", late)
    fetch = VersionCopies._fetch

    def noting(self: VersionCopies, number: int, *of: Any) -> None:
        fetch(self, number, *of)
        if number == 2 and not lines:
            lines.append(str(line_now(2)))

    follow = Follower._follow

    def at_once(self: Follower, *of: Any) -> None:
        follow(self, *of)
        if self._switch is not None:
            self._switch.join(30.0)

    monkeypatch.setattr(VersionCopies, "_fetch", noting)
    monkeypatch.setattr(Follower, "_follow", at_once)  # it serves before the next look
    node.store.load_snapshot(scenes.write_snapshot(node.data, 2, stamp=0, dtype="bfloat16"))
    scenes.eventually(lambda: front.model("ctr").active_version == 2, "the front serves version 2")
    assert len(lines) == 2
    check(front, "item", KEYS, 1)
    assert front.model("ctr").lookup("item_id", [99_999]).any()


def test_a_fold_under_way_puts_no_undone_dense_part_into_a_version_that_is_opened_anew(
    scene: Scene, heads: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = scene.node()
    node.store.load_snapshot(heads.snapshot(node.data))
    front = scene.front()
    update_dense, fold = VersionCopies.update_dense, Version.fold
    goes_on, ended = threading.Event(), threading.Event()

    def updated(self: VersionCopies, number: int) -> Any:
        pointer = update_dense(self, number)
        goes_on.set()
        assert ended.wait(60.0)
        return pointer

    def late(self: Version, overlay: Any) -> None:
        if self.rows.disk is not None:  # the node's own
            fold(self, overlay)
            return
        assert goes_on.wait(60.0)
        try:
            fold(self, overlay)
        finally:
            ended.set()

    monkeypatch.setattr(VersionCopies, "update_dense", updated)
    monkeypatch.setattr(Version, "fold", late)
    node.store.apply_delta(scenes.delta(1, heads.rows(3), heads={"": heads.graph("", 3), "cvr": heads.graph("cvr", 3)}))
    await_watermark(front, 1)
    assert (heads.predict(front, ""), heads.predict(front, "cvr")) == ((3, 3), (3, 3))
    scenes.eventually(lambda: front.model("ctr").publisher.current.open_version.rows.reached == 1, "it may be folded")  # type: ignore[union-attr]
    node.store.rollback("ctr", to_seq=0)
    scenes.eventually(lambda: is_undone(front), "delta 1 is undone")
    assert heads.every(front) == {"": (1, 1), "cvr": (1, 1), "ltv": (1, 1)}


def test_a_version_that_serves_again_has_the_dense_part_that_it_has_by_now(scene: Scene, heads: ModuleType) -> None:
    node = scene.node()
    node.store.load_snapshot(heads.snapshot(node.data))
    node.store.load_snapshot(heads.snapshot(node.data, 2, 2), activate=False)
    front = scene.front()

    def change(seq: int) -> None:
        node.store.apply_delta(scenes.delta(seq, heads.rows(10 + seq), heads=heads.graphs(10 + seq, *heads.HEADS)))
        await_watermark(front, seq)
        scenes.eventually(lambda: front.status()["models"]["ctr"]["overlays"] == 0, f"delta {seq} is folded")

    def activate(number: int) -> None:
        node.store.activate("ctr", number)
        scenes.eventually(lambda: front.model("ctr").active_version == number, f"the front serves version {number}")

    change(1)
    activate(2)
    activate(1)
    assert heads.every(front) == dict.fromkeys(heads.HEADS, (11, 11))
    activate(2)
    change(2)
    activate(1)
    assert heads.every(front) == dict.fromkeys(heads.HEADS, (12, 12))


def test_a_dense_part_that_comes_while_the_front_opens_a_version_is_not_passed_over(
    scene: Scene, heads: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = scene.node()
    node.store.load_snapshot(heads.snapshot(node.data))
    front = scene.front()
    follower, opener = follower_of(front), front.model("ctr").opener
    open_ = opener.open

    def late(info: Any) -> Any:
        if not follower.pointer.seq:
            node.store.apply_delta(scenes.delta(1, heads.rows(9), heads=heads.graphs(9, *heads.HEADS)))
            scenes.eventually(lambda: follower.pointer.marks.get(2) == 1, "the front has heard of delta 1")
        return open_(info)

    monkeypatch.setattr(opener, "open", late)
    node.store.load_snapshot(heads.snapshot(node.data, 2, 2))
    scenes.eventually(lambda: front.model("ctr").active_version == 2, "the front serves version 2")
    await_watermark(front, 1)
    assert heads.every(front) == dict.fromkeys(heads.HEADS, (9, 9))


def test_no_dense_part_is_copied_ahead_of_what_the_front_knows_of_its_deltas(
    scene: Scene, heads: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = scene.node()
    node.store.load_snapshot(heads.snapshot(node.data))
    front = scene.front()
    may_look, looks, look = threading.Event(), threading.Event(), Watch._look

    def late(self: Watch) -> None:
        looks.set()
        assert may_look.wait(60.0)
        look(self)

    monkeypatch.setattr(Watch, "_look", late)
    assert looks.wait(60.0)
    node.store.apply_delta(scenes.delta(1, heads.rows(9), heads=heads.graphs(9, *heads.HEADS)))
    seqs: list[int | None] = []
    copying = threading.Thread(target=lambda: seqs.append(follower_of(front)._copies.update_dense(1).seq))
    copying.start()
    copying.join(0.3)
    may_look.set()
    copying.join(60.0)
    assert seqs == [1]


def test_a_delta_that_comes_while_the_front_opens_a_version_is_not_taken_to_be_in_its_caches(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = scene.node()
    node.load(1, 0)
    node.load(2, 7, activate=False)
    front = scene.front()
    learn, warm, apply_one = VersionInfo.learn, Version.warm, Follower._apply_one
    follower, is_warm = follower_of(front), threading.Event()

    def learned(self: VersionInfo, rows: Any) -> None:
        learn(self, rows)
        if rows.disk is None and self.number == 2:
            node.store.apply_delta(scenes.stamped(1, {"item": KEYS}))
            scenes.eventually(lambda: follower.pointer.marks.get(2) == 1, "the front has heard that the rows have it")

    def warmed(self: Version, like: Any, progress: Any) -> None:
        warm(self, like, progress)
        if self.rows.disk is None:
            is_warm.set()

    def applied(*arguments: Any) -> bool:
        assert is_warm.wait(60.0)
        return apply_one(*arguments)

    node.store.activate("ctr", 2)
    scenes.eventually(lambda: front.model("ctr").active_version == 2, "the front serves version 2")
    node.store.activate("ctr", 1)
    scenes.eventually(lambda: front.model("ctr").active_version == 1, "the front serves version 1 again")
    monkeypatch.setattr(VersionInfo, "learn", learned)
    monkeypatch.setattr(Version, "warm", warmed)
    monkeypatch.setattr(Follower, "_apply_one", applied)
    node.store.activate("ctr", 2)
    scenes.eventually(lambda: front.model("ctr").active_version == 2, "the front serves version 2")
    await_watermark(front, 1)
    check(front, "item", KEYS, 1)


def test_a_head_that_an_undone_delta_brought_is_gone_at_the_front(scene: Scene, heads: ModuleType) -> None:
    node = scene.node()
    node.store.load_snapshot(heads.snapshot(node.data))
    front = scene.front()
    node.store.apply_delta(scenes.delta(1, heads.rows(3), heads={"new": heads.graph("cvr", 3)}))
    await_watermark(front, 1)
    scenes.eventually(lambda: front.status()["models"]["ctr"]["overlays"] == 0, "delta 1 is folded")
    front.model("ctr").predict({"item_id": heads.KEYS}, head="new")
    node.store.rollback("ctr", to_seq=0)
    scenes.eventually(lambda: is_undone(front), "delta 1 is undone")
    with pytest.raises(NotFound, match="no head 'new'"):
        front.model("ctr").predict({"item_id": heads.KEYS}, head="new")
    assert heads.every(front) == {"": (1, 1), "cvr": (1, 1), "ltv": (1, 1)}


def test_a_view_with_undone_deltas_is_not_taken_for_one_without(scene: Scene) -> None:
    node = scene.node()
    node.load(1, 0)
    node.load(2, 0, activate=False)
    store, model = node.store, node.store.model("ctr")
    store.canary("ctr", 2, 0.5)
    store.apply_delta(scenes.stamped(1, {"item": KEYS}))
    held = model.publisher.hold()
    before = [line_of(model, view) for view in held]
    store.rollback("ctr", to_seq=0)
    late = [line_of(model, view) for view in held]  # as by a thread that held them before the rollback
    model.publisher.unhold(*held)
    store.canary("ctr", 2, 0.5)
    after = [line_of(model, view) for view in model.served.views]
    assert [view.version for view in held] == [view.version for view in model.served.views] == [1, 2]
    assert len({*before, *late, *after}) == 6


def test_a_front_whose_memory_has_no_room_for_a_delta_takes_it_while_another_version_waits(scene: Scene) -> None:
    first, second = scene.node(), scene.node()
    for node in scene.nodes:
        node.load(1, 0)
        node.load(2, 7, activate=False)
    front = scene.front(overlay_budget="16KiB")
    follower = follower_of(front)
    first.store.activate("ctr", 2)
    scenes.eventually(lambda: follower._prepared == 2, "version 2 is ready, and waits")
    scene.apply(scenes.stamped(1, {"item": KEYS}))
    await_watermark(front, 1)
    check(front, "item", KEYS, 1)
    second.store.activate("ctr", 2)
    scenes.eventually(lambda: front.model("ctr").active_version == 2, "the front serves version 2")
    check(front, "item", KEYS, 1)


def test_a_front_that_cannot_serve_what_its_nodes_serve_says_so_and_tries_again(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "AGAIN_S", 0.2)
    node = scene.node()
    node.load(1, 0)
    front = scene.front()
    switcher, fails = front.model("ctr").switcher, threading.Event()
    follow = switcher.follow

    def failing(*arguments: Any, **options: Any) -> None:
        if fails.is_set():
            raise StorageError("no file can be opened")
        follow(*arguments, **options)

    fails.set()
    monkeypatch.setattr(switcher, "follow", failing)
    node.load(2, 7)
    text = "version 2, which is to be served, is not ready here: no file can be opened"
    scenes.eventually(lambda: text in problems(front), "the status says why")
    check(front, "item", KEYS, 0)
    fails.clear()
    scenes.eventually(lambda: front.model("ctr").active_version == 2, "the front serves version 2")
    scenes.eventually(lambda: text not in problems(front), "the status says nothing any more")
    check(front, "item", KEYS, 7)
