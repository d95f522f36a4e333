"""Behind a proxy the log and the audit name the client that the proxy was asked by, and nobody whom a client makes up."""

from __future__ import annotations

import ipaddress
import logging
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.interop.proxies import PROXIES, started
from tests.service.conftest import eventually, settings_for
from tests.service.scenes import KEYS, items, write_snapshot
from tierstore.access.audit import read
from tierstore.config import load_settings
from tierstore.engine.store import Store
from tierstore.errors import ConfigError
from tierstore.service.forwarded import Proxies
from tierstore.service.server import ServerThread

CLIENT, MADE_UP = "127.0.0.2", "198.51.100.7"  # all of 127.0.0.0/8 is this machine


def requests_in(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """The lines of the request log, whatever else is logged."""
    return [record.fields for record in caplog.records if record.name == "tierstore.service.request_log"]  # type: ignore[attr-defined]


@pytest.mark.parametrize("way", ["nginx", "haproxy", "envoy"])
def test_the_log_names_the_client_of_a_trusted_proxy(
    way: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tierstore.service.request_log")
    settings = settings_for(tmp_path, access_log=True, trusted_proxies="127.0.0.1,10.0.0.0/8")
    with (
        Store(settings) as store,
        ServerThread(store) as server,
        started(PROXIES[way], server.port, tmp_path) as url,
        httpx.Client(base_url=url, transport=httpx.HTTPTransport(local_address=CLIENT), timeout=60) as http,
    ):
        store.load_snapshot(write_snapshot(tmp_path))
        eventually(lambda: http.get("/v2/models/ctr").status_code == 200, "the proxy has found the service ready")
        headers = {"x-forwarded-for": MADE_UP, "forwarded": f"for={MADE_UP}", "x-request-id": "r-1"}
        assert http.get("/v2/models/ctr", headers=headers).status_code == 200
        assert http.get("/admin/models").status_code == 404, "the proxy passes no such request on"
    clients = [fields["client"] for fields in requests_in(caplog) if fields.get("id") == "r-1"]
    assert clients == [CLIENT]


def test_the_audit_names_it_too_and_nobody_believes_a_stranger(tmp_path: Path) -> None:
    for number, (trusted, named) in enumerate((("127.0.0.1", "203.0.113.9"), ("10.0.0.0/8", "127.0.0.1:"))):
        settings = settings_for(tmp_path / str(number), trusted_proxies=trusted)
        with Store(settings) as store, ServerThread(store) as server:
            headers = {"x-forwarded-for": f"{MADE_UP}, 203.0.113.9"}
            httpx.post(f"{server.url}/admin/models/nobody/rollback", headers=headers, timeout=60)
        (line,) = [line for line in read(settings.data) if line["outcome"] == "failed"]
        assert line["who"].startswith(named)


def test_calls_of_grpc_pass_envoy_and_the_log_names_whom_it_names(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    triton = pytest.importorskip("tritonclient.grpc", reason="tritonclient[grpc] is not installed")
    caplog.set_level(logging.INFO, "tierstore.service.request_log")
    settings = settings_for(tmp_path, access_log=True, trusted_proxies="127.0.0.1", grpc_port=0)
    with Store(settings) as store, ServerThread(store) as server:
        store.load_snapshot(write_snapshot(tmp_path))
        with started(PROXIES["envoy"], server.port, tmp_path) as url:
            eventually(
                lambda: httpx.get(f"{url}/v2/models/ctr").status_code == 200, "Envoy has found the service ready"
            )
            with triton.InferenceServerClient(url.removeprefix("http://")) as client:
                keys = triton.InferInput("item_id", [len(KEYS)], "INT64")
                keys.set_data_from_numpy(KEYS)
                for _ in range(5):
                    answer = client.infer("ctr", [keys], headers={"x-forwarded-for": MADE_UP})
                    assert np.array_equal(answer.as_numpy("item_id"), items(KEYS))
        assert server.service.reactors.answers >= 1, "the compiled loop answers them too"
    lines = [fields for fields in requests_in(caplog) if fields["method"] == "gRPC"]
    (client,) = {line["client"] for line in lines}
    ipaddress.ip_address(
        client
    )  # of this machine, as Envoy puts it for one on loopback: no port, as it is not the connection's
    assert client != MADE_UP


@pytest.mark.parametrize(
    ("values", "client"),
    [
        ([], "10.0.0.5"),
        (["203.0.113.9"], "203.0.113.9"),
        (["1.1.1.1, 203.0.113.9, 10.0.0.9"], "203.0.113.9"),  # the second proxy is trusted too
        (["1.1.1.1", "203.0.113.9"], "203.0.113.9"),  # a header of its own, behind the client's
        (["10.1.1.1, 10.0.0.9"], "10.1.1.1"),
        (["203.0.113.9:4711"], "203.0.113.9"),
        (["[2001:db8::7]:4711"], "2001:db8::7"),
        (["2001:db8::7"], "2001:db8::7"),
        (["::ffff:203.0.113.9"], "203.0.113.9"),
        (["1.1.1.1, unknown"], "10.0.0.5"),
        (["1.1.1.1, unknown, 10.0.0.9"], "10.0.0.9"),
        (["", "203.0.113.9,"], "10.0.0.5"),
        (["\xff"], "10.0.0.5"),
    ],
)
def test_the_list_is_read_from_its_end(values: list[str], client: str) -> None:
    headers: Any = [(b"host", b"a"), *((b"x-forwarded-for", value.encode("latin-1")) for value in values)]
    assert Proxies(["10.0.0.0/8"]).host("10.0.0.5", headers) == client
    assert Proxies(["10.0.0.0/8"]).host("203.0.113.1", headers) == "203.0.113.1"
    assert Proxies([]).host("10.0.0.5", headers) == "10.0.0.5"


def test_what_is_no_network_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"expected addresses or networks such as .*, got 'proxy.example'"):
        load_settings(None, trusted_proxies="10.0.0.0/8,proxy.example")
