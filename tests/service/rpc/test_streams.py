"""Calls of gRPC on streams of HTTP/2, without a socket: what comes of a stream, and what is sent over it."""

from __future__ import annotations

import asyncio
import gzip
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.service.conftest import settings_for
from tests.service.fake_store import VERSION, FakeStore
from tests.service.rpc.fake_stream import SomeStream
from tests.service.scenes import items
from tierstore.access.roles import Role
from tierstore.access.tokens import TokenFile
from tierstore.errors import DeadlineExceeded, InvalidInput, Overloaded, RateLimited
from tierstore.reactor import layout as kernel
from tierstore.service.context import Service
from tierstore.service.rpc import flow as flow_module
from tierstore.service.rpc.calls import Calls
from tierstore.service.rpc.messages import CODES, Messages, prefixed, status_of
from tierstore.service.rpc.protobuf import message_class
from tierstore.wire.http2.head import NO_TIMEOUT

INFER = b"/inference.GRPCInferenceService/ModelInfer"
STREAM = b"/inference.GRPCInferenceService/ModelStreamInfer"
LIVE = b"/inference.GRPCInferenceService/ServerLive"
METADATA = b"/inference.GRPCInferenceService/ModelMetadata"
LOAD = b"/inference.GRPCInferenceService/RepositoryModelLoad"
PREDICT = b"/tensorflow.serving.PredictionService/Predict"
CHECK, WATCH = b"/grpc.health.v1.Health/Check", b"/grpc.health.v1.Health/Watch"
GRPC, GZIP = (b"content-type", b"application/grpc"), (b"grpc-encoding", b"gzip")
DEADLINE_S = 30.0
KEYS = np.arange(4)


@pytest.fixture
def store(tmp_path: Any) -> FakeStore:
    return FakeStore(settings_for(tmp_path, lookup_threads=1))


@pytest.fixture
def service(store: FakeStore) -> Iterator[Service]:
    made = Service(store, store.settings)
    yield made
    for name in store.models():
        store.model(name).gate.set()
    made.close()


def calls_of(service: Service, allow: Callable[..., None] = lambda *_: None) -> Calls:
    return Calls(service, allow)


def keys_message(keys: np.ndarray = KEYS, **more: Any) -> bytes:
    wanted = message_class("inference.ModelInferRequest")(model_name="ctr", **more)
    wanted.inputs.add(name="item_id", datatype="INT64", shape=[len(keys)])
    wanted.raw_input_contents.append(keys.astype(np.int64).tobytes())
    made: bytes = wanted.SerializeToString()
    return made


def rows_of(answer: bytes, kind: str = "inference.ModelInferResponse") -> np.ndarray:
    read = message_class(kind).FromString(answer[5:])
    response = read.infer_response if kind.endswith("StreamInferResponse") else read
    return np.frombuffer(response.raw_output_contents[0], np.float32).reshape(-1, 4)


