"""The admin interface end to end: load, deltas, switch, rollback, drop, and what is refused on the way."""

from __future__ import annotations

import errno
import os
import socket
import threading
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.http as triton

from tests.engine import quick_build
from tests.service.conftest import eventually, load, settings_for
from tests.service.fake_store import ITEMS, FakeStore
from tests.service.raw_clients import request
from tests.service.scenes import delta, rows, write_snapshot
from tierstore.engine.store import Store
from tierstore.engine.versions.version import Version
from tierstore.errors import InvalidInput, Overloaded
from tierstore.service.admin import routes
from tierstore.service.admin.allowed_places import check_still_there, resolve_source
from tierstore.service.context import ADMIN_THREADS
from tierstore.service.server import ServerThread

ARROW = {"Content-Type": "application/vnd.apache.arrow.stream"}
Own = tuple[Store, ServerThread, httpx.Client]


def refused(response: httpx.Response, status: int, *words: str) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    document: dict[str, Any] = response.json()
    assert document["status"] == status
    for word in words:
        assert word in document["detail"], document["detail"]
    return document


def look_up(http: httpx.Client, keys: list[int]) -> tuple[int, np.ndarray]:
    """(version, rows) of items."""
    tensor = {"name": "item_id", "datatype": "INT64", "shape": [len(keys)], "data": keys}
    answer = http.post("/v2/models/ctr/infer", json={"inputs": [tensor]})
    assert answer.status_code == 200, answer.text
    document = answer.json()
    (output,) = document["outputs"]
    return int(document["model_version"]), np.array(output["data"], np.float32).reshape(output["shape"])


def push(http: httpx.Client, body: bytes) -> httpx.Response:
    return http.post("/admin/models/ctr/deltas", content=body, headers=ARROW)


def test_a_model_from_its_first_snapshot_to_the_end_of_a_version(own: Own, tmp_path: Path) -> None:
    _, _, http = own
    assert http.get("/v2/health/ready").status_code == 200, "ready without models"
    assert http.get("/admin/models").json()["models"] == []
    job = load(http, write_snapshot(tmp_path, 1))
    assert (job["state"], job["error"], job["version"]) == ("done", None, 1)
    assert look_up(http, [1, 2]) == (1, pytest.approx(rows("item", [1.0, 2.0])))

    assert push(http, delta(1, {1: 50.0, 777: 60.0}, delete=(2,))).json() == {"seq": 1, "applied": True}
    assert look_up(http, [1, 777, 2]) == (1, pytest.approx(rows("item", [50.0, 60.0, -1.0])))
    assert push(http, delta(2, {})).json() == {"seq": 2, "applied": True}

    job = load(http, write_snapshot(tmp_path, 2, shift=1000.0, delta_seq=2), activate=False)
    assert job["state"] == "done", job
    status = http.get("/admin/models/ctr").json()
    assert status["active_version"] == 1
    assert {entry["version"]: entry["state"] for entry in status["versions"]} == {1: "active", 2: "kept"}
    assert status["watermark"] == 2

    assert http.post("/admin/models/ctr/activate", json={"version": 2}).json() == {"model": "ctr", "active_version": 2}
    assert look_up(http, [1, 777]) == (2, pytest.approx(rows("item", [1001.0, -1.0])))
    assert push(http, delta(3, {777: 70.0})).json()["applied"]
    assert http.post("/admin/models/ctr/rollback").json() == {"model": "ctr", "active_version": 1}
    assert look_up(http, [1, 777]) == (1, pytest.approx(rows("item", [50.0, 70.0]))), (
        "caught up with what came while it was kept"
    )

    refused(http.delete("/admin/models/ctr/versions/1"), 409)
    assert http.delete("/admin/models/ctr/versions/2").status_code == 200
    refused(http.delete("/admin/models/ctr/versions/2"), 404)
    assert [entry["version"] for entry in http.get("/admin/models/ctr").json()["versions"]] == [1]
    refused(http.post("/admin/models/ctr/rollback", json={"force": True}), 409)


