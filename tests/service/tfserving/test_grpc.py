"""TensorFlow Serving's services over gRPC give the rows of a real store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import permutations
from typing import Any

import numpy as np
import pytest

grpc = pytest.importorskip("grpc", reason="grpcio is not installed")

from tests.service.conftest import eventually  # noqa: E402
from tests.service.fake_store import DEFAULT, ITEMS, USERS, VERSION  # noqa: E402
from tests.service.scenes import rows  # noqa: E402
from tierstore.errors import InvalidInput, TooLarge  # noqa: E402
from tierstore.service.dataplane.plan import OutputSpec, Plan  # noqa: E402
from tierstore.service.rpc.protobuf import message_class  # noqa: E402
from tierstore.service.rpc.tensor_proto import answer_of, tensor_of  # noqa: E402
from tierstore.service.server import ServerThread  # noqa: E402

PredictRequest = message_class("tensorflow.serving.PredictRequest")
PredictResponse = message_class("tensorflow.serving.PredictResponse")
TensorProto = message_class("tensorflow.TensorProto")
NUMBERS = {"float32": 1, "float64": 2, "int32": 3, "int64": 9, "bool": 10, "float16": 19, "uint64": 23}
DTYPES = {number: np.dtype(name) for name, number in NUMBERS.items()}
VALUES = {"float32": "float_val", "int64": "int64_val", "uint64": "uint64_val", "int32": "int_val"}


@pytest.fixture(scope="module")
def call(server: ServerThread) -> Iterator[Callable[..., Any]]:
    """Call a method: (full name, request message, class of the answer) → answer."""
    with grpc.insecure_channel(server.grpc_target) as channel:

        def call(method: str, request: Any, answer: Any) -> Any:
            stub = channel.unary_unary(
                f"/tensorflow.serving.{method}", lambda m: m.SerializeToString(), answer.FromString
            )
            return stub(request, timeout=30)

        yield call


def tensor(array: Any, *, values: bool = False) -> Any:
    """A TensorProto of `array`, as content or as values."""
    array = np.asarray(array)
    if array.dtype.kind == "U":
        made = TensorProto(dtype=7, string_val=[text.encode() for text in array.reshape(-1).tolist()])
    else:
        made = TensorProto(dtype=NUMBERS[array.dtype.name])
        if values:
            getattr(made, VALUES[array.dtype.name]).extend(array.reshape(-1).tolist())
        else:
            made.tensor_content = array.tobytes()
    for size in array.shape:
        made.tensor_shape.dim.add(size=size)
    return made


def request(inputs: dict[str, Any], *, picked: tuple[str, ...] = (), **spec: Any) -> Any:
    wanted = PredictRequest(output_filter=picked)
    wanted.model_spec.name = spec.pop("model", "ctr")
    if (version := spec.pop("version", None)) is not None:
        wanted.model_spec.version.value = version
    for name, value in spec.items():
        setattr(wanted.model_spec, name, value)
    for name, value in inputs.items():
        wanted.inputs[name].CopyFrom(value if isinstance(value, TensorProto) else tensor(value))
    return wanted


def arrays(answer: Any) -> dict[str, np.ndarray]:
    return {
        name: np.frombuffer(of.tensor_content, DTYPES[of.dtype]).reshape([dim.size for dim in of.tensor_shape.dim])
        for name, of in answer.outputs.items()
    }


@pytest.fixture(scope="module")
def predict(call: Callable[..., Any]) -> Callable[..., dict[str, np.ndarray]]:
    return lambda inputs, **more: arrays(call("PredictionService/Predict", request(inputs, **more), PredictResponse))


Predict = Callable[..., dict[str, np.ndarray]]


def items(keys: Any) -> np.ndarray:
    keys = np.asarray(keys, np.int64)
    return rows("item", [ITEMS.get(int(key), DEFAULT) for key in keys.ravel()]).reshape(*keys.shape, 4)


@pytest.mark.parametrize("values", [False, True])
def test_rows_in_the_order_of_the_keys(predict: Predict, values: bool) -> None:
    keys = np.array([[5, -(1 << 63)], [100, (1 << 63) - 1]], np.int64)
    big = np.array([1 << 63, 5], np.uint64)
    answer = predict(
        {
            "item_id": tensor(keys, values=values),
            "big": tensor(big, values=values),
            "user": np.array(["u1", "λ"]),
        }
    )
    assert answer.keys() == {"item_id", "big", "user"}
    np.testing.assert_array_equal(answer["item_id"], items(keys))
    np.testing.assert_array_equal(answer["big"], rows("big", [9.0, 5.0]))
    np.testing.assert_array_equal(answer["user"], rows("user", [USERS["u1"], USERS["λ"]]))


@pytest.mark.parametrize("values", [False, True])
def test_integers_that_tensorflow_made_narrow_are_keys_too(predict: Predict, values: bool) -> None:
    """`make_tensor_proto([1, 2])` has the dtype int32."""
    keys, starts = np.array([5, -7, 100], np.int32), np.array([0, 2], np.int32)
    answer = predict(
        {
            name: tensor(array, values=values)
            for name, array in (("item_id", keys), ("clicked", keys), ("clicked.offsets", starts))
        }
    )
    np.testing.assert_array_equal(answer["item_id"], items(keys))
    np.testing.assert_allclose(answer["clicked"], [items([5, -7]).mean(0), items([100])[0]], rtol=1e-6)
    big = predict({"big": tensor(np.array([5], np.int32), values=values)})
    np.testing.assert_array_equal(big["big"], rows("big", [5.0]))


def test_version_0_is_the_one_that_serves(call: Callable[..., Any], predict: Predict) -> None:
    """OpenVINO's client sends it by default."""
    np.testing.assert_array_equal(predict({"item_id": np.array([1])}, version=0)["item_id"], items([1]))
    answer = call("PredictionService/Predict", request({"item_id": np.array([1])}, version=0), PredictResponse)
    assert answer.model_spec.version.value == VERSION


