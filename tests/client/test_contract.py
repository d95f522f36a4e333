"""What both clients promise about answers: whole or in parts, predictions, versions, documents."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
import pytest

from tests.client.conftest import Make, same
from tests.client.fake_service import Act, FakeService, rows, sums
from tierstore.client import AsyncClient
from tierstore.errors import (
    InvalidInput,
    NotFound,
    NotReady,
    SnapshotError,
    TierstoreError,
)

QUICK = {"backoff_s": 0.001}


# --- whole and in shards


@pytest.mark.parametrize("n", [0, 1, 95, 20_000])
@pytest.mark.parametrize("split_keys", [10_000, None])
def test_rows_come_in_the_order_of_the_keys(make: Make, service: FakeService, n: int, split_keys: int | None) -> None:
    keys = np.arange(n)
    got, found = make(service.url, split_keys=split_keys).lookup("m", "f", keys, return_found=True)
    same(got, rows(keys))
    same(found, np.ones(n, bool))
    assert len(service.seen) == (2 if n > 10_000 and split_keys else 1)
    assert got.flags.writeable
    assert got.flags.c_contiguous
    assert got.flags.aligned


def test_shards_are_of_one_size_and_one_request(make: Make, service: FakeService) -> None:
    keys = np.arange(95)
    same(make(service.url, split_keys=10).lookup("m", "f", keys), rows(keys))
    assert sorted(len(seen.tensors["f"]) for seen in service.seen) == [5] + [10] * 9
    ids = {seen.headers["x-request-id"] for seen in service.seen}
    assert len(ids) == 1
    assert ids != {""}
    assert service.connections <= 4


def test_every_request_has_an_id_of_its_own_or_the_callers(make: Make, service: FakeService) -> None:
    client = make(service.url)
    for _ in range(2):
        client.lookup("m", "f", [1])
    client.lookup("m", "f", [1], request_id="user-7")
    ids = [seen.headers["x-request-id"] for seen in service.seen]
    assert ids[0] != ids[1]
    assert ids[2] == "user-7"
    with pytest.raises(InvalidInput, match="request_id"):
        client.lookup("m", "f", [1], request_id="a\r\nb")


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        (7, "expected a sequence of integer or string keys, got a single int"),
        ("seven", "got a single str"),
        ({7, 8}, "got a set, which has no order"),
        ({7: 8}, "got a dict, which has no order"),
        (None, "got NoneType"),
    ],
)
def test_what_is_no_sequence_of_keys_is_refused_by_name(
    make: Make, service: FakeService, keys: Any, reason: str
) -> None:
    client = make(service.url)
    for call in (lambda: client.lookup("m", "f", keys), lambda: client.lookup_many("m", {"f": keys})):
        with pytest.raises(InvalidInput, match=reason):
            call()
    assert service.seen == []


def test_bags_are_cut_between_bags(make: Make, service: FakeService) -> None:
    rng = np.random.default_rng(0)
    keys, weights = rng.integers(0, 50, 300), rng.random(300).astype(np.float32)
    offsets = np.sort(np.append(0, rng.integers(0, 301, 40)))
    client = make(service.url, split_keys=40)
    got, found = client.lookup_bags("m", "bag", keys, offsets, weights=weights, return_found=True)
    np.testing.assert_allclose(got, sums(keys, offsets, weights), rtol=1e-5)
    assert len(found) == 300
    assert len(service.seen) > 4


def test_many_features_and_bags_are_one_request(make: Make, service: FakeService) -> None:
    f, keys, offsets = np.arange(7), np.arange(10), np.array([0, 4, 4])
    client = make(service.url)
    got = client.lookup_many("m", {"user": [3], "f": f, "bag": (keys, offsets, np.full(10, 0.5))}, return_found=True)
    same(got["user"][0], rows(np.array([3])))
    same(got["f"][0], rows(f))
    same(got["bag"][0], sums(keys, offsets, np.full(10, 0.5, np.float32)))
    assert [len(got[name][1]) for name in ("user", "f", "bag")] == [1, 7, 10]
    assert len(service.seen) == 1
    got = client.lookup_many("m", {"bag": (keys, offsets)})
    same(got["bag"], sums(keys, offsets, None))


class Jagged:
    """The faces of TorchRec's JaggedTensor: offsets have an end."""

    def __init__(self, keys: Any, offsets: Any, weights: Any = None) -> None:
        self._parts = keys, offsets, weights

    def values(self) -> Any:
        return self._parts[0]

    def offsets(self) -> Any:
        return self._parts[1]

    def weights_or_none(self) -> Any:
        return self._parts[2]


