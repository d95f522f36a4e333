"""Spans of requests and deltas reach a collector: a server that takes OTLP over HTTP, as collectors do."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.extras import has_grpc
from tests.kafka_broker import Brokers
from tests.service.conftest import GRPC, eventually, settings_for
from tests.service.scenes import KEYS, delta, items, rows, write_snapshot
from tierstore.client import AsyncClient, Client
from tierstore.engine.store import Store
from tierstore.errors import ConfigError
from tierstore.kafka.writer import KafkaDeltaWriter
from tierstore.service.server import ServerThread, check_settings

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra `otel` is not installed")
from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import TracerProvider

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED, NOT_SAMPLED = f"00-{TRACE}-{SPAN}-01", f"00-{TRACE}-{SPAN}-00"
JSON = {"inputs": [{"name": "item_id", "datatype": "INT64", "shape": [2], "data": [5, 99]}]}


class Collector:
    """Keeps the spans that are sent to `url`, with the attributes of their resource."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: list[tuple[dict[str, str], Any]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.path == "/v1/traces"
                body = self.rfile.read(int(self.headers["content-length"]))
                with outer._lock:
                    for one in ExportTraceServiceRequest.FromString(body).resource_spans:
                        named = {pair.key: pair.value.string_value for pair in one.resource.attributes}
                        outer._spans += [(named, span) for scope in one.scope_spans for span in scope.spans]
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def of(self, trace_id: str | int) -> list[Any]:
        """The spans of a trace that have come."""
        wanted = trace_id if isinstance(trace_id, str) else f"{trace_id:032x}"
        with self._lock:
            return [span for _, span in self._spans if span.trace_id.hex() == wanted]

    def services(self) -> set[str]:
        with self._lock:
            return {named["service.name"] for named, _ in self._spans}

    def root(self, trace_id: str | int, name: str) -> Any:
        """The span of that name, once it is there; and it is one."""
        spans = eventually(
            lambda: [span for span in self.of(trace_id) if span.name == name], f"span {name}; {self.of(trace_id)}"
        )
        assert len(spans) == 1
        return spans[0]

    def stages(self, root: Any) -> dict[str, int]:
        """Nanoseconds of its stages, by name; all lie within it."""
        children = [span for span in self.of(root.trace_id.hex()) if span.parent_span_id == root.span_id]
        for child in children:
            assert root.start_time_unix_nano <= child.start_time_unix_nano
            assert child.end_time_unix_nano <= root.end_time_unix_nano
        return {child.name: child.end_time_unix_nano - child.start_time_unix_nano for child in children}

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def attributes(span: Any) -> dict[str, Any]:
    return {pair.key: pair.value.string_value or pair.value.int_value for pair in span.attributes}


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    made = Collector()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", made.url)
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
        patch.setenv("NO_PROXY", "127.0.0.1")
        yield made
    made.close()


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory, collector: Collector) -> Iterator[ServerThread]:
    root = tmp_path_factory.mktemp("traced")
    with Store(settings_for(root, grpc_port=GRPC, traces=True)) as store:
        store.load_snapshot(write_snapshot(root))
        with ServerThread(store) as server:
            yield server


@pytest.fixture(scope="module")
def tracer() -> trace.Tracer:
    """Of a program that calls the service; its own spans go nowhere."""
    return TracerProvider().get_tracer("caller")


def by_reason(server: ServerThread) -> dict[str, float]:
    """Requests that reactors have answered (""), and those that they left to Python, by the reason."""
    found = {"": 0.0}
    for line in httpx.get(f"{server.url}/metrics").text.splitlines():
        if line.startswith("tierstore_reactor_answers_total"):
            found[""] += float(line.rpartition(" ")[2])
        elif line.startswith("tierstore_reactor_handed_on_total"):
            reason = line.split('reason="')[1].split('"')[0]  # of each reactor
            found[reason] = found.get(reason, 0.0) + float(line.rpartition(" ")[2])
    return found


def test_a_sampled_request_alone_has_a_span_with_its_stages(traced: ServerThread, collector: Collector) -> None:
    with httpx.Client(base_url=traced.url) as http:
        for sent in (None, NOT_SAMPLED, "nonsense", SAMPLED):
            headers = {} if sent is None else {"traceparent": sent}
            assert http.post("/v2/models/ctr/infer", json=JSON, headers=headers).status_code == 200
    root = collector.root(TRACE, "POST /v2/models/ctr/infer")
    assert (root.parent_span_id.hex(), root.kind) == (SPAN, 2)  # SPAN_KIND_SERVER
    assert attributes(root)["http.response.status_code"] == 200
    assert {"plan", "look up", "encode"} <= collector.stages(root).keys() <= {
        "queue", "plan", "look up", "look up below memory", "encode"
    }  # fmt: skip
    assert collector.services() == {"tierstore"}


