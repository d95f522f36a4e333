"""The ways that a front's requests go: through reactors, Python and TLS, to nodes that are there, or not yet."""

from __future__ import annotations

import time
from pathlib import Path

import httpx
import numpy as np
import pytest

import tierstore
from tests import int4_model
from tests.certificates import Authority
from tests.engine import scenes
from tests.service.conftest import settings_for
from tests.service.limits.test_rates import SLOW, statuses
from tests.service.reactor.test_reactor import reactor_answers
from tests.service.upstream.scenes import KEYS, NO_CACHE, Scene, Upstream, await_watermark, check, of_share
from tierstore.access.roles import NO_LIMITS, Rates, Role
from tierstore.access.tokens import TokenFile
from tierstore.errors import NotFound, RemoteUnavailable
from tierstore.service.server import ServerThread
from tierstore.tiers.upstream import wire
from tierstore.tiers.upstream.layout import ABSENT, FOREIGN, THERE


def warm(node: Upstream, items: np.ndarray) -> None:
    """Have its share of these in its memory, those that are absent as such."""
    for _ in range(2):
        node.store.model("ctr").lookup("item_id", of_share(items, node.own))


def counted(node: Upstream) -> tuple[int, dict[str, int]]:
    """(what its reactors have answered, the keys of `item` by tier)."""
    node.server.service.refresh()
    return reactor_answers(node.server), node.store.status()["models"]["ctr"]["tables"]["item"]["lookup_keys"]


def test_rows_of_four_bits_are_answered_as_documented_over_the_wire(scene: Scene) -> None:
    model, halves = int4_model.Model(), [scene.node((0, 3)), scene.node((4, 7))]
    snapshot = model.snapshot(scene.root / "snapshot")
    for node in halves:
        node.store.load_snapshot(snapshot)
    front = scene.front()
    with ServerThread(front) as server, tierstore.Client(server.url) as client:
        for seq in (1, 2):
            for _ in range(2):  # from the nodes, then from memory
                model.check(front.model("ctr"))
                model.check(client.model("ctr"))
            scene.apply(model.delta(seq))
            await_watermark(front, seq)
        model.check(client.model("ctr"))


def test_reactors_answer_for_rows_that_are_in_memory(scene: Scene) -> None:
    for own in ((0, 3), (4, 7)):
        node = scene.node(own)
        node.load(1, 0)
        warm(node, np.array([*KEYS, 5001, 5002]))
    front = scene.front(host_budget=NO_CACHE)
    check(front, "item", KEYS, 0)  # by Python, which tells the reactors how
    before = [counted(node) for node in scene.nodes]
    for _ in range(3):
        check(front, "item", KEYS, 0)
    after = [counted(node) for node in scene.nodes]
    assert [more - less for (less, _), (more, _) in zip(before, after, strict=True)] == [3] * 2
    assert sum(more["host"] - less["host"] for (_, less), (_, more) in zip(before, after, strict=True)) == 3 * len(KEYS)
    answered = httpx.get(f"{scene.nodes[0].url}/metrics").text
    count = 'tierstore_request_seconds_count{outcome="ok",protocol="upstream"} '
    assert float(answered.partition(count)[2].split()[0]) >= 4

    # a delta over the rows, and keys that are absent
    scene.apply(scenes.stamped(1, {"item": range(0, 1000, 2)}, deletes={"item": [1, 3]}))
    await_watermark(front, 1)
    check(front, "item", range(0, 1000, 2), 1)  # a dense part aside, the plan is that of before
    before = [counted(node) for node in scene.nodes]
    asked = np.array([0, 1, 2, 3, 5, 5001, 5002])
    rows, found = front.model("ctr").lookup("item_id", asked, return_found=True)
    assert found.tolist() == [True, False, True, False, True, False, False]
    np.testing.assert_array_equal(rows[[0, 2]], scenes.vectors("item", 1, [0, 2]))
    np.testing.assert_array_equal(rows[4:5], scenes.vectors("item", 0, [5]))
    assert not rows[[1, 3, 5, 6]].any()
    assert sum(counted(node)[0] for node in scene.nodes) > sum(answers for answers, _ in before)


