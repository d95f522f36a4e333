"""A node that fetches from a peer the deltas that it lacks."""

from __future__ import annotations

import json
import re
import struct
from typing import Any

import httpx
import numpy as np
import pytest

import tierstore
from tests.engine import scenes
from tierstore.config import load_settings
from tierstore.engine.operations.from_peers import follow_undone
from tierstore.errors import ConfigError
from tierstore.service.server import check_settings
from tierstore.service.sources import peers
from tools.raw_server import RawServer, http_answer, is_whole_http

from ..conftest import eventually
from ..upstream.scenes import Scene
from .peer_scenes import (
    assert_equal,
    assert_problem_is_in_the_status_of,
    audit,
    await_problem,
    await_ready,
    await_undone,
    digests,
    last,
    rows,
    stamped,
    status,
    two,
)


def test_a_node_that_comes_back_fetches_the_deltas_that_it_lacks(scene: Scene) -> None:
    first, second = two(scene, 2)
    for seq in range(3, 8):
        first.store.apply_delta(stamped(seq))
    second.start()
    await_ready(second)
    assert_equal(first, second)
    assert digests(first) == digests(second)
    assert status(second)["applied"] == 5
    for seq in range(8, 11):  # and from then on
        first.store.apply_delta(stamped(seq))
    eventually(lambda: last(second) == 10, "later deltas are here")
    assert_equal(first, second)
    assert status(second)["problems"] == []
    assert "tierstore_peer_deltas_total 8.0" in httpx.get(f"{second.url}/metrics").text
    lines = (second.data / "audit/deltas.jsonl").read_text()
    assert lines.count('"who": "peer"') == 8


@pytest.mark.thorough
def test_deltas_from_a_peer_and_from_a_producer_are_applied_once_each(scene: Scene) -> None:
    first, second = two(scene, 0)
    second.start()
    await_ready(second)
    for seq in range(1, 40):
        first.store.apply_delta(data := stamped(seq))
        while last(second) < seq - 1:  # what a producer does that is told which delta is expected
            pass
        second.store.apply_delta(data)
    assert_equal(first, second)
    assert digests(first) == digests(second)
    assert status(second)["problems"] == []


@pytest.mark.thorough
@pytest.mark.parametrize("had", [6, 8, 9])
def test_what_the_peer_has_undone_is_undone(scene: Scene, had: int) -> None:
    """The peer has gone back from 9 to 6; the node was away since it had some of the undone deltas, or none."""
    first, second = two(scene, had)
    for seq in range(had + 1, 10):
        first.store.apply_delta(stamped(seq))
    first.store.rollback("ctr", to_seq=6)
    for seq in (10, 11):
        first.store.apply_delta(stamped(seq))
    second.start()
    await_ready(second)
    eventually(lambda: last(second) == 11, "all deltas")
    assert_equal(first, second)
    assert digests(first) == digests(second)
    assert second.store.status("ctr")["models"]["ctr"]["undone"] == [[7, 9]]
    # built again only where it served what is undone
    assert (second.data / "models/ctr/1.1").exists() is (had > 6)
    second.stop()
    second.start()
    assert_equal(first, second)


@pytest.mark.thorough
def test_rollbacks_are_followed_while_both_serve(scene: Scene) -> None:
    first, second = two(scene, 4)
    second.start()
    await_ready(second)
    for to in (3, 1, 2):
        first.store.rollback("ctr", to_seq=to)
        await_undone(second, [to + 1, 4])
        assert_equal(first, second)
    for seq in (5, 6):
        first.store.apply_delta(stamped(seq))
    eventually(lambda: last(second) == 6, "all deltas")
    first.store.rollback("ctr", to_seq=5)
    await_undone(second, [3, 4], [6, 6])
    assert_equal(first, second)
    assert status(second)["problems"] == []
    assert [line["what"] for line in audit(second) if line["who"] == "peer"] == ["rollback"] * 4


@pytest.mark.thorough
def test_an_undone_delta_of_which_the_node_hears_before_it_has_it_is_not_taken_from_a_producer(scene: Scene) -> None:
    first, second = two(scene, 1)
    second.start()
    await_ready(second)
    follow_undone(second.store.model("ctr"), ((2, 4),))  # as where the peer is lost right after that
    second.store.apply_delta(stamped(2))
    with pytest.raises(tierstore.errors.Conflict, match=r"deltas 3 to 4 .* undone on the peer .* or roll back to 2"):
        second.store.apply_delta(stamped(3))
    second.store.rollback("ctr", to_seq=2)
    assert second.store.apply_delta(stamped(3)).applied
    assert first.store.status("ctr")["models"]["ctr"]["undone"] == []


@pytest.mark.thorough
def test_a_rollback_here_is_not_turned_back_by_a_peer_that_has_not_done_it(scene: Scene) -> None:
    first, second = two(scene, 4)
    second.start()
    await_ready(second)
    second.store.rollback("ctr", to_seq=2)
    before = rows(second)
    first.store.apply_delta(stamped(5))
    await_problem(
        second, r"its rollbacks of 'ctr' are others than here: it went back nowhere, and this node from 4 to 2"
    )
    np.testing.assert_array_equal(before["item"][0], rows(second)["item"][0])
    assert last(second) == 4


