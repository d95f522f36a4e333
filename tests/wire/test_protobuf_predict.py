"""The scanner of PredictRequests beside protobuf: what it takes means the same there, and it takes what clients send."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import DecodeError

from tests.counts import few_or_many
from tests.guard_pages import Guarded
from tierstore.errors import TierstoreError
from tierstore.kernels.codec import address_of
from tierstore.service.dataplane.datatypes import DATATYPES
from tierstore.service.rpc.protobuf import message_class
from tierstore.service.rpc.tensor_proto import TensorProto, tensor_of
from tierstore.wire import request_record as layout
from tierstore.wire.json.scan import DATA_BYTES
from tierstore.wire.protobuf import predict as protobuf_predict

PredictRequest = message_class("tensorflow.serving.PredictRequest")
GUARDED = Guarded(1 << 19)
DATA = np.zeros(DATA_BYTES, np.uint8)
Input = tuple[str, str, tuple[int, ...], bytes]


def wire(elements: Any) -> bytes:
    """Elements as a binary tensor has them."""
    if isinstance(elements, np.ndarray):
        return elements.tobytes()
    return b"".join(len(text).to_bytes(4, "little") + text for text in elements.to_pylist())


def alike(inputs: list[Input]) -> list[Input]:
    """Inputs whose NaN all are the same: Python makes quiet ones of those that came one by one."""
    made = []
    for name, datatype, shape, data in inputs:
        dtype = DATATYPES[datatype].dtype
        if dtype is not None and dtype.kind == "f":
            array = np.frombuffer(data, dtype).copy()
            array[np.isnan(array)] = np.nan
            data = array.tobytes()
        made.append((name, datatype, shape, data))
    return made


def by_kernels(
    message: bytes, wide: bool, *, at_end: bool = True
) -> tuple[bytes, bytes, list[Input], list[bytes]] | None:
    """(the model's name, structure, inputs, names of outputs); None where it is not of the form. `wide`: keys of 32 bits are read as of 64."""
    words = np.full(layout.RECORD_BYTES // 8, -77, np.int64)
    structure = np.zeros(layout.MOST_STRUCTURE_BYTES, np.uint8)
    begin = GUARDED.place(message, at_end)
    size = protobuf_predict.scan(begin, len(message), address_of(words), address_of(structure))
    if not size:
        return None
    record = layout.RECORD.view(address_of(words))

    def row(number: int) -> Any:
        return layout.ROW.view(address_of(words) + layout.RECORD.bytes + layout.ROW.bytes * number)

    def name(number: int) -> bytes:
        of = row(number)
        return message[of.name_at - begin :][: of.name_bytes]

    rows = [row(1 + k) for k in range(record.inputs)]
    names = [name(1 + k) for k in range(record.inputs)]
    assert names == sorted(names)
    outputs = [name(1 + record.inputs + k) for k in range(record.outputs)]
    datatypes = np.array([one.datatype for one in rows], np.int64)
    if wide:
        of_32, of_64 = (1 + layout.DATATYPES.index(name) for name in ("INT32", "INT64"))
        datatypes[datatypes == of_32] = of_64
    if not protobuf_predict.read(begin, address_of(datatypes), address_of(words), address_of(DATA)):
        return None
    memory = DATA if record.decoded else np.frombuffer(message, np.uint8)
    inputs = [
        (each.decode("utf-8", "replace"), layout.DATATYPES[of.datatype - 1], tuple(of.dims[: of.rank]), memory[of.at : of.at + of.size].tobytes())
        for each, of in zip(names, rows, strict=True)
    ]  # fmt: skip
    return name(0), structure[:size].tobytes(), inputs, outputs


def by_protobuf(message: bytes, wide: bool) -> tuple[bytes, list[Input], list[bytes]]:
    parsed = PredictRequest.FromString(message)
    inputs = []
    for name, tensor in parsed.inputs.items():
        spec, elements = tensor_of(name, tensor, 1 << 20)
        datatype = spec.datatype
        if wide and datatype == "INT32":
            datatype, elements = "INT64", elements.astype(np.int64)
        inputs.append((name, datatype, spec.shape, wire(elements)))
    return parsed.model_spec.name.encode(), sorted(inputs), [name.encode() for name in parsed.output_filter]


def check(message: bytes, *, wide: bool = False, taken: bool | None = None) -> bytes | None:
    """Both understand it alike, or only protobuf takes it. Returns its structure."""
    found = by_kernels(message, wide)
    if taken is not None:
        assert (found is not None) == taken
    if found is None:
        return None
    model, structure, inputs, outputs = found
    assert (model, inputs, outputs) == by_protobuf(message, wide)
    return structure


def tensor(rng: random.Random, datatype: str, shape: list[int], *, content: bool) -> Any:
    of = DATATYPES[datatype]
    made = TensorProto(dtype=of.tf_number, tensor_shape={"dim": [{"size": size} for size in shape]})
    count = int(np.prod(shape))
    if datatype == "BYTES":
        made.string_val.extend(rng.choice([b"", b"a", "grün".encode(), b"\xff\x00", b"x" * 200]) for _ in range(count))
        return made
    dtype = of.dtype
    assert dtype is not None
    if dtype.kind == "f":
        array = np.array([rng.choice([0, -1.5, 1e-3, float("nan"), float("inf")]) for _ in range(count)], dtype)
    elif dtype.kind == "b":
        array = np.array([rng.random() < 0.5 for _ in range(count)], bool)
    else:
        limits = np.iinfo(dtype)
        array = np.array(
            [rng.choice([0, 1, limits.min, limits.max, rng.randint(limits.min, limits.max)]) for _ in range(count)],
            dtype,
        )
    if content:
        made.tensor_content = array.tobytes()
    elif datatype == "FP16":
        made.half_val.extend(array.view(np.uint16).tolist())
    else:
        getattr(made, of.tf_field).extend(array.tolist())
    return made


def request(rng: random.Random) -> Any:
    made = PredictRequest(model_spec={"name": rng.choice(["ctr", "größe", "m" * 200])})
    if rng.random() < 0.3:
        made.model_spec.version.value = rng.choice([0, 1, 1 << 40])
    elif rng.random() < 0.2:
        made.model_spec.version_label = "stable"
    if rng.random() < 0.4:
        made.model_spec.signature_name = rng.choice(["lookup", "serving_default"])
    for name in rng.sample(["item", "user", "clicked", "clicked.offsets", "größe", "n" * 130], rng.randint(0, 5)):
        shape = [rng.randint(0, 4) for _ in range(rng.randint(1, 3))]
        made.inputs[name].CopyFrom(tensor(rng, rng.choice(list(DATATYPES)), shape, content=rng.random() < 0.5))
    made.output_filter.extend(rng.sample(["item", "b.found", "c"], rng.randint(0, 2)))
    return made


@pytest.mark.counted
def test_requests_as_clients_send_them_mean_the_same_to_both() -> None:
    rng = random.Random(1)
    for _ in range(few_or_many(2000, 40_000)):
        message = request(rng).SerializeToString(deterministic=rng.random() < 0.5)
        wide = rng.random() < 0.5
        assert check(message, wide=wide, taken=True) == check(message, wide=not wide, taken=True)
        by_kernels(message, wide, at_end=False)


@pytest.mark.counted
def test_what_is_taken_of_damaged_requests_means_the_same_to_both() -> None:
    rng = random.Random(2)
    taken = 0
    for _ in range(few_or_many(8000, 120_000)):
        damaged = bytearray(request(rng).SerializeToString())
        for _ in range(rng.randint(1, 2)):
            at = rng.randrange(len(damaged))
            match rng.randrange(3):
                case 0:
                    damaged[at : at + rng.randint(1, 4)] = b""
                case 1:
                    damaged[at] = rng.randrange(256)
                case 2:
                    damaged[at:at] = rng.randbytes(rng.randint(1, 3))
            if not damaged:
                break
        found = by_kernels(bytes(damaged), wide=True)
        if found is None:
            continue
        taken += 1
        try:
            model, inputs, outputs = by_protobuf(bytes(damaged), wide=True)
        except DecodeError:  # of a text or of the version, which no plan has
            assert not _is_text([found[0], found[1], *found[3]]) or not _is_message(bytes(damaged))
            continue
        except TierstoreError as error:
            if "takes" not in str(error) and "beside 0" not in str(error):  # found when the record is bound
                raise
            continue
        assert (found[0], alike(found[2]), found[3]) == (model, alike(inputs), outputs)
    assert taken > 100


def _is_text(texts: list[bytes]) -> bool:
    try:
        b"\n".join(texts).decode()
    except UnicodeDecodeError:
        return False
    return True


def _is_message(message: bytes) -> bool:
    """Whether the first field, `model_spec`, is one by itself."""
    size, at, shift = 0, 1, 0
    while True:
        byte = message[at]
        size, at, shift = size | (byte & 0x7F) << shift, at + 1, shift + 7
        if byte < 0x80:
            break
    try:
        PredictRequest.FromString(message[: at + size])
    except DecodeError:
        return False
    return True


def of_one(**fields: Any) -> bytes:
    made = PredictRequest(model_spec={"name": "ctr"})
    made.inputs["item"].CopyFrom(TensorProto(**fields))
    message: bytes = made.SerializeToString()
    return message


def test_what_is_rare_is_for_python() -> None:
    two = {"dim": [{"size": 2}]}
    assert check(of_one(dtype=9, tensor_shape=two, int64_val=[1, 2]), taken=True)
    assert check(of_one(dtype=9, tensor_shape={"dim": [{"size": 0}]}), taken=True)
    for fields in (
        {"dtype": 9, "tensor_shape": two, "int64_val": [1]},  # the last one stands for the rest
        {"dtype": 9, "int64_val": [1]},
        {"dtype": 9, "tensor_shape": two},
        {"dtype": 9, "tensor_shape": two, "int_val": [1, 2]},
        {"dtype": 9, "tensor_shape": two, "int64_val": [1, 2], "float_val": [1]},
        {"dtype": 9, "tensor_shape": {"dim": [{"size": 2, "name": "x"}]}, "int64_val": [1, 2]},
        {"dtype": 9, "tensor_shape": {"unknown_rank": True}, "int64_val": [1, 2]},
        {"dtype": 9, "tensor_shape": {"dim": [{"size": 1}] * 5}, "int64_val": [1]},
        {"dtype": 9, "tensor_shape": two, "version_number": 1, "int64_val": [1, 2]},
        {"dtype": 8, "tensor_shape": two, "scomplex_val": [1, 2, 3, 4]},
        {"dtype": 6, "tensor_shape": two, "int_val": [1, 128]},
        {"dtype": 7, "tensor_shape": two, "tensor_content": b"\x01\x01ab"},
    ):
        check(of_one(**fields), taken=False)
    message = of_one(dtype=9, tensor_shape=two, int64_val=[1, 2])
    check(message + message[5:], taken=False)  # an input that comes twice
    check(message[5:], taken=False)  # no model
    check(message[5:] + message[:5], taken=False)


def test_the_order_of_a_map_means_nothing() -> None:
    rng = random.Random(4)
    names = [f"f{number}" for number in range(40)]
    structures = set()
    for _ in range(5):
        rng.shuffle(names)
        parts = [PredictRequest(model_spec={"name": "ctr"}).SerializeToString()]
        for name in names:
            one = PredictRequest()
            one.inputs[name].CopyFrom(
                TensorProto(dtype=9, tensor_shape={"dim": [{"size": 1}]}, tensor_content=bytes(8))
            )
            parts.append(one.SerializeToString())
        structures.add(check(b"".join(parts), taken=True))
    assert len(structures) == 1
