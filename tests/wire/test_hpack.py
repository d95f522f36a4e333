"""HPACK beside the package `hpack` and the examples of RFC 7541: the same fields, the same tables, the same refusals."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest
from hpack import Decoder, HPACKError
from hpack.huffman import HuffmanEncoder
from hpack.huffman_constants import REQUEST_CODES, REQUEST_CODES_LENGTH
from hpack.table import HeaderTable

from tests.counts import few_or_many
from tests.guard_pages import Guarded
from tierstore.wire.http2 import hpack as kernels
from tierstore.wire.http2.hpack import COMPRESSION, TOO_LARGE

Field = tuple[bytes, bytes]

ROOM, FIELDS = 1 << 16, 2048
_TABLE, _BLOCK = Guarded(kernels.TABLE.bytes), Guarded(1 << 17)
_TEXT, _FIELDS = Guarded(ROOM), Guarded(kernels.FIELD.bytes * FIELDS)
_FIRST = {name: 61 - k for k, (name, _) in enumerate(reversed(HeaderTable.STATIC_TABLE))}  # of each static name
_CODER = HuffmanEncoder(REQUEST_CODES, REQUEST_CODES_LENGTH)


class Table:
    """A connection's table, with all memory that decoding uses between guards."""

    def __init__(self) -> None:
        self._at = _TABLE.last(kernels.TABLE.bytes)
        _TABLE.array[:] = 0xA5
        kernels.begin_table(self._at)

    def decode(
        self, block: bytes, room: int = ROOM, most_fields: int = FIELDS, at_end: bool = True
    ) -> list[Field] | int:
        row_bytes = kernels.FIELD.bytes
        text, rows = _TEXT.last(room), _FIELDS.last(row_bytes * most_fields)
        at = _BLOCK.place(block, at_end)
        count = kernels.decode(self._at, at, len(block), text, room, rows, most_fields)
        if count < 0:
            return int(count)
        assert count <= most_fields
        written = _TEXT.array[_TEXT.size - room :]
        found = []
        words = _FIELDS.array[_FIELDS.size - row_bytes * most_fields :].view(np.int64)
        for name_at, name_bytes, value_at, value_bytes, name_is in words.reshape(-1, 5)[:count].tolist():
            assert 0 <= name_at <= name_at + name_bytes <= value_at <= value_at + value_bytes <= room
            name = written[name_at : name_at + name_bytes].tobytes()
            assert name_is == _FIRST.get(name, 0)
            found.append((name, written[value_at : value_at + value_bytes].tobytes()))
        return found

    def entries(self) -> list[Field]:
        """The dynamic table, the newest entry first."""
        found: list[Field] = []
        while isinstance(one := self.decode(integer(62 + len(found), 7, 0x80)), list):
            found += one
        return found


def integer(value: int, bits: int, first: int = 0) -> bytes:
    """RFC 7541, 5.1, with other bits of the first byte."""
    most = (1 << bits) - 1
    if value < most:
        return bytes([first | value])
    value -= most
    out = [first | most]
    while value > 127:
        out.append(128 | value & 127)
        value >>= 7
    return bytes([*out, value])


def string(text: bytes, coded: bool = False) -> bytes:
    if not coded:
        return integer(len(text), 7) + text
    packed = packed_of(text)
    return integer(len(packed), 7, 0x80) + packed


@cache
def packed_of(text: bytes) -> bytes:
    """Text in Huffman's code. The package takes long for long ones."""
    return _CODER.encode(text)


def fields(*pairs: str) -> list[Field]:
    return [(name.encode(), value.encode()) for name, value in zip(pairs[::2], pairs[1::2], strict=True)]


