"""The server around the answers: who may ask, what happens when too many do, metrics, pages, and an orderly end."""

from __future__ import annotations

import concurrent.futures
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.service.conftest import eventually, load, settings_for
from tests.service.fake_store import FakeStore
from tests.service.scenes import delta, write_snapshot
from tierstore.addresses import is_loopback
from tierstore.errors import ConfigError, Locked
from tierstore.service.addresses import host_name
from tierstore.service.server import ServerThread, check_settings, serve

ITEM = {"inputs": [{"name": "item_id", "datatype": "INT64", "shape": [2], "data": [1, 100]}]}
PATHS = ["/v2", "/v2/models/ctr", "/admin/models", "/metrics", "/", "/docs", "/nothing"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("headers", "allowed"),
    [
        ({"Host": "localhost"}, True),
        ({"Host": "LOCALHOST:1"}, True),
        ({"Host": "127.0.0.1:9"}, True),
        ({"Host": "[::1]"}, True),
        ({"Host": "[::1]:80"}, True),
        ({"Host": "evil.example"}, False),
        ({"Host": "127.0.0.1.evil.example"}, False),
        ({"Host": "localhost.evil.example:8000"}, False),
        ({"Host": "evil.example:127.0.0.1"}, False),
        ({"Host": "localhost:x@evil"}, False),
        ({"Host": "10.0.0.1"}, False),
        ({"Host": ""}, False),
        ({"Host": "[::1"}, False),
        ({"Host": "localhost:8000", "Origin": "http://localhost:8000"}, True),
        ({"Host": "localhost", "Origin": "http://localhost"}, True),
        ({"Host": "[::1]:5", "Origin": "http://[::1]:5"}, True),
        ({"Host": "localhost:443", "Origin": "https://localhost"}, True),
        ({"Host": "localhost:8000", "Origin": "http://localhost:3000"}, False),
        ({"Host": "localhost:8000", "Origin": "http://127.0.0.1:8000"}, False),
        ({"Host": "localhost:8000", "Origin": "http://localhost"}, False),
        ({"Origin": "https://evil.example"}, False),
        ({"Origin": "http://localhost.evil.example"}, False),
        ({"Origin": "null"}, False),
        ({"Origin": "http://[broken"}, False),
        ({"Origin": ""}, False),
    ],
)
def test_only_this_machine_and_its_own_pages_may_ask(
    http: httpx.Client, path: str, headers: dict[str, str], allowed: bool
) -> None:
    answer = http.get(path, headers=headers)
    assert (answer.status_code != 403) is allowed, answer.text
    if not allowed:
        assert answer.json()["error"]


def test_a_refused_request_changes_nothing(http: httpx.Client) -> None:
    assert http.post("/v2/repository/models/ctr/unload", headers={"Origin": "https://evil.example"}).status_code == 403
    assert http.get("/v2/models/ctr/ready").status_code == 200


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ("a:1", "a"),
        ("a", "a"),
        ("[::1]:1", "::1"),
        ("[::1]x", None),
        (":1", None),
        ("a:b", None),
        ("a:1:2", None),
        ("::1", None),
        ("a:١", None),
    ],
)
def test_the_name_in_a_host_header(value: str, name: str | None) -> None:
    assert host_name(value) == name


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.8.9.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False), ("x", False)],
)
def test_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


@pytest.mark.parametrize(
    ("overrides", "error", "words"),
    [
        ({"host": "0.0.0.0"}, ConfigError, "allow_open_network"),
        ({"host": "example.com"}, ConfigError, "loopback"),
        ({"watch": "/nothing/here"}, ConfigError, "watch"),
    ],
)
def test_what_cannot_be_served_is_said_at_start(
    tmp_path: Path, overrides: dict[str, object], error: type[Exception], words: str
) -> None:
    settings = settings_for(tmp_path, **overrides)
    with pytest.raises(error, match=words):
        serve(settings, announce=lambda *_: pytest.fail("it came up"))
    assert not (tmp_path / "data").exists()


def test_an_open_network_answers_under_its_names_and_addresses_but_to_no_foreign_page(tmp_path: Path) -> None:
    settings = settings_for(tmp_path, host="0.0.0.0", allow_open_network=True, allowed_host=["Store.example"])
    check_settings(settings)
    with ServerThread(FakeStore(settings)) as server:  # type: ignore[arg-type]
        url = f"http://127.0.0.1:{server.port}/v2"
        assert httpx.get(url, headers={"Host": "store.example:8000"}).status_code == 200
        assert httpx.get(url, headers={"Host": "10.0.0.1:8000"}).status_code == 200
        assert httpx.get(url, headers={"Host": socket.gethostname()}).status_code == 200
        assert httpx.get(url, headers={"Host": "rebound.example"}).status_code == 403
        assert httpx.get(url, headers={"Host": "store.example", "Origin": "https://store.example"}).status_code == 200
        assert httpx.get(url, headers={"Host": "store.example", "Origin": "https://evil.example"}).status_code == 403


