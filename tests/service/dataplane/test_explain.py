"""Why a key is answered as it is, over HTTP, with the clients, and at a front of several nodes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import tierstore
from tests.engine import scenes
from tests.service.conftest import settings_for
from tests.service.scenes import delta, write_snapshot
from tests.service.upstream.scenes import COUNT, Scene, await_watermark
from tierstore.access.roles import Rates, Role
from tierstore.access.tokens import TokenFile
from tierstore.engine.store import Store
from tierstore.formats.keys import partition_of
from tierstore.service.admin.explain import MOST_BYTES, ExplainRequest
from tierstore.service.server import ServerThread
from tierstore.tiers.upstream.connections import UpstreamNode

Own = tuple[Store, ServerThread, httpx.Client]


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(tmp_path)
    yield scene
    scene.close()


def post(http: httpx.Client, **body: Any) -> httpx.Response:
    return http.post("/admin/models/ctr/explain", json=body)


def test_over_http_and_with_both_clients_as_in_process(own: Own, tmp_path: Path) -> None:
    store, server, http = own
    store.load_snapshot(write_snapshot(tmp_path, 1, delta_seq=3))
    store.apply_delta(delta(4, {1: 50.0}))
    keys = [1, 2, 10**12]
    expected = store.explain("ctr", "item_id", keys)
    assert [entry["state"] for entry in expected["keys"]] == ["present", "present", "never_there"]
    assert expected["keys"][0]["written"]["seq"] == 4

    def steady(document: dict[str, Any]) -> list[dict[str, Any]]:
        """Without what a fold in between changes."""
        names = ("key", "code", "found", "default", "row", "state", "written")
        return [{name: entry[name] for name in names} for entry in document["keys"]]

    answer = post(http, feature="item_id", keys=keys)
    assert (answer.status_code, steady(answer.json())) == (200, steady(expected))
    with tierstore.Client(server.url) as client:
        assert steady(client.explain("ctr", "item_id", keys, version="stable")) == steady(expected)

    async def both() -> dict[str, Any]:
        async with tierstore.AsyncClient(server.url) as client:
            return await client.explain("ctr", "item_id", keys)

    assert steady(asyncio.run(both())) == steady(expected)


def test_malformed_requests_are_refused(own: Own, tmp_path: Path) -> None:
    store, _, http = own
    store.load_snapshot(write_snapshot(tmp_path, 1))
    for body in (
        {},
        {"feature": "item_id"},
        {"feature": "item_id", "keys": []},
        {"feature": "item_id", "keys": list(range(101))},
        {"feature": "item_id", "keys": [1.5]},
        {"feature": "item_id", "keys": [True]},
        {"feature": "item_id", "keys": ["a"]},
        {"feature": "item_id", "keys": [2**63]},
        {"feature": "item_id", "keys": [None]},
        {"feature": "item_id", "keys": [1], "more": 1},
    ):
        assert post(http, **body).status_code == 400, body
    assert post(http, feature="nobody", keys=[1]).status_code == 404
    assert post(http, feature="item_id", keys=[1], version=9).status_code == 404
    assert http.post("/admin/models/nobody/explain", json={"feature": "f", "keys": [1]}).status_code == 404


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"feature": "item_id", "keys": [1, *[None] * 10_000]}, "keys"),
        ({"feature": "item_id", "keys": [1.5] * 10_000}, "keys"),
        ({"feature": "item_id", "keys": [1], **{f"x{i}": i for i in range(5000)}}, "x0"),
    ],
)
def test_of_thousands_of_faults_the_first_is_named(own: Own, tmp_path: Path, body: dict[str, Any], named: str) -> None:
    """All of them took the event loop half a second, on which health checks wait too."""
    store, _, http = own
    store.load_snapshot(write_snapshot(tmp_path, 1))
    refused = post(http, **body)
    assert (refused.status_code, named in refused.text, len(refused.content) < 1000) == (400, True, True)


def test_who_may_look_rows_up_may_ask_at_their_rate(tmp_path: Path) -> None:
    with Store(settings_for(tmp_path)) as store:
        store.load_snapshot(write_snapshot(tmp_path, 1))
        tokens = TokenFile(tmp_path / "data" / "tokens.json")
        secrets = {role: tokens.create(role)[1] for role in (Role.READER, Role.WRITER, Role.METRICS)}
        other = tokens.create(Role.READER, models=["other"])[1]
        slow = tokens.create(Role.READER, rates=Rates(keys=2.0))[1]
        with ServerThread(store) as server, httpx.Client(base_url=server.url) as http:

            def status(secret: str | None) -> int:
                headers = {} if secret is None else {"authorization": f"Bearer {secret}"}
                body = {"feature": "item_id", "keys": [1, 2, 3]}
                return http.post("/admin/models/ctr/explain", json=body, headers=headers).status_code

            assert [status(secrets[role]) for role in (Role.READER, Role.WRITER, Role.METRICS)] == [200, 200, 403]
            assert (status(other), status(None)) == (403, 401)
            assert [status(slow), status(slow)] == [200, 429]


@pytest.mark.parametrize("framing", ["length", "chunks"])
def test_a_body_is_bounded_and_charged_before_it_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, framing: str
) -> None:
    parsed: list[int] = []
    parse = ExplainRequest.model_validate_json
    monkeypatch.setattr(ExplainRequest, "model_validate_json", lambda body: parsed.append(len(body)) or parse(body))
    with Store(settings_for(tmp_path)) as store:
        store.load_snapshot(write_snapshot(tmp_path, 1))
        tokens = TokenFile(tmp_path / "data" / "tokens.json")
        secrets = {size: tokens.create(Role.READER, rates=Rates(nbytes=float(size)))[1] for size in (3000, 1 << 20)}
        with ServerThread(store) as server, httpx.Client(base_url=server.url) as http:

            def ask(secret: str, keys: list[Any], name: str = "item_id") -> httpx.Response:
                body = json.dumps({"feature": name, "keys": keys}).encode()
                content: Any = body if framing == "length" else iter([body[:100], body[100:]])
                headers = {"authorization": f"Bearer {secret}", "content-type": "application/json"}
                return http.post("/admin/models/ctr/explain", content=content, headers=headers)

            refused = ask(secrets[1 << 20], [1.5] * 150_000)
            assert refused.status_code == 413
            assert str(MOST_BYTES) in refused.text
            assert parsed == []
            assert [ask(secrets[3000], [1]).status_code, ask(secrets[3000], [1] * 2000).status_code] == [200, 400]
            assert len(parsed) == 2
            assert ask(secrets[3000], [1]).status_code == 429, "its bytes are used up by one that was wrong"
            assert len(parsed) == 2
            wrong = ask(secrets[1 << 20], [1.5] * 100)
            assert (wrong.status_code, wrong.headers["content-type"]) == (400, "application/problem+json")
            assert "body.keys.0" in wrong.json()["detail"]
            assert len(wrong.text) < 1000


# --- a front


def test_a_front_says_what_it_holds_and_what_the_owner_says(scene: Scene) -> None:
    scene.quarters()
    front = scene.front()
    scene.apply(scenes.stamped(1, {"item": [3]}, deletes={"item": [4]}))
    await_watermark(front, 1)
    keys = [3, 4, 500, 99_999]
    document = front.explain("ctr", "item_id", keys)
    written, deleted, old, never = document["keys"]
    assert [entry["state"] for entry in document["keys"]] == ["present", "deleted", "present", "never_there"]
    assert (written["written"]["seq"], deleted["written"]["seq"]) == (1, 1)
    assert (old["tier"], never["default"]) == ("remote", True)
    partitions = partition_of(scenes.np.array(keys), COUNT)
    for entry, partition in zip(document["keys"], partitions.tolist(), strict=True):
        assert entry["partition"] == {"number": partition, "count": COUNT, "own": True}
        assert entry["node"].rpartition(":")[2] == scene.nodes[partition // 2].url.rpartition(":")[2]
        assert entry["owner"]["tiers"]
    rows, found = front.model("ctr").lookup("item_id", keys, return_found=True)
    assert found.tolist() == [entry["found"] for entry in document["keys"]]
    assert [entry["row"] for entry in document["keys"]] == rows.tolist()
    warm = front.explain("ctr", "item_id", [500])["keys"][0]
    assert (warm["tier"], warm["agree"]) == ("host", True)


def test_a_front_shows_the_string_that_a_node_keeps(scene: Scene, tmp_path: Path) -> None:
    node = scene.node()
    with tierstore.SnapshotWriter(tmp_path / "words", model="words", version=1) as writer:
        writer.table("word", dim=1, key="string").write(["a", "b"], [[1.0], [2.0]])
        writer.feature("word", table="word")
    node.store.load_snapshot(tmp_path / "words")
    front = scene.front()
    scenes.eventually(lambda: "words" in front.models() and front.model("words").active_version == 1, "it follows", 60)
    shown = front.explain("words", "word", ["a", "never"])["keys"]
    assert [entry["string"] for entry in shown] == ["a", None]


def test_a_front_that_asks_changes_nothing_at_the_owner(scene: Scene) -> None:
    scene.node().load(1, 0)
    front = scene.front()

    def counts(store: Store) -> Any:
        table = store.status("ctr")["models"]["ctr"]["tables"]["item"]
        return {name: table[name] for name in ("lookup_keys", "host")}

    owner = scene.nodes[0].store

    def is_warm() -> bool:
        """The front has read the snapshot's 32 warm-up keys, and the owner has counted that."""
        return counts(front)["host"]["rows"] == 32 and sum(counts(owner)["lookup_keys"].values()) == 32

    scenes.eventually(is_warm, "the front is warm", 60)
    before = counts(front), counts(owner)
    for _ in range(3):
        front.explain("ctr", "item_id", [500, 501, 99_999])
    assert (counts(front), counts(owner)) == before