GET = (":method", "GET", ":scheme", "http", ":path", "/", ":authority", "www.example.com")
GET_SECURE = (":method", "GET", ":scheme", "https", ":path", "/index.html", ":authority", "www.example.com")
LATER, LATEST = "Mon, 21 Oct 2013 20:13:21 GMT", "Mon, 21 Oct 2013 20:13:22 GMT"
URL, COOKIE = "https://www.example.com", "foo=ASDJKHQKBZXOQWEOPIUAXQWEOIU; max-age=3600; version=1"
REQUESTS = [
    (fields(*GET), fields(":authority", "www.example.com")),
    (fields(*GET, "cache-control", "no-cache"), fields("cache-control", "no-cache", ":authority", "www.example.com")),
    (
        fields(*GET_SECURE, "custom-key", "custom-value"),
        fields("custom-key", "custom-value", "cache-control", "no-cache", ":authority", "www.example.com"),
    ),
]
RESPONSES = [
    (
        fields(":status", "302", "cache-control", "private", "date", LATER, "location", URL),
        fields("location", URL, "date", LATER, "cache-control", "private", ":status", "302"),
    ),
    (
        fields(":status", "307", "cache-control", "private", "date", LATER, "location", URL),
        fields(":status", "307", "location", URL, "date", LATER, "cache-control", "private"),
    ),
    (
        fields(":status", "200", "cache-control", "private", "date", LATEST, "location", URL, "content-encoding", "gzip", "set-cookie", COOKIE),
        fields("set-cookie", COOKIE, "content-encoding", "gzip", "date", LATEST),
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("block", "found", "table"),
    [
        ("400a637573746f6d2d6b65790d637573746f6d2d686561646572", ("custom-key", "custom-header"), True),
        ("040c2f73616d706c652f70617468", (":path", "/sample/path"), False),
        ("100870617373776f726406736563726574", ("password", "secret"), False),
        ("82", (":method", "GET"), False),
    ],
)
def test_each_form_of_a_field_is_read_as_in_appendix_c_2(block: str, found: tuple[str, str], table: bool) -> None:
    own = Table()
    assert own.decode(bytes.fromhex(block)) == fields(*found)
    assert own.entries() == (fields(*found) if table else [])


@pytest.mark.parametrize(
    "blocks",
    [
        ("828684410f7777772e6578616d706c652e636f6d", "828684be58086e6f2d6361636865", "828785bf400a637573746f6d2d6b65790c637573746f6d2d76616c7565"),
        ("828684418cf1e3c2e5f23a6ba0ab90f4ff", "828684be5886a8eb10649cbf", "828785bf408825a849e95ba97d7f8925a849e95bb8e8b4bf"),
    ],
    ids=["C.3", "C.4"],
)  # fmt: skip
def test_requests_of_one_connection_are_read_as_in_appendix_c(blocks: tuple[str, ...]) -> None:
    own = Table()
    for block, (found, table) in zip(blocks, REQUESTS, strict=True):
        assert own.decode(bytes.fromhex(block)) == found
        assert own.entries() == table


@pytest.mark.parametrize(
    "blocks",
    [
        (
            "4803333032580770726976617465611d4d6f6e2c203231204f637420323031332032303a31333a323120474d546e1768747470733a2f2f7777772e6578616d706c652e636f6d",
            "4803333037c1c0bf",
            "88c1611d4d6f6e2c203231204f637420323031332032303a31333a323220474d54c05a04677a69707738666f6f3d4153444a4b48514b425a584f5157454f50495541585157454f49553b206d61782d6167653d333630303b2076657273696f6e3d31",
        ),
        (
            "488264025885aec3771a4b6196d07abe941054d444a8200595040b8166e082a62d1bff6e919d29ad171863c78f0b97c8e9ae82ae43d3",
            "4883640effc1c0bf",
            "88c16196d07abe941054d444a8200595040b8166e084a62d1bffc05a839bd9ab77ad94e7821dd7f2e6c7b335dfdfcd5b3960d5af27087f3672c1ab270fb5291f9587316065c003ed4ee5b1063d5007",
        ),
    ],
    ids=["C.5", "C.6"],
)  # fmt: skip
def test_answers_that_evict_entries_are_read_as_in_appendix_c(blocks: tuple[str, ...]) -> None:
    own = Table()
    assert own.decode(integer(256, 5, 0x20)) == []  # the size that these examples have
    for block, (found, table) in zip(blocks, RESPONSES, strict=True):
        assert own.decode(bytes.fromhex(block)) == found
        assert own.entries() == table


NAMES = [
    b":path", b":authority", b"content-type", b"te", b"grpc-timeout", b"x-request-id", b"user-agent", b"x-b3-traceid", b"a", b"",
    b"x" * 300, b"y" * 3900, b"www-authenticate", b"via",
]  # fmt: skip


def text(rng: random.Random) -> bytes:
    kind = rng.random()
    if kind < 0.55:
        return rng.choice(
            [b"application/grpc", b"trailers", b"/inference.GRPCInferenceService/ModelInfer", b"1S", b"4999m", b""]
        )
    if kind < 0.75:
        return b"%d" % rng.randrange(1 << 40)
    if kind < 0.85:
        return rng.randbytes(rng.randrange(40))  # long codes among them
    return rng.choice([b"v", b"9", b"\xff"]) * rng.choice(
        [30, 127, 128, 400, 1200, 4000, 4096 - 33, 4096 - 32, 4096 - 31, 5000]
    )


def block_of(rng: random.Random, entries: int) -> bytes:
    """A block as any encoder might write it; most of them are right if a table has so many entries."""
    out = b""
    while rng.random() < 0.08:
        out += integer(rng.choice([0, 31, 100, 600, 2000, 4095, 4096, 4096, 4096]), 5, 0x20)
    for _ in range(rng.choice([0, 1, 1, 2, 3, 3, 4, 6, 9])):
        if rng.random() < 0.5:
            out += integer(
                rng.randint(1, 61) if not entries or rng.random() < 0.4 else 61 + rng.randint(1, entries), 7, 0x80
            )
            continue
        bits, first = rng.choice([(6, 0x40), (6, 0x40), (4, 0), (4, 0x10)])
        if rng.random() < 0.5:
            out += integer(0, bits, first) + string(rng.choice(NAMES), rng.random() < 0.5)
        else:
            out += integer(rng.randint(1, 61 + min(entries, rng.choice([0, 3, 200]))), bits, first)
        value = text(rng)
        out += string(value, rng.random() < (0.5 if len(value) < 500 else 0.03))
    return out


class Reference:
    """The package's decoder; what it refuses is COMPRESSION."""

    def __init__(self) -> None:
        self._decoder = Decoder(max_header_list_size=1 << 40)

    def decode(self, block: bytes) -> list[Field] | int:
        try:
            return [(bytes(name), bytes(value)) for name, value in self._decoder.decode(block, raw=True)]
        except HPACKError:
            return COMPRESSION

    @property
    def entries(self) -> list[Field]:
        return [(bytes(name), bytes(value)) for name, value in self._decoder.header_table.dynamic_entries]


@pytest.mark.counted
@pytest.mark.parametrize("seed", range(8))
def test_any_connection_is_read_as_the_package_reads_it(seed: int) -> None:
    rng = random.Random(seed)
    own, reference, wrong, right = Table(), Reference(), 0, 0
    count = few_or_many(3_000, 13_000)
    for number in range(count):
        block = block_of(rng, len(reference.entries))
        expected = reference.decode(block)
        assert own.decode(block, at_end=number % 2 == 0) == expected, block.hex()
        right += expected != COMPRESSION
        if expected == COMPRESSION:  # an index that an entry of the same block has pushed out
            own, reference, wrong = Table(), Reference(), wrong + 1
        elif number % 50 == 0:
            assert own.entries() == reference.entries
    assert right > count * 3 // 4
    assert wrong > count // 1000


def spoil(rng: random.Random, block: bytes) -> bytes:
    for _ in range(rng.choice([1, 1, 2, 4])):
        i = rng.randrange(len(block) + 1)
        match rng.randrange(5):
            case 0:
                block = block[:i] + bytes([rng.randrange(256)]) + block[i + 1 :]
            case 1:
                block = block[:i] + block[i + rng.choice([1, 1, 2, 9]) :]
            case 2:
                block = (
                    block[:i]
                    + rng.choice(
                        [
                            b"\x80",
                            b"\xff",
                            b"\x7f",
                            b"\xff\xff\xff\xff\x7f",
                            b"\x3f\xe1\x1f",
                            b"\x20",
                            b"\xff" * 6 + b"\x00",
                        ]
                    )
                    + block[i:]
                )
            case 3:
                block = block[:i] + rng.randbytes(rng.randrange(1, 5)) + block[i:]
            case _:
                block = block[:i]
    return block


@pytest.mark.counted
@pytest.mark.parametrize("seed", range(4))
def test_a_damaged_block_is_refused_where_the_package_refuses_it(seed: int) -> None:
    rng = random.Random(1000 + seed)
    refused = 0
    count = few_or_many(1500, 5000)
    for number in range(count):
        own, reference = Table(), Reference()
        for _ in range(rng.randrange(3)):
            block = block_of(rng, len(reference.entries))
            expected = reference.decode(block)
            assert own.decode(block) == expected
            if expected == COMPRESSION:
                own, reference = Table(), Reference()
        block = spoil(rng, block_of(rng, len(reference.entries)))
        expected = reference.decode(block)
        assert own.decode(block, at_end=number % 2 == 0) == expected, block.hex()
        if expected == COMPRESSION:
            refused += 1
        else:
            assert own.entries() == reference.entries
    assert count // 5 < refused < count * 9 // 10


@pytest.mark.parametrize("seed", range(3))
def test_a_block_that_ends_anywhere_is_read_as_the_package_reads_it(seed: int) -> None:
    rng = random.Random(2000 + seed)
    for _ in range(60):
        block = block_of(rng, 0)[:1500]
        for size in range(len(block) + 1):
            assert Table().decode(block[:size]) == Reference().decode(block[:size]), block[:size].hex()


def test_random_bytes_are_read_as_the_package_reads_them() -> None:
    rng = random.Random(3000)
    for _ in range(20_000):
        block = rng.randbytes(rng.randrange(1, 40))
        assert Table().decode(block) == Reference().decode(block), block.hex()


def literal(coded: bytes) -> bytes:
    """A field `a` whose value is these bytes of Huffman's code."""
    return b"\x00\x01a" + integer(len(coded), 7, 0x80) + coded


def bits(*codes: tuple[int, int]) -> bytes:
    """Codes, each a number and its length, end to end."""
    whole = "".join(f"{code:0{length}b}" for code, length in codes)
    assert len(whole) % 8 == 0
    return int(whole, 2).to_bytes(len(whole) // 8, "big")


def test_each_byte_has_its_code() -> None:
    everything = bytes(range(256))
    for value in [everything, *(bytes([one, other]) for one in (0, 48, 97, 255) for other in everything)]:
        assert Table().decode(literal(_CODER.encode(value))) == [(b"a", value)]


A, ZERO = (0b00011, 5), (0, 5)  # the letter `a` and the digit 0


@pytest.mark.parametrize(
    ("coded", "value"),
    [
        (b"", b""),
        (bits(A, (0b111, 3)), b"a"),
        (bits(*[ZERO] * 8), b"0" * 8),
        (bits(*[ZERO] * 5, (0x7F, 7)), b"00000"),
        (bits(A, (0b110, 3)), None),  # padding that is not the beginning of EOS
        (bits(A, (0b011, 3)), None),
        (bits(A, (0b000, 3)), None),
        (bits(A, (0b111, 3), (0xFF, 8)), None),  # more than seven bits of it
        (b"\xff", None),
        (b"\xff" * 4, None),  # EOS itself
        (bits((0x3FFFFFFF, 30), A, ZERO), None),
        (bits(A, (0x3FFFFFFF, 30), ZERO), None),
    ],
)
def test_a_coded_text_ends_with_less_than_a_byte_of_ones_and_has_no_end_in_it(
    coded: bytes, value: bytes | None
) -> None:
    expected: list[Field] | int = COMPRESSION if value is None else [(b"a", value)]
    assert Table().decode(literal(coded)) == expected == Reference().decode(literal(coded))


@pytest.mark.parametrize(
    "block",
    [
        b"\x80",  # index 0
        b"\xbe",  # index 62 of an empty table
        b"\x7f\x00a",
        b"\x82" + integer(4096, 5, 0x20),  # a size behind a field
        integer(4097, 5, 0x20),
        integer(1 << 34, 5, 0x20),
        b"\x3f" + b"\x80" * 5 + b"\x00",  # an integer of six bytes behind the first
        b"\xff" + b"\x80" * 5 + b"\x01",
        b"\xff" + b"\xff" * 9 + b"\x7f",
        b"\x00\x7f" + b"\xff" * 4 + b"\x7f" + b"a" * 200,  # a text of 2**35 bytes
        b"\x00\x01",
        b"\x40",
    ],
)
def test_what_no_encoder_may_write_is_refused(block: bytes) -> None:
    assert Table().decode(block) == COMPRESSION
    assert Reference().decode(block) == COMPRESSION


def test_sizes_are_changed_as_often_as_wanted_at_the_beginning_of_a_block() -> None:
    own = Table()
    own.decode(b"\x40" + string(b"a") + string(b"b"))
    assert own.entries() == [(b"a", b"b")]
    assert own.decode(integer(0, 5, 0x20) + integer(4096, 5, 0x20) + b"\x82") == [(b":method", b"GET")]
    assert own.entries() == []


@pytest.mark.parametrize("room", [kernels.LEAST_ROOM, kernels.LEAST_ROOM + 1, 9000])
@pytest.mark.parametrize("most_fields", [0, 1, 4])
def test_a_list_beyond_the_room_leaves_the_table_as_it_has_to_be(room: int, most_fields: int) -> None:
    rng = random.Random(room + most_fields)
    own, reference, large, fits = Table(), Reference(), 0, 0
    for _ in range(4000):
        block = block_of(rng, len(reference.entries))
        expected = reference.decode(block)
        found = own.decode(block, room, most_fields)
        if expected == COMPRESSION:
            assert found == COMPRESSION
            own, reference = Table(), Reference()
            continue
        assert isinstance(expected, list)
        is_over = len(expected) > most_fields or sum(len(name + value) for name, value in expected) > room
        assert found == (TOO_LARGE if is_over else expected)
        assert own.entries() == reference.entries
        large, fits = large + is_over, fits + (not is_over)
    assert large > 50
    assert fits > 50


def test_a_small_block_that_unfolds_to_much_is_refused_before_it_costs_much() -> None:
    longest = b"\x40" + string(b"n" * 4000) + string(b"v" * 64)
    own = Table()
    assert own.decode(longest + b"\xbe" * 250) == TOO_LARGE  # 1,020,064 bytes
    assert own.entries() == [(b"n" * 4000, b"v" * 64)]
    assert Table().decode(longest + b"\xbe" * 260) == COMPRESSION
    assert Table().decode(longest + b"\x7e\x00" * 270) == COMPRESSION  # each makes a new entry of the last one's name


def encoded(name: bytes, value: bytes) -> bytes:
    """By `encode_field`, which writes within what it says."""
    most = len(name) + len(value) + kernels.MOST_ADDED
    target, source = Guarded(most), Guarded(most)
    at = source.place(name + value)
    written = kernels.encode_field(target.last(most), at, len(name), at + len(name), len(value))
    assert written <= most
    return target.array[target.size - most :][:written].tobytes()


def texts(rng: random.Random) -> Iterator[Field]:
    for name in [*NAMES, *_FIRST]:
        for size in (0, 1, 126, 127, 128, 254, 255, 256, 16383 + 127, 16384 + 127, 70_000):
            yield name, rng.randbytes(size)
    yield b"n" * 70_000, b""


def test_every_decoder_reads_what_is_encoded_and_no_table_changes() -> None:
    for field in texts(random.Random(4)):
        block = encoded(*field)
        reference = Reference()
        assert reference.decode(block) == [field]
        assert reference.entries == []
        assert (block[0] & 15 or block[0]) == min(_FIRST.get(field[0], 0), 15)
        assert block[0] < 16  # not indexed, and no promise that nobody ever does
