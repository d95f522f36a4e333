"""The scanner of requests beside the full parser: what it takes means the same there, and it takes what clients send."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import numpy as np
import orjson
import pytest

from tests.counts import few_or_many
from tests.guard_pages import Guarded
from tierstore.errors import InvalidInput
from tierstore.kernels.codec import address_of
from tierstore.service.dataplane.plan import Request
from tierstore.service.protocols.oip.json_request import InBody, parse_request
from tierstore.wire import request_record as layout
from tierstore.wire.json import scan as json_scan
from tierstore.wire.json import text as json_text
from tierstore.wire.json.elements import GROWTH

Record = dict[str, Any]
GUARDED = Guarded(1 << 20)


def scan(text: bytes) -> tuple[bytes, Record] | None:
    """(structure, record) of a request's JSON; None where it is not of the form. A read beyond its end ends the process.

    An input whose elements came in the JSON has their bytes under `data`.
    """
    words = np.full(layout.RECORD_BYTES // 8, -77, np.int64)
    structure = np.zeros(layout.MOST_STRUCTURE_BYTES, np.uint8)
    begin = GUARDED.place(text)
    data = np.full(GROWTH * len(text) + 64, 0xA5, np.uint8)
    size = json_scan.scan(begin, len(text), address_of(words), address_of(data), address_of(structure))
    assert (data[GROWTH * len(text) :] == 0xA5).all()
    if not size:
        return None
    record = layout.RECORD.view(address_of(words))

    def texts(at: int, nbytes: int, skip: int = 0) -> bytes | None:
        return text[at - begin + skip : at - begin + nbytes] if nbytes else None

    def row(number: int) -> dict[str, Any]:
        own = layout.ROW.view(address_of(words) + layout.RECORD.bytes + layout.ROW.bytes * number)
        return {
            "name": texts(own.name_at, own.name_bytes),
            "datatype": ("", *layout.DATATYPES)[own.datatype],
            "shape": tuple(own.dims[: own.rank]),
            "size": own.size, "at": own.at,
            "binary": (None, False, True)[own.binary], "default": (None, False, True)[own.by_default],
            "dtype": texts(own.dtype_at, own.dtype_bytes, 1),
            "combiner": texts(own.combiner_at, own.combiner_bytes, 1),
            "timeout": own.timeout_us,
        }  # fmt: skip

    def elements(row: dict[str, Any]) -> dict[str, Any]:
        if record.decoded:
            row["data"] = data[row["at"] : row["at"] + row["size"]].tobytes()
        return row

    inputs, outputs = record.inputs, record.outputs
    id_bytes = record.id_bytes
    own = row(0)
    return structure[:size].tobytes(), {
        "id": None if id_bytes < 0 else (texts(record.id_at, id_bytes) or b""),
        "timeout": own["timeout"], "default": own["default"], "combiner": own["combiner"],
        "inputs": [elements(row(1 + i)) for i in range(inputs)],
        "outputs": [row(1 + inputs + i) for i in range(outputs)],
    }  # fmt: skip


def wire(elements: Any) -> bytes:
    """Elements as a binary tensor has them."""
    if isinstance(elements, np.ndarray):
        return elements.tobytes()
    return b"".join(len(text).to_bytes(4, "little") + text for text in elements.to_pylist())


def check_means_the_same(text: bytes, record: Record) -> None:
    """The full parser understands `text` as the record says, or refuses sizes that are compared with data later."""
    in_json = any("data" in tensor for tensor in record["inputs"])
    size = 0 if in_json else sum(tensor["size"] for tensor in record["inputs"])
    try:
        parsed = parse_request(memoryview(text), size)
    except InvalidInput as error:
        # a number of elements, and strings that are no UTF-8, are found when the record is bound
        if not re.search("takes|beside 0|does not match data|not valid JSON: str is not valid UTF-8", str(error)):
            raise
        return
    request = parsed.request
    assert isinstance(request, Request)
    assert [(one.name.encode(), one.datatype, one.shape) for one in request.inputs] == [
        (one["name"], one["datatype"], one["shape"]) for one in record["inputs"]
    ]
    if in_json:
        assert [wire(source.elements) for source in parsed.sources] == [one["data"] for one in record["inputs"]]  # type: ignore[union-attr]
    else:
        assert parsed.sources == [InBody(one["at"], one["at"] + one["size"]) for one in record["inputs"]]
    wanted = [(one.name.encode(), one.datatype, one.combiner) for one in request.outputs]
    told = [
        (one["name"], *(None if one[part] is None else one[part].decode() for part in ("dtype", "combiner")))
        for one in record["outputs"]
    ]
    assert wanted == told
    assert parsed.targets == [one["binary"] for one in record["outputs"]]
    assert parsed.binary_default == bool(record["default"])
    assert parsed.timeout_us == (record["timeout"] or None)
    assert request.combiner == (None if record["combiner"] is None else record["combiner"].decode())
    if parsed.id is None:
        assert record["id"] is None
    else:  # it goes into the answer as it came
        assert orjson.dumps(parsed.id) == b'"' + record["id"] + b'"'


NAMES = ["item_id", "user", "clicked", "a.b", "x y"]


def value(rng: random.Random, datatype: str) -> Any:
    """An element as clients send it, mostly."""
    if datatype == "BYTES":
        return rng.choice(["", "a", "user 7", "grün ✓", "\x7f", 'a "b"'] if rng.random() < 0.1 else ["", "a", "w12"])
    if datatype.startswith("FP"):
        return rng.choice(
            [0, 1, -1, 0.5, rng.gauss(0, 1), float(np.float32(rng.gauss(0, 1))), 1e-7, 1e30, 12345678901234567]
        )
    bits = int(datatype.strip("UINT"))
    low, high = (0, 1 << bits) if datatype.startswith("U") else (-1 << (bits - 1), 1 << (bits - 1))
    return rng.choice(
        [
            0,
            1,
            low,
            high - 1,
            rng.randrange(low, high),
            *([min(high, (1 << 64) - 1), max(low - 1, -1 << 63), 1.5] if rng.random() < 0.01 else []),
        ]
    )


def nested(flat: list[Any], shape: list[int]) -> list[Any]:
    for size in shape[:0:-1]:
        flat = [flat[i : i + size] for i in range(0, len(flat), size or 1)]
    return flat


def with_elements(rng: random.Random) -> dict[str, Any]:
    """A request with elements in its JSON."""
    inputs = []
    for name in rng.sample(NAMES, rng.randint(1, 3)):
        shape = [rng.choice([0, 1, 3, 7]) for _ in range(rng.choice([1, 1, 2, 3]))]
        datatype = rng.choice([name for name in layout.DATATYPES if name not in ("BOOL", "FP16")])
        data = [value(rng, datatype) for _ in range(int(np.prod(shape)))]
        if rng.random() < 0.5 and 0 not in shape:
            data = nested(data, shape)
        tensor = {"name": name, "datatype": datatype, "shape": shape, "data": data}
        inputs.append(dict(rng.sample(list(tensor.items()), len(tensor))) if rng.random() < 0.5 else tensor)
    return {"id": "a", "inputs": inputs}


def document(rng: random.Random) -> dict[str, Any]:
    """A request as clients send them, without data in it."""
    inputs = []
    for name in rng.sample(NAMES, rng.randint(1, len(NAMES))):
        shape = [rng.choice([0, 1, 3, 64, 3000, (1 << 31) - 1]) for _ in range(rng.choice([1, 1, 1, 2, 4]))]
        size = rng.choice([8 * int(np.prod(shape[:1])), 0, 24, (1 << 31) - 1])
        tensor = {"name": name, "datatype": rng.choice(layout.DATATYPES), "shape": shape}
        tensor["parameters"] = {"binary_data_size": min(size, (1 << 31) - 1)}
        inputs.append(dict(rng.sample(list(tensor.items()), len(tensor))))
    made: dict[str, Any] = {"inputs": inputs}
    if rng.random() < 0.8:
        made["outputs"] = [
            {"name": name, "parameters": dict(rng.sample(list(parameters.items()), rng.randint(0, 3)))}
            for name in rng.sample(NAMES, rng.randint(0, 4))
            for parameters in [{"binary_data": rng.random() < 0.9, "dtype": "FP16", "combiner": "mean"}]
        ]
    ids = [
        "",
        "a",
        "7",
        "6045257d-d777-487d-ac0f-52a80a57ff83",
        'a "quoted" \\ one\n',
        "grün ✓ 🙂",
        "\x7f",
        "\x01",
        "x" * 300,
    ]
    if rng.random() < 0.7:
        made["id"] = rng.choice([*ids, None])
    if rng.random() < 0.5:
        parameters = {
            "timeout": rng.choice([0, 50_000, 1 << 40]), "binary_data_output": rng.random() < 0.5, "combiner": "sum",
            "sequence_id": 7, "sequence_end": False, "other": "text", "sequence_start": None, "negative": -3,
        }  # fmt: skip
        made["parameters"] = dict(rng.sample(list(parameters.items()), rng.randint(0, len(parameters))))
    if rng.random() < 0.2:
        made["model_name"] = "ctr"
    return dict(rng.sample(list(made.items()), len(made)))


def written(rng: random.Random, made: dict[str, Any]) -> bytes:
    """By one of the serialisers that there are."""
    return rng.choice(
        [
            lambda: orjson.dumps(made),
            lambda: orjson.dumps(made, option=orjson.OPT_INDENT_2),
            lambda: json.dumps(made).encode(),
            lambda: json.dumps(made, ensure_ascii=False, separators=(" , ", "\t:\r\n")).encode(),
        ]
    )()


@pytest.mark.parametrize("seed", range(4))
def test_what_clients_send_is_scanned_however_it_is_written(seed: int) -> None:
    rng = random.Random(seed)
    left = 0
    for _ in range(600):
        made = document(rng)
        text = written(rng, made)
        scanned = scan(text)
        if scanned is None:  # ids that are written back in another way are for the full parser
            odd = made.get("id") or ""
            assert not odd.isascii() or "\x01" in odd or "\x7f" in odd or len(odd) > json_text.MOST_ID_BYTES, text
            left += 1
            continue
        check_means_the_same(text, scanned[1])
    assert left < 300


@pytest.mark.counted
@pytest.mark.parametrize("seed", range(4))
def test_elements_in_the_json_are_read_as_the_full_parser_reads_them(seed: int) -> None:
    rng = random.Random(200 + seed)
    count = few_or_many(1500, 6000)
    as_sent = spoiled = 0
    for _ in range(count):
        text = written(rng, with_elements(rng))
        scanned = scan(text)
        if scanned is not None:
            check_means_the_same(text, scanned[1])
            as_sent += 1
        text = spoil(rng, text)
        scanned = scan(text)
        if scanned is not None:
            check_means_the_same(text, scanned[1])
            spoiled += 1
    assert as_sent > count * 3 // 4
    assert spoiled > count // 20


NUMBERS = ["0", "-0", "-0.0", "0.0", "00", "01", "-01", "1.", ".5", "-", "+1", "1e3", "1E3", "1e+3", "1e-3", "1e", "1e+", "0e0", "-0e0", "1.0", "1.5e300", "1e400",
    "1e-400", "3.4028235e38", "3.4028236e38", "-3.5e38", "1e-45", "7e-46", "2.5e-324", "123456789012345678", "1234567890123456789", "12345678901234567890",
    "9223372036854775807", "9223372036854775808", "-9223372036854775808", "-9223372036854775809", "18446744073709551615", "18446744073709551616",
    "127", "128", "-128", "-129", "255", "256", "65535", "65536", "2147483648", "4294967296", "0.1", "0.30000000000000004", "9007199254740993", "9007199254740993.0",
    "16777217", "16777217.0", "0.100000001490116119384765625", "1e22", "1e23", "1.7976931348623157e308", "true", "null", "NaN", "Infinity", '"1"', "1 2", "0x1", "1_0"]  # fmt: skip


def test_every_form_of_a_number_is_read_as_the_full_parser_reads_it() -> None:
    taken = set()
    for datatype in layout.DATATYPES:
        for number in NUMBERS:
            for data in (f"[{number}]", f"[1,{number} ]", f"[ {number}\n, 1]"):
                shape = data.count(",") + 1
                text = f'{{"inputs":[{{"name":"a","datatype":"{datatype}","shape":[{shape}],"data":{data}}}]}}'.encode()
                scanned = scan(text)
                if scanned is not None:
                    check_means_the_same(text, scanned[1])
                    taken.add((datatype, number))
    # what is ordinary is read here, not left to the full parser
    for datatype in ("INT64", "UINT64", "FP32", "FP64"):
        assert {(datatype, number) for number in ("0", "-0", "1234567890123456789", "9223372036854775807")} <= taken
    for number in ("-0.0", "1e3", "1E3", "1e-3", "1.0", "0.1", "0.30000000000000004", "1e-45", "16777217.0", "1e22"):
        assert ("FP32", number) in taken
        assert ("INT64", number) not in taken


@pytest.mark.parametrize(
    ("shape", "data"),
    [
        ([2, 2], [1, 2, 3, 4]), ([2, 2], [[1, 2], [3, 4]]), ([2, 2], [[1, 2, 3, 4]]), ([2, 2], [[1, 2], [3]]), ([2, 2], [[1, 2], 3, 4]), ([4], [[1, 2, 3, 4]]),
        ([2, 2], [[[1, 2]], [[3, 4]]]), ([1, 2, 2], [[[1, 2], [3, 4]]]), ([1, 2, 2], [[1, 2], [3, 4]]), ([0], []), ([0, 3], []), ([0, 3], [[]]), ([2, 0], [[], []]),
        ([2, 0], [[]]), ([1, 0], [[], []]), ([2, 0], []), ([1, 1, 1, 1], [[[[1]]]]), ([1], [[[[[1]]]]]), ([2], [[], [1, 2]]), ([2], [1, []]), ([2], [[1], [2]]),
        ([1], []), ([1], 1), ([1], {}), ([1], None), ([2], [1]), ([2], [1, 2, 3]), ([1, 1], [[1], []]),
    ],
)  # fmt: skip
def test_lists_are_flat_or_of_the_shape_as_the_full_parser_has_it(shape: list[int], data: Any) -> None:
    for made in ({"shape": shape, "data": data}, {"data": data, "shape": shape}):
        text = orjson.dumps({"inputs": [{"name": "a", "datatype": "INT64", **made}]})
        scanned = scan(text)
        try:
            parse_request(memoryview(text), None)
            refused = ""
        except InvalidInput as error:
            refused = str(error)
        if refused:
            assert scanned is None or "does not match data" in refused
        else:
            assert scanned is not None
            check_means_the_same(text, scanned[1])


BITS = [b"{", b"}", b"[", b"]", b",", b":", b'"', b"\\", b"\\u0041", b"null", b"true", b"1", b"-1", b"0", b"00", b"1.5", b"1e3", b"9" * 19,
        b"9223372036854775808", b"2147483648", b" ", b"\n", b"\x00", b"\xff", b"\xc3\xa4", b'"id":"x",', b'"id":null,', b'"data":[1],', b'"name":"z",',
        b'"shared_memory_region":"r",', b'"binary_data_size":8,', b'"binary_data":1,', b"NaN", b"[" * 300, b'{"a":' * 50, b'"timeout":"x",']  # fmt: skip


def spoil(rng: random.Random, text: bytes) -> bytes:
    for _ in range(rng.choice([1, 1, 2, 3])):
        i = rng.randrange(len(text) + 1)
        match rng.randrange(5):
            case 0:
                text = text[:i] + bytes([rng.randrange(256)]) + text[i + 1 :]
            case 1:
                text = text[:i] + text[i + rng.choice([1, 1, 2, 8]) :]
            case 2 | 3:
                text = text[:i] + rng.choice(BITS) + text[i:]
            case _:
                text = text[:i]
    return text


@pytest.mark.counted
@pytest.mark.parametrize("seed", range(4))
def test_what_is_scanned_means_the_same_to_the_full_parser(seed: int) -> None:
    rng = random.Random(100 + seed)
    taken = 0
    count = few_or_many(1500, 5000)
    for _ in range(count):
        text = spoil(rng, written(rng, document(rng)))
        scanned = scan(text)
        if scanned is not None:
            check_means_the_same(text, scanned[1])
            taken += 1
    assert count // 50 < taken < count * 4 // 5


def tensor(name: str = "a", shape: Any = (2,), size: Any = 16, **more: Any) -> dict[str, Any]:
    return {"name": name, "datatype": "INT64", "shape": shape, "parameters": {"binary_data_size": size}, **more}


def structure(**made: Any) -> bytes | None:
    scanned = scan(orjson.dumps(made))
    return None if scanned is None else scanned[0]


def test_sizes_ids_timeouts_order_and_what_nobody_reads_are_not_in_the_structure() -> None:
    one = structure(inputs=[tensor()], outputs=[{"name": "a"}])
    assert one is not None
    for same in (
        structure(inputs=[tensor(shape=[999], size=4)], outputs=[{"name": "a"}]),
        structure(outputs=[{"name": "a"}], id="7", inputs=[tensor()]),
        structure(inputs=[tensor()], outputs=[{"name": "a", "parameters": {"other": 1}}], parameters={"timeout": 3}, model_name="m"),
    ):  # fmt: skip
        assert same == one


def test_what_needs_another_plan_is_in_the_structure() -> None:
    inputs, outputs = [tensor(), tensor("b")], [{"name": "a"}, {"name": "b"}]

    def wanted(name: str, **parameters: Any) -> dict[str, Any]:
        return {"name": name, "parameters": parameters}

    others = [
        structure(inputs=inputs, outputs=outputs),
        structure(inputs=inputs[::-1], outputs=outputs),
        structure(inputs=inputs, outputs=outputs[::-1]),
        structure(inputs=inputs[:1], outputs=outputs),
        structure(inputs=inputs, outputs=outputs[:1]),
        structure(inputs=inputs),
        structure(inputs=[tensor(datatype="UINT64"), tensor("b")], outputs=outputs),
        structure(inputs=[tensor(shape=[1, 2]), tensor("b")], outputs=outputs),
        structure(inputs=inputs, outputs=outputs, parameters={"binary_data_output": True}),
        structure(inputs=inputs, outputs=outputs, parameters={"combiner": "sum"}),
        structure(inputs=inputs, outputs=outputs, parameters={"combiner": ""}),
        *(
            structure(inputs=inputs, outputs=[outputs[0], wanted("b", **{name: value})])
            for name, value in (("binary_data", True), ("binary_data", False), ("dtype", "FP16"), ("dtype", ""), ("combiner", "FP16"))
        ),
        structure(inputs=[tensor("ab"), tensor("c")]),
        structure(inputs=[tensor("a"), tensor("bc")]),
    ]  # fmt: skip
    assert None not in others
    assert len(set(others)) == len(others)


@pytest.mark.parametrize(
    "text",
    [
        b"", b"{", b"{}", b"[]", b"null", b'{"inputs":null}', b'{"inputs":{}}', b'{"inputs":[{}]}',
        *(orjson.dumps(made) for made in (
            {"outputs": [{"name": "a"}]},
            {"inputs": [tensor(), tensor() | {"data": [1, 2]}]}, {"inputs": [tensor() | {"data": [1, 2]}]}, {"inputs": [tensor(data=[1, 2])]},
            {"inputs": [{"data": [1, 2]} | tensor()]}, {"inputs": [tensor(), {"name": "b", "datatype": "INT64", "shape": [1], "data": [1]}]},
            {"inputs": [{"name": "b", "datatype": "BOOL", "shape": [1], "data": [True]}]}, {"inputs": [{"name": "b", "datatype": "FP16", "shape": [1], "data": [1]}]},
            {"inputs": [{"name": "b", "shape": [1], "data": [1]}]}, {"inputs": [{"name": "b", "datatype": "INT64", "data": [1]}]},
            {"inputs": [tensor()], "outputs": [{"name": "b", "datatype": "INT64", "data": [1]}]},
            {"inputs": [tensor(shape=[])]}, {"inputs": [tensor(shape=[-1])]}, {"inputs": [tensor(shape=[1 << 31])]},
            {"inputs": [tensor(shape=[1] * 5)]}, {"inputs": [tensor(size=-1)]}, {"inputs": [tensor(size=None)]}, {"inputs": [tensor(size=1.0)]},
            {"inputs": [tensor(datatype="INT65")]}, {"inputs": [tensor(name="")]}, {"inputs": [tensor(name="ä")]},
            {"inputs": [tensor()], "id": 7}, {"inputs": [tensor()], "id": ["a"]}, {"inputs": [tensor()], "id": "x" * 257},
            {"inputs": [tensor()], "outputs": [{}]}, {"inputs": [tensor()], "outputs": [{"name": "a", "parameters": {"shared_memory_region": "r"}}]},
            {"inputs": [tensor()], "outputs": [{"name": "a", "parameters": {"classification": 0}}]},
            {"inputs": [tensor()], "other": {}}, {"inputs": [tensor()], "other": 1.5}, {"inputs": [tensor()], "parameters": {"timeout": "1"}},
            {"inputs": [tensor(str(i)) for i in range(layout.MOST_TENSORS + 1)]},
        )),
        orjson.dumps({"inputs": [tensor()]})[:-1] + b',"inputs":[]}',
        orjson.dumps({"inputs": [tensor()]})[:-1] + b',"id":"a","id":"b"}',
        orjson.dumps({"inputs": [tensor()]}).replace(b'"a"', b'"a","name":"b"'),
        orjson.dumps({"inputs": [tensor()]}).replace(b'"a"', b'"\\u0061"'),
        orjson.dumps({"inputs": [tensor()]}).replace(b"16", b"016"),
        orjson.dumps({"inputs": [tensor()]}).replace(b"16", b"16e0"),
        orjson.dumps({"inputs": [tensor()]}).replace(b"}]}", b"},]}"),
        b"\xef\xbb\xbf" + orjson.dumps({"inputs": [tensor()]}), orjson.dumps({"inputs": [tensor()]}) + b"{}",
        *(b'{"id":"' + bad + b'",' + orjson.dumps({"inputs": [tensor()]})[1:] for bad in (
            b"\xff", b"\xc0\xaf", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xc3", b"\\u0041", b"\\/", b"\\x", b"\x1f", b"\\")),
        orjson.dumps({"inputs": [tensor()], "x": "a" * json_scan.MOST_TEXT_BYTES}),
    ],
)  # fmt: skip
def test_what_is_of_another_form_is_for_the_full_parser(text: bytes) -> None:
    assert scan(text) is None