def test_a_peer_of_another_lineage_is_refused_and_named(scene: Scene) -> None:
    first, second = two(scene, 2)
    for seq in range(3, 12):
        first.store.apply_delta(stamped(seq))
    second.settings = {}
    second.start()
    for seq in range(3, 9):
        second.store.apply_delta(stamped(seq) if seq != 5 else scenes.stamped(5, {"item": [1]}))
    before, held = rows(second), digests(second)
    second.stop()
    second.settings = {"peer": [first.url]}
    second.start()
    text = await_problem(second, r"delta 5 of 'ctr' is another one there than here")
    assert first.url in text
    assert_problem_is_in_the_status_of(second, text)
    await_ready(second)  # it serves what it has
    assert digests(second) == held
    np.testing.assert_array_equal(before["item"][0], rows(second)["item"][0])


@pytest.mark.thorough
def test_the_peer_that_is_right_is_taken_where_another_one_is_not(scene: Scene) -> None:
    right, second = two(scene, 2)
    wrong = scene.node()
    wrong.load(1, 0)
    for seq in range(1, 9):
        wrong.store.apply_delta(scenes.stamped(seq, {"item": [seq]}))
    right.store.apply_delta(stamped(3))
    second.settings = {"peer": [wrong.url, "http://127.0.0.1:9", right.url]}
    second.start()
    await_ready(second)
    assert_equal(right, second)
    assert last(second) == 3
    problems = status(second)["problems"]
    assert [re.sub(r"(?<=:)\d+", "N", text.split(": ")[0]) for text in problems] == [
        "http://127.0.0.1:N does not answer",
        "http://127.0.0.1:N",
    ]


@pytest.mark.thorough
def test_a_peer_that_is_behind_changes_nothing(scene: Scene) -> None:
    first, second = two(scene, 2)
    second.settings = {}
    second.start()
    for seq in (3, 4):
        second.store.apply_delta(stamped(seq))
    second.stop()
    second.settings = {"peer": [first.url]}
    second.start()
    await_ready(second)
    assert (last(first), last(second)) == (2, 4)
    assert status(second)["problems"] == []


@pytest.mark.thorough
def test_deltas_that_the_peer_has_forgotten_are_named(scene: Scene) -> None:
    first, second = two(scene, 2)
    for seq in range(3, 7):
        first.store.apply_delta(stamped(seq))
    eventually(lambda: first.store.status("ctr")["models"]["ctr"]["folded_watermark"] == 6, "all is folded")
    with first.store.model("ctr").state.live.write:
        first.store.model("ctr").state.log.prune(4)
    second.start()
    text = await_problem(second, "lacks delta 3, and the log of .* begins after 4")
    assert f"move {second.data / 'models/ctr'} away" in text
    await_ready(second)
    assert last(second) == 2
    # and what it says helps
    second.stop()
    (second.data / "models/ctr").rename(scene.root / "moved")
    second.start()
    await_ready(second)
    assert_equal(first, second)


@pytest.mark.thorough
def test_a_peer_that_is_down_keeps_no_node_with_models_from_serving(scene: Scene) -> None:
    first, second = two(scene, 1)
    first.store.apply_delta(stamped(2))
    first.stop()
    second.start()
    await_ready(second)
    assert last(second) == 1
    text = await_problem(second, "does not answer")
    assert first.url in text
    first.start()
    eventually(lambda: last(second) == 2, "it goes on trying")
    assert_equal(first, second)
    eventually(lambda: not status(second)["problems"], "no problem any more")


@pytest.mark.thorough
def test_a_peer_that_answers_and_gives_nothing_keeps_a_node_from_serving_for_a_time_alone(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "PATIENCE_S", 1.0)
    first, second = two(scene, 1)
    first.store.apply_delta(stamped(2))
    monkeypatch.setattr(peers.Peer, "deltas", lambda *_: [])
    second.start()
    await_problem(second, "does not give delta 2 of 'ctr'")
    await_ready(second)
    assert last(second) == 1
    monkeypatch.undo()
    eventually(lambda: last(second) == 2, "it goes on trying")


@pytest.mark.thorough
def test_nodes_that_name_each_other_and_themselves_become_ready(scene: Scene) -> None:
    first = scene.node()
    third = scene.node()
    third.load(1, 0)
    urls = [first.url, third.url]
    second = scene.node(peer=urls)
    await_ready(second)
    first.stop()
    first.settings = {"peer": [first.url, second.url, third.url]}
    second.stop()
    second.settings = {"peer": [first.url, second.url]}
    first.start()
    second.start()
    await_ready(first)
    await_ready(second)
    assert_equal(first, third)
    first.store.apply_delta(stamped(1))
    eventually(lambda: last(second) == 1, "it goes round")


