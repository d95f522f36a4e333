"""TensorFlow Serving's services over gRPC, beside what all protocols answer alike (`dataplane/test_answers.py`): its tensors, statuses, documents."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

grpc = pytest.importorskip("grpc", reason="grpcio is not installed")

from tests.service import scenes  # noqa: E402
from tests.service.callers import (  # noqa: E402
    PREDICT,
    PredictRequest,
    PredictResponse,
    TensorProto,
    arrays_of,
    predict_request,
    tensor_proto,
    tfs_call,
)
from tests.service.conftest import eventually  # noqa: E402
from tests.service.fake_store import USERS, VERSION  # noqa: E402
from tierstore.errors import InvalidInput, TooLarge  # noqa: E402
from tierstore.service.dataplane.plan import OutputSpec, Plan  # noqa: E402
from tierstore.service.rpc.protobuf import message_class  # noqa: E402
from tierstore.service.rpc.tensor_proto import answer_of, tensor_of  # noqa: E402
from tierstore.service.server import ServerThread  # noqa: E402


@pytest.fixture(scope="module")
def channel(server: ServerThread) -> Iterator[Any]:
    with grpc.insecure_channel(server.grpc_target) as channel:
        yield channel


@pytest.fixture(scope="module")
def predict(channel: Any) -> Callable[..., Any]:
    """Send a message, or one of these inputs → PredictResponse."""
    call = channel.unary_unary(PREDICT, PredictRequest.SerializeToString, PredictResponse.FromString)
    return lambda wanted, **more: call(
        predict_request(wanted, **more) if isinstance(wanted, dict) else wanted, timeout=30
    )


Predict = Callable[..., Any]


def items(keys: Any) -> np.ndarray:
    return scenes.items(np.asarray(keys, np.int64))


@pytest.mark.parametrize("values", [False, True])
def test_integers_that_tensorflow_made_narrow_are_keys_too(predict: Predict, values: bool) -> None:
    """`make_tensor_proto([1, 2])` has the dtype int32."""
    keys, starts = np.array([5, -7, 100], np.int32), np.array([0, 2], np.int32)
    inputs = {"item_id": keys, "clicked": keys, "clicked.offsets": starts}
    answer = arrays_of(predict(inputs, content=not values))
    np.testing.assert_array_equal(answer["item_id"], items(keys))
    np.testing.assert_allclose(answer["clicked"], [items([5, -7]).mean(0), items([100])[0]], rtol=1e-6)
    big = arrays_of(predict({"big": np.array([5], np.int32)}, content=not values))
    np.testing.assert_array_equal(big["big"], scenes.rows("big", [5.0]))


def test_version_0_is_the_one_that_serves(predict: Predict) -> None:
    """OpenVINO's client sends it by default."""
    answer = predict({"item_id": np.array([1])}, version={"value": 0})
    np.testing.assert_array_equal(arrays_of(answer)["item_id"], items([1]))
    assert answer.model_spec.version.value == VERSION


def test_one_value_stands_for_all(predict: Predict) -> None:
    one = TensorProto(dtype=9, int64_val=[7])
    one.tensor_shape.dim.add(size=5)
    few = TensorProto(dtype=7, string_val=[b"u1", b"u2"])
    few.tensor_shape.dim.add(size=4)
    answer = arrays_of(predict({"item_id": one, "user": few}))
    np.testing.assert_array_equal(answer["item_id"], items([7] * 5))
    np.testing.assert_array_equal(answer["user"], scenes.rows("user", [USERS["u1"], *[USERS["u2"]] * 3]))


def test_the_answer_says_which_version_and_signature(predict: Predict) -> None:
    spec = predict({"item_id": np.array([1])}, version={"value": VERSION}, signature_name="lookup").model_spec
    assert (spec.name, spec.version.value, spec.signature_name) == ("ctr", VERSION, "lookup")


ONE = {"item_id": np.array([1])}


def test_what_is_wrong_is_said(predict: Predict) -> None:
    for wanted, code, says in (
        (predict_request(ONE, model=""), "INVALID_ARGUMENT", "names no model"),
        (predict_request(ONE, version_label="x" * 100_000), "NOT_FOUND", "no label"),
        (predict_request(ONE, signature_name="nope"), "INVALID_ARGUMENT", "unknown signature"),
        (predict_request({"user": np.array([1], np.int32)}), "INVALID_ARGUMENT", "INT32"),
        (predict_request({"item_id": np.array([1], np.int32)}, ["nope"]), "INVALID_ARGUMENT", "unknown output"),
        (predict_request({"item_id": TensorProto(dtype=14)}), "INVALID_ARGUMENT", "dtype 14"),
        (predict_request({"item_id": TensorProto(dtype=9, int64_val=[1])}), "INVALID_ARGUMENT", "shape"),
    ):
        with pytest.raises(grpc.RpcError) as refused:
            predict(wanted)
        assert (refused.value.code().name, says in refused.value.details()) == (code, True), refused.value.details()


def test_other_methods_are_refused(channel: Any) -> None:
    methods = {f"PredictionService/{name}": "Predict" for name in ("Classify", "Regress", "MultiInference")}
    for method, says in (methods | {"ModelService/HandleReloadConfigRequest": "snapshots"}).items():
        with pytest.raises(grpc.RpcError, match=says) as refused:
            channel.unary_unary(f"/tensorflow.serving.{method}")(b"", timeout=30)
        assert refused.value.code() == grpc.StatusCode.UNIMPLEMENTED


