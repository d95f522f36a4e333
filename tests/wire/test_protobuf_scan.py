"""The scanner of requests over gRPC beside protobuf: what it takes means the same there, and it takes what clients send."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import DecodeError

from tests.counts import few_or_many
from tests.guard_pages import Guarded
from tierstore.kernels.codec import address_of
from tierstore.service.rpc.protobuf import message_class
from tierstore.wire import request_record as layout
from tierstore.wire.protobuf import scan as protobuf_scan

Record = dict[str, Any]
Request = message_class("inference.ModelInferRequest")
GUARDED = Guarded(1 << 19)


def scan(message: bytes, *, at_end: bool = True) -> tuple[bytes, Record] | None:
    """(structure, record) of a message; None where it is not of the form. A read beyond its end, or before it, ends the process."""
    words = np.full(layout.RECORD_BYTES // 8, -77, np.int64)
    structure = np.zeros(layout.MOST_STRUCTURE_BYTES, np.uint8)
    begin = GUARDED.place(message, at_end)
    size = protobuf_scan.scan(begin, len(message), address_of(words), address_of(structure))
    if not size:
        return None
    record = layout.RECORD.view(address_of(words))

    def text(at: int, nbytes: int, skip: int = 0) -> bytes | None:
        return message[at - begin + skip : at - begin + nbytes] if nbytes else None

    def row(number: int) -> dict[str, Any]:
        own = layout.ROW.view(address_of(words) + layout.RECORD.bytes + layout.ROW.bytes * number)
        return {
            "name": text(own.name_at, own.name_bytes) or b"",
            "version": text(own.version_at, own.version_bytes) or b"" if number == 0 else None,
            "datatype": ("", *layout.DATATYPES)[own.datatype],
            "shape": own.dims[: own.rank],
            "data": message[own.at : own.at + own.size],
            "dtype": text(own.dtype_at, own.dtype_bytes, 1),
            "combiner": text(own.combiner_at, own.combiner_bytes, 1),
            "timeout": own.timeout_us,
        }  # fmt: skip

    inputs, outputs, id_bytes = (record.inputs, record.outputs, record.id_bytes)
    return structure[:size].tobytes(), {
        "id": b"" if id_bytes == layout.NO_ID else text(record.id_at, id_bytes),
        **row(0),
        "inputs": [row(1 + i) for i in range(inputs)],
        "outputs": [row(1 + inputs + i) for i in range(outputs)],
    }


def parameter(parameters: Any, name: str) -> bytes | None:
    """A parameter that is text, if it is there."""
    if name not in parameters or parameters[name].WhichOneof("parameter_choice") is None:
        return None
    assert parameters[name].WhichOneof("parameter_choice") == "string_param"
    value: bytes = parameters[name].string_param.encode()
    return value


def check_means_the_same(message: bytes, record: Record) -> None:
    """Protobuf understands a message as the record says, or one of its names is no text, which no plan has."""
    try:
        parsed = Request.FromString(message)
    except DecodeError:
        names = [record, *record["inputs"], *record["outputs"]]
        with pytest.raises(UnicodeDecodeError):
            b"\n".join([record["version"], *(row["name"] for row in names)]).decode()
        return
    assert record["name"] == parsed.model_name.encode()
    assert record["version"] == parsed.model_version.encode()
    assert record["id"] == parsed.id.encode()
    assert record["combiner"] == parameter(parsed.parameters, "combiner")
    timeout = parsed.parameters.get("timeout")
    assert record["timeout"] == (0 if timeout is None else timeout.int64_param or timeout.uint64_param)
    assert [
        (one["name"].decode(), one["datatype"], one["shape"]) for one in record["inputs"]
    ] == [(one.name, one.datatype, list(one.shape)) for one in parsed.inputs]  # fmt: skip
    assert [one["data"] for one in record["inputs"]] == list(parsed.raw_input_contents)
    assert all(one.contents.ByteSize() == 0 for one in parsed.inputs)
    assert [(one["name"].decode(), one["dtype"], one["combiner"]) for one in record["outputs"]] == [
        (one.name, parameter(one.parameters, "dtype"), parameter(one.parameters, "combiner")) for one in parsed.outputs
    ]
    for one in (*parsed.inputs, *parsed.outputs):
        assert one.name
        assert not {"shared_memory_region", "classification"} & set(one.parameters)


NAMES = ["item_id", "user", "clicked", "a.b", "größe"]
PARAMETERS = {
    "sequence_id": {"uint64_param": (1 << 64) - 1}, "sequence_start": {"bool_param": False}, "priority": {"uint64_param": 3},
    "other": {"string_param": "tëxt"}, "ratio": {"double_param": 0.5}, "negative": {"int64_param": -1}, "nothing": {},
    "combiner": {"string_param": "sum"}, "timeout": {"int64_param": 50_000},
}  # fmt: skip


def give(rng: random.Random, parameters: Any, choices: dict[str, dict[str, Any]]) -> None:
    for name in rng.sample(sorted(choices), rng.randint(0, min(3, len(choices)))):
        parameters[name].SetInParent()
        for field, value in choices[name].items():
            setattr(parameters[name], field, value)


def made(rng: random.Random) -> Any:
    """A request as clients send them."""
    request = Request(model_name=rng.choice(["ctr", "m", ""]), model_version=rng.choice(["", "1", "stable"]))
    request.id = rng.choice(["", "", "a", "6045257d-d777-487d-ac0f-52a80a57ff83", "grün ✓ 🙂", "x" * 300])
    give(rng, request.parameters, PARAMETERS)
    for name in rng.sample(NAMES, rng.randint(1, len(NAMES))):
        shape = [rng.choice([0, 1, 3, 200, 70_000, (1 << 31) - 1]) for _ in range(rng.choice([1, 1, 1, 2, 4]))]
        tensor = request.inputs.add(name=name, datatype=rng.choice(layout.DATATYPES), shape=shape)
        if rng.random() < 0.1:
            give(rng, tensor.parameters, PARAMETERS)
        request.raw_input_contents.append(rng.randbytes(rng.choice([0, 1, 24, 127, 128, 2000])))
    for name in rng.sample(NAMES, rng.randint(0, 4)):
        output = request.outputs.add(name=name)
        give(
            rng, output.parameters, {"dtype": {"string_param": "FP16"}, "combiner": {"string_param": ""}, **PARAMETERS}
        )
    return request


def varint(value: int) -> bytes:
    return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + varint(value >> 7)


def field(number: int, data: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(data)) + data


@pytest.mark.parametrize("seed", range(4))
def test_what_clients_send_is_scanned(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(600):
        request = made(rng)
        message = request.SerializeToString()
        scanned = scan(message, at_end=rng.random() < 0.5)
        if scanned is None:
            assert len(request.id) > 256
            continue
        check_means_the_same(message, scanned[1])


BITS = [
    field(1, b"ctr"), field(2, b"2"), field(3, b"id"), field(3, b"\xff"), field(7, b""), field(7, b"12345678"), field(9, b"unknown"),
    field(16, b""), field(5, field(1, b"x") + field(2, b"INT64") + b"\x18\x01"), field(6, field(1, b"x")), field(5, b""), field(6, b""),
    field(4, field(1, b"dtype") + field(2, b"\x1a\x04FP16")), field(2, field(1, b"dtype") + field(2, b"\x1a\x04FP16")),
    field(4, field(1, b"shared_memory_region") + field(2, b"\x1a\x01r")), field(4, field(1, b"timeout") + field(2, b"\x10\x05")),
    field(2, field(1, b"classification") + field(2, b"\x10\x05")), field(5, field(3, b"\x01")), b"\x18\x01", b"\x1a\x02\x01\x01", b"\x1a\x00",
    b"\x08\x01", b"\x0b", b"\x0c", b"\x33\x34", b"\x80\x00", b"\xff" * 10, b"\x80" * 9 + b"\x01", b"\x00", b"\x2a\x00", b"\x22\x00",
]  # fmt: skip


def spoil(rng: random.Random, message: bytes) -> bytes:
    for _ in range(rng.choice([1, 1, 2, 3])):
        i = rng.randrange(len(message) + 1)
        match rng.randrange(6):
            case 0:
                message = message[:i] + bytes([rng.randrange(256)]) + message[i + 1 :]
            case 1:
                message = message[:i] + message[i + rng.choice([1, 1, 2, 8]) :]
            case 2:
                message = message[:i] + rng.choice(BITS) + message[i:]
            case 3:  # where a field may be
                message = rng.choice(BITS) + message if rng.random() < 0.5 else message + rng.choice(BITS)
            case 4 if i < len(message):  # lengths, mostly, are small
                message = message[:i] + bytes([message[i] + rng.choice([-1, 1]) & 255]) + message[i + 1 :]
            case _:
                message = message[:i]
    return message


@pytest.mark.counted
@pytest.mark.parametrize("seed", range(4))
def test_what_is_scanned_means_the_same_to_protobuf(seed: int) -> None:
    rng = random.Random(100 + seed)
    taken = 0
    count = few_or_many(1_500, 5_000)
    for _ in range(count):
        message = spoil(rng, made(rng).SerializeToString())
        scanned = scan(message, at_end=rng.random() < 0.9)
        if scanned is not None:
            check_means_the_same(message, scanned[1])
            taken += 1
    assert count // 20 < taken < count * 4 // 5


def test_no_beginning_of_a_message_is_read_beyond_its_end() -> None:
    rng = random.Random(7)
    for _ in range(20):
        message = made(rng).SerializeToString()
        for size in range(min(len(message), 400)):
            scanned = scan(message[:size])
            if scanned is not None:
                check_means_the_same(message[:size], scanned[1])


def request(**more: Any) -> Any:
    """A request of one input, `a`, of two keys."""
    made = Request(model_name="m", **more)
    made.inputs.add(name="a", datatype="INT64", shape=[2])
    made.raw_input_contents.append(bytes(16))
    return made


def changed(change: Any) -> bytes:
    one = request()
    change(one)
    message: bytes = one.SerializeToString()
    return message


def structure(change: Any = lambda _: None) -> bytes | None:
    scanned = scan(changed(change))
    return None if scanned is None else scanned[0]


def wanted(*names: str, **texts: str) -> Any:
    def change(one: Any) -> None:
        for name in names:
            output = one.outputs.add(name=name)
            for parameter, text in texts.items():
                output.parameters[parameter].string_param = text

    return change


def of_request(**texts: str) -> Any:
    def change(one: Any) -> None:
        for parameter, text in texts.items():
            one.parameters[parameter].string_param = text

    return change


def test_sizes_the_id_the_timeout_the_model_and_what_nobody_reads_are_not_in_the_structure() -> None:
    one = structure()
    assert one is not None

    def resized(request: Any) -> None:
        request.inputs[0].shape[:] = [70_000]
        request.raw_input_contents[:] = [bytes(24)]
        request.id, request.model_name = "7", "another"
        request.parameters["timeout"].int64_param = 3
        request.parameters["other"].double_param = 1
        request.inputs[0].parameters["other"].bool_param = True

    assert structure(resized) == one


def test_what_needs_another_plan_is_in_the_structure() -> None:
    def second(one: Any) -> None:
        one.inputs.add(name="b", datatype="INT64", shape=[2])
        one.raw_input_contents.append(bytes(16))

    def renamed(one: Any) -> None:
        one.inputs[0].name = "b"

    def other(one: Any) -> None:
        one.inputs[0].datatype = "UINT64"

    def deeper(one: Any) -> None:
        one.inputs[0].shape.append(1)

    def versioned(one: Any) -> None:
        one.model_version = "1"

    others = [
        structure(), structure(second), structure(renamed), structure(other), structure(deeper), structure(versioned),
        structure(wanted("a")), structure(wanted("a", "b")), structure(wanted("b", "a")), structure(wanted("a", dtype="FP16")),
        structure(wanted("a", dtype="")), structure(wanted("a", combiner="FP16")), structure(wanted("a", combiner="")),
        structure(of_request(combiner="sum")), structure(of_request(combiner="")),
    ]  # fmt: skip
    assert None not in others
    assert len(set(others)) == len(others)


def test_the_most_inputs_and_outputs_are_scanned_and_one_more_is_not() -> None:
    def many(inputs: int, outputs: int) -> Any:
        def change(one: Any) -> None:
            for i in range(1, inputs):
                one.inputs.add(name=f"a{i}", datatype="INT64", shape=[0])
                one.raw_input_contents.append(b"")
            for i in range(outputs):
                one.outputs.add(name=f"a{i}")

        return change

    most = layout.MOST_TENSORS
    assert structure(many(most, most)) is not None
    assert structure(many(most + 1, 0)) is None
    assert structure(many(1, most + 1)) is None


def shared(one: Any) -> None:
    one.inputs[0].parameters["shared_memory_region"].string_param = "r"
    del one.raw_input_contents[:]


def contents(one: Any) -> None:
    one.inputs[0].contents.int64_contents[:] = [1, 2]


def typed(one: Any) -> None:
    contents(one)
    del one.raw_input_contents[:]


def nameless(one: Any) -> None:
    one.inputs[0].name = ""


def scalar(one: Any) -> None:
    del one.inputs[0].shape[:]


def deep(one: Any) -> None:
    one.inputs[0].shape[:] = [1, 1, 1, 1, 2]


def negative(one: Any) -> None:
    one.inputs[0].shape[:] = [-1]


def huge(one: Any) -> None:
    one.inputs[0].shape[:] = [1 << 31]


def odd(one: Any) -> None:
    one.inputs[0].datatype = "INT65"


def too_few(one: Any) -> None:
    del one.raw_input_contents[:]


def too_many(one: Any) -> None:
    one.raw_input_contents.append(b"")


def long_id(one: Any) -> None:
    one.id = "x" * 257


def classes(one: Any) -> None:
    one.outputs.add(name="a").parameters["classification"].int64_param = 1


def number(one: Any) -> None:
    one.outputs.add(name="a").parameters["dtype"].int64_param = 1


def late(one: Any) -> None:
    one.parameters["timeout"].string_param = "5"


def before(one: Any) -> None:
    one.parameters["timeout"].int64_param = -5


def long_text(one: Any) -> None:
    one.parameters["other"].string_param = "x" * protobuf_scan.MOST_DESCRIPTION_BYTES


TENSOR = field(5, field(1, b"a") + field(2, b"INT64") + field(3, b"\x02"))
RAW = field(7, bytes(16))


@pytest.mark.parametrize(
    "message",
    [
        *map(changed, (
            shared, contents, typed, nameless, scalar, deep, negative, huge, odd, too_few, too_many, long_id, classes, number, late,
            before, long_text,
        )),
        RAW + TENSOR,  # fields in another order
        field(1, b"m") + field(1, b"m") + TENSOR + RAW,
        TENSOR + field(1, b"m") + RAW,
        TENSOR + RAW + field(8, b""),
        TENSOR + RAW + field(16, b""),
        b"\x0a\x81\x00m" + TENSOR + RAW,  # a length in more bytes than it needs
        b"\x8a\x00\x01m" + TENSOR + RAW,  # a tag, too
        b"\x0d\x01\x00\x00\x00" + TENSOR + RAW,
        field(3, b"\xff") + TENSOR + RAW,
        field(3, b"\xed\xa0\x80") + TENSOR + RAW,
        field(4, field(1, b"\xff") + field(2, b"\x08\x01")) + TENSOR + RAW,
        field(4, field(1, b"k") + field(2, b"\x1a\x01\xff")) + TENSOR + RAW,
        field(4, field(1, b"dtype") + field(2, b"\x1a\x01\xff")) + TENSOR + RAW,
        field(4, field(1, b"k") + field(2, b"\x08\x02")) + TENSOR + RAW,
        field(4, field(1, b"k") + field(2, b"\x08\x01\x10\x01")) + TENSOR + RAW,
        field(4, field(1, b"k")) + TENSOR + RAW,
        field(4, field(2, b"\x08\x01")) + TENSOR + RAW,
        field(4, field(1, b"k") + field(2, b"\x10" + b"\xff" * 9 + b"\x02")) + TENSOR + RAW,
        *(field(4, field(1, b"combiner") + field(2, value)) * 2 + TENSOR + RAW for value in (b"\x1a\x03sum", b"")),
        field(5, field(1, b"a") + field(1, b"a") + field(2, b"INT64") + b"\x18\x02") + RAW,
        field(5, field(2, b"INT64") + field(1, b"a") + b"\x18\x02") + RAW,
        field(5, field(1, b"a") + field(2, b"INT64") + b"\x18") + RAW,
        TENSOR + field(6, b"") + RAW,
        TENSOR + field(6, field(1, b"a") + field(1, b"b")) + RAW,
        TENSOR + b"\x3b" + RAW,  # a group
        TENSOR + b"\x3a\xff\xff\xff\xff\x07" + bytes(16),
        TENSOR + b"\x3a" + b"\xff" * 8 + b"\x7f" + bytes(16),
    ],
)  # fmt: skip
def test_what_is_of_another_form_is_for_protobuf(message: bytes) -> None:
    assert scan(message) is None


@pytest.mark.parametrize(
    "message",
    [
        field(5, field(1, b"a") + field(2, b"INT64") + b"\x18\x02\x18\x01") + RAW,
        field(5, field(1, b"a") + field(2, b"INT64") + b"\x1a\x01\x02\x18\x01") + RAW,
        field(5, field(1, b"a") + field(2, b"INT64") + b"\x1a\x01\x02\x2a\x00") + RAW,
        field(4, field(1, b"timeout") + field(2, b"\x28\x05")) + TENSOR + RAW,
        field(1, b"") + TENSOR + field(6, field(1, b"a")) + RAW,
    ],
)  # fmt: skip
def test_other_ways_to_write_the_same_are_scanned(message: bytes) -> None:
    scanned = scan(message)
    assert scanned is not None
    check_means_the_same(message, scanned[1])