class KeyedJagged(Jagged):
    def to_dict(self) -> dict[str, Any]:
        return {"bag": Jagged(*self._parts)}


def test_a_jagged_tensor_is_as_many_bags_as_it_has(make: Make, service: FakeService) -> None:
    keys, ends = np.arange(10), np.array([0, 4, 4, 10])
    client = make(service.url)
    for weights in (None, np.full(10, 0.5, np.float32)):
        wanted = sums(keys, ends[:-1], weights)
        jagged = KeyedJagged(keys, ends, weights)
        same(client.lookup_many("m", jagged.to_dict())["bag"], wanted)
        got = client.predict("m", {**jagged.to_dict(), "hour": np.zeros(3, np.float32)})
        same(got, wanted[:, 0])
    for verb in (client.lookup_many, client.predict):
        with pytest.raises(InvalidInput, match=r"'bag': offsets with an end: expected 10 as the last.*got 4"):
            verb("m", {"bag": Jagged(keys, ends[:-1])})
        with pytest.raises(InvalidInput, match=r"'bag': expected the JaggedTensor of one feature.*to_dict\(\)"):
            verb("m", {"bag": jagged})


def test_many_features_are_cut_each_by_itself(make: Make, service: FakeService) -> None:
    f, keys, offsets = np.arange(70), np.arange(50), np.arange(0, 50, 5)
    client = make(service.url, split_keys=20)
    got = client.lookup_many("m", {"user": [3], "f": f, "bag": (keys, offsets)}, return_found=True)
    same(got["user"][0], rows(np.array([3])))
    same(got["f"][0], rows(f))
    same(got["f"][1], np.ones(70, bool))
    same(got["bag"][0], sums(keys, offsets, None))
    same(got["bag"][1], np.ones(50, bool))
    assert len(service.seen) >= 6
    assert (
        max(sum(tensor.size for name, tensor in seen.tensors.items() if "." not in name) for seen in service.seen) <= 20
    )


# --- predict


def ranking(n: int) -> tuple[dict[str, Any], np.ndarray]:
    """A request that ranks n items for one user, and its scores."""
    f, keys, offsets = np.arange(n), np.arange(2 * n), np.arange(0, 2 * n, 2)
    hour = np.linspace(0, 1, n)
    score = (f + sums(keys, offsets, None)[:, 0] + 5).astype(np.float32) + hour.astype(np.float32)
    inputs = {"f": f, "bag": (keys, offsets), "user": [5], "hour": hour, "scale": [2.0]}
    return inputs, score * 2