def test_deltas_are_undone_by_a_rollback_to_the_one_before_them(own: Own, tmp_path: Path) -> None:
    _, _, http = own
    load(http, write_snapshot(tmp_path, 1))
    for seq in (1, 2, 3):
        assert push(http, delta(seq, {1: 50.0 + seq, 777: 60.0})).json() == {"seq": seq, "applied": True}
    back = {"to_seq": 1, "expected_active": 1}
    for _ in range(2):  # a request that is sent again changes nothing
        answer = http.post("/admin/models/ctr/rollback", json=back)
        assert answer.json() == {"model": "ctr", "active_version": 1}, answer.text
        assert look_up(http, [1, 777]) == (1, pytest.approx(rows("item", [51.0, 60.0])))
    status = http.get("/admin/models/ctr").json()
    assert (status["undone"], status["watermark"]) == ([[2, 3]], 3)
    assert push(http, delta(4, {2: 9.0})).json()["applied"]
    assert look_up(http, [1, 2]) == (1, pytest.approx(rows("item", [51.0, 9.0])))
    assert 'tierstore_delta_age_seconds{model="ctr"}' in http.get("/metrics").text
    refused(http.post("/admin/models/ctr/rollback", json={"to_seq": 9}), 409, "expected a seq from 0 to 4, got 9")
    assert http.post("/admin/models/ctr/rollback", json={"to_seq": -1}).status_code == 400
    refused(http.post("/admin/models/ctr/rollback", json={"to_seq": 1, "force": True}), 400, "force")