@pytest.mark.parametrize("kind", ["threads", "asyncio"])
def test_clients_pass_on_the_span_that_they_are_called_in(
    traced: ServerThread, collector: Collector, tracer: trace.Tracer, kind: str
) -> None:
    import asyncio

    async def look_up() -> Any:
        async with AsyncClient(traced.url) as client:
            return await client.lookup("ctr", "item_id", KEYS)

    with Client(traced.url) as client:
        client.lookup("ctr", "item_id", KEYS)  # reactors know the form
    before = by_reason(traced)
    with tracer.start_as_current_span("caller") as span:
        if kind == "asyncio":
            got = asyncio.run(look_up())
        else:
            with Client(traced.url) as client:
                got = client.lookup("ctr", "item_id", KEYS)
    assert np.array_equal(got, items(KEYS))
    context = span.get_span_context()
    root = collector.root(context.trace_id, "POST /v2/models/ctr/infer")
    assert root.parent_span_id.hex() == f"{context.span_id:016x}"
    after = by_reason(traced)
    assert (after["traced"] - before["traced"], after[""] - before[""]) == (1, 0)
    assert sum(collector.stages(root).values()) <= root.end_time_unix_nano - root.start_time_unix_nano


def test_a_client_outside_of_a_span_sends_none_and_is_answered_by_reactors(traced: ServerThread) -> None:
    with Client(traced.url) as client:
        client.lookup("ctr", "item_id", KEYS)
        client.lookup("ctr", "item_id", KEYS)
        before = by_reason(traced)
        for _ in range(5):
            client.lookup("ctr", "item_id", KEYS)
        after = by_reason(traced)
    assert after[""] - before[""] >= 5
    assert after["traced"] == before["traced"]


@pytest.mark.skipif(not has_grpc(), reason="grpcio is not installed")
def test_a_call_of_grpc_has_a_span_of_its_method(traced: ServerThread, collector: Collector) -> None:
    import tritonclient.grpc as triton

    trace_id = "11" * 16
    client = triton.InferenceServerClient(traced.grpc_target)
    keys = triton.InferInput("item_id", [len(KEYS)], "INT64")
    keys.set_data_from_numpy(KEYS)
    client.infer("ctr", [keys])
    client.infer("ctr", [keys])
    before = by_reason(traced)
    client.infer("ctr", [keys], headers={"traceparent": f"00-{trace_id}-{SPAN}-00"})
    assert by_reason(traced)[""] - before[""] == 1, "a reactor has answered"
    client.infer("ctr", [keys], headers={"traceparent": f"00-{trace_id}-{SPAN}-03", "tracestate": "vendor=1"})
    root = collector.root(trace_id, "inference.GRPCInferenceService/ModelInfer")
    assert {"plan", "look up", "encode"} <= collector.stages(root).keys()
    assert attributes(root)["rpc.method"] == "ModelInfer"
    assert root.trace_state == "vendor=1"
    assert by_reason(traced)[""] - before[""] == 1
    client.close()


def test_rows_from_disk_are_a_stage_of_their_own(tmp_path: Path, collector: Collector) -> None:
    trace_id = "22" * 16
    with Store(settings_for(tmp_path, traces=True)) as store:
        store.load_snapshot(write_snapshot(tmp_path))
        with ServerThread(store) as server:
            body = {"inputs": [{**JSON["inputs"][0], "shape": [1], "data": [0]}]}
            httpx.post(f"{server.url}/v2/models/ctr/infer", json=body, headers={"traceparent": f"00-{trace_id}-{SPAN}-01"})  # fmt: skip
    root = collector.root(trace_id, "POST /v2/models/ctr/infer")
    assert collector.stages(root)["look up below memory"] > 0


def test_an_error_of_the_service_marks_its_span(traced: ServerThread, collector: Collector) -> None:
    """One of the caller does not."""
    trace_id = "33" * 16
    answer = httpx.post(f"{traced.url}/v2/models/nobody/infer", json=JSON, headers={"traceparent": f"00-{trace_id}-{SPAN}-01"})  # fmt: skip
    assert answer.status_code == 404
    root = collector.root(trace_id, "POST /v2/models/nobody/infer")
    assert (attributes(root)["http.response.status_code"], root.status.code) == (404, 0)


def test_a_delta_over_kafka_goes_on_with_the_trace_of_its_writer(
    tmp_path: Path, collector: Collector, tracer: trace.Tracer
) -> None:
    brokers = Brokers()
    topic = brokers.new_topic(1)
    options = {"kafka": brokers.address, "kafka_topic": topic, "traces": True}
    with Store(settings_for(tmp_path, **options)) as store:
        store.load_snapshot(write_snapshot(tmp_path, delta_seq=3))
        with (
            ServerThread(store),
            tracer.start_as_current_span("trainer") as span,
            KafkaDeltaWriter(brokers.address, topic, "ctr", next_seq=4) as writer,
        ):
            writer.send(delta(4, {5: 50.0}))
            writer.flush()
            eventually(
                lambda: np.array_equal(store.model("ctr").lookup("item_id", [5]), rows("item", [50.0])), "the delta"
            )
    found = collector.root(span.get_span_context().trace_id, "apply delta")
    assert found.kind == 5  # SPAN_KIND_CONSUMER
    assert attributes(found) | {"tierstore.model": "ctr", "tierstore.seq": 4} == attributes(found)
    brokers.close()


def test_a_protocol_that_is_not_spoken_is_refused_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    check_settings(settings_for(tmp_path))
    with pytest.raises(ConfigError, match="expected http/protobuf, got 'grpc'"):
        check_settings(settings_for(tmp_path, traces=True))
