"""The scanner of TensorFlow Serving's JSON beside the full parser: what it takes means the same there, and it takes what clients send."""

from __future__ import annotations

import ctypes
import json
import random
from typing import Any

import numpy as np
import pytest

from tests.counts import few_or_many
from tests.guard_pages import Guarded
from tierstore.errors import InvalidInput
from tierstore.kernels.codec import address_of
from tierstore.service.dataplane.view import TensorInfo
from tierstore.service.protocols.tfserving.json_messages import parse_predict, tensors_of
from tierstore.service.protocols.tfserving.signature import ServedSignatures
from tierstore.types import FeatureSpec
from tierstore.wire import request_record as layout
from tierstore.wire.json import predict as json_predict
from tierstore.wire.json.elements import GROWTH

GUARDED = Guarded(1 << 20)
read = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 6)(json_predict.read.address)
Input = tuple[str, str, tuple[int, ...], bytes]
DATATYPES = {
    "item": "INT64", "clicked": "INT64", "clicked.offsets": "INT64", "clicked.weights": "FP32", "user": "UINT64", "word": "BYTES",
    "tag": "BYTES", "tag.offsets": "INT64", "tag.weights": "FP32", "price": "FP32", "exact": "FP64", "small": "INT8",
}  # fmt: skip


def signature(names: list[str]) -> ServedSignatures:
    infos = {
        name: TensorInfo(name, datatype, ()) for name, datatype in DATATYPES.items() if name.split(".")[0] in names
    }
    features = {
        name: FeatureSpec(name, name, combiner="sum" if name in ("clicked", "tag") else None)
        for name in names
        if name in ("item", "clicked", "user", "word", "tag")
    }
    return ServedSignatures(features, None, infos, {})


def wire(elements: Any) -> bytes:
    """Elements as a binary tensor has them."""
    if isinstance(elements, np.ndarray):
        return elements.tobytes()
    return b"".join(len(text).to_bytes(4, "little") + text for text in elements.to_pylist())


def by_python(text: bytes, names: list[str]) -> tuple[list[Input], list[str] | None]:
    parsed = parse_predict(text)
    tensors = tensors_of(parsed, signature(names))
    inputs = [(spec.name, spec.datatype, spec.shape, wire(elements)) for spec, elements in tensors]
    return sorted(inputs), parsed.picked


