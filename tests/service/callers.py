"""One request in the words of every protocol: whoever asks, and however, the answer and the refusal are the same.

A caller asks as users do: the store in this process, tierstore's client, tritonclient, TensorFlow Serving's JSON and messages.
Keys and the dense part's own inputs are arrays by name, beside them `<feature>.offsets` and `<feature>.weights`; strings are str in arrays of objects.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, ClassVar

import httpx
import numpy as np
import pytest
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

import tierstore
from tierstore.errors import InvalidInput, NotFound, NotReady, TierstoreError, TooLarge, WrongPartition
from tierstore.service.dataplane.datatypes import BY_TF_NUMBER, DATATYPES
from tierstore.service.rpc.protobuf import message_class
from tierstore.service.server import ServerThread

Inputs = dict[str, np.ndarray]
Outputs = list[str] | None  # names; None: the default ones
BAD, UNKNOWN, LARGE, ELSEWHERE, ASLEEP = "bad input", "unknown", "too large", "wrong partition", "not ready"
_BY_STATUS = {"400": BAD, "404": UNKNOWN, "413": LARGE, "421": ELSEWHERE, "503": ASLEEP}
_BY_CODE = {"INVALID_ARGUMENT": BAD, "NOT_FOUND": UNKNOWN, "RESOURCE_EXHAUSTED": LARGE, "OUT_OF_RANGE": ELSEWHERE, "UNAVAILABLE": ASLEEP}  # fmt: skip
_BY_ERROR = {WrongPartition: ELSEWHERE, InvalidInput: BAD, NotFound: UNKNOWN, TooLarge: LARGE, NotReady: ASLEEP}


class Refused(Exception):
    """A request that was refused; `kind` is one of the words above."""

    def __init__(self, kind: str, said: str) -> None:
        super().__init__(said)
        self.kind = kind


@dataclass
class Asked:
    """A request, of any protocol."""

    model: str
    inputs: Inputs
    outputs: Outputs = None
    version: int | str | None = None  # a number or a label
    half: bool = False  # rows as float16
    combiner: str | None = None  # of all features
    request_id: str | None = None


class Answer(dict[str, np.ndarray]):
    """Arrays by output; one alone has no name where the protocol gives it none, and is under ''. Strings are str."""

    version: int | None = None  # where the protocol says it


def text(array: np.ndarray) -> np.ndarray:
    """Strings as str, which some clients give as bytes."""
    if array.dtype != object:
        return array
    flat = [each.decode() if isinstance(each, bytes) else each for each in array.ravel().tolist()]
    return np.array(flat, object).reshape(array.shape)


def encoded(array: np.ndarray) -> np.ndarray:
    """Strings as bytes, which protocols want."""
    if array.dtype != object:
        return array
    flat = [each.encode() if isinstance(each, str) else each for each in array.ravel().tolist()]
    return np.array(flat, object).reshape(array.shape)


class Caller:
    """A way to ask a service. `lacks` has what its protocol has no words for."""

    lacks: ClassVar[frozenset[str]] = frozenset()
    compiled = True  # whether reactors answer what they have learned

    def __init__(self, server: ServerThread) -> None:
        self.server = server

    def ask(self, model: str, inputs: Inputs, outputs: Outputs = None, **how: Any) -> Answer:
        """The answer. Raises Refused. `how`: other fields of Asked."""
        return self.send(Asked(model, inputs, outputs, **how))

    def send(self, asked: Asked) -> Answer:
        raise NotImplementedError

    def close(self) -> None:
        """Close its connections."""


class OurClient(Caller):
    """tierstore.Client: rows by its verbs for look-ups, the rest by `predict`."""

    lacks = frozenset({"loose tensors"})
    route = "request_id"

    def __init__(self, server: ServerThread) -> None:
        super().__init__(server)
        self._client = tierstore.Client(server.url, retries=0)

    def close(self) -> None:
        self._client.close()

    def model(self, name: str) -> Any:
        return self._client.model(name)

    def send(self, asked: Asked) -> Answer:
        inputs, outputs, combiner = asked.inputs, asked.outputs, asked.combiner
        name, _, head = asked.model.partition(".")
        how = {"version": asked.version, self.route: asked.request_id}
        rows = {"dtype": "float16" if asked.half else "float32", "return_found": True, **how}
        try:
            pooled, scores = self._about(name, head)
            given = {each: self._bags(inputs, each, each in pooled, combiner) for each in inputs if "." not in each}
            found: dict[str, np.ndarray] = {}
            for each in given if not scores or outputs or asked.half or combiner else ():
                if outputs is None or {each, f"{each}.found"} & {*outputs}:
                    found |= self._rows(self.model(name), each, inputs[each].shape, given[each], combiner, rows)
            picked = [each for each in outputs or () if each not in found]
            if not found or picked:
                made = self.model(name).predict(given, outputs=picked or None, head=head, **how)
                found |= made if isinstance(made, dict) else {"": made}
        except TierstoreError as error:
            kinds = [kind for of, kind in _BY_ERROR.items() if isinstance(error, of)]
            raise Refused(kinds[0] if kinds else type(error).__name__, str(error)) from error
        return Answer({each: text(found[each]) for each in outputs or found if outputs or ".found" not in each})

    def _about(self, name: str, head: str) -> tuple[set[str], bool]:
        """(features with a combiner, whether a dense part answers)."""
        try:
            with self.server.service.store.model(name).view() as view:
                pooled = {each for each, of in view.features.items() if of.combiner is not None}
                return pooled, bool(head) or view.has_dense
        except NotFound:
            return set(), False

    @staticmethod
    def _bags(inputs: Inputs, name: str, pooled: bool, combiner: str | None) -> Any:
        """Keys, or a tuple of them with offsets and weights."""
        keys, offsets, weights = inputs[name], inputs.get(f"{name}.offsets"), inputs.get(f"{name}.weights")
        if offsets is None and weights is None and not pooled and combiner is None:
            return keys
        if offsets is None:
            offsets = np.arange(len(keys)) * (keys.shape[1] if keys.ndim == 2 else 1)
        return keys.ravel(), offsets, None if weights is None else weights.ravel()

    @staticmethod
    def _rows(served: Any, name: str, shape: Any, value: Any, combiner: str | None, how: dict[str, Any]) -> Inputs:
        if isinstance(value, tuple):
            keys, offsets, weights = value
            rows, found = served.lookup_bags(name, keys, offsets, weights=weights, combiner=combiner, **how)
        else:
            rows, found = served.lookup(name, value.ravel(), **how)
            rows = rows.reshape(*shape, rows.shape[-1])
        return {name: rows, f"{name}.found": found.reshape(shape)}


class InProcess(OurClient):
    """The store itself."""

    compiled = False
    route = "route"

    def __init__(self, server: ServerThread) -> None:
        Caller.__init__(self, server)

    def close(self) -> None:
        pass

    def model(self, name: str) -> Any:
        return self.server.service.store.model(name)


class TritonHttp(Caller):
    """tritonclient.http, its tensors behind the JSON."""

    triton: Any = triton_http
    binary = True

    def __init__(self, server: ServerThread) -> None:
        super().__init__(server)
        self.client = self.triton.InferenceServerClient(self.address())

    def close(self) -> None:
        self.client.close()

    def address(self) -> str | None:
        return self.server.url.removeprefix("http://")

    def tensor(self, name: str, array: np.ndarray) -> Any:
        made = self.triton.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
        made.set_data_from_numpy(encoded(array), binary_data=self.binary)
        return made

    def wanted(self, name: str, **parameters: Any) -> Any:
        """The client has no argument for parameters of its own."""
        made = self.triton.InferRequestedOutput(name, binary_data=self.binary)
        made._parameters.update(parameters)
        return made

    def send(self, asked: Asked) -> Answer:
        inputs, outputs = asked.inputs, asked.outputs
        parameters = {"dtype": "FP16"} if asked.half else {}
        parameters |= {} if asked.combiner is None else {"combiner": asked.combiner}
        if outputs is None and parameters:
            outputs = [name for name in inputs if "." not in name]
        wanted = [self.wanted(name, **(parameters if name in inputs else {})) for name in outputs or ()] or None
        tensors = [self.tensor(name, array) for name, array in inputs.items()]
        headers = None if asked.request_id is None else {"x-request-id": asked.request_id}
        try:
            made = self.client.infer(asked.model, tensors, str(asked.version or ""), wanted, headers=headers)
        except InferenceServerException as error:
            status = str(error.status()).removeprefix("StatusCode.")
            raise Refused((_BY_STATUS | _BY_CODE).get(status, status), error.message()) from error
        number, names = self.about(made.get_response())
        answer = Answer({name: text(made.as_numpy(name)) for name in names})
        answer.version = int(number)
        return answer

    def about(self, response: Any) -> tuple[str, list[str]]:
        """(version, names of the outputs)."""
        return response["model_version"], [each["name"] for each in response["outputs"]]


class TritonJson(TritonHttp):
    """The same with all tensors in the JSON; answers too, where outputs are named."""

    binary = False


class TritonGrpc(TritonHttp):
    """tritonclient.grpc."""

    def __init__(self, server: ServerThread) -> None:
        self.triton = pytest.importorskip("tritonclient.grpc", reason="tritonclient[grpc] is not installed")
        super().__init__(server)

    def address(self) -> str | None:
        return self.server.grpc_target

    def tensor(self, name: str, array: np.ndarray) -> Any:
        made = self.triton.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
        made.set_data_from_numpy(encoded(array))
        return made

    def wanted(self, name: str, **parameters: Any) -> Any:
        made = self.triton.InferRequestedOutput(name)
        for key, value in parameters.items():
            kind = "string_param" if isinstance(value, str) else "int64_param"
            setattr(made._output.parameters[key], kind, value)
        return made

    def about(self, response: Any) -> tuple[str, list[str]]:
        return response.model_version, [output.name for output in response.outputs]


class TritonTyped(TritonGrpc):
    """The same on the port of HTTP, with a field of the message for each element, as clients of other languages may send them."""

    compiled = False

    def address(self) -> str | None:
        return f"127.0.0.1:{self.server.port}"

    def tensor(self, name: str, array: np.ndarray) -> Any:
        made = self.triton.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
        field = {"BYTES": "bytes", "INT32": "int"}.get(made.datatype(), made.datatype().lower())
        getattr(made._input.contents, f"{field}_contents").extend(encoded(array).ravel().tolist())
        return made


class TfsColumns(Caller):
    """TensorFlow Serving's REST, by columns. JSON has no types: numbers are taken for float32 where they are none of JSON's whole ones."""

    lacks = frozenset({"combiner", "order", "types", "empty shapes"})
    key = "outputs"

    def __init__(self, server: ServerThread) -> None:
        super().__init__(server)
        self._client = httpx.Client(base_url=server.url, timeout=60)

    def close(self) -> None:
        self._client.close()

    def body(self, inputs: Inputs) -> dict[str, Any]:
        return {"inputs": {name: array.tolist() for name, array in inputs.items()}}

    def send(self, asked: Asked) -> Answer:
        version = asked.version
        path = "" if version is None else f"/{'versions' if isinstance(version, int) else 'labels'}/{version}"
        body = self.body(asked.inputs) | ({"output_filter": asked.outputs} if asked.outputs else {})
        body |= {"signature_name": "lookup_float16"} if asked.half else {}
        headers = {} if asked.request_id is None else {"x-request-id": asked.request_id}
        path = f"/v1/models/{asked.model}{path}:predict"
        response = self._client.post(path, content=json.dumps(body), headers=headers)
        document = json.loads(response.text)  # which may have NaN
        if response.status_code != 200:
            raise Refused(_BY_STATUS[str(response.status_code)], document["error"])
        assert document.keys() == {self.key}
        return Answer(
            {name: self._array(values, asked.half) for name, values in self.columns(document[self.key]).items()}
        )

    def columns(self, found: Any) -> dict[str, Any]:
        return found if isinstance(found, dict) else {"": found}

    @staticmethod
    def _array(values: Any, half: bool) -> np.ndarray:
        array = np.array(values)
        if array.dtype.kind == "f":
            return array.astype(np.float16 if half else np.float32)
        return array.astype(object) if array.dtype.kind == "U" else array


class TfsRows(TfsColumns):
    """The same by rows: a bag is a list of any length, and all inputs have as many rows."""

    lacks = TfsColumns.lacks | {"no rows", "lengths that differ", "loose tensors"}
    key = "predictions"

    def body(self, inputs: Inputs) -> dict[str, Any]:
        columns: dict[str, list[Any]] = {}
        for name, array in inputs.items():
            starts = inputs.get(f"{name.removesuffix('.weights')}.offsets")
            if name.endswith(".offsets"):
                continue
            columns[name] = (
                array.tolist() if starts is None else [part.tolist() for part in np.split(array, starts[1:])]
            )
        return {"instances": [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]}

    def columns(self, found: Any) -> dict[str, Any]:
        if not isinstance(found[0], dict):
            return {"": found}
        return {name: [row[name] for row in found] for name in found[0]}


PredictRequest, PredictResponse, TensorProto = (
    message_class(name) for name in ("tensorflow.serving.PredictRequest", "tensorflow.serving.PredictResponse", "tensorflow.TensorProto")
)  # fmt: skip
PREDICT = "/tensorflow.serving.PredictionService/Predict"


def tensor_proto(array: np.ndarray, *, content: bool = True) -> Any:
    """A tensor as TensorFlow makes it: its bytes, or values one by one; strings may be bytes already."""
    of = DATATYPES[np_to_triton_dtype(array.dtype)]
    made = TensorProto(dtype=of.tf_number, tensor_shape={"dim": [{"size": size} for size in array.shape]})
    if content and array.dtype != object:
        made.tensor_content = array.tobytes()
    else:
        getattr(made, of.tf_field).extend(encoded(array).ravel().tolist())
    return made


def predict_request(inputs: Inputs, outputs: Outputs = None, model: str = "ctr", *, content: bool = True, **spec: Any) -> Any:  # fmt: skip
    """A message; `inputs` may hold tensors that are made already."""
    made = PredictRequest(model_spec={"name": model, **spec}, output_filter=outputs or [])
    for name, array in inputs.items():
        made.inputs[name].CopyFrom(tensor_proto(array, content=content) if isinstance(array, np.ndarray) else array)
    return made


def arrays_of(response: Any) -> dict[str, np.ndarray]:
    """Outputs of a PredictResponse, strings as bytes."""
    found = {}
    for name, of in response.outputs.items():
        flat = (
            np.array([*of.string_val], object)
            if of.dtype == 7
            else np.frombuffer(of.tensor_content, BY_TF_NUMBER[of.dtype].dtype)
        )
        found[name] = flat.reshape([dim.size for dim in of.tensor_shape.dim])
    return found


def tfs_call(channel: Any, method: str, model: str, **fields: Any) -> Any:
    """The answer of a method of TensorFlow Serving, such as ModelService/GetModelStatus."""
    request, answer = (
        message_class(f"tensorflow.serving.{method.partition('/')[2]}{kind}") for kind in ("Request", "Response")
    )
    call = channel.unary_unary(f"/tensorflow.serving.{method}", request.SerializeToString, answer.FromString)
    spec = fields.pop("model_spec", {})
    return call(request(model_spec={"name": model, **spec}, **fields), timeout=60)


class TfsGrpc(Caller):
    """TensorFlow Serving's gRPC, tensors as their bytes."""

    lacks = frozenset({"combiner", "order"})
    content = True

    def __init__(self, server: ServerThread) -> None:
        super().__init__(server)
        grpc = pytest.importorskip("grpc", reason="grpcio is not installed")
        self._errors, self._channel = grpc.RpcError, grpc.insecure_channel(self.address())
        self._call = self._channel.unary_unary(PREDICT, PredictRequest.SerializeToString, PredictResponse.FromString)

    def address(self) -> str | None:
        return self.server.grpc_target

    def close(self) -> None:
        self._channel.close()

    def send(self, asked: Asked) -> Answer:
        spec: dict[str, Any] = {"version_label": asked.version} if isinstance(asked.version, str) else {}
        spec |= {"version": {"value": asked.version}} if isinstance(asked.version, int) else {}
        spec |= {"signature_name": "lookup_float16"} if asked.half else {}
        message = predict_request(asked.inputs, asked.outputs, asked.model, content=self.content, **spec)
        metadata = [] if asked.request_id is None else [("x-request-id", asked.request_id)]
        try:
            made = self._call(message, timeout=60, metadata=metadata)
        except self._errors as error:
            raise Refused(_BY_CODE.get(error.code().name, error.code().name), error.details()) from error
        answer = Answer({name: text(array) for name, array in arrays_of(made).items()})
        answer.version = made.model_spec.version.value
        return answer


class TfsValues(TfsGrpc):
    """The same on the port of HTTP, with a field of the message for each element."""

    content = False

    def address(self) -> str | None:
        return f"127.0.0.1:{self.server.port}"


OIP: list[type[TritonHttp]] = [TritonHttp, TritonJson, TritonGrpc, TritonTyped]
CALLERS: list[type[Caller]] = [InProcess, OurClient, *OIP, TfsColumns, TfsRows, TfsGrpc, TfsValues]


def over_all(*needs: str, callers: list[type[Caller]] | list[type[TritonHttp]] = CALLERS) -> Any:
    """Runs a test with all callers that lack nothing of what it needs."""
    able = [caller for caller in callers if not caller.lacks & {*needs}]
    return pytest.mark.parametrize("caller", able, ids=lambda caller: caller.__name__, indirect=True)