class Asker:
    """Requests for rows of `item` to one node, by hand, with a token where there is one."""

    def __init__(self, node: Upstream, secret: str | None = None) -> None:
        headers = {} if secret is None else {"authorization": f"Bearer {secret}"}
        self.http = httpx.Client(base_url=node.url, timeout=60, headers=headers)
        state = self.http.get("/upstream/models", params={"front": "test", "serves": "{}"}).json()
        self.line = state["models"]["ctr"]["versions"]["1"]["line"]

    def __call__(self, codes: object, *, upto: int = 0, floor: int = 0, line: str = "") -> httpx.Response:
        request = wire.RowsRequest(upto, floor, line or self.line, np.asarray(codes, np.int64))
        return self.http.post(wire.rows_path("ctr", 1, "item"), content=wire.encode_request(request))


def test_reactors_and_python_answer_alike(scene: Scene) -> None:
    node = scene.node((0, 3))
    node.load(1, 0)
    warm(node, np.array([*KEYS, 7000, 7001, 7002, 7003]))
    ask = Asker(node)
    batches = [[], [5], [*KEYS, 7000, 7001, 7002, 7003], [7000, 7001, 7002, 7003], range(500, 600)]
    plans, node.server.service.plans = node.server.service.plans, None  # nothing is learned
    by_python = [ask(codes) for codes in batches]
    assert {answer.status_code for answer in by_python} == {200}
    assert reactor_answers(node.server) == 0
    node.server.service.plans = plans
    assert ask([]).status_code == 200  # learned now
    for codes, before in zip(batches, by_python, strict=True):
        assert ask(codes).content == before.content
    assert reactor_answers(node.server) == len(batches)
    states = np.frombuffer(by_python[2].content, np.uint8)[16 : 16 + len(KEYS) + 4]
    assert set(states.tolist()) == {THERE, ABSENT, FOREIGN}
    assert ask([2, 1]).status_code == 400
    assert ask([1, 1]).status_code == 400
    assert ask([5], line="x" * 16).status_code == 404
    assert ask([5], floor=1).status_code == 409
    # as of a view that is not the newest any more
    was = ask(range(50)).content
    node.store.apply_delta(scenes.stamped(1, {"item": range(50)}))
    assert ask(range(50)).content == was
    now = ask(range(50), upto=1)
    assert int.from_bytes(now.content[:8], "little") == 1
    assert now.content != was


def test_what_fronts_ask_is_for_fronts_alone_whoever_has_asked_before(scene: Scene) -> None:
    tokens = TokenFile(scene.root / "node-0/tokens.json")
    secrets = {role: tokens.create(role)[1] for role in Role}
    node = scene.node()
    node.load(1, 0)
    warm(node, np.array(KEYS))
    asks = {role: Asker(node, secrets[role]) for role in (Role.FRONT, Role.ADMIN)}
    assert asks[Role.FRONT](KEYS).status_code == 200  # by Python, which tells the reactors how
    for ask in asks.values():
        ask(KEYS)  # each is known from its first request on
        before = reactor_answers(node.server)
        assert [ask(KEYS).status_code for _ in range(3)] == [200] * 3
        assert reactor_answers(node.server) == before + 3
    for role in (Role.READER, Role.WRITER):
        front = asks[Role.FRONT]
        front.http.headers["authorization"] = f"Bearer {secrets[role]}"
        before = reactor_answers(node.server)
        assert statuses(node.server, "ctr", {"authorization": front.http.headers["authorization"]}) == [200] * 6
        assert reactor_answers(node.server) >= before + 4, "reactors know its token"
        for _ in range(3):
            refused = front(KEYS)
            assert (refused.status_code, refused.json()["error"]) == (
                403,
                f"{tokens_name(tokens, role)} has the role {role}: this takes front or admin",
            )
        ghost = front.http.get("/upstream/models", params={"front": "ghost", "serves": '{"ctr": [1, 0]}'})
        assert ghost.status_code == 403


def test_requests_for_rows_count_however_they_are_answered(scene: Scene) -> None:
    """By those who ask, and by models."""
    tokens = TokenFile(scene.root / "node-0/tokens.json")
    rates = {"free": NO_LIMITS, "asks": Rates(requests=SLOW), "keys": Rates(keys=SLOW), "bytes": Rates(nbytes=SLOW)}
    secrets = {name: tokens.create(Role.FRONT, rates=of)[1] for name, of in rates.items()}
    node = scene.node()
    node.load(1, 0)
    many = range(3000)
    for name, secret in secrets.items():
        ask = Asker(node, secret)
        expected = [200] * 4 if name == "free" else [200] + [429] * 3
        assert [ask(KEYS).status_code for _ in range(4)] == expected, name
        refused = ask(many)
        assert refused.status_code == expected[-1], name
        assert name == "free" or int(refused.headers["retry-after"]) > 60
    for codes in ([5], many):
        limited = scene.node(quotas={"ctr": {"keys_per_second": SLOW}})
        limited.load(1, 0)
        warm(limited, np.array(codes))
        ask = Asker(limited)
        assert [ask(codes).status_code for _ in range(4)] == [200] + [429] * 3
        assert reactor_answers(limited.server) == 0