def by_kernels(text: bytes, names: list[str]) -> tuple[bytes, list[Input], list[str]] | None:
    """(structure, inputs, names of outputs); None where it is not of the form. A read or write beyond its memory ends the process."""
    words = np.full(layout.RECORD_BYTES // 8, -77, np.int64)
    structure = np.zeros(layout.MOST_STRUCTURE_BYTES, np.uint8)
    begin = GUARDED.place(text)
    data = np.full(GROWTH * len(text) + 64, 0xA5, np.uint8)
    size = json_predict.scan(begin, len(text), address_of(words), address_of(data), address_of(structure))
    if not size:
        return None
    record = layout.RECORD.view(address_of(words))

    def row(number: int) -> Any:
        return layout.ROW.view(address_of(words) + layout.RECORD.bytes + layout.ROW.bytes * number)

    def name(number: int) -> str:
        of = row(number)
        where = data if address_of(data) <= of.name_at < address_of(data) + len(data) else GUARDED.array
        return bytes(where[of.name_at - address_of(where) :][: of.name_bytes]).decode()

    inputs = [name(1 + k) for k in range(record.inputs)]
    outputs = [name(1 + record.inputs + k) for k in range(record.outputs)]
    assert inputs == sorted(inputs)
    if "" in inputs:
        if len(names) > 1:
            return None
        inputs = [names[0] + each if each in ("", ".offsets") else each for each in inputs]
    if set(inputs) - set(signature(names).inputs):
        return None  # no plan has it
    datatypes = np.array([1 + layout.DATATYPES.index(DATATYPES[each]) for each in inputs], np.int64)
    ranks = [row(1 + k).rank for k in range(record.inputs)]
    came = read(address_of(datatypes), address_of(words), address_of(data), 0, 0, 0)
    assert (data[GROWTH * len(text) :] == 0xA5).all()
    if not came:
        return None
    found = []
    for k, each in enumerate(inputs):
        of = row(1 + k)
        assert of.rank == ranks[k]
        assert of.at + of.size <= record.data_bytes
        found.append(
            (
                each,
                layout.DATATYPES[of.datatype - 1],
                tuple(of.dims[: of.rank]),
                data[of.at : of.at + of.size].tobytes(),
            )
        )
    return structure[:size].tobytes(), found, outputs


def check(text: bytes, names: list[str], *, taken: bool | None = None) -> bytes | None:
    """Both understand it alike, or only Python takes it. Returns its structure."""
    found = by_kernels(text, names)
    if taken is not None:
        assert (found is not None) == taken, text
    if found is None:
        return None
    structure, inputs, outputs = found
    wanted, picked = by_python(text, names)
    assert inputs == wanted, text
    assert outputs == (picked or [])
    return structure


ELEMENTS: dict[str, list[Any]] = {
    "INT64": [0, -1, 7, 9223372036854775807, -9223372036854775808, 123456],
    "UINT64": [0, 18446744073709551615, 5],
    "INT8": [-128, 127, 0],
    "FP32": [0, 1, -1.5, 1e-7, 3.4e38, 0.1],
    "FP64": [0, 0.1, 1e60, -2.5],
    "BYTES": ["", "a", "user 7", "grün ✓"],
}


def element(rng: random.Random, name: str) -> Any:
    return rng.choice(ELEMENTS[DATATYPES[name]])


def lists(rng: random.Random, name: str, shape: list[int]) -> Any:
    return element(rng, name) if not shape else [lists(rng, name, shape[1:]) for _ in range(shape[0])]


def written(rng: random.Random, document: dict[str, Any]) -> bytes:
    separators = rng.choice([(",", ":"), (", ", ": "), (" ,\n", " :\t")])
    return json.dumps(document, separators=separators, ensure_ascii=rng.random() < 0.1).encode()


def request(rng: random.Random) -> tuple[bytes, list[str]]:
    """A request as clients send it, and the inputs of its model."""
    names = rng.sample([name for name in DATATYPES if "." not in name], rng.randint(1, 5))
    rows, sizes = rng.randint(1, 6), {name: [rng.randint(0, 4) for _ in range(rng.randint(0, 2))] for name in names}
    document: dict[str, Any] = {}
    if rng.random() < 0.3:
        document["signature_name"] = rng.choice(["lookup", "", None, "serving_default"])
    if rng.random() < 0.3:
        document["output_filter"] = rng.choice([None, [], ["item"], ["item.found", "b"]])
    if len(names) == 1 and rng.random() < 0.7:
        values = [lists(rng, names[0], sizes[names[0]]) for _ in range(rows)]
        if names[0] in ("clicked", "tag") and rng.random() < 0.5:
            values = [lists(rng, names[0], [rng.randint(0, 4)]) for _ in range(rows)]
        document[rng.choice(["inputs", "instances"])] = values
    elif rng.random() < 0.5:
        document["inputs"] = {name: [lists(rng, name, sizes[name]) for _ in range(rows)] for name in names}
    else:
        bags = {name for name in names if name in ("clicked", "tag") and rng.random() < 0.7}
        document["instances"] = [
            {name: lists(rng, name, [rng.randint(0, 4)] if name in bags else sizes[name]) for name in names}
            for _ in range(rows)
        ]
    if rng.random() < 0.2:
        document["unread"] = rng.choice([1, "x", None, True])
    members = list(document.items())
    rng.shuffle(members)
    return written(rng, dict(members)), names


@pytest.mark.counted
def test_requests_as_clients_send_them_mean_the_same_to_both() -> None:
    rng = random.Random(1)
    taken = 0
    count = few_or_many(3000, 60_000)
    for _ in range(count):
        text, names = request(rng)
        taken += check(text, names) is not None
    assert taken > 0.8 * count


@pytest.mark.counted
def test_what_is_taken_of_damaged_requests_means_the_same_to_both() -> None:
    rng = random.Random(2)
    for _ in range(few_or_many(4000, 80_000)):
        text, names = request(rng)
        damaged = bytearray(text)
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(damaged))
            match rng.randrange(4):
                case 0:
                    damaged[at : at + rng.randint(1, 5)] = b""
                case 1:
                    damaged[at:at] = rng.choice(
                        [b",", b"[", b"]", b"{", b"}", b'"', b"1", b"-", b".5", b"null", b"\\", b" ", b"e1"]
                    )
                case 2:
                    damaged[at] = rng.randrange(256)
                case 3:
                    other = rng.randrange(len(damaged))
                    damaged[at:at] = damaged[min(at, other) : max(at, other)][:40]
            if not damaged:
                break
        found = by_kernels(bytes(damaged), names)
        if found is None:
            continue
        try:
            wanted, picked = by_python(bytes(damaged), names)
        except InvalidInput as error:
            if not any(text in str(error) for text in FOUND_LATER):
                raise
        else:
            assert found[1] == wanted, bytes(damaged)
            assert found[2] == (picked or [])


# errors that no plan is made for, or that are found when the record is bound
FOUND_LATER = (
    "unknown signature",
    "nested unevenly",
    "expected a list of at least one",
    "not valid UTF-8",
    "output_filter",
)


def test_rows_and_columns_differ_in_their_structure_and_orders_do_not() -> None:
    names = ["item", "user"]
    rows = check(b'{"instances":[{"item":1,"user":2},{"item":3,"user":4}]}', names, taken=True)
    assert rows == check(b'{"instances":[{"user":2,"item":1}]}', names, taken=True)
    columns = check(b'{"inputs":{"item":[1,2],"user":[3,4]}}', names, taken=True)
    assert columns == check(b'{"inputs":{"user":[],"item":[]}}', names, taken=True)
    assert rows != columns
    assert columns != check(b'{"inputs":{"item":[[1]],"user":[3]}}', names, taken=True)
    assert columns != check(b'{"inputs":{"item":[1],"user":[3]},"signature_name":"lookup"}', names, taken=True)
    assert columns != check(b'{"inputs":{"item":[1],"user":[3]},"output_filter":["item"]}', names, taken=True)


