"""A new node that copies models from a peer."""

from __future__ import annotations

import threading
from typing import Any

import httpx
import pytest

import tierstore
from tests.engine import scenes
from tierstore.access.roles import Role
from tierstore.access.tokens import TokenFile
from tierstore.engine.operations import for_peers, from_peers
from tierstore.engine.operations.for_peers import PeerSide
from tierstore.formats import files

from ..conftest import eventually
from ..upstream.scenes import Scene
from .peer_scenes import (
    assert_equal,
    await_problem,
    await_ready,
    digests,
    is_ready,
    last,
    stamped,
    status,
)


def test_a_new_node_copies_all_models_and_says_ready_when_it_has_caught_up(scene: Scene) -> None:
    first = scene.node()
    first.load(1, 0)
    for seq in range(1, 4):
        first.store.apply_delta(stamped(seq))
    first.load(2, 9, activate=False, delta_seq=2)
    first.store.canary("ctr", 2, 0.25)
    first.store.label("ctr", "trial", 2)
    first.store.load_snapshot(scenes.write_snapshot(scene.root / "other", model="other"))
    second = scene.node(peer=[first.url])
    await_ready(second)
    assert second.store.models() == ["ctr", "other"]
    ours, theirs = (node.store.status("ctr")["models"]["ctr"] for node in (first, second))
    for what in ("active_version", "watermark", "canary", "labels", "log"):
        if what == "canary":
            assert theirs[what]["share"] == ours[what]["share"] == 0.25
        else:
            assert theirs[what] == ours[what], what
    assert_equal(first, second)
    assert second.store.verify().problems == ()
    assert status(second)["copied"] == 2
    assert from_peers.copies_of(second.data) == []
    first.store.apply_delta(stamped(4))
    eventually(lambda: last(second) == 4, "the next delta")
    second.stop()
    second.settings = {}
    second.start()  # what was copied is its own
    assert_equal(first, second)
    second.store.rollback("ctr", to_seq=1)
    second.store.activate("ctr", 2)