def tokens_name(tokens: TokenFile, role: Role) -> str:
    return next(token.principal.name for token in tokens.tokens() if token.role is role)


def test_a_front_that_has_heard_of_no_node_says_so(scene: Scene) -> None:
    node, other = scene.node(), scene.node()
    for each in scene.nodes:
        each.load(1, 0)
        each.stop()
    front = scene.front()
    settings = settings_for(scene.root, data=front.settings.data, grpc_port="off")
    with ServerThread(front, settings) as server, httpx.Client(base_url=server.url, timeout=60) as http:
        with pytest.raises(RemoteUnavailable, match=rf"no node upstream has answered yet: .*:{node.port}"):
            front.model("ctr")
        asked = http.post("/v2/models/ctr/infer", json={"inputs": []})
        assert (asked.status_code, "no node upstream has answered yet" in asked.text) == (503, True)
        assert http.get("/v2/health/ready").status_code == 400
        node.start()
        scenes.eventually(lambda: http.get("/v2/health/ready").status_code == 200, "it is ready: a model is served")
        check(front, "item", range(32), 0)
        with pytest.raises(RemoteUnavailable, match=rf"not every node upstream has answered yet: .*:{other.port}"):
            front.model("another")
        other.start()

        def all_heard() -> bool:
            with pytest.raises((RemoteUnavailable, NotFound)) as raised:
                front.model("another")
            return raised.type is NotFound

        scenes.eventually(all_heard, "there is no such model")
        assert http.get("/v2/health/ready").status_code == 200


def test_a_front_of_nodes_that_have_no_model_is_ready(scene: Scene) -> None:
    scene.node()
    front = scene.front()
    with pytest.raises(NotFound, match="no model 'ctr'; there is none yet"):
        front.model("ctr")
    with ServerThread(front, settings_for(scene.root, data=front.settings.data, grpc_port="off")) as server:
        assert httpx.get(f"{server.url}/v2/health/ready").status_code == 200


@pytest.mark.thorough
def test_rows_come_over_tls_from_nodes_with_a_certificate_of_the_authority(scene: Scene) -> None:
    authority, other = Authority(scene.root), Authority(scene.root, "another")
    own = authority.issue("node", "IP:127.0.0.1")
    for at in (0, 4):
        scene.node((at, at + 3), tls_cert=own.cert, tls_key=own.key).load(1, 0)
    plain = scene.node()
    plain.load(1, 0)  # a copy without TLS beside them
    assert [node.url.partition(":")[0] for node in scene.nodes] == ["https", "https", "http"]
    front = scene.front(host_budget=NO_CACHE, upstream_ca=authority.ca)
    for _ in range(2):
        check(front, "item", KEYS, 0)
    plain.stop()
    check(front, "user", range(500), 0)
    stranger = scene.front(upstream_ca=other.ca)
    with pytest.raises(RemoteUnavailable, match=r"(?i)certificate"):
        stranger.model("ctr")


def test_rows_with_a_ttl_expire_on_the_nodes_and_a_front_looks_for_no_times(scene: Scene, tmp_path: Path) -> None:
    with tierstore.SnapshotWriter(tmp_path / "ttl", model="ctr", version=1) as writer:
        table = writer.table("user", dim=4, ttl_s="30d", time_column="seen")
        table.write(np.arange(9), np.ones((9, 4), np.float32), np.full(9, int(time.time())))
        writer.feature("user_id", table="user")
    node = scene.node()
    node.store.load_snapshot(tmp_path / "ttl")
    assert node.store.model("ctr").served.active.open_version.info.times_ids  # type: ignore[union-attr]
    front = scene.front()
    front.model("ctr").housekeeping.tasks.run()
    assert front.status()["problems"] == []
    assert front.model("ctr").lookup("user_id", [3], return_found=True)[1].all()
