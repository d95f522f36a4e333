"""Request ids come back, and the log says what failed, what was slow, and who changed what serves."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

import tierstore.service.request_log as request_log
from tests.service.conftest import eventually, load, settings_for
from tests.service.fake_store import VERSION, FakeStore
from tests.service.scenes import KEYS, delta, write_snapshot
from tierstore.engine.store import Store
from tierstore.errors import Forbidden, Overloaded
from tierstore.log_limits import BURST
from tierstore.logs import configure
from tierstore.service.server import ServerThread

JSON = {"inputs": [{"name": "item_id", "datatype": "INT64", "shape": [2], "data": [5, 99]}]}
REQUESTS, CHANGES = "tierstore.service.request_log", "tierstore.engine.events.changes"

Lines = Callable[[str], list[dict[str, Any]]]


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Lines:
    """The fields of the lines of a logger, with their level and text."""
    caplog.set_level(logging.DEBUG, "tierstore")

    def of(logger: str) -> list[dict[str, Any]]:
        return [
            {**record.fields, "level": record.levelname, "text": record.getMessage(), "traceback": record.exc_text or record.exc_info}  # type: ignore[attr-defined]
            for record in caplog.records
            if record.name == logger
        ]  # fmt: skip

    return of


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/v2/models/ctr/infer", 200),
        ("POST", "/v2/models/ctr/infer?", 200),
        ("POST", "/v2/models/nobody/infer", 404),
        ("POST", "/v1/models/ctr:predict", 400),
        ("GET", "/v2/health/live", 200),
        ("GET", "/", 200),
        ("GET", "/metrics", 200),
        ("GET", "/admin/models", 200),
        ("GET", "/admin/models/nobody", 404),
        ("GET", "/nothing", 404),
    ],
)
@pytest.mark.parametrize("request_id", [b"r-7", "ü".encode()], ids=["ascii", "any bytes"])
def test_the_id_of_a_request_comes_back(
    http: httpx.Client, method: str, path: str, status: int, request_id: bytes
) -> None:
    content = {**JSON, "unread": []} if method == "POST" else None  # a list that nobody reads makes it Python's
    answer = http.request(method, path, headers={b"X-Request-Id": request_id}, json=content)
    assert answer.status_code == status, answer.text
    assert [value for name, value in answer.headers.raw if name.lower() == b"x-request-id"] == [request_id]
    assert "x-request-id" not in http.request(method, path, json=content).headers


def test_a_secret_in_what_a_client_sent_is_cut_out_before_it_is_made_short() -> None:
    for before in (0, 200, 230, 250):
        for secret in (f"tierstore_0123456789ab_{'Q' * 43}", "https://user:QQQQ@host"):
            assert "QQ" not in request_log.one_line("/" + "x" * before + secret)
    assert len(request_log.one_line("x" * 1000)) == 256


def test_refusals_of_access_and_of_connections_are_logged_too(tmp_path: Path, lines: Lines) -> None:
    store = FakeStore(settings_for(tmp_path, max_connections=1))
    with (
        ServerThread(store) as server,  # type: ignore[arg-type]
        httpx.Client(base_url=server.url) as first,
        httpx.Client(base_url=server.url) as other,
    ):
        refused = first.get("/", headers={"X-Request-Id": "g", "Origin": "http://evil.example"})
        assert (refused.status_code, refused.headers["x-request-id"]) == (403, "g")
        full = other.get("/v2/health/live", headers={"X-Request-Id": "d"})
        assert (full.status_code, full.headers["x-request-id"]) == (503, "d")
    own = [line for line in lines(REQUESTS) if line.get("id") in ("g", "d")]  # a server before may log its last one now
    assert [line["status"] for line in own] == [403, 503]
    assert own[0]["level"] == "WARNING"
    assert "Origin 'http://evil.example' is foreign" in own[0]["text"]


def test_a_failed_request_is_logged_in_a_line(fake: tuple[FakeStore, ServerThread], lines: Lines) -> None:
    store, server = fake
    with httpx.Client(base_url=server.url) as http:
        assert http.post("/v2/models/nobody/infer", json=JSON, headers={"X-Request-Id": "a b"}).status_code == 404
        store.delta_error = Overloaded("deltas come too fast")
        assert http.post("/admin/models/ctr/deltas", content=b"x").status_code == 429
        store.status = None  # type: ignore[assignment, method-assign]
        assert http.get("/admin/models", headers={"X-Request-Id": "broken"}).status_code == 500
        with http.stream("POST", "/v2/models/ctr/infer", json=JSON):
            pass
    unknown, slow_down, defect = lines(REQUESTS)
    assert (unknown["level"], unknown["method"], unknown["path"], unknown["status"], unknown["id"]) == (
        "DEBUG", "POST", "/v2/models/nobody/infer", 404, "a b",
    )  # fmt: skip
    assert unknown["client"].startswith("127.0.0.1:"), "asked of a reactor's connection"
    assert unknown["text"].startswith("POST /v2/models/nobody/infer: 404 in ")
    assert unknown["text"].endswith("no model 'nobody'")
    assert (slow_down["level"], slow_down["status"]) == ("DEBUG", 429)
    assert (defect["level"], defect["status"], defect["id"]) == ("ERROR", 500, "broken")
    assert "TypeError" in str(defect["traceback"])
    assert defect["client"].startswith("127.0.0.1:")


def posted(path: str, client: str | None = None) -> request_log.LoggedRequest:
    return request_log.LoggedRequest("POST", path, 0, lambda: client)


def test_so_many_lines_a_second(tmp_path: Path, lines: Lines) -> None:
    now_s = 100.0
    note = request_log.RequestLog(settings_for(tmp_path), lambda: now_s).note
    for _ in range(request_log.LINES_A_SECOND + 5):
        note(posted("/v2/\nx"), 503)
    note(posted("/"), 500)
    now_s = 101.0
    note(posted("/"), 503)
    *first, defect, last = lines(REQUESTS)
    assert len(first) == request_log.LINES_A_SECOND
    assert r"POST /v2/\nx: 503" in first[0]["text"], "in one line"
    assert defect["status"] == 500, "of another kind"
    assert (last["left_out"], "5 like it left out" in last["text"]) == (5, True)


def test_requests_that_are_not_let_in_have_fewer_lines(tmp_path: Path, lines: Lines) -> None:
    now_s = 100.0
    note = request_log.RequestLog(settings_for(tmp_path), lambda: now_s).note

    def refuse(status: int) -> None:
        error = Forbidden("token 0123 is for crt alone: not for 'ctr'")
        note(posted("/v2/models/ctr/infer", "10.0.0.7:1234"), status, error=error)

    for _ in range(request_log.LINES_A_SECOND + 15):
        refuse(403)
    refuse(401)
    now_s += request_log.REFUSED_EVERY_S
    refuse(403)
    *first, other, last = lines(REQUESTS)
    assert len(first) == request_log.LINES_A_SECOND
    assert first[0]["level"] == "WARNING"
    assert (first[0]["client"], first[0]["reason"]) == ("10.0.0.7:1234", "token 0123 is for crt alone: not for 'ctr'")
    assert other["status"] == 401
    assert last["left_out"] == 15


def test_no_count_of_lines_that_were_left_out_is_lost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The limit on lines of one place in the code lets pass what the limit on requests has admitted."""
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    seconds, each = 2 * BURST // request_log.LINES_A_SECOND, 3 * request_log.LINES_A_SECOND
    try:
        configure("json", "info")
        now_s = 100.0
        note = request_log.RequestLog(settings_for(tmp_path), lambda: now_s).note
        for _ in range(seconds):
            for _ in range(each):
                note(posted("/"), 503)
            now_s += 1.0
        note(posted("/"), 503)
    finally:
        root.handlers[:] = before
        root.setLevel(level)
    written = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert len(written) + sum(line.get("left_out", 0) for line in written) == seconds * each + 1