def test_bags_with_weights(predict: Predict) -> None:
    weights = np.array([1, 1, 2, 5], np.float32)
    wanted = {
        "clicked.weights": weights,
        "clicked": np.array([1, 2, 3, 4]),
        "clicked.offsets": np.array([0, 3, 3]),
    }
    expected = [np.average(items([1, 2, 3]), axis=0, weights=weights[:3]), np.zeros(4), items([4])[0]]
    np.testing.assert_allclose(predict(wanted)["clicked"], expected, rtol=1e-6)


def test_one_value_stands_for_all(predict: Predict) -> None:
    one = TensorProto(dtype=9, int64_val=[7])
    one.tensor_shape.dim.add(size=5)
    few = TensorProto(dtype=7, string_val=[b"u1", b"u2"])
    few.tensor_shape.dim.add(size=4)
    answer = predict({"item_id": one, "user": few})
    np.testing.assert_array_equal(answer["item_id"], items([7] * 5))
    np.testing.assert_array_equal(answer["user"], rows("user", [USERS["u1"], *[USERS["u2"]] * 3]))


def test_outputs_are_picked_by_name(predict: Predict) -> None:
    keys = np.array([1, 100])
    answer = predict({"item_id": keys, "user": np.array(["u1"])}, picked=("item_id.found", "item_id"))
    assert answer.keys() == {"item_id.found", "item_id"}
    assert answer["item_id.found"].tolist() == [True, False]
    half = predict({"item_id": keys}, signature_name="lookup_float16")
    np.testing.assert_array_equal(half["item_id"], items(keys).astype(np.float16))
    assert half["item_id"].dtype == np.float16
    assert predict({"item_id": keys}, signature_name="lookup")["item_id"].dtype == np.float32


def test_no_keys_give_no_rows(predict: Predict) -> None:
    answer = predict({"item_id": np.zeros(0, np.int64), "clicked": np.zeros((2, 0), np.int64)})
    assert answer["item_id"].shape == (0, 4)
    np.testing.assert_array_equal(answer["clicked"], np.zeros((2, 4)))


def test_the_answer_says_which_version_and_signature(call: Callable[..., Any]) -> None:
    wanted = request({"item_id": np.array([1])}, version=VERSION, signature_name="lookup")
    spec = call("PredictionService/Predict", wanted, PredictResponse).model_spec
    assert (spec.name, spec.version.value, spec.signature_name) == ("ctr", VERSION, "lookup")


def test_the_order_of_inputs_means_nothing(predict: Predict) -> None:
    inputs = {
        "item_id": np.arange(3),
        "clicked": np.arange(4),
        "clicked.offsets": np.array([0, 1, 3]),
        "clicked.weights": np.ones(4, np.float32),
        "user": np.array(["u1", "u2", "λ"]),
        "big": np.array([5, 6], np.uint64),
    }
    first = predict(inputs)
    for order in [*permutations(inputs)][::5]:
        answer = predict({name: inputs[name] for name in order})
        assert answer.keys() == first.keys()
        assert all(np.array_equal(answer[name], first[name]) for name in first)