def test_a_node_asked_by_itself_says_which_keys_are_elsewhere(scene: Scene) -> None:
    node = scene.quarters()[0]
    entries = node.store.explain("ctr", "item_id", list(range(60)))["keys"]
    for entry in entries:
        assert entry["state"] == ("present" if entry["partition"]["number"] < 2 else "elsewhere")
    assert {entry["state"] for entry in entries} == {"present", "elsewhere"}


def test_where_the_owner_is_gone_memory_still_answers_and_the_others_are_unreadable(scene: Scene) -> None:
    scene.quarters()
    front = scene.front(remote_timeout_s=2.0)
    front.model("ctr").lookup("item_id", range(100, 200))
    for node in scene.nodes:
        node.stop()
    hot, cold = front.explain("ctr", "item_id", [150, 600])["keys"]
    assert (hot["tier"], hot["found"], hot["agree"]) == ("host", True, None)
    assert (cold["tier"], cold["state"], cold["found"], cold["default"]) == (None, "unreadable", False, False)
    assert any("error" in tier for tier in cold["tiers"])


def test_a_copy_of_the_owner_answers_in_its_place(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        scene.node().load(1, 0)
    front = scene.front()
    request, failing = UpstreamNode.request, str(front.placement.nodes.nodes[0])  # type: ignore[attr-defined]

    def broken(node: UpstreamNode, method: str, target: str, *given: Any, **more: Any) -> Any:
        if str(node) == failing and target.endswith("/explain"):
            raise tierstore.errors.RemoteUnavailable(f"{node} does not answer")
        return request(node, method, target, *given, **more)

    monkeypatch.setattr(UpstreamNode, "request", broken)
    (entry,) = front.explain("ctr", "item_id", [500])["keys"]
    assert (entry["state"], entry["node"]) == ("present", str(front.placement.nodes.nodes[1]))  # type: ignore[attr-defined]


def test_a_front_says_what_its_ssd_holds(scene: Scene) -> None:
    scene.node().load(1, 0)
    front = scene.front(ssd_cache="8MiB", host_budget="16KiB")
    front.model("ctr").lookup("item_id", [500])
    front.placement.followed.ssd_cache.drain()  # type: ignore[attr-defined]
    (entry,) = front.explain("ctr", "item_id", [500])["keys"]
    assert (entry["tier"], entry["agree"]) == ("ssd_cache", True)


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b'{"line": "x", "upto": 1}', b'{"line": "x", "upto": 1, "codes": []}',
     b'{"line": "x", "upto": 1, "codes": [99999999999999999999]}', b'{"line": "x", "upto": "y", "codes": [1]}'],
)  # fmt: skip
def test_what_no_front_sends_is_refused(own: Own, tmp_path: Path, body: bytes) -> None:
    store, _, http = own
    store.load_snapshot(write_snapshot(tmp_path, 1))
    answer = http.post("/upstream/models/ctr/versions/1/tables/item/explain", content=body)
    assert answer.status_code == 400, answer.text
    assert http.get("/upstream/models/ctr/versions/1/tables/item/explain").status_code == 405