def test_slow_requests_and_all_of_them(tmp_path: Path, lines: Lines) -> None:
    for settings, levels in (
        ({"slow_request_ms": 0.001}, ["WARNING", "WARNING"]),
        ({"access_log": True, "slow_request_ms": 3.6e6}, ["INFO", "INFO"]),
        ({}, []),
    ):
        before = len(lines(REQUESTS))
        with (
            ServerThread(FakeStore(settings_for(tmp_path, **settings))) as server,  # type: ignore[arg-type]
            httpx.Client(base_url=server.url) as http,
        ):
            assert http.post("/v2/models/ctr/infer", json=JSON, headers={"X-Request-Id": "r-8"}).status_code == 200
            assert http.get("/v2").status_code == 200
        came = lines(REQUESTS)[before:]
        assert [line["level"] for line in came] == levels
        if levels == ["WARNING", "WARNING"]:
            assert came[0]["text"].startswith("slow: POST /v2/models/ctr/infer: 200 in ")
            assert came[0]["memory_ms"] + came[0]["disk_ms"] > 0
            assert {"queued_ms", "dense_ms"} <= came[0].keys()
        if levels:
            assert (came[0]["id"], came[0]["status"], came[1]["path"]) == ("r-8", 200, "/v2")


def test_over_grpc(tmp_path: Path, lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    grpc = pytest.importorskip("grpc")
    pytest.importorskip("tritonclient.grpc", reason="tritonclient[grpc] is not installed")
    from tritonclient.grpc import service_pb2, service_pb2_grpc

    given = service_pb2.ModelInferRequest.InferInputTensor(name="item_id", datatype="INT64", shape=[len(KEYS)])
    lookup = service_pb2.ModelInferRequest(model_name="ctr", inputs=[given], raw_input_contents=[KEYS.tobytes()])
    store = FakeStore(settings_for(tmp_path, grpc_port=0, access_log=True))
    with ServerThread(store) as server, grpc.insecure_channel(server.grpc_target) as channel:  # type: ignore[arg-type]
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        options = {"metadata": (("x-request-id", "g-1"),), "timeout": 60}
        for method, request in ((stub.ModelInfer, lookup), (stub.ServerLive, service_pb2.ServerLiveRequest())):
            _, call = method.with_call(request, **options)
            assert ("x-request-id", "g-1") in [tuple(entry) for entry in call.trailing_metadata()]
        (streamed,) = stub.ModelStreamInfer(iter([lookup]), **options)
        assert not streamed.error_message
        monkeypatch.setattr(store, "model", None)  # a defect
        with pytest.raises(grpc.RpcError) as caught:
            stub.ModelInfer(lookup, **options)
        assert ("x-request-id", "g-1") in [tuple(entry) for entry in caught.value.trailing_metadata()]
        monkeypatch.undo()
    look_up, control, stream, defect = lines(REQUESTS)
    service = "/inference.GRPCInferenceService"
    assert [line["path"] for line in (look_up, control, stream)] == [
        f"{service}/ModelInfer", f"{service}/ServerLive", f"{service}/ModelStreamInfer",
    ]  # fmt: skip
    for line in (look_up, control, stream):
        assert (line["level"], line["method"], line["status"], line["id"]) == ("INFO", "gRPC", "OK", "g-1")
        assert line["client"].startswith("127.0.0.1:")
    assert (defect["level"], defect["status"]) == ("ERROR", "INTERNAL")
    assert defect["traceback"]


def test_who_changed_what_serves(own: tuple[Store, ServerThread, httpx.Client], tmp_path: Path, lines: Lines) -> None:
    store, _, http = own
    http.headers["X-Request-Id"] = "ops-1"
    with_older = [write_snapshot(tmp_path, VERSION + i) for i in range(3)]
    assert load(http, with_older[0])["state"] == "done"
    assert load(http, with_older[1], activate=False)["state"] == "done"
    ctr = "/admin/models/ctr"
    for method, path, body in (
        ("POST", f"{ctr}/activate", {"version": VERSION + 1}),
        ("POST", f"{ctr}/rollback", None),
        ("POST", f"{ctr}/canary", {"version": VERSION + 1, "share": 0.25}),
        ("PUT", f"{ctr}/labels/next", {"version": VERSION + 1}),
        ("DELETE", f"{ctr}/labels/next", None),
        ("POST", f"{ctr}/withdraw", None),
        ("POST", f"{ctr}/canary", {"version": VERSION + 1}),
        ("POST", f"{ctr}/promote", None),
        ("POST", f"{ctr}/activate", {"version": 7}),
        ("DELETE", f"{ctr}/versions/{VERSION}", None),
        ("POST", "/v2/repository/models/ctr/unload", None),
    ):
        answer = http.request(method, path, json=body)
        assert answer.is_success or body == {"version": 7}, answer.text
    store.load_snapshot(with_older[2])
    came = lines(CHANGES)
    assert [(line["change"], line["from"], line["to"]) for line in came] == [
        ("load", None, VERSION),
        ("load", VERSION, VERSION),
        ("activate", VERSION, VERSION + 1),
        ("rollback", VERSION + 1, VERSION),
        ("canary", VERSION, VERSION),
        ("label", VERSION, VERSION),
        ("unlabel", VERSION, VERSION),
        ("withdraw", VERSION, VERSION),
        ("canary", VERSION, VERSION),
        ("promote", VERSION, VERSION + 1),
        ("drop", VERSION + 1, VERSION + 1),
        ("deactivate", VERSION + 1, None),
        ("load", None, VERSION + 2),
    ], "none for what was refused"
    *by_admin, by_program = came
    assert all("ops-1" in line["asked_by"] and "127.0.0.1:" in line["asked_by"] for line in by_admin)
    assert by_admin[0]["asked_by"].startswith("job ")
    assert "asked_by" not in by_program
    assert (came[4]["version"], came[4]["share"], came[5]["label"]) == (VERSION + 1, 0.25, "next")
    assert all(line["seconds"] >= 0 and line["model"] == "ctr" and line["level"] == "INFO" for line in came)
    assert f"model ctr: activate: active version {VERSION} → {VERSION + 1}, in " in came[2]["text"]
    assert http.post(f"{ctr}/deltas", content=delta(1, {5: 6.0})).status_code == 200
    assert len(lines(CHANGES)) == len(came)


def test_a_reactor_answers_with_or_without_an_id(own: tuple[Store, ServerThread, httpx.Client], tmp_path: Path) -> None:
    """What proxies put on every request must not make look-ups slow: see docs/decisions/reactor.md."""
    from tritonclient.http import InferenceServerClient, InferInput

    store, server, http = own
    store.load_snapshot(write_snapshot(tmp_path))
    keys = InferInput("item_id", [len(KEYS)], "INT64")
    keys.set_data_from_numpy(KEYS)

    def by_reactors() -> float:
        text = http.get("/metrics").text
        return sum(
            float(line.split()[1]) for line in text.splitlines() if line.startswith("tierstore_reactor_answers_total")
        )

    with InferenceServerClient(server.url.removeprefix("http://")) as client:
        rows = client.infer("ctr", [keys]).as_numpy("item_id")
        before = by_reactors()

        def wanted() -> bool:
            answer = client.infer("ctr", [keys], headers={"X-Request-Id": "r-9"})
            np.testing.assert_array_equal(answer.as_numpy("item_id"), rows)
            return by_reactors() > before

        eventually(wanted, "a reactor answers")