@pytest.mark.parametrize(
    ("wanted", "code", "says"),
    [
        (request({"nope": np.array([1])}), "INVALID_ARGUMENT", "unknown input 'nope'"),
        (request({}), "INVALID_ARGUMENT", "no inputs"),
        (request({"item_id": np.array([1])}, model="nope"), "NOT_FOUND", "nope"),
        (request({"item_id": np.array([1])}, model=""), "INVALID_ARGUMENT", "names no model"),
        (request({"item_id": np.array([1])}, version=7), "NOT_FOUND", "7"),
        (request({"item_id": np.array([1])}, version_label="nope"), "NOT_FOUND", "nope"),
        (request({"item_id": np.array([1])}, version_label="x" * 100_000), "NOT_FOUND", "no label"),
        (request({"item_id": np.array([1])}, signature_name="nope"), "INVALID_ARGUMENT", "unknown signature"),
        (request({"item_id": np.array([1])}, picked=("nope",)), "INVALID_ARGUMENT", "unknown output"),
        (request({"user": np.array([1], np.int32)}), "INVALID_ARGUMENT", "INT32"),
        (request({"item_id": np.array([1], np.int32)}, picked=("nope",)), "INVALID_ARGUMENT", "unknown output"),
        (request({"item_id": TensorProto(dtype=14)}), "INVALID_ARGUMENT", "dtype 14"),
        (request({"item_id": TensorProto(dtype=9, int64_val=[1])}), "INVALID_ARGUMENT", "shape"),
    ],
)
def test_what_is_wrong_is_said(call: Callable[..., Any], wanted: Any, code: str, says: str) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        call("PredictionService/Predict", wanted, PredictResponse)
    assert (refused.value.code().name, says in refused.value.details()) == (code, True), refused.value.details()


@pytest.mark.parametrize("method", ["Classify", "Regress", "MultiInference"])
def test_other_predictions_are_refused(call: Callable[..., Any], method: str) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        call(f"PredictionService/{method}", request({}), PredictResponse)
    assert refused.value.code() == grpc.StatusCode.UNIMPLEMENTED
    assert "Predict" in refused.value.details()


def test_a_reload_of_configuration_is_refused(call: Callable[..., Any]) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        call("ModelService/HandleReloadConfigRequest", request({}), PredictResponse)
    assert refused.value.code() == grpc.StatusCode.UNIMPLEMENTED
    assert "snapshots" in refused.value.details()


def test_metadata(call: Callable[..., Any]) -> None:
    wanted = message_class("tensorflow.serving.GetModelMetadataRequest")(metadata_field=["signature_def"])
    wanted.model_spec.name = "ctr"
    answer = call(
        "PredictionService/GetModelMetadata", wanted, message_class("tensorflow.serving.GetModelMetadataResponse")
    )
    assert answer.model_spec.version.value == VERSION
    every = message_class("tensorflow.serving.SignatureDefMap")()
    assert answer.metadata["signature_def"].Unpack(every)
    default = every.signature_def["serving_default"]
    assert default.inputs["item_id"].dtype == 9
    assert [dim.size for dim in default.outputs["item_id"].tensor_shape.dim] == [-1, 4]
    assert every.signature_def["lookup_float16"].outputs["user"].dtype == 19
    for fields in ([], ["nope"]):
        del wanted.metadata_field[:]
        wanted.metadata_field.extend(fields)
        with pytest.raises(grpc.RpcError, match="metadata_field"):
            call("PredictionService/GetModelMetadata", wanted, PredictResponse)


def test_model_status(call: Callable[..., Any]) -> None:
    wanted = message_class("tensorflow.serving.GetModelStatusRequest")()
    wanted.model_spec.name = "ctr"
    response = message_class("tensorflow.serving.GetModelStatusResponse")
    (entry,) = call("ModelService/GetModelStatus", wanted, response).model_version_status
    assert (entry.version, entry.state, entry.status.error_code) == (VERSION, 30, 0)
    wanted.model_spec.version.value = 7
    with pytest.raises(grpc.RpcError) as refused:
        call("ModelService/GetModelStatus", wanted, response)
    assert refused.value.code() == grpc.StatusCode.NOT_FOUND


def test_requests_are_counted(server: ServerThread, predict: Predict) -> None:
    def counts() -> tuple[int, int]:
        service = server.service
        service.refresh()  # reactors count for themselves
        times = service.request_times.histograms[("tfs_grpc", "ok")].counts
        return sum(times), service.inference_stats.of("ctr", VERSION).success

    predict({"item_id": np.array([1])})
    before = counts()
    predict({"item_id": np.array([1])})
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
        assert of.dtype == NUMBERS[array.dtype.name]
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
