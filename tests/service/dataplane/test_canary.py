"""A canary over HTTP: who gets which version, what the figures say of each, and the admin interface."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import tritonclient.http

from tests.engine.quick_build import in_process
from tests.service.conftest import GRPC, settings_for
from tests.service.scenes import delta, row, write_snapshot
from tierstore.engine.store import Store
from tierstore.errors import DeadlineExceeded, RunLimit, StorageError
from tierstore.service.dataplane.plan import Request
from tierstore.service.dataplane.tensors import TensorSpec
from tierstore.service.server import ServerThread

ASK = b'{"inputs": [{"name": "item_id", "datatype": "INT64", "shape": [1], "data": [5]}]}'
SHIFT = 1000.0  # of the canary's values


class Scene:
    """Versions 1, active, and 2, the canary with half of the requests, behind a server."""

    def __init__(self, store: Store, server: ServerThread, http: httpx.Client) -> None:
        self.store, self.server, self.http = store, server, http

    def ask(self, version: object = None, **headers: str) -> httpx.Response:
        path = "/v2/models/ctr" + ("" if version is None else f"/versions/{version}") + "/infer"
        return self.http.post(path, content=ASK, headers=headers)

    def version(self, version: object = None, **headers: str) -> int:
        answer = self.ask(version, **headers)
        assert answer.status_code == 200, answer.text
        document = answer.json()
        number = int(document["model_version"])
        assert document["outputs"][0]["data"] == row("item", 5.0 + (SHIFT if number == 2 else 0)).tolist()
        return number

    def series(self, name: str) -> dict[tuple[str, ...], float]:
        """Values of a metric, by its labels' values in the order of their names."""
        text = self.http.get("/metrics").text
        found = re.findall(rf"^{name}{{(.*)}} (\S+)$", text, re.MULTILINE)
        return {tuple(re.findall(r'="([^"]*)"', labels)): float(value) for labels, value in found}


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    with (
        in_process(),
        Store(settings_for(tmp_path, keep_versions=9, grpc_port=GRPC)) as store,
        ServerThread(store) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        store.load_snapshot(write_snapshot(tmp_path, 1))
        store.load_snapshot(write_snapshot(tmp_path, 2, shift=SHIFT), activate=False)
        store.canary("ctr", 2, 0.5)
        yield Scene(store, server, http)


def test_a_version_is_requested_by_number_and_by_label(scene: Scene) -> None:
    scene.store.label("ctr", "holdout", 1)
    wanted = {1: 1, 2: 2, "stable": 1, "canary": 2, "holdout": 1}
    assert {name: scene.version(name) for name in wanted} == wanted
    unknown = scene.ask("nobody")
    assert (unknown.status_code, "stable, canary, holdout" in unknown.json()["error"]) == (404, True)
    assert scene.ask("a.b").status_code == 400
    assert scene.ask(9).status_code == 404


def test_requests_of_one_id_get_one_version(scene: Scene) -> None:
    chosen = {f"r{number}": scene.version(**{"X-Request-Id": f"r{number}"}) for number in range(40)}
    assert set(chosen.values()) == {1, 2}
    assert {name: scene.version(**{"x-request-id": name}) for name in chosen} == chosen
    assert {scene.version() for _ in range(60)} == {1, 2}


def test_tritonclient_requests_a_label_and_sees_both_versions(scene: Scene) -> None:
    with tritonclient.http.InferenceServerClient(scene.server.url.removeprefix("http://")) as client:
        assert client.get_model_metadata("ctr")["versions"] == ["1", "2"]
        assert client.get_model_metadata("ctr", "canary")["versions"] == ["2"]
        assert client.is_model_ready("ctr", "canary")
        index = {(entry["name"], entry["version"]): entry["state"] for entry in client.get_model_repository_index()}
        assert index == {("ctr", "1"): "READY", ("ctr", "2"): "READY"}
        stats = client.get_inference_statistics("ctr")["model_stats"]
        assert [entry["version"] for entry in stats] == ["1", "2"]


def test_metrics_distinguish_the_versions_and_go_with_them(scene: Scene) -> None:
    wanted = Counter([scene.version() for _ in range(30)])
    bad = ASK.replace(b"INT64", b"FP32")
    assert scene.http.post("/v2/models/ctr/versions/canary/infer", content=bad).status_code == 400
    assert scene.series("tierstore_model_requests_total") == {
        ("ctr", "ok", "1"): wanted[1],
        ("ctr", "ok", "2"): wanted[2],
        ("ctr", "bad_input", "2"): 1,
    }
    counted = scene.series("tierstore_model_request_seconds_count")
    assert counted == {("ctr", "1"): wanted[1], ("ctr", "2"): wanted[2]}
    assert scene.series("tierstore_canary_share") == {("ctr",): 0.5}
    of_canary = scene.http.get("/v2/models/ctr/versions/canary/stats").json()["model_stats"]
    stats = [(entry["version"], entry["inference_stats"]) for entry in of_canary]
    assert [(version, of["success"]["count"], of["fail"]["count"]) for version, of in stats] == [("2", wanted[2], 1)]
    scene.store.withdraw("ctr")
    scene.store.drop("ctr", 2)
    assert {labels[2] for labels in scene.series("tierstore_model_requests_total")} == {"1"}
    assert scene.series("tierstore_canary_version") == {("ctr",): 0.0}


def test_a_request_that_finds_no_version_counts_for_version_0_of_its_model(scene: Scene) -> None:
    def asked(path: str) -> int:
        return scene.http.post(f"/v2/models/{path}/infer", content=ASK).status_code

    paths = ["ctr/versions/9", "ctr/versions/nowhere", "ctr.nothing", "nobody", "nobody/versions/1"]
    assert [asked(path) for path in paths] == [404] * 5
    assert scene.http.post("/v1/models/ctr/versions/9:predict", json={"inputs": {"item_id": [1]}}).status_code == 404
    assert scene.series("tierstore_model_requests_total") == {("ctr", "not_found", "0"): 3}
    assert scene.series("tierstore_model_request_seconds_count") == {}
    stats = scene.http.get("/v2/models/ctr/stats").json()["model_stats"]
    assert [(entry["version"], entry["inference_stats"]["fail"]["count"]) for entry in stats] == [("1", 0), ("2", 0)]
    assert scene.http.get("/admin/models/ctr/history").json()["hour"]["failed"] == 0
    scene.store.deactivate("ctr")
    assert asked("ctr") == 400
    assert scene.series("tierstore_model_requests_total")["ctr", "bad_input", "0"] == 1


def test_what_a_caller_does_wrong_speaks_against_no_version(scene: Scene) -> None:
    ids = [name for name in map(str, range(40)) if scene.version(**{"X-Request-Id": name}) == 2]
    wrong = ASK.replace(b"item_id", b"nothing")
    for name in ids:
        refused = scene.http.post("/v2/models/ctr/infer", content=wrong, headers={"X-Request-Id": name})
        assert refused.status_code in (400, 404)
    stats = scene.server.service.inference_stats
    asked = stats.requests("ctr", 2)
    assert asked.total >= 2 * len(ids), "they were given to the canary"
    assert asked.failed == 0
    scene.server.service.count_failed("ctr", 1000, DeadlineExceeded("the caller waits no longer"))
    assert stats.requests("ctr", 1).failed == 0
    scene.server.service.count_failed("ctr", 1000, StorageError("the disk does not answer"))
    scene.server.service.count_failed("ctr", 1000, RunLimit("the dense part took too long"))
    assert stats.requests("ctr", 1).failed == 2


def test_a_request_that_comes_again_is_planned_once_for_each_version(scene: Scene) -> None:
    plane, request = scene.server.service.dataplane, Request([TensorSpec("item_id", "INT64", (1,))], [])
    plans = []
    for version in (1, "canary", "stable", 2):
        with plane.open("ctr", version, request) as inference:
            plans.append(inference.plan)
    assert [plan.version for plan in plans] == [1, 2, 1, 2]
    assert plans[0] is plans[2]
    assert plans[1] is plans[3]


def test_a_canary_through_the_admin_interface(scene: Scene, tmp_path: Path) -> None:
    def admin(method: str, path: str, body: Any = None) -> tuple[int, dict[str, Any]]:
        answer = scene.http.request(method, f"/admin/models/ctr{path}", json=body)
        return answer.status_code, answer.json()

    status, document = admin("POST", "/canary", {"version": 2, "share": 1})
    assert (status, document) == (
        200,
        {
            "model": "ctr",
            "active_version": 1,
            "canary": {"version": 2, "share": 1.0},
            "labels": {"stable": 1, "canary": 2},
        },
    )
    assert scene.version() == 2
    assert admin("PUT", "/labels/trial", {"version": 2})[1]["labels"] == {"stable": 1, "canary": 2, "trial": 2}
    _, status_of = admin("GET", "")
    assert status_of["canary"]["share"] == 1.0
    served = {entry["version"]: (entry["state"], entry["labels"]) for entry in status_of["versions"]}
    assert served == {1: ("active", ["stable"]), 2: ("canary", ["canary", "trial"])}
    assert admin("DELETE", "/versions/2")[0] == 409
    assert admin("POST", "/withdraw")[1]["withdrawn"] == 2
    assert admin("POST", "/withdraw")[0] == 409
    assert admin("PUT", "/labels/trial", {"version": 2})[0] == 409
    assert admin("DELETE", "/labels/trial")[0] == 404
    assert admin("POST", "/canary", {"version": 2})[1]["canary"] == {"version": 2, "share": 0.05}
    assert admin("POST", "/promote")[1] == {
        "model": "ctr",
        "active_version": 2,
        "canary": None,
        "labels": {"stable": 2},
    }
    assert scene.version() == 2


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "/canary", {"version": 2, "share": 1.5}, 400),
        ("POST", "/canary", {"version": 2, "share": "5%"}, 400),
        ("POST", "/canary", {"version": 1}, 409),
        ("POST", "/canary", {"version": 7}, 404),
        ("POST", "/canary", {}, 400),
        ("PUT", "/labels/17", {"version": 1}, 400),
        ("PUT", "/labels/stable", {"version": 2}, 400),
        ("PUT", "/labels/a%20b", {"version": 1}, 400),
        ("PUT", "/labels/trial", {"version": 7}, 404),
        ("DELETE", "/labels/canary", None, 409),
    ],
)
def test_what_the_admin_interface_refuses(scene: Scene, method: str, path: str, body: Any, status: int) -> None:
    answer = scene.http.request(method, f"/admin/models/ctr{path}", json=body)
    assert answer.status_code == status, answer.text
    assert scene.store.model("ctr").served.all_labels() == {"stable": 1, "canary": 2}


def test_a_delta_is_seen_in_both_versions_once_it_is_acknowledged(scene: Scene) -> None:
    scene.http.post("/admin/models/ctr/deltas", content=delta(1, {5: 77.0})).raise_for_status()
    for version in (1, 2):
        assert scene.ask(version).json()["outputs"][0]["data"] == row("item", 77.0).tolist()


@pytest.mark.parametrize("verb", ["promote", "withdraw"])
def test_no_request_fails_while_the_canary_comes_to_its_end(scene: Scene, verb: str) -> None:
    versions: list[int] = []
    end: Callable[[], Any] = lambda: scene.http.post(f"/admin/models/ctr/{verb}").raise_for_status()  # noqa: E731
    for number in range(60):
        if number == 30:
            end()
        versions.append(scene.version())
    assert set(versions[:30]) == {1, 2}
    assert set(versions[30:]) == {2 if verb == "promote" else 1}
