"""One life of a request: whoever brings it, it is authorised and charged before any work is done for it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tests.extras import has_grpc
from tests.service.conftest import GRPC, settings_for
from tests.service.rpc.fake_stream import SomeStream
from tests.service.scenes import write_small
from tierstore.access.roles import LOCAL, NOBODY, Action, Rates, Role
from tierstore.access.tokens import TokenFile
from tierstore.engine.store import Store
from tierstore.errors import Forbidden, InvalidInput, NotFound, RateLimited
from tierstore.service.context import Service
from tierstore.service.exchange import Exchange
from tierstore.service.forwarded import Proxies
from tierstore.service.http.application import HttpRequest
from tierstore.service.http.messages import ARRIVED
from tierstore.service.http.oip import OipHttp
from tierstore.service.limits.worker_pool import Reservation
from tierstore.service.rpc.caller import RpcCaller
from tierstore.service.server import ServerThread

SLOW = 0.01  # of something in a second: one, and not another one in the time of a test
needs_grpc = pytest.mark.skipif(not has_grpc(), reason="grpcio is not installed")


def test_nobody_may_do_nothing_but_what_everybody_may() -> None:
    assert {action for action in Action if NOBODY.may(action)} == {Action.OPEN}
    assert {action for action in Action if LOCAL.may(action)} == set(Action)
    with pytest.raises(Forbidden, match="nobody has no role: this takes reader or"):
        NOBODY.check(Action.READ, "one")


def test_a_request_whose_caller_was_not_checked_is_refused(server: ServerThread) -> None:
    """An application that somebody mounts without the check of access answers nobody."""
    body = b'{"inputs":[{"name":"item_id","datatype":"INT64","shape":[1],"data":[5]}]}'
    scope: dict[str, Any] = {"type": "http", "method": "POST", "path": "/v2/models/one/infer", "headers": []}
    request = HttpRequest(scope | {ARRIVED: time.perf_counter_ns()}, OipHttp(server.service), server.service.inflight)
    request.route = request.application.route(request)
    request.take(memoryview(body))
    assert request.admit() is None, "it waits for no thread"
    response = request.application.answer(request)
    assert response is not None
    assert response.status == 403


def message_naming(model: str, *, broken: bool) -> bytes:
    from tierstore.service.rpc.protobuf import message_class

    wanted = message_class("inference.ModelInferRequest")(model_name=model)
    wanted.inputs.add(name="item_id", datatype="INT64", shape=[1]).contents.int64_contents.append(5)
    made: bytes = wanted.SerializeToString()
    return made + b"\x12" if broken else made


def exchange_of(service: Service, message: bytes) -> Exchange[bytes]:
    from tierstore.service.rpc.messages import WireMessage
    from tierstore.service.rpc.oip import InferMessage

    caller = RpcCaller(SomeStream(), Proxies())
    caller.waiting.principal = LOCAL
    holding = Reservation(service.inflight)
    return Exchange(service, InferMessage(service, WireMessage(message), caller, holding), caller.waiting)


@needs_grpc
def test_a_malformed_message_costs_what_a_good_one_does(tmp_path: Path) -> None:
    with Store(settings_for(tmp_path, quotas={"one": {"requests_per_second": SLOW}})) as store:
        store.load_snapshot(write_small(tmp_path, "one", "item"))
        service = Service(store, store.settings)
        try:
            broken = exchange_of(service, message_naming("one", broken=True))
            broken.admit()
            with pytest.raises(InvalidInput):
                broken.answer()
            good = exchange_of(service, message_naming("one", broken=False))
            with pytest.raises(RateLimited):
                good.admit()
        finally:
            service.close()


@needs_grpc
def test_a_model_that_a_message_names_late_is_charged_too_and_one_that_is_not_there_is_not(tmp_path: Path) -> None:
    """Of a field that comes twice the last one counts: the first must not be what is charged instead."""
    with Store(settings_for(tmp_path, quotas={"*": {"requests_per_second": SLOW}})) as store:
        store.load_snapshot(write_small(tmp_path, "one", "item"))
        service = Service(store, store.settings)
        try:
            renamed = message_naming("nothing", broken=False) + message_naming("one", broken=False)[:5]
            first = exchange_of(service, renamed)
            first.admit()
            assert first.answer()
            again = exchange_of(service, renamed)
            again.admit()
            with pytest.raises(RateLimited):
                again.answer()
            assert ("model ", "nothing") not in service.rates._buckets
            unknown = exchange_of(service, message_naming("nothing", broken=False))
            unknown.admit()
            with pytest.raises(NotFound):
                unknown.answer()
        finally:
            service.close()


@needs_grpc
def test_malformed_messages_over_grpc_use_up_the_rate_of_their_caller(tmp_path: Path) -> None:
    import grpc

    settings = settings_for(tmp_path, grpc_port=GRPC)
    tokens = TokenFile(settings.data / "tokens.json")
    _, limited = tokens.create(Role.READER, rates=Rates(requests=SLOW))
    with Store(settings) as store:
        store.load_snapshot(write_small(tmp_path, "one", "item"))
        with ServerThread(store) as server, grpc.insecure_channel(server.grpc_target) as channel:
            codes = []
            for path in ("/inference.GRPCInferenceService/ModelInfer", "/tensorflow.serving.PredictionService/Predict"):
                call = channel.unary_unary(path).future(
                    b"\xff" * 9, metadata=[("authorization", f"Bearer {limited}")], timeout=60
                )
                codes.append(call.code())
            assert codes == [grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED]


@needs_grpc
def test_the_time_that_a_body_takes_is_not_of_the_look_up(
    server: ServerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loads make way for look-ups that became slow: a client that is slow to send must not look like that."""
    clock_ns, took = [10**9], list[int]()
    monkeypatch.setattr("tierstore.service.exchange.time.perf_counter_ns", lambda: clock_ns[0])
    stats = server.service.inference_stats
    monkeypatch.setattr(stats, "succeeded", lambda _model, _version, elapsed_ns, _spent: took.append(elapsed_ns))
    exchange = exchange_of(server.service, message_naming("one", broken=False))
    clock_ns[0] += 30 * 10**9
    exchange.admit()
    exchange.answer()
    assert took == [0]