def test_bags_of_rows_have_their_starts() -> None:
    text = b'{"instances":[{"clicked":[1,2],"item":7},{"clicked":[],"item":8},{"clicked":[3],"item":9}]}'
    structure = check(text, ["clicked", "item"], taken=True)
    found = by_kernels(text, ["clicked", "item"])
    assert found is not None
    assert [(name, shape) for name, _, shape, _ in found[1]] == [
        ("clicked", (3,)),
        ("clicked.offsets", (3,)),
        ("item", (3,)),
    ]
    assert np.frombuffer(found[1][1][3], np.int64).tolist() == [0, 2, 2]
    assert check(b'{"instances":[[1,2],[],[3]]}', ["clicked"], taken=True) != structure
    even = b'{"instances":[{"clicked":[1,2],"item":7},{"clicked":[3,4],"item":8}]}'
    assert check(even, ["clicked", "item"], taken=True) != structure


@pytest.mark.parametrize(
    "text",
    [
        '{"instances":[{"item":{"b64":"AA=="}}]}', '{"instances":[{"b64":"AA=="}]}', '{"instances":[]}', '{"instances":null,"inputs":[1]}',
        '{"inputs":[1],"instances":[1]}', '{"inputs":{}}', '{"inputs":{"item":1}}', '{"instances":[{"item":1},2]}', '{"instances":[1,[2]]}',
        '{"instances":[{"item":1},{"item":[1]}]}', '{"instances":[{"item":1,"user":2},{"user":2,"item":1}]}', '{"instances":[{"item":1},{}]}',
        '{"instances":[{"item":1,"item":2}]}', '{"inputs":{"item":[1],"item":[2]}}', '{"inputs":[1],"inputs":[2]}',
        '{"instances":[{"clicked":[1],"clicked.weights":[1]},{"clicked":[],"clicked.weights":[]}]}',
        '{"instances":[{"clicked":1,"clicked.offsets":0}]}', '{"inputs":{"it\\u0065m":[1]}}', '{"instances":[{"":1}]}',
        '{"inputs":[1.0]}', '{"inputs":[1e3]}', '{"inputs":[true]}', '{"inputs":[null]}', '{"inputs":["1"]}', '{"inputs":[1]} x', '{"inputs":[1],}',
        '{"inputs":[[1],2]}', '{"inputs":[[1],[2,3]]}', '{"inputs":[[[[[1]]]]]}', '{"instances":[NaN]}', '[]', '{}',
        '{"inputs":[1],"output_filter":"item"}', '{"inputs":[1],"output_filter":[1]}', '{"inputs":[1],"signature_name":1}',
    ],
)  # fmt: skip
def test_what_is_rare_is_for_python(text: str) -> None:
    names = ["item"] if "user" not in text and "clicked" not in text else ["item", "user", "clicked"]
    check(text.encode(), names, taken=False)


def test_many_inputs_are_put_in_order() -> None:
    names = [f"item_{k}" for k in range(layout.MOST_TENSORS)]
    random.Random(3).shuffle(names)
    text = json.dumps({"inputs": {name: [k] for k, name in enumerate(names)}}).encode()
    words = np.zeros(layout.RECORD_BYTES // 8, np.int64)
    structure, data = np.zeros(layout.MOST_STRUCTURE_BYTES, np.uint8), np.zeros(GROWTH * len(text), np.uint8)

    def scan(text: bytes) -> bytes:
        begin = GUARDED.place(text)
        size = json_predict.scan(begin, len(text), address_of(words), address_of(data), address_of(structure))
        return structure[:size].tobytes()

    first = scan(text)
    assert first
    assert first == scan(json.dumps({"inputs": {name: [1] for name in sorted(names)}}).encode())
    assert not scan(json.dumps({"inputs": {name: [1] for name in [*names, "one more"]}}).encode())


@pytest.mark.parametrize("commas", [1, 60, 3000, 50_000])
def test_commas_of_no_element_take_no_room(commas: int) -> None:
    """Nothing is written behind the text's room (`by_kernels` looks there), though each comma promises an element."""
    empty = "[1" + "," * commas + "]"
    for names in (["clicked", "item"], ["item", "price"], ["item", "user", "exact"]):
        for bad in names:
            good = [f'"{each}":7' for each in names if each != bad]
            for members in ([f'"{bad}":{empty}', *good], [*good, f'"{bad}":{empty}']):
                text = "{" + ",".join(members) + "}"
                check(f'{{"instances":[{text}]}}'.encode(), names, taken=False)
                check(f'{{"instances":[{text},{text}]}}'.encode(), names, taken=False)
                check(f'{{"inputs":{text}}}'.encode(), names, taken=False)