@pytest.mark.thorough
def test_deltas_that_are_damaged_on_their_way_are_fetched_again(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = two(scene, 1)
    for seq in range(2, 5):
        first.store.apply_delta(stamped(seq))
    from tierstore.engine.deltas.log import DeltaLog

    read, failed = DeltaLog.read, []

    def damaged(self: DeltaLog, seq: int) -> bytes:
        data = read(self, seq)
        if self is first.store.model("ctr").log and seq == 3 and not failed:
            failed.append(seq)
            return data[:100] + bytes([data[100] ^ 1]) + data[101:]
        return data

    monkeypatch.setattr(DeltaLog, "read", damaged)
    second.start()
    await_ready(second)
    assert failed == [3]
    assert_equal(first, second)
    assert digests(first) == digests(second)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"peer": "a:8000"}, "peer: expected addresses of nodes such as"),
        ({"peer": "http://u:p@a:8000"}, "peer: expected addresses such as .* got a user or a password"),
        ({"peer": "http://a", "upstream": "http://b"}, "peer: this node's rows are on other machines"),
        ({"peer": "http://a", "remote": "redis://b"}, "peer: this node's rows are on other machines"),
        (
            {"peer": "http://a", "kafka": "b:1", "kafka_rows": "t=m/t"},
            "peer and kafka_rows: each node makes deltas of its own",
        ),
        ({"peer": "http://a", "upstream_token": "x"}, "upstream_token: "),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], why: str) -> None:
    pytest.importorskip("confluent_kafka") if "kafka" in settings else None
    with pytest.raises(ConfigError, match=why):
        check_settings(load_settings(None, **settings))


INFINITE = b'{"node": "x", "copying": false, "models": {"ctr": {"active": 1, "start": 0, "last": Infinity, "damage": null, "rollbacks": []}}}'
NONSENSE = {
    "a number that is none": http_answer(INFINITE),
    "deep": http_answer(b"[" * 100_000),
    "a length": b"HTTP/1.1 200 OK\r\nContent-Length: 999999999999999999\r\n\r\n",
    "another kind": http_answer(b"[1]"),
}


@pytest.mark.parametrize("answer", NONSENSE.values(), ids=NONSENSE)
def test_a_peer_that_answers_nonsense_keeps_no_new_node_from_its_other_peers(scene: Scene, answer: bytes) -> None:
    first = scene.node()
    first.load(1, 0)
    first.store.apply_delta(stamped(1))
    with RawServer(lambda _: answer, is_whole_http) as bad:
        url = f"http://127.0.0.1:{bad.port}"
        second = scene.node(peer=[url, first.url])
        await_ready(second)
        assert_equal(first, second)
        assert url in await_problem(second, url)
        first.store.apply_delta(stamped(2))
        eventually(lambda: last(second) == 2, "later deltas come")
        second.stop()


def test_a_peer_that_causes_what_nobody_expected_is_named_and_the_others_are_followed(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = scene.node()
    first.load(1, 0)
    third = scene.node()
    third.load(1, 0)
    ask = peers.Peer.logs

    def fails(peer: peers.Peer) -> object:
        if str(peer) == third.url:
            raise MemoryError
        return ask(peer)

    monkeypatch.setattr(peers.Peer, "logs", fails)
    second = scene.node(peer=[third.url, first.url])
    await_ready(second)
    assert await_problem(second, "internal error").startswith(third.url)
    first.store.apply_delta(stamped(1))
    eventually(lambda: last(second) == 1, "deltas of the other one come")


@pytest.mark.parametrize("question", ["deltas", "image"])
def test_a_peer_that_has_what_it_does_not_give_keeps_nobody_from_the_others(scene: Scene, question: str) -> None:
    """Its logs are sound, and what is fetched then is not."""
    first = scene.node()
    first.load(1, 0)
    for seq in (1, 2):
        first.store.apply_delta(stamped(seq))
    logs = {"active": 1, "start": 0, "last": 9, "damage": None, "rollbacks": []}
    document = http_answer(json.dumps({"node": "x", "copying": False, "models": {"ctr": logs}}).encode())
    bad_entry = http_answer(struct.pack("<qq", 3, -32) + b"0" * 16)

    def answer(request: bytes) -> bytes:
        line = request.split(b"\r\n")[0]
        if b"/logs" in line:
            return document
        if b"/log?" in line:
            after, upto = (int(one) for one in re.findall(rb"(?:after|upto)=(\d+)", line))
            held = first.store.model("ctr").log.digest_of(after, upto)
            return http_answer(json.dumps({"digest": held}).encode())
        return bad_entry

    with RawServer(answer, is_whole_http) as bad:
        url = f"http://127.0.0.1:{bad.port}"
        second = scene.node() if question == "deltas" else scene.node(peer=[url, first.url])
        if question == "deltas":
            second.load(1, 0)
            second.stop()
            second.settings["peer"] = [url, first.url]
            second.start()
        eventually(
            lambda: "ctr" in second.store.models() and last(second) == 2, f"what the other one has; {status(second)}"
        )
        assert_equal(first, second)
        await_problem(second, f"{url}.*whole deltas")
        second.stop()