def test_metadata(channel: Any) -> None:
    answer = tfs_call(channel, "PredictionService/GetModelMetadata", "ctr", metadata_field=["signature_def"])
    assert answer.model_spec.version.value == VERSION
    every = message_class("tensorflow.serving.SignatureDefMap")()
    assert answer.metadata["signature_def"].Unpack(every)
    default = every.signature_def["serving_default"]
    assert default.inputs["item_id"].dtype == 9
    assert [dim.size for dim in default.outputs["item_id"].tensor_shape.dim] == [-1, 4]
    assert every.signature_def["lookup_float16"].outputs["user"].dtype == 19
    for fields in ([], ["nope"]):
        with pytest.raises(grpc.RpcError, match="metadata_field"):
            tfs_call(channel, "PredictionService/GetModelMetadata", "ctr", metadata_field=fields)


def test_model_status(channel: Any) -> None:
    (entry,) = tfs_call(channel, "ModelService/GetModelStatus", "ctr").model_version_status
    assert (entry.version, entry.state, entry.status.error_code) == (VERSION, 30, 0)
    with pytest.raises(grpc.RpcError) as refused:
        tfs_call(channel, "ModelService/GetModelStatus", "ctr", model_spec={"version": {"value": 7}})
    assert refused.value.code() == grpc.StatusCode.NOT_FOUND


def test_requests_are_counted(server: ServerThread, predict: Predict) -> None:
    def counts() -> tuple[int, int]:
        service = server.service
        service.refresh()  # reactors count for themselves
        times = service.request_times.histograms[("tfs_grpc", "ok")].counts
        return sum(times), service.inference_stats.of("ctr", VERSION).success

    predict(ONE)
    before = counts()
    predict(ONE)
    assert counts() == (before[0] + 1, before[1] + 1)
    eventually(lambda: server.service.inflight.used_bytes == 0, "its bytes are given back")


# --- tensors by themselves

LIMIT = 1 << 20


@pytest.mark.parametrize(
    "array",
    [
        np.array([[1.5, -2]], np.float32),
        np.array([0.1, 65504], np.float16),
        np.array([True, False]),
        np.array([1, -1], np.int64),
        np.zeros((0, 4), np.float32),
        np.array(["a", "", "λ"], object),
    ],
)
@pytest.mark.parametrize("fixed", [True, False])
def test_an_answer_is_the_message_that_protobuf_would_write(array: np.ndarray, fixed: bool) -> None:
    words = {"float32": "FP32", "float16": "FP16", "bool": "BOOL", "int64": "INT64", "object": "BYTES"}
    spec = OutputSpec("out", words[array.dtype.name], array.shape, fixed=fixed)
    plan = Plan(7, {}, None, None, None, [], [spec], 0, 0)
    answer = PredictResponse.FromString(answer_of("m", 7, "lookup", plan, [array]))
    assert (answer.model_spec.name, answer.model_spec.version.value) == ("m", 7)
    assert answer.model_spec.signature_name == "lookup"
    of = answer.outputs["out"]
    assert [dim.size for dim in of.tensor_shape.dim] == list(array.shape)
    if array.dtype == object:
        assert [text.decode() for text in of.string_val] == array.tolist()
    else:
        assert of.dtype == tensor_proto(array).dtype
        assert of.tensor_content == array.tobytes()


def test_strings_may_come_as_content() -> None:
    texts = [b"", b"x" * 300, b"y", b"z" * 20_000]
    lengths = b"\x00" + b"\xac\x02" + b"\x01" + b"\xa0\x9c\x01"
    proto = TensorProto(dtype=7, tensor_content=lengths + b"".join(texts))
    proto.tensor_shape.dim.add(size=2)
    proto.tensor_shape.dim.add(size=2)
    spec, elements = tensor_of("s", proto, LIMIT)
    assert spec.shape == (2, 2)
    assert elements.to_pylist() == texts
    for content in (lengths[:2], lengths + b"x", b"\xff" * 40, b"\xff\xff\xff\xff\xff\xff\x01" * 4):
        proto.tensor_content = content
        with pytest.raises(InvalidInput, match="tensor_content"):
            tensor_of("s", proto, LIMIT)


@pytest.mark.parametrize(
    ("proto", "error", "says"),
    [
        (TensorProto(dtype=9, int64_val=[1]), TooLarge, "filled with one value"),
        (TensorProto(dtype=7, string_val=[b"x" * 100]), TooLarge, "filled with one value"),
        (TensorProto(dtype=7, string_val=[b""]), TooLarge, "filled with one value"),
        (TensorProto(dtype=9), InvalidInput, "got 0"),
        (TensorProto(dtype=9, int64_val=range(10)), InvalidInput, "takes 5"),
        (TensorProto(dtype=9, tensor_content=b"12345678"), InvalidInput, "takes 40 bytes"),
        (TensorProto(dtype=4, int_val=[1, 2, 3, 4, -5]), InvalidInput, "does not fit"),
    ],
)
def test_a_tensor_that_cannot_be_is_refused(proto: Any, error: type[Exception], says: str) -> None:
    proto.tensor_shape.dim.add(size=1 << 20 if error is TooLarge else 5)
    if error is TooLarge:
        proto.tensor_shape.dim.add(size=1 << 20)
    with pytest.raises(error, match=says):
        tensor_of("t", proto, LIMIT)


def test_half_values_are_their_bits() -> None:
    proto = TensorProto(dtype=19, half_val=np.array([1.5, -2], np.float16).view(np.uint16).tolist())
    proto.tensor_shape.dim.add(size=3)
    assert tensor_of("h", proto, LIMIT)[1].tolist() == [1.5, -2, -2]