def test_answers_without_a_body_are_sent_too_and_in_their_order(server: ServerThread) -> None:
    requests = [
        b"HEAD /v2 HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /v2/nothing HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"POST /v2/repository/index HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n{}",
        b"HEAD /v2/health/ready HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
    ]
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(b"".join(requests[:3]))
        connection.sendall(requests[3])
        connection.sendall(requests[4])
        answers = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    assert re.findall(rb"HTTP/1.1 (\d+)", answers) == [b"200", b"200", b"404", b"200", b"200"]


def test_a_port_in_use_is_an_error_at_start(server: ServerThread, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot listen"):
        ServerThread(FakeStore(settings_for(tmp_path, port=server.port)))  # type: ignore[arg-type]


def test_beyond_the_queue_requests_are_refused_at_once_and_the_others_are_answered(
    fake: tuple[FakeStore, ServerThread],
) -> None:
    store, server = fake
    pool = server.service.lookup_pool
    store.model("ctr").gate.clear()
    with httpx.Client(base_url=server.url, timeout=60) as http, concurrent.futures.ThreadPoolExecutor(2) as threads:
        waiting = [threads.submit(http.post, "/v2/models/ctr/infer", json=ITEM) for _ in range(2)]
        eventually(lambda: (pool.busy, pool.waiting) == (1, 1), "one look-up at work and one that waits")
        answer = http.post("/v2/models/ctr/infer", json=ITEM)
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "1"
        assert "lookup" in answer.json()["error"]
        assert http.get("/v2/health/live").status_code == 200, "the loop is not held up"
        stats = samples(http)
        assert stats["tierstore_lookup_queue_depth", ()] == stats["tierstore_lookup_queue_limit", ()] == 1
        assert stats["tierstore_lookup_rejected_total", ()] == 1
        store.model("ctr").gate.set()
        assert [future.result().status_code for future in waiting] == [200, 200]
    eventually(lambda: pool.busy == 0, "an idle pool")


def test_bytes_in_flight_have_a_bound(tmp_path: Path) -> None:
    settings = settings_for(tmp_path, max_inflight="4MiB", lookup_threads=2)
    store = FakeStore(settings)
    keys = {"inputs": [{"name": "item_id", "datatype": "INT64", "shape": [40_000], "data": [1] * 40_000}]}
    with ServerThread(store) as server, httpx.Client(base_url=server.url, timeout=60) as http:  # type: ignore[arg-type]
        store.model("ctr").gate.clear()
        with concurrent.futures.ThreadPoolExecutor(1) as threads:
            first = threads.submit(http.post, "/v2/models/ctr/infer", json=keys)
            eventually(lambda: server.service.inflight.used_bytes > 2 << 20, "the first to hold what it takes")
            answer = http.post("/v2/models/ctr/infer", json=keys)
            assert answer.status_code == 503
            assert answer.headers["retry-after"] == "1"
            store.model("ctr").gate.set()
            assert first.result().status_code == 200
        eventually(lambda: server.service.inflight.used_bytes == 0, "everything given back")


def samples(http: httpx.Client) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every sample of /metrics by name and labels."""
    answer = http.get("/metrics")
    assert answer.status_code == 200
    families = text_string_to_metric_families(answer.text)
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def test_metrics(own: tuple[object, ServerThread, httpx.Client], tmp_path: Path) -> None:
    _, _, http = own
    load(http, write_snapshot(tmp_path, 1))
    before = samples(http)
    assert http.post("/v2/models/ctr/infer", json=ITEM).status_code == 200
    assert http.post("/v2/models/ctr/infer", json={}).status_code == 400
    body = delta(1, {5: 6.0})
    assert (
        http.post(
            "/admin/models/ctr/deltas", content=body, headers={"Content-Type": "application/vnd.apache.arrow.stream"}
        ).status_code
        == 200
    )
    after = samples(http)

    item = (("model", "ctr"), ("table", "item"))
    tiers = {
        dict(labels)["tier"]
        for name, labels in after
        if name == "tierstore_lookup_keys_total" and set(item) <= set(labels)
    }
    assert {"host", "disk", "overlay", "absent"} <= tiers

    def keys(stats: dict[tuple[str, tuple[tuple[str, str], ...]], float]) -> float:
        return sum(
            value
            for (name, labels), value in stats.items()
            if name == "tierstore_lookup_keys_total" and set(item) <= set(labels)
        )

    assert keys(after) - keys(before) == 2
    assert after["tierstore_delta_watermark", (("model", "ctr"),)] == 1
    assert after["tierstore_delta_freshness_seconds_count", (("model", "ctr"),)] == 1
    assert after["tierstore_tier_bytes", tuple(sorted((*item, ("tier", "disk"))))] > 0
    assert after["tierstore_tier_budget_bytes", tuple(sorted((*item, ("tier", "host"))))] > 0
    assert after["tierstore_request_seconds_count", (("outcome", "ok"), ("protocol", "oip_http"))] == 1
    assert after["tierstore_request_seconds_count", (("outcome", "bad_input"), ("protocol", "oip_http"))] == 1
    assert after["tierstore_request_seconds_bucket", (("le", "+Inf"), ("outcome", "ok"), ("protocol", "oip_http"))] == 1
    names = {name for name, _ in after}
    for bound in ("lookup_queue", "control_queue"):
        assert {f"tierstore_{bound}_depth", f"tierstore_{bound}_limit"} <= names
    for pair in (
        ("inflight_bytes", "inflight_limit_bytes"),
        ("overlay_used_bytes", "overlay_budget_bytes"),
        ("jobs", "jobs_limit"),
    ):
        assert {f"tierstore_{name}" for name in pair} <= names


def test_pages(http: httpx.Client) -> None:
    page = http.get("/")
    assert page.status_code == 200
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert not re.search(r"(src|href)=[\"']?(https?:)?//", page.text), "nothing is fetched from elsewhere"
    assert "/admin/models" in page.text
    state = http.get("/admin/models").json()
    assert {"models", "service", "host_budget", "overlay_budget"} <= set(state)
    assert {"ready", "requests", "lookup_queue", "inflight_bytes"} <= set(state["service"])
    assert "/admin/models/{model}/deltas" in http.get("/openapi.json").json()["paths"]
    assert http.get("/docs").status_code == 200


def test_draining_goes_on_serving_and_says_not_ready(tmp_path: Path) -> None:
    server = ServerThread(FakeStore(settings_for(tmp_path)))  # type: ignore[arg-type]
    with server, httpx.Client(base_url=server.url, timeout=60) as http:
        assert http.get("/v2/health/ready").status_code == 200
        server.stop(drain_s=600)
        eventually(lambda: http.get("/v2/health/ready").status_code == 400, "not ready")
        assert http.get("/v2/health/live").status_code == 200
        assert http.post("/v2/models/ctr/infer", json=ITEM).status_code == 200
    with pytest.raises(httpx.ConnectError):
        httpx.get(server.url)


def test_what_was_started_is_finished_before_the_end(tmp_path: Path) -> None:
    store = FakeStore(settings_for(tmp_path))
    store.model("ctr").gate.clear()
    with concurrent.futures.ThreadPoolExecutor(1) as threads, ServerThread(store) as server:  # type: ignore[arg-type]
        answer = threads.submit(httpx.post, f"{server.url}/v2/models/ctr/infer", json=ITEM, timeout=60)
        eventually(lambda: server.service.lookup_pool.busy == 1, "a look-up at work")
        closing = threading.Thread(target=server.close)
        closing.start()
        eventually(lambda: _refused(server.url), "no new connections")
        store.model("ctr").gate.set()
        assert answer.result().status_code == 200
        closing.join()


def _refused(url: str) -> bool:
    try:
        httpx.get(url)
    except httpx.TransportError:
        return True
    return False


SERVE = """
import sys
from tierstore.config import load_settings
from tierstore.service.server import serve
serve(load_settings(None, data=sys.argv[1], port=0, drain_s=float(sys.argv[2]), host_budget="4MiB", disk_threads=2))
"""


def start(data: Path, drain_s: float) -> tuple[subprocess.Popen[str], str]:
    """A service in a process of its own, and its URL once it is up."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TIERSTORE_")}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE, str(data), str(drain_s)], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    found = re.search(r"http://127\.0\.0\.1:[0-9]+", line)
    assert found is not None, line
    return process, found[0]


@pytest.mark.thorough
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_signal_drains_and_ends_the_process_in_order(tmp_path: Path, number: signal.Signals) -> None:
    process, url = start(tmp_path / "data", 0.3)
    with process:
        with pytest.raises(Locked):
            serve(settings_for(tmp_path), announce=lambda *_: pytest.fail("two processes hold one directory"))
        with httpx.Client(base_url=url, timeout=60) as http:
            assert http.get("/v2/health/ready").status_code == 200
            process.send_signal(number)
            eventually(lambda: http.get("/v2/health/ready").status_code == 400, "not ready")
        assert process.wait(60) == 0


@pytest.mark.thorough
def test_a_second_signal_skips_the_wait(tmp_path: Path) -> None:
    process, url = start(tmp_path / "data", 600)
    with process:
        process.send_signal(signal.SIGINT)
        eventually(lambda: httpx.get(f"{url}/v2/health/ready").status_code == 400, "not ready")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