async def until(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end
        await asyncio.sleep(0.002)


def answered(service: Service, path: bytes, body: bytes, *headers: tuple[bytes, bytes], **more: Any) -> list[Any]:
    """What is sent for a call with a whole body."""
    return answered_over(service, SomeStream(path, [GRPC, *headers], **more), body)


def answered_over(service: Service, stream: SomeStream, body: bytes) -> list[Any]:
    async def run() -> None:
        calls_of(service).request(stream, body)
        await until(lambda: stream.sent)

    asyncio.run(run())
    return stream.sent


def status(sent: list[Any]) -> tuple[str, str]:
    """The status of an answer, and its text."""
    trailers = sent[-1] or sent[0]
    (name,) = (name for name, number in CODES.items() if number == int(trailers[b"grpc-status"]))
    return name, trailers.get(b"grpc-message", b"").decode()


def test_a_look_up_is_answered_and_holds_nothing_then(service: Service) -> None:
    headers, data, trailers = answered(service, INFER, prefixed(keys_message()), (b"x-request-id", b"seven"))
    assert headers[b"content-type"] == b"application/grpc"
    assert b"gzip" in headers[b"grpc-accept-encoding"]
    np.testing.assert_array_equal(rows_of(data), items(KEYS))
    assert data[:5] == b"\0" + (len(data) - 5).to_bytes(4, "big")
    assert trailers == {b"grpc-status": b"0", b"x-request-id": b"seven"}
    assert service.inflight.used_bytes == 0


@pytest.mark.parametrize(
    ("path", "body", "code"),
    [
        (b"/inference.GRPCInferenceService/Nothing", prefixed(b""), "UNIMPLEMENTED"),
        (INFER, b"", "UNIMPLEMENTED"),  # no message
        (INFER, b"\0\0\0\0\x09", "UNIMPLEMENTED"),
        (INFER, prefixed(b"\xff\xff"), "INVALID_ARGUMENT"),
        (INFER, b"\1\0\0\0\1x", "INVALID_ARGUMENT"),  # compressed, nobody knows how
        (INFER, b"\0\xff\xff\xff\xff", "RESOURCE_EXHAUSTED"),
        (INFER, prefixed(keys_message()[:3]), "INVALID_ARGUMENT"),
        (METADATA, prefixed(b"\n\2xx"), "NOT_FOUND"),
        (CHECK, prefixed(b"\n\2xx"), "NOT_FOUND"),
    ],
)
def test_what_is_wrong_is_a_status_alone(service: Service, path: bytes, body: bytes, code: str) -> None:
    sent = answered(service, path, body)
    assert status(sent)[0] == code
    assert sent[1:] == [b"", None]
    assert service.inflight.used_bytes == 0


def test_a_message_that_the_reactor_has_dropped_is_too_large(service: Service) -> None:
    stream = SomeStream(INFER, [GRPC], reason=kernel.SIZE)
    stream.too_large = True
    assert status(answered_over(service, stream, b""))[0] == "RESOURCE_EXHAUSTED"


@pytest.mark.parametrize(
    ("value", "timeout_ms", "code"), [(b"1m", 1, "DEADLINE_EXCEEDED"), (b"soon", NO_TIMEOUT, "INVALID_ARGUMENT")]
)
def test_a_deadline_that_has_passed_and_one_without_a_meaning(
    service: Service, value: bytes, timeout_ms: int, code: str
) -> None:
    stream = SomeStream(INFER, [GRPC, (b"grpc-timeout", value)])
    stream.arrived_ns, stream.timeout_ms = 1, timeout_ms
    assert status(answered_over(service, stream, prefixed(keys_message())))[0] == code
    assert not service.inference_stats.predicts()


def test_what_unfolds_is_bounded_and_reserved_before(service: Service) -> None:
    bomb = gzip.compress(bytes(64 << 20))
    body = b"\1" + len(bomb).to_bytes(4, "big") + bomb
    most: list[int] = []
    reserved = 0

    def reserve(nbytes: int) -> None:
        nonlocal reserved
        reserved += nbytes
        most.append(reserved)

    with pytest.raises(Exception, match="more than the 1048576 bytes"):
        Messages(b"gzip", 1 << 20).first(body).decode(reserve)
    assert most[-1] <= 2 << 20
    assert status(answered(service, INFER, body, GZIP))[0] == "RESOURCE_EXHAUSTED"
    assert status(answered(service, INFER, body, (b"grpc-encoding", b"br")))[0] == "UNIMPLEMENTED"
    cut = b"\1" + (20).to_bytes(4, "big") + bomb[:20]
    assert status(answered(service, INFER, cut, GZIP))[0] == "INVALID_ARGUMENT"
    assert service.inflight.used_bytes == 0


@pytest.mark.parametrize(("behind", "members"), [(b"", 16), (b"junk", 1), (b"", 17)])
def test_all_members_of_a_message_are_read_and_nothing_else(behind: bytes, members: int) -> None:
    packed = b"".join(gzip.compress(bytes([one])) for one in range(members)) + behind
    message = Messages(b"gzip", 1 << 20).first(b"\1" + len(packed).to_bytes(4, "big") + packed)
    if members == 16:
        assert message.decode(lambda nbytes: None) == bytes(range(16))
    else:
        with pytest.raises(InvalidInput, match=r"not valid gzip|more than 16 members"):
            message.decode(lambda nbytes: None)


def compressed(message: bytes) -> bytes:
    """`message` as it is sent in gzip."""
    packed = gzip.compress(message)
    return b"\1" + len(packed).to_bytes(4, "big") + packed


@pytest.mark.parametrize(
    ("path", "message"), [(INFER, keys_message()), (STREAM, keys_message()), (METADATA, b""), (PREDICT, b"")]
)
def test_health_is_answered_while_a_thread_decodes_a_message(
    service: Service, monkeypatch: pytest.MonkeyPatch, path: bytes, message: bytes
) -> None:
    begun, gate, decoder = threading.Event(), threading.Event(), zlib.decompressobj

    def waiting(*args: Any) -> Any:
        assert threading.current_thread() is not threading.main_thread(), "the event loop decodes it"
        begun.set()
        assert gate.wait(DEADLINE_S)
        return decoder(*args)

    async def run() -> list[Any]:
        calls, slow, live = calls_of(service), SomeStream(path, [GRPC, GZIP]), SomeStream(LIVE, [GRPC])
        calls.request(slow, compressed(message))
        await until(begun.is_set)
        calls.request(live, prefixed(b""))
        assert status(live.sent)[0] == "OK"
        assert len(slow.sent) == (path == STREAM), "only the headers of a stream"
        gate.set()
        await until(lambda: not calls.busy)
        return slow.sent

    monkeypatch.setattr(zlib, "decompressobj", waiting)
    sent = asyncio.run(run())
    if message:
        kind = "inference.ModelStreamInferResponse" if path == STREAM else "inference.ModelInferResponse"
        np.testing.assert_array_equal(rows_of(sent[1], kind), items(KEYS))
    assert service.inflight.used_bytes == 0


def test_health_decodes_no_more_than_takes_no_time(service: Service) -> None:
    assert status(answered(service, LIVE, compressed(b""), GZIP))[0] == "OK"
    comment = b"\x1f\x8b\x08\x10" + bytes(6) + b"c" * (1 << 20) + b"\0"  # a header of gzip, longer than what it is of
    for body in (compressed(bytes(1 << 20)), prefixed(bytes(1 << 20)), b"\1" + prefixed(comment)[1:]):
        assert status(answered(service, LIVE, body, GZIP))[0] == "RESOURCE_EXHAUSTED"


def test_rates_count_the_bytes_of_a_compressed_message_as_it_came(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    body, charged = compressed(keys_message(np.zeros(1000))), []
    monkeypatch.setattr(service.rates, "admit", lambda _, model, nbytes: charged.append((model, nbytes)))
    assert status(answered(service, INFER, body, GZIP))[0] == "OK"
    assert charged == [(None, len(body) - 5), ("ctr", len(body) - 5)], "its caller, then its model"


def predict_message() -> bytes:
    wanted = message_class("tensorflow.serving.PredictRequest")()
    wanted.model_spec.name = "ctr"
    made: bytes = wanted.SerializeToString()
    return made


def refuse_all(service: Service, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RateLimited("too many", retry_after_s=1.0) if why == "rate" else Overloaded("the queue is full")

    monkeypatch.setattr(*((service.rates, "admit") if why == "rate" else (service.lookup_pool, "start")), refuse)


LONG = np.zeros(1 << 16)  # keys of a message that is short as it comes, and long once decoded


@pytest.mark.parametrize("why", ["rate", "queue"])
@pytest.mark.parametrize("pack", [prefixed, compressed])
def test_a_look_up_that_is_refused_before_it_is_decoded_counts_for_its_model(
    service: Service, monkeypatch: pytest.MonkeyPatch, pack: Callable[[bytes], bytes], why: str
) -> None:
    refuse_all(service, monkeypatch, why)
    for path, message in ((INFER, keys_message()), (PREDICT, predict_message())):
        assert status(answered(service, path, pack(message), GZIP))[0] == "RESOURCE_EXHAUSTED"
    (error,) = errors_of_a_stream(service, SomeStream(STREAM, [GRPC, GZIP]), pack(keys_message(id="seven")))
    assert (error.infer_response.id, bool(error.error_message)) == ("seven", True)
    assert service.inference_stats.of("ctr", VERSION).failed == 3
    assert service.inflight.used_bytes == 0


def errors_of_a_stream(service: Service, stream: SomeStream, data: bytes, count: int = 1) -> list[Any]:
    async def run() -> None:
        calls = calls_of(service)
        calls.opened(stream)
        calls.data(stream, data)
        await until(lambda: len(stream.sent) > count)
        calls.ended(stream)
        await until(lambda: not calls.busy)

    asyncio.run(run())
    kind = message_class("inference.ModelStreamInferResponse")
    return [kind.FromString(sent[5:]) for sent in stream.sent[1 : 1 + count]]


def test_a_request_of_a_stream_whose_deadline_has_passed_is_told_by_its_id(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(_: Any) -> None:
        raise DeadlineExceeded("too late")

    monkeypatch.setattr(service.shed, "check", late)
    stream = SomeStream(STREAM, [GRPC, GZIP])
    (error,) = errors_of_a_stream(service, stream, compressed(keys_message(id="seven")))
    assert (error.infer_response.id, error.error_message) == ("seven", "too late")


def test_what_is_refused_is_decoded_only_if_that_takes_no_time(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_all(service, monkeypatch, "rate")
    cut = compressed(keys_message())[:-9]
    for body in (compressed(keys_message(LONG, id="seven")), b"\1" + prefixed(cut[5:])[1:]):
        (error,) = errors_of_a_stream(service, SomeStream(STREAM, [GRPC, GZIP]), body)
        assert (error.infer_response.id, error.error_message) == ("", "too many")
        assert status(answered(service, INFER, body, GZIP)) == ("RESOURCE_EXHAUSTED", "too many")
    assert not service.inference_stats.by_version()


def test_what_is_refused_counts_for_no_model_that_its_caller_may_not_read(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_for(tmp_path)
    _, secret = TokenFile(settings.data / "tokens.json").create(Role.READER, models=["other"])
    store = FakeStore(settings)
    service = Service(store, settings)
    try:
        refuse_all(service, monkeypatch, "rate")
        bearer = b"authorization", b"Bearer " + secret.encode()
        assert status(answered(service, INFER, compressed(keys_message()), GZIP, bearer))[0] == "RESOURCE_EXHAUSTED"
        assert not service.inference_stats.by_version()
    finally:
        service.close()


@pytest.mark.parametrize(("path", "message"), [(METADATA, b"\n\2xx"), (LOAD, b"\x12\2xx")])
def test_the_message_of_a_call_that_waits_for_a_thread_counts(service: Service, path: bytes, message: bytes) -> None:
    gate, packed = threading.Event(), compressed(message)

    async def run() -> None:
        calls, streams = calls_of(service), [SomeStream(path, [GRPC, GZIP]) for _ in range(3)]
        pool = service.switch_pool if path == LOAD else service.admin_pool
        busy = [pool.run(gate.wait, DEADLINE_S) for _ in range(pool.threads)]
        calls.request(streams[0], prefixed(message))
        calls.request(streams[1], packed)
        held = service.inflight.used_bytes
        assert held == len(message) + len(packed) - 5
        service.inflight.hold(service.inflight.limit_bytes - held)
        calls.request(streams[2], prefixed(message))
        assert status(streams[2].sent)[0] == "RESOURCE_EXHAUSTED"
        service.inflight.release(service.inflight.limit_bytes - held)
        gate.set()
        await asyncio.gather(*busy)
        await until(lambda: all(stream.sent for stream in streams[:2]))
        assert {status(stream.sent)[0] for stream in streams[:2]} == {"NOT_FOUND"}
        await until(lambda: service.inflight.used_bytes == 0)

    asyncio.run(run())


def test_a_text_passes_as_ascii_and_is_cut() -> None:
    assert dict(status_of("NOT_FOUND", "100 % für\n")) == {
        b"grpc-status": b"5",
        b"grpc-message": b"100 %25 f%C3%BCr%0A",
    }
    assert len(dict(status_of("NOT_FOUND", "ü" * 9000))[b"grpc-message"]) < 8000


def test_who_has_no_token_is_refused_and_reactors_hear_of_who_has_one(tmp_path: Any) -> None:
    settings = settings_for(tmp_path)
    _, secret = TokenFile(settings.data / "tokens.json").create(Role.READER)
    store = FakeStore(settings)
    service, heard = Service(store, settings), []

    def ask(*headers: tuple[bytes, bytes], reason: int = kernel.ACCESS) -> str:
        stream = SomeStream(INFER, [GRPC, *headers], reason)

        async def run() -> None:
            calls_of(service, lambda *of: heard.append(of)).request(stream, prefixed(keys_message()))
            await until(lambda: stream.sent)

        asyncio.run(run())
        return status(stream.sent)[0]

    try:
        bearer = b"Bearer " + secret.encode()
        assert ask() == "UNAUTHENTICATED"
        assert ask((b"authorization", bearer), (b"authorization", bearer)) == "UNAUTHENTICATED"
        assert not heard
        assert ask((b"authorization", bearer)) == "OK"
        assert [(host, value) for host, value, _ in heard] == [(b"localhost", bearer)]
    finally:
        service.close()


@pytest.mark.parametrize("headers", [[], [(b"authorization", b"Bearer what")]])
@pytest.mark.parametrize(
    ("authority", "known"), [(b"localhost:8000", True), (b"[::1]", True), (b"evil.example", False)]
)
def test_where_nobody_needs_a_token_reactors_hear_of_the_names_of_the_service(
    service: Service, headers: list[tuple[bytes, bytes]], authority: bytes, known: bool
) -> None:
    heard: list[Any] = []
    stream = SomeStream(INFER, [GRPC, *headers], kernel.ACCESS)
    stream.authority = authority

    async def run() -> None:
        calls_of(service, lambda *of: heard.append(of)).request(stream, prefixed(keys_message()))
        await until(lambda: stream.sent)

    asyncio.run(run())
    assert status(stream.sent)[0] == ("OK" if known else "PERMISSION_DENIED")
    assert [value for _, value, _ in heard] == ([None] if known else [])


# --- streams of messages


class Client:
    """A stream of messages, on the loop of the test."""

    def __init__(self, calls: Calls, path: bytes = STREAM, host: str = "192.0.2.7") -> None:
        self.calls, self.stream = calls, SomeStream(path, [GRPC])
        self.stream.client = (host, 4711)
        calls.opened(self.stream)

    def send(self, data: bytes) -> None:
        self.calls.data(self.stream, data)

    async def sent(self, count: int) -> list[Any]:
        await until(lambda: len(self.stream.sent) >= count)
        return self.stream.sent


def test_a_stream_answers_in_order_and_outlives_an_error(service: Service) -> None:
    many = [np.arange(size) for size in (1, 5, 2)]
    data = prefixed(keys_message(many[0])) + prefixed(b"\xff") + b"".join(prefixed(keys_message(k)) for k in many[1:])

    async def run() -> list[Any]:
        client = Client(calls_of(service))
        for at in range(0, len(data), 7):  # cut anywhere
            client.send(data[at : at + 7])
        client.calls.ended(client.stream)
        sent = await client.sent(6)
        assert client.stream.taken == len(data)
        assert not client.calls.busy
        return sent

    headers, first, wrong, second, third, trailers = asyncio.run(run())
    assert headers[b"content-type"] == b"application/grpc"
    for answer, keys in zip((first, second, third), many, strict=True):
        np.testing.assert_array_equal(rows_of(answer, "inference.ModelStreamInferResponse"), items(keys))
    assert "malformed" in message_class("inference.ModelStreamInferResponse").FromString(wrong[5:]).error_message
    assert trailers == {b"grpc-status": b"0"}
    assert service.inflight.used_bytes == 0


def test_a_client_may_send_on_only_as_its_messages_are_worked_on(store: FakeStore, service: Service) -> None:
    gate, message = store.model("ctr").gate, prefixed(keys_message())

    async def run() -> None:
        gate.clear()
        client = Client(calls_of(service))
        client.send(message)
        client.send(message)
        assert client.stream.taken == len(message), "the second has to wait"
        gate.set()
        await client.sent(3)
        await until(lambda: client.stream.taken == 2 * len(message))

    asyncio.run(run())


def test_a_stream_whose_first_message_does_not_come_ends(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flow_module, "FIRST_S", 0.05)

    async def run() -> None:
        client = Client(calls_of(service))
        sent = await client.sent(2)
        assert status(sent)[0] == "DEADLINE_EXCEEDED"

    asyncio.run(run())


def test_a_stop_ends_idle_streams_and_answers_what_is_under_way(store: FakeStore, service: Service) -> None:
    gate = store.model("ctr").gate

    async def run() -> None:
        calls = calls_of(service)
        idle, busy, never = Client(calls), Client(calls), SomeStream(INFER, [GRPC])
        gate.clear()
        busy.send(prefixed(keys_message()))
        calls.request(never, prefixed(keys_message()))
        calls.stop()
        assert status(idle.stream.sent)[0] == "UNAVAILABLE"
        assert len(busy.stream.sent) == 1
        assert status(Client(calls).stream.sent)[0] == "UNAVAILABLE"
        calls.cut_off()
        assert status(never.sent)[0] == "UNAVAILABLE"
        gate.set()
        sent = await busy.sent(3)
        assert status(sent)[0] == "UNAVAILABLE"
        await until(lambda: not service.lookup_pool.under_way())
        assert len(never.sent) == 3, "it is answered once"

    asyncio.run(run())
    assert service.inflight.used_bytes == 0


def test_a_lost_stream_does_no_work_and_holds_nothing(store: FakeStore, service: Service) -> None:
    gate, lost = store.model("ctr").gate, SomeStream(INFER, [GRPC])

    async def run() -> None:
        calls = calls_of(service)
        gate.clear()
        first = SomeStream(INFER, [GRPC])
        calls.request(first, prefixed(keys_message()))
        calls.request(lost, prefixed(keys_message(np.arange(9000))))
        lost.lost = True
        calls.lost(lost)
        gate.set()
        await until(lambda: not calls.busy)

    asyncio.run(run())
    assert service.inflight.used_bytes == 0
    assert service.shed.of("gone") == 1


# --- health and reflection


def states(sent: list[Any]) -> list[int]:
    kind = message_class("grpc.health.v1.HealthCheckResponse")
    return [kind.FromString(data[5:]).status for data in sent[1:] if isinstance(data, bytes)]


@pytest.mark.parametrize("release", ["v1", "v1alpha"])
def test_reflection_describes_every_service(service: Service, release: str) -> None:
    request_kind, answer_kind = (
        message_class(f"grpc.reflection.{release}.ServerReflection{kind}") for kind in ("Request", "Response")
    )

    async def run() -> list[Any]:
        client = Client(calls_of(service), f"/grpc.reflection.{release}.ServerReflection/ServerReflectionInfo".encode())
        client.send(
            prefixed(request_kind(list_services="*").SerializeToString())
            + prefixed(request_kind(file_containing_symbol="inference.GRPCInferenceService").SerializeToString())
            + prefixed(request_kind(file_by_filename="nothing").SerializeToString())
        )
        return await client.sent(4)

    services, file, nothing = (answer_kind.FromString(data[5:]) for data in asyncio.run(run())[1:])
    names = {entry.name for entry in services.list_services_response.service}
    assert {
        "inference.GRPCInferenceService",
        "grpc.health.v1.Health",
        f"grpc.reflection.{release}.ServerReflection",
    } <= names
    assert any(b"ModelInferRequest" in each for each in file.file_descriptor_response.file_descriptor_proto)
    assert nothing.error_response.error_code == CODES["NOT_FOUND"]