def test_a_change_that_has_begun_is_made_though_its_client_has_left(
    own: Own, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, server, http = own
    begun, left = threading.Event(), threading.Event()
    activate = store.activate

    def held(*args: Any, **options: Any) -> Any:
        begun.set()
        assert left.wait(60)
        return activate(*args, **options)

    with quick_build.in_process():
        store.load_snapshot(write_snapshot(tmp_path, 1))
        store.load_snapshot(write_snapshot(tmp_path, 2), activate=False)
    monkeypatch.setattr(store, "activate", held)
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(request("/admin/models/ctr/activate", {"version": 2}, {"Content-Type": "application/json"}))
        assert begun.wait(60)
    left.set()
    eventually(lambda: http.get("/admin/models/ctr").json()["active_version"] == 2, "version 2 is active")


def test_a_load_beyond_the_quota_of_versions_is_a_job_that_fails(tmp_path: Path) -> None:
    settings = settings_for(tmp_path, quotas={"ctr": {"versions": 1}})
    with (
        quick_build.in_process(),
        Store(settings) as store,
        ServerThread(store) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        assert load(http, write_snapshot(tmp_path, 1))["state"] == "done"
        job = load(http, write_snapshot(tmp_path, 2))
    assert (job["state"], "its quota is 1; it serves or loads them all" in job["error"]) == ("failed", True)


def test_a_delta_out_of_turn_names_the_one_that_is_next(own: Own, tmp_path: Path) -> None:
    _, _, http = own
    load(http, write_snapshot(tmp_path, 1, delta_seq=10))
    assert refused(push(http, delta(13, {1: 2.0})), 409)["expected_seq"] == 11
    first = delta(11, {1: 2.0})
    assert push(http, first).json() == {"seq": 11, "applied": True}
    assert push(http, first).json() == {"seq": 11, "applied": False}
    refused(push(http, delta(11, {1: 3.0})), 409)
    assert look_up(http, [1]) == (1, pytest.approx(rows("item", [2.0])))


def test_deltas_that_are_refused(own: Own, tmp_path: Path) -> None:
    _, _, http = own
    load(http, write_snapshot(tmp_path, 1))
    refused(push(http, b""), 400)
    refused(push(http, b"not arrow"), 400)
    refused(push(http, delta(1, {1: 2.0})[:-40]), 400)
    refused(push(http, delta(1, {1: 2.0}, model="other")), 400, "other")
    refused(push(http, b"x" * ((1 << 20) + 1)), 413, "1048576")
    refused(http.post("/admin/models/ctr/deltas", content=b"{}", headers={"Content-Type": "application/json"}), 415)
    refused(http.post("/admin/models/ctr/deltas", content=b"{}", headers=ARROW | {"Content-Encoding": "gzip"}), 415)
    refused(
        http.post("/admin/models/other/deltas", content=delta(1, {1: 2.0}, model="other"), headers=ARROW), 404, "other"
    )
    assert look_up(http, [1]) == (1, pytest.approx(rows("item", [1.0])))
    assert own[1].service.delta_bytes.used_bytes == 0


def test_a_producer_that_is_too_fast_gets_retry_after(fake: tuple[FakeStore, ServerThread]) -> None:
    store, server = fake
    store.delta_error = Overloaded("overlays are full", retry_after_s=2.5)
    with httpx.Client(base_url=server.url) as http:
        answer = push(http, b"x")
        refused(answer, 429, "overlays are full")
        assert answer.headers["retry-after"] == "3"


def test_sources_lie_under_the_roots(own: Own, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    _, _, http = own
    snapshot = write_snapshot(tmp_path, 1)
    elsewhere = write_snapshot(tmp_path_factory.mktemp("elsewhere"), 1)
    os.symlink(elsewhere, tmp_path / "link")
    os.symlink(tmp_path / "circle", tmp_path / "circle")
    secret = "/proc/1/root/secret"
    for source, words in (
        ("/etc", ["outside the source roots"]),
        (secret, ["source"]),
        (f"{tmp_path}/../{elsewhere.parent.name}/{elsewhere.name}", ["outside the source roots"]),
        (str(tmp_path / "link"), ["outside the source roots"]),
        (str(tmp_path / "circle"), ["source"]),
        ("../" * 30 + "etc", ["outside the source roots"]),
        (str(tmp_path / "nothing"), ["does not exist"]),
        ("", ["source"]),
        ("a\0b", ["source"]),
        ("x" * 5000, ["source"]),
        (f"file://{tmp_path}::s3://bucket", ["chained"]),
        ("s3://bucket/x", ["s3://", "outside the source roots"]),
        ("http://localhost/x", ["http://"]),
        (f"file://elsewhere{snapshot}", ["file:"]),
    ):
        refused(http.post("/admin/models/ctr/snapshots", json={"source": source}), 400, *words)
    assert http.get("/admin/jobs").json() == {"jobs": []}
    assert load(http, f"file://{snapshot}")["state"] == "done"  # type: ignore[arg-type]
    job = load(http, Path(write_snapshot(tmp_path, 2).name))
    assert job["state"] == "done", "a relative path is sought under the roots"


def test_urls_are_read_from_under_source_roots_alone() -> None:
    roots = [Path("/models"), "s3://models/ctr", "gs://others/"]
    for source in ("s3://models/ctr", "s3://models/ctr/1", "s3://models/ctr/1/snapshot.json", "gs://others/x"):
        assert resolve_source(source, roots) == source
    for source in ("s3://models", "s3://models/ctr2", "s3://other/ctr", "az://models/ctr/1", "S3://models/ctr/1"):
        with pytest.raises(InvalidInput, match="outside the source roots"):
            resolve_source(source, roots)
    for source in ("s3://models/ctr/../x", "s3://models/ctr//x", "s3://models/ctr/./x"):
        with pytest.raises(InvalidInput, match="expected names between its slashes"):
            resolve_source(source, roots)


def test_a_load_that_fails_says_why_and_changes_nothing(own: Own, tmp_path: Path) -> None:
    _, _, http = own
    load(http, write_snapshot(tmp_path, 1))
    bad = write_snapshot(tmp_path, 2)
    next(bad.glob("item/*")).unlink()
    job = load(http, bad)
    assert job["state"] == "failed"
    assert "item" in job["error"]
    job = load(http, tmp_path / "ctr-1", model="other")
    assert job["state"] == "failed"
    assert "other" in job["error"]
    job = load(http, tmp_path / "ctr-1")
    assert job["state"] == "failed", "that version is there already"
    assert look_up(http, [1])[0] == 1
    jobs = http.get("/admin/jobs").json()["jobs"]
    assert [entry["state"] for entry in jobs] == ["failed", "failed", "failed", "done"]
    refused(http.delete(f"/admin/jobs/{jobs[0]['job']}"), 409)
    refused(http.post(f"/admin/jobs/{jobs[3]['job']}/acknowledge"), 409)
    refused(http.post("/admin/jobs/nothing/acknowledge"), 404)

    def failed() -> list[str]:
        problems = http.get("/admin/models").json()["problems"]
        return sorted(problem["model"] for problem in problems if problem["kind"] == "load_failed")

    assert failed() == ["ctr", "other"]
    assert http.post(f"/admin/jobs/{jobs[1]['job']}/acknowledge").json()["acknowledged"]
    assert failed() == ["ctr"]
    load(http, write_snapshot(tmp_path, 3))
    assert failed() == []


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/admin/models/nobody", None, 404),
        ("GET", "/admin/jobs/nothing", None, 404),
        ("DELETE", "/admin/jobs/nothing", None, 404),
        ("GET", "/admin/nothing", None, 404),
        ("GET", "/nothing", None, 404),
        ("PUT", "/admin/models", None, 405),
        ("POST", "/admin/models/ctr/activate", {}, 400),
        ("POST", "/admin/models/ctr/activate", {"version": "1"}, 400),
        ("POST", "/admin/models/ctr/activate", {"version": 1, "x": 1}, 400),
        ("POST", "/admin/models/ctr/activate", {"version": -1}, 400),
        ("POST", "/admin/models/ctr/activate", {"version": 1 << 70}, 400),
        ("POST", "/admin/models/ctr/activate", {"version": 7}, 404),
        ("POST", "/admin/models/nobody/activate", {"version": 7}, 404),
        ("POST", "/admin/models/nobody/rollback", None, 404),
        ("POST", "/admin/models/a.b/rollback", None, 400),
        ("POST", "/admin/models/ctr/snapshots", {"source": 3}, 400),
        ("POST", "/admin/models/ctr/snapshots", {}, 400),
        ("POST", "/admin/models/ctr/snapshots", [], 400),
        ("POST", "/admin/models/ctr/snapshots", None, 400),
        ("POST", "/admin/models/ctr/deltas%0A", None, 404),
        ("DELETE", "/admin/models/ctr/versions/0", None, 400),
        ("DELETE", "/admin/models/ctr/versions/x", None, 400),
        ("DELETE", "/admin/models/ctr/versions/99999999999999999999", None, 400),
    ],
)
def test_bad_admin_requests_are_problems(http: httpx.Client, method: str, path: str, body: Any, status: int) -> None:
    answer = http.request(method, path, json=body) if body is not None else http.request(method, path)
    refused(answer, status)


def test_admin_bodies_have_a_bound(http: httpx.Client) -> None:
    body = b'{"version": 1, "pad": "' + b"x" * (1 << 20) + b'"}'
    json_type = {"Content-Type": "application/json"}
    assert http.post("/admin/models/ctr/activate", content=body, headers=json_type).status_code == 413
    assert http.post("/admin/models/ctr/activate", content=iter([body]), headers=json_type).status_code in (400, 413)


def test_load_and_unload_of_the_repository_extension(own: Own, tmp_path: Path) -> None:
    _, server, http = own
    load(http, write_snapshot(tmp_path, 1))
    load(http, write_snapshot(tmp_path, 2, shift=5.0), activate=False)
    with triton.InferenceServerClient(server.url.removeprefix("http://")) as client:
        client.load_model("ctr")
        assert client.is_model_ready("ctr", "1"), "a ready model stays at its version"
        client.unload_model("ctr")
        assert client.is_server_ready()
        assert not client.is_model_ready("ctr")
        assert http.get("/v2/models/ctr").status_code == 400
        assert http.post("/v2/models/ctr/infer", json={"inputs": []}).status_code == 400
        assert {entry["state"] for entry in client.get_model_repository_index()} == {"UNAVAILABLE"}
        assert http.post("/v2/repository/index", json={"ready": True}).json() == []
        client.load_model("ctr")
        assert client.is_model_ready("ctr", "2"), "the most recent kept version"
        assert look_up(http, [1]) == (2, pytest.approx(rows("item", [6.0])))
        http.post("/admin/models/ctr/activate", json={"version": 1}).raise_for_status()
        http.post("/admin/models/ctr/activate", json={"version": 2}).raise_for_status()
        http.post("/admin/models/ctr/rollback").raise_for_status()
        client.unload_model("ctr")
        client.load_model("ctr")
        assert client.is_model_ready("ctr", "1"), "a rollback has rejected the other"


def test_readers_see_one_version_or_the_other_and_never_an_error_while_versions_are_switched(
    own: Own, tmp_path: Path
) -> None:
    _, server, http = own
    load(http, write_snapshot(tmp_path, 1))
    load(http, write_snapshot(tmp_path, 2, shift=1000.0), activate=False)
    keys = list(range(64))
    base = rows("item", [ITEMS[key] for key in keys])
    expected = {1: base, 2: rows("item", [ITEMS[key] + 1000.0 for key in keys])}
    stop = threading.Event()
    seen: list[set[int]] = [set(), set(), set()]
    faults: list[str] = []

    def read(versions: set[int]) -> None:
        with httpx.Client(base_url=server.url, timeout=60) as client:
            while not stop.is_set():
                try:
                    version, got = look_up(client, keys)
                    versions.add(version)
                    if not np.array_equal(got, expected[version]):
                        faults.append(f"rows of another version than {version}")
                except Exception as error:  # noqa: BLE001 - reported by the test
                    faults.append(repr(error))
                    return

    readers = [threading.Thread(target=read, args=(versions,)) for versions in seen]
    for reader in readers:
        reader.start()
    for version in (2, 1, 2, 1, 2):
        assert http.post("/admin/models/ctr/activate", json={"version": version}).json()["active_version"] == version
        assert look_up(http, keys[:1])[0] == version, "who asks after the switch gets the new version"
    stop.set()
    for reader in readers:
        reader.join()
    assert faults == []
    assert set.union(*seen) == {1, 2}
    eventually(lambda: server.service.inflight.used_bytes == 0, "its bytes are given back")


def test_a_delta_waits_for_no_version_of_another_model_that_is_being_warmed(
    own: Own, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, server, http = own
    for model in ("ctr", "other"):
        for version in (1, 2):
            assert load(http, write_snapshot(tmp_path, version, model=model), model)["state"] == "done"
    warming, go_on, warm = threading.Event(), threading.Event(), Version.warm

    def slowly(version: Version, *args: Any) -> None:
        warming.set()
        assert go_on.wait(20)
        warm(version, *args)

    monkeypatch.setattr(Version, "warm", slowly)

    def back() -> None:  # the first one warms, the others wait for it
        with httpx.Client(base_url=http.base_url, timeout=30) as mine:
            mine.post("/admin/models/other/activate", json={"version": 1})

    threads = [threading.Thread(target=back, daemon=True) for _ in range(2 * ADMIN_THREADS)]
    for thread in threads:
        thread.start()
    assert warming.wait(20)
    eventually(lambda: server.service.switch_pool.waiting >= ADMIN_THREADS, "all of them wait")
    try:
        answer = http.post("/admin/models/ctr/deltas", content=delta(1, {1: 50.0}), headers=ARROW, timeout=15)
        assert answer.json() == {"seq": 1, "applied": True}
        assert http.get("/metrics", timeout=15).status_code == 200
    finally:
        go_on.set()
        for thread in threads:
            thread.join(30)
    assert store.model("other").active_version == 1


def test_a_source_that_becomes_a_link_while_its_load_waits_is_not_loaded(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    snapshot = write_snapshot(root, 1)
    found = resolve_source(str(snapshot), [root])
    check_still_there(found, [root])
    snapshot.rename(tmp_path / "moved")
    write_snapshot(outside, 1)
    for target in (outside, root / "other"):
        os.symlink(target, snapshot)
        with pytest.raises(InvalidInput):
            check_still_there(found, [root])
        snapshot.unlink()
    with pytest.raises(InvalidInput):
        check_still_there(found, [root])


def test_what_could_not_be_made_for_want_of_descriptors_is_made_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = list[OSError]()

    def make_app(service: Any) -> Any:
        if not failed:
            failed.append(OSError(errno.EMFILE, "Too many open files"))
            raise failed[0]
        return made(service)

    made = routes.make_app
    monkeypatch.setattr(routes, "make_app", make_app)
    with ServerThread(FakeStore(settings_for(tmp_path))) as server:  # type: ignore[arg-type]
        eventually(lambda: httpx.get(f"{server.url}/admin/models").status_code == 200, "it is made")
    assert failed