@pytest.mark.parametrize("split_items", [200, 7, None])
def test_scores_are_the_same_in_one_request_and_in_shards(
    make: Make, service: FakeService, split_items: int | None
) -> None:
    inputs, expected = ranking(700)
    scores = make(service.url, split_items=split_items).predict("m", inputs)
    np.testing.assert_allclose(scores, expected, rtol=1e-6)
    assert scores.dtype == np.float32
    shards = 1 if split_items is None else -(-700 // split_items)
    assert len(service.seen) == shards
    assert len({seen.headers["x-request-id"] for seen in service.seen}) == 1
    for seen in service.seen:
        assert seen.tensors["user"].tolist() == [5]
        assert seen.tensors["scale"].tolist() == [2.0]
        assert seen.tensors["hour"].dtype == np.float32
        assert len(seen.tensors["f"]) == len(seen.tensors["bag.offsets"]) <= (split_items or 700)


def test_named_outputs_come_by_name_and_one_users_rows_come_once(make: Make, service: FakeService) -> None:
    inputs, expected = ranking(50)
    got = make(service.url, split_items=20).predict("m", inputs, outputs=["score", "user", "user.found", "bag.found"])
    np.testing.assert_allclose(got["score"], expected, rtol=1e-6)
    same(got["user"], rows(np.array([5])))
    same(got["user.found"], np.array([True]))
    same(got["bag.found"], np.ones(100, bool))
    assert len(service.seen) == 3


def test_an_output_without_the_batch_dimension_is_requested_whole(make: Make, service: FakeService) -> None:
    inputs, expected = ranking(50)
    client = make(service.url, split_items=20)
    for requests in (4, 5):  # the second time it is known
        got = client.predict("m", inputs, outputs=["total"])["total"]
        np.testing.assert_allclose(got, [expected.sum()], rtol=1e-5)
        assert len(service.seen) == requests


def test_one_call_may_be_kept_whole(make: Make, service: FakeService) -> None:
    inputs, _ = ranking(50)
    make(service.url, split_items=20).predict("m", inputs, split_items=None)
    assert len(service.seen) == 1


def test_offsets_and_weights_may_be_inputs_of_their_own(make: Make, service: FakeService) -> None:
    inputs = {"bag": [1, 2, 3], "bag.offsets": [0, 2], "bag.weights": [1.0, 2.0, 0.5], "hour": [0.0, 0.0]}
    np.testing.assert_allclose(make(service.url, split_items=1).predict("m", inputs), [5.0, 1.5])
    assert len(service.seen) == 2


@pytest.mark.parametrize(
    ("inputs", "match"),
    [
        ({}, "by name"),
        ({"hour": ["a"]}, "FP32"),
        ({"f": [1.5]}, "INT64"),
        ({"f": [1], "bag": ([1], [5])}, "offsets"),
        ({"bag": ([1], [0], [1.0], 4)}, "tuple of 4"),
    ],
)
def test_inputs_that_are_none_are_refused(make: Make, service: FakeService, inputs: dict[str, Any], match: str) -> None:
    with pytest.raises(InvalidInput, match=match):
        make(service.url).predict("m", inputs)


# --- versions


def test_a_version_or_label_is_requested_by_path(make: Make, service: FakeService) -> None:
    client = make(service.url)
    client.lookup("m", "f", [1], version="canary")
    client.lookup_many("m", {"f": [1]}, version=1)
    client.lookup_bags("m", "bag", [1], [0], version="1")
    client.predict("m", {"f": [1], "hour": [0]}, version="stable")
    assert [seen.path for seen in service.seen] == [
        "/v2/models/m/versions/canary/infer",
        "/v2/models/m/versions/1/infer",
        "/v2/models/m/versions/1/infer",
        "/v2/models/m/versions/stable/infer",
    ]


def test_shards_of_two_versions_are_never_put_together(make: Make, service: FakeService) -> None:
    service.script = [Act(version=1), Act(version=2)]
    service.version = 2
    same(make(service.url, split_keys=10, parallel=1).lookup("m", "f", np.arange(40)), rows(np.arange(40)))
    assert [seen.path for seen in service.seen] == ["/v2/models/m/infer"] * 4 + ["/v2/models/m/versions/2/infer"] * 4


def test_a_version_that_is_gone_again_is_not_insisted_on(make: Make, service: FakeService) -> None:
    service.script = [Act(version=1), Act(version=2)]
    service.version = 3
    client = make(service.url, split_keys=20, parallel=1)
    same(client.lookup("m", "f", np.arange(40)), rows(np.arange(40)))
    paths = [seen.path for seen in service.seen]
    assert paths[:3] == ["/v2/models/m/infer"] * 2 + ["/v2/models/m/versions/2/infer"]
    assert paths[-2:] == ["/v2/models/m/infer"] * 2


def test_a_model_that_switches_again_and_again_is_not_ready(make: Make, service: FakeService) -> None:
    service.script = [Act(version=number) for number in range(1, 40)]
    with pytest.raises(NotReady, match="changed its version"):
        make(service.url, split_keys=20).lookup("m", "f", np.arange(40))


# --- documents


def test_a_load_is_followed_to_its_end(make: Make, service: FakeService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tierstore.client.operations.POLL_S", (0.001, 0.001))
    documents = iter(
        [
            {"state": "running", "phase": "queued", "done": 0, "total": 0},
            {"state": "running", "phase": "read", "done": 5, "total": 10},
            {"state": "running", "phase": "read", "done": 5, "total": 10},
            {"state": "done", "phase": "warm", "done": 10, "total": 10, "version": 3},
            {"state": "failed", "error": "row 3"},
        ]
    )

    def answer(method: str, path: str, body: bytes) -> tuple[int, Any]:
        if method == "POST":
            assert path == "/admin/models/ctr/snapshots"
            assert json.loads(body)["source"] == "s3://x/1"
            return 202, {"job": "j1"}
        assert path == "/admin/jobs/j1"
        return 200, next(documents)

    service.documents = answer
    seen: list[Any] = []
    client = make(service.url)
    assert client.load_snapshot("s3://x/1", model="ctr", activate=False, progress=seen.append) == 3
    assert [(p.phase, p.done) for p in seen] == [("queued", 0), ("read", 5), ("warm", 10)]
    with pytest.raises(SnapshotError, match="row 3"):
        client.load_snapshot("s3://x/1", model="ctr")


def test_deltas_are_sent_again_and_switches_are_not(make: Make, service: FakeService) -> None:
    statuses = iter([503, 200, 503])

    def answer(method: str, path: str, body: bytes) -> tuple[int, Any]:
        status = next(statuses)
        return status, {"seq": 7, "applied": True} if status == 200 else {"detail": "busy"}

    service.documents = answer
    client = make(service.url, **QUICK)
    assert client.apply_delta(b"arrow", model="m").seq == 7
    with pytest.raises(NotReady, match="busy"):
        client.activate("m", 1)
    assert service.paths == ["POST /admin/models/m/deltas"] * 2 + ["POST /admin/models/m/activate"]


def test_a_document_that_is_none_is_an_error_of_ours(make: Make, service: FakeService) -> None:
    with pytest.raises(NotFound, match="no such path"):
        make(service.url).status("m")
    service.documents = lambda *_: (200, None)
    with pytest.raises((TierstoreError, TypeError)):
        make(service.url).status()


def test_a_path_before_ours_is_kept(make: Make, service: FakeService) -> None:
    service.documents = lambda method, path, body: (200, {"models": []})
    assert make(f"{service.url}/team/").status()["models"] == {}
    assert service.paths == ["GET /team/admin/models"]


def test_a_token_goes_with_every_request(make: Make, service: FakeService) -> None:
    client = make(service.url, token="secret")
    client.lookup("m", "f", [1])
    assert service.seen[0].headers["authorization"] == "Bearer secret"
    with pytest.raises(InvalidInput, match="token"):
        make(service.url, token="a\nb")


@pytest.mark.parametrize(
    "url", ["localhost:8000", "ftp://x", "http://", "127.0.0.1", "http://[::1", "http://x:y", "http://a b"]
)
def test_a_url_that_is_none_is_refused(make: Make, url: str) -> None:
    with pytest.raises(InvalidInput, match=r"http://127\.0\.0\.1:8000"):
        make(url)


def test_a_cancelled_verb_closes_its_connections(service: FakeService) -> None:
    service.script = [Act(how="hang")] * 3

    async def cancelled() -> None:
        async with AsyncClient(service.url, split_keys=10, max_connections=2) as client:
            asking = asyncio.create_task(client.lookup("m", "f", np.arange(25)))
            while len(service.seen) < 2:
                await asyncio.sleep(0)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            assert client.figures()["connections"] == {"busy": 0, "idle": 0, "limit": 2, "waiting": 0}
            service.released.set()
            service.script.clear()
            same(await client.lookup("m", "f", np.arange(25)), rows(np.arange(25)))

    asyncio.run(cancelled())


def test_an_async_client_belongs_to_one_loop_at_a_time(service: FakeService) -> None:
    client = AsyncClient(service.url)
    for _ in range(2):  # one loop after the other has ended
        asyncio.run(client.lookup("m", "f", [1]))
    with asyncio.Runner() as first, asyncio.Runner() as second:
        first.run(client.lookup("m", "f", [1]))
        with pytest.raises(InvalidInput, match="event loop"):
            second.run(client.lookup("m", "f", [1]))
        first.run(client.close())