@pytest.mark.thorough
def test_deltas_that_come_during_the_copy_are_there_before_it_is_ready(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = scene.node()
    first.load(1, 0)
    read, number = PeerSide.read, iter(range(1, 1000))
    seen: list[bool] = []

    def slow(self: PeerSide, *words: Any) -> bytes:
        first.store.apply_delta(stamped(next(number)))
        seen.append(is_ready(second))
        return read(self, *words)

    made = scene.node  # so that `second` is bound while its thread runs
    monkeypatch.setattr(PeerSide, "read", lambda *words: blocked.wait(30) and slow(*words))
    blocked = threading.Event()
    second = made(peer=[first.url])
    blocked.set()
    await_ready(second)
    assert last(second) == next(number) - 1 > 3
    assert not any(seen)
    assert_equal(first, second)


@pytest.mark.thorough
def test_a_peer_that_forgets_deltas_during_a_copy_is_copied_as_of_later(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = scene.node()
    first.load(1, 0)
    first.store.apply_delta(stamped(1))
    read, reads = PeerSide.read, []

    def forgetful(self: PeerSide, model: str, content: str, *words: int) -> bytes:
        reads.append(content)
        if len(reads) == 2:
            for seq in range(2, 6):
                first.store.apply_delta(stamped(seq))
            folded = lambda: first.store.status("ctr")["models"]["ctr"]["folded_watermark"] == 5  # noqa: E731
            eventually(folded, "all is folded")
            with first.store.model("ctr").state.live.write:
                first.store.model("ctr").state.log.prune(4)
        return read(self, model, content, *words)

    monkeypatch.setattr(PeerSide, "read", forgetful)
    second = scene.node(peer=[first.url])
    await_ready(second)
    assert_equal(first, second)
    assert digests(second) == digests(first)


@pytest.mark.thorough
def test_an_empty_node_is_not_ready_before_a_peer_answers(scene: Scene) -> None:
    first = scene.node()
    first.load(1, 0)
    first.stop()
    second = scene.node(peer=[first.url])
    await_problem(second, "does not answer")
    assert not is_ready(second)
    first.start()
    await_ready(second)
    assert_equal(first, second)


@pytest.mark.thorough
def test_two_empty_nodes_that_name_each_other_become_ready(scene: Scene) -> None:
    first = scene.node()
    second = scene.node(peer=[first.url])
    first.stop()
    first.settings = {"peer": [second.url]}
    first.start()
    await_ready(first)
    await_ready(second)
    first.load(1, 0)  # a load after that is of one node
    assert second.store.models() == []


@pytest.mark.parametrize("damage", ["flipped", "short"])
def test_a_file_that_is_damaged_on_its_way_is_read_again_and_never_served(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    first = scene.node()
    first.load(1, 0)
    read, failed = PeerSide.read, []

    def damaged(self: PeerSide, model: str, content: str, begin: int, count: int) -> bytes:
        data = read(self, model, content, begin, count)
        if content not in failed and len(failed) < 3:
            failed.append(content)
            return bytes([data[0] ^ 1]) + data[1:] if damage == "flipped" else b""
        return data

    monkeypatch.setattr(PeerSide, "read", damaged)
    second = scene.node(peer=[first.url])
    await_problem(second, "was damaged on its way" if damage == "flipped" else "ends after 0 of")
    await_ready(second)
    assert len(failed) == 3
    assert_equal(first, second)
    assert second.store.verify().problems == ()


@pytest.mark.thorough
def test_a_copy_that_was_broken_off_goes_on_where_it_ended(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    first = scene.node()
    first.load(1, 0)
    monkeypatch.setattr(from_peers, "CHUNK_BYTES", 1000)
    read, spans, broken = PeerSide.read, [], threading.Event()

    def counted(self: PeerSide, model: str, content: str, begin: int, count: int) -> bytes:
        if not broken.is_set() and len(spans) == 20:
            broken.set()
            raise tierstore.errors.Overloaded("the peer has no time")
        spans.append((content, begin))
        return read(self, model, content, begin, count)

    monkeypatch.setattr(PeerSide, "read", counted)
    second = scene.node(peer=[first.url])
    eventually(broken.is_set, "it was broken off")
    second.stop()
    (left,) = from_peers.copies_of(second.data)
    assert files.tree_bytes(left) > 15_000
    second.start()
    await_ready(second)
    assert len(spans) == len(set(spans))  # nothing was read twice
    assert_equal(first, second)
    assert from_peers.copies_of(second.data) == []


@pytest.mark.thorough
def test_what_a_copy_has_left_goes_where_no_peer_is_named_any_more(scene: Scene) -> None:
    (left := scene.root / "node-0" / f"{from_peers.SCRATCH}ctr").mkdir(parents=True)
    node = scene.node()
    eventually(lambda: not left.exists(), "it is removed")
    assert node.store.models() == []


@pytest.mark.thorough
def test_a_copy_that_has_no_room_is_not_begun(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    first = scene.node()
    first.load(1, 0)
    from tierstore.engine.data import disk_room

    monkeypatch.setattr(
        disk_room, "_free_and_floor", lambda root, reserve: (1000, 500) if root.name == "node-1" else (1 << 40, 500)
    )
    second = scene.node(peer=[first.url])
    await_problem(second, "no room for a copy of model 'ctr'")
    assert not is_ready(second)
    assert files.tree_bytes(next(iter(from_peers.copies_of(second.data)), second.data / "none")) == 0


@pytest.mark.thorough
def test_an_image_that_nobody_asks_for_is_removed(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(for_peers, "HOLD_S", 0.05)
    first = scene.node()
    first.load(1, 0)
    held = first.server.service.peer_side
    made = eventually(lambda: held.image("ctr").get("backup"), "the image")
    content = f"files/{made['files'][0]['xxh3']}-{made['files'][0]['bytes']}"
    eventually(lambda: not list((first.data / "models/ctr").glob(".tmp-*")), "it is removed")
    with pytest.raises(tierstore.errors.NotFound, match="ask for the image again"):
        held.read("ctr", content, 0, 1)


@pytest.mark.thorough
def test_what_peers_ask_takes_the_role_front(scene: Scene) -> None:
    first = scene.node()
    first.load(1, 0)
    first.store.apply_delta(stamped(1))
    held = TokenFile(first.data / "tokens.json")
    secrets = {role: held.create(role)[1] for role in (Role.READER, Role.WRITER, Role.FRONT, Role.ADMIN)}
    first.stop()
    first.start()
    with httpx.Client(base_url=first.url) as http:
        content = None
        for role in (Role.ADMIN, Role.FRONT, Role.READER, Role.WRITER, None):
            headers = {} if role is None else {"Authorization": f"Bearer {secrets[role]}"}
            may = role in (Role.ADMIN, Role.FRONT)

            def image() -> httpx.Response:
                return http.post("/upstream/models/ctr/image", headers=headers)  # noqa: B023

            if may:
                made = eventually(lambda: image().json().get("backup"), "the image")
                content = f"files/{made['files'][0]['xxh3']}-{made['files'][0]['bytes']}"
            answers = [
                http.get("/upstream/logs", headers=headers),
                http.get("/upstream/models/ctr/log?after=0&upto=1", headers=headers),
                http.get(f"/upstream/models/ctr/image/{content}?begin=0&count=1", headers=headers),
                image(),
            ]
            assert {answer.status_code for answer in answers} == {200 if may else 401 if role is None else 403}, role
        admin = {"Authorization": f"Bearer {secrets[Role.ADMIN]}"}
        for path, code in (
            ("models/nobody/log?after=0&upto=1", 404),
            ("models/ctr/log?after=0", 400),
            (f"models/ctr/image/{content}?begin=0&count=0", 400),
            (f"models/ctr/image/{content}?begin=0&count={1 << 40}", 400),
            ("models/ctr/image/files/0123456789abcdef-7?begin=0&count=1", 404),
            ("models/ctr/image/files/../../version.json?begin=0&count=1", 404),
        ):
            assert http.get(f"/upstream/{path}", headers=admin).status_code == code, path
        assert http.get("/upstream/models/ctr/log?after=0&upto=9000000000000000000", headers=admin).json() == {
            "digest": None
        }
    second = scene.node(peer=[first.url], upstream_token="wrong")
    await_problem(second, r"answers 401")
    assert not is_ready(second)
    second.stop()
    second.settings["upstream_token"] = secrets[Role.READER]
    second.start()
    await_problem(second, r"answers 403")
    second.stop()
    second.settings["upstream_token"] = secrets[Role.FRONT]
    second.start()
    await_ready(second)
    assert last(second) == 1
