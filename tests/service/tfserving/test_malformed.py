"""Whatever comes over TensorFlow Serving's interface is answered or refused, never failed at: by Hypothesis."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.counts import few_or_many
from tests.service.conftest import eventually
from tests.service.rpc.fake_stream import SomeStream
from tierstore.access.roles import LOCAL
from tierstore.errors import TierstoreError
from tierstore.service.limits.worker_pool import Reservation
from tierstore.service.server import ServerThread

QUICK = settings(max_examples=few_or_many(40, 150), suppress_health_check=[HealthCheck.function_scoped_fixture])

names = st.sampled_from(["item_id", "clicked", "clicked.offsets", "clicked.weights", "user", "big", "nope", "b64", ""])
numbers = st.integers(-(1 << 65), 1 << 65) | st.integers(-1, 5) | st.floats()
leaf_values = (
    st.none() | st.booleans() | numbers | st.text(max_size=3) | st.just({"b64": "dTE="}) | st.just({"b64": "!"})
)
values = st.recursive(leaf_values, lambda inner: st.lists(inner, max_size=4), max_leaves=8)
inputs = st.dictionaries(names, values, max_size=4)
bodies = st.fixed_dictionaries(
    {},
    optional={
        "instances": values | st.lists(inputs, max_size=4),
        "inputs": values | inputs,
        "signature_name": st.sampled_from(["serving_default", "lookup", "lookup_float16", "", None, 5]) | leaf_values,
        "output_filter": st.lists(names | leaf_values, max_size=3) | leaf_values,
    },
)


@QUICK
@given(body=bodies | values, model=st.sampled_from(["ctr", "one", "names"]))
def test_any_json_is_answered_or_refused(http: httpx.Client, body: Any, model: str) -> None:
    response = http.post(f"/v1/models/{model}:predict", content=json.dumps(body))
    assert response.status_code in (200, 400, 413), response.text
    (key,) = json.loads(response.text)
    assert key in ({"outputs", "predictions"} if response.status_code == 200 else {"error"})


@QUICK
@given(body=st.binary(max_size=40) | bodies.map(lambda body: json.dumps(body).encode()[:-3]))
def test_any_bytes_are_refused(http: httpx.Client, body: bytes) -> None:
    response = http.post("/v1/models/ctr:predict", content=body)
    assert response.status_code == 400, response.text


tensors = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from([0, 1, 3, 7, 9, 10, 14, 19, 23, 99]),
        "tensor_content": st.binary(max_size=24),
        "int64_val": st.lists(st.integers(-(1 << 63), (1 << 63) - 1), max_size=3),
        "uint64_val": st.lists(st.integers(0, (1 << 64) - 1), max_size=3),
        "string_val": st.lists(st.binary(max_size=4), max_size=3),
        "float_val": st.lists(st.floats(width=32), max_size=3),
    },
)
shapes = st.lists(st.integers(-2, 4) | st.sampled_from([1 << 40, (1 << 31) - 1]), max_size=3)


@QUICK
@given(
    given_inputs=st.dictionaries(names, st.tuples(tensors, shapes), max_size=3),
    picked=st.lists(names, max_size=3),
    cut=st.integers(0, 6),
)
def test_any_message_is_answered_or_refused(
    server: ServerThread, given_inputs: dict[str, Any], picked: list[str], cut: int
) -> None:
    pytest.importorskip("grpc", reason="grpcio is not installed")
    from tierstore.service.exchange import Exchange
    from tierstore.service.forwarded import Proxies
    from tierstore.service.rpc.caller import RpcCaller
    from tierstore.service.rpc.protobuf import message_class
    from tierstore.service.rpc.tfserving import PredictMessage

    request = message_class("tensorflow.serving.PredictRequest")(output_filter=picked)
    request.model_spec.name = "ctr"
    for name, (fields, shape) in given_inputs.items():
        tensor = message_class("tensorflow.TensorProto")(**fields)
        for size in shape:
            tensor.tensor_shape.dim.add(size=size)
        request.inputs[name].CopyFrom(tensor)
    received = request.SerializeToString()
    service = server.service
    caller, holding = RpcCaller(SomeStream(), Proxies()), Reservation(service.inflight)
    caller.waiting.principal = LOCAL
    exchange = Exchange(
        service, PredictMessage(service, received[: len(received) - cut], caller, holding), caller.waiting
    )
    try:
        exchange.admit()
        answer = exchange.answer()
    except TierstoreError:
        answer = b""
    finally:
        holding.release()
    message_class("tensorflow.serving.PredictResponse").FromString(answer)
    eventually(lambda: server.service.inflight.used_bytes == 0, "its bytes are given back")
