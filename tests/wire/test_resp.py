"""The kernels of the Redis protocol: replies in pieces of any size, spoiled replies, grouping and matching."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.counts import few_or_many
from tierstore.kernels.codec import address_of
from tierstore.types import Tier
from tierstore.wire import resp

ROW_BYTES = 10
HEAD = b"$10\r\n"
ROWS = [b"0123456789", None, b"\r\n$-1\r\n$10", b"$10\r\n*2\r\n\0", None]
MARK = b"*2\r\n$2\r\n17\r\n$2\r\n18\r\n"


def reply(rows: list[bytes | None] = ROWS) -> bytes:
    return b"*%d\r\n" % len(rows) + b"".join(b"$-1\r\n" if row is None else b"$%d\r\n%s\r\n" % (len(row), row) for row in rows)  # fmt: skip


class Parser:
    """One connection that asks for a tag's watermark, five rows, and the watermark."""

    def __init__(self, buffer_bytes: int = 64) -> None:
        self.buffer = np.zeros(buffer_bytes + 16, np.uint8)
        self.server = resp.SERVER.make(buffer_at=address_of(self.buffer), buffer_bytes=buffer_bytes, end=3, item=-1)
        self.commands = np.array([(resp.MARK, 0, 0, 2), (resp.ROWS, 0, 0, 5), (resp.MARK, 0, 1, 2)], resp.COMMAND.dtype)
        self.order = np.array([4, 3, 2, 1, 0])
        self.rows, self.state = np.full((5, ROW_BYTES), 0xEE, np.uint8), np.zeros(5, np.uint8)
        self.marks, self.errors = np.full((1, 2), -1, np.int64), np.zeros((1, resp.ERROR_BYTES), np.uint8)
        self.targets = resp.TARGETS.make(
            commands=address_of(self.commands), order_at=address_of(self.order), rows_at=address_of(self.rows),
            stride=ROW_BYTES, row_bytes=ROW_BYTES, head=int.from_bytes(HEAD, "little"), head_bytes=len(HEAD),
            states_at=address_of(self.state), marks_at=address_of(self.marks), errors_at=address_of(self.errors),
        )  # fmt: skip

    @property
    def status(self) -> int:
        return int(self.server["status"])

    def feed(self, data: bytes) -> None:
        """As a connection does: as much as there is room for, until all is read or something is wrong."""
        while data and self.status == resp.RUNNING:
            room = int(self.server["buffer_bytes"] - self.server["received"])
            part, data = data[:room], data[room:]
            at = int(self.server["received"])
            self.buffer[at : at + len(part)] = np.frombuffer(part, np.uint8)
            self.server["received"] += len(part)
            resp.parse(address_of(self.server), address_of(self.targets))


@given(st.lists(st.integers(1, 40), max_size=60))
@settings(max_examples=few_or_many(60, 200))
def test_replies_in_pieces(sizes: list[int]) -> None:
    data, parser = MARK + reply() + MARK, Parser()
    at = 0
    for size in sizes:
        parser.feed(data[at : at + size])
        at += size
    parser.feed(data[at:])
    assert parser.status == resp.DONE
    assert parser.marks.tolist() == [[17, 18]]
    for place, row in zip(parser.order, ROWS, strict=True):
        assert parser.state[place] == (Tier.ABSENT if row is None else Tier.REMOTE)
        assert parser.rows[place].tobytes() == (row or b"\xee" * ROW_BYTES)


def test_an_error_fails_its_command_alone() -> None:
    parser = Parser()
    parser.feed(MARK + b"-MOVED 1 a:2\r\n" + MARK)
    assert parser.status == resp.DONE
    assert parser.errors[0].tobytes().rstrip(b"\0") == b"MOVED 1 a:2"
    assert not parser.state.any()


def test_a_watermark_that_is_missing_is_minus_one() -> None:
    parser = Parser()
    parser.feed(b"*2\r\n$-1\r\n$-1\r\n" + reply() + MARK)
    assert parser.marks.tolist() == [[-1, 18]]


@pytest.mark.parametrize(
    "data",
    [
        b"*3\r\n",
        b"*x\r\n",
        b":1\r\n",
        b"+OK\r\n",
        b"*2\r\n$2\r\nab\r\n",
        b"*2\r\n:17\r\n",
        b"*2\r\n$20\r\n12345678901234567890\r\n",
        MARK + b"*4\r\n",
        MARK + b"*5\r\n$9\r\n123456789\r\n",
        MARK + b"*5\r\n$11\r\n12345678901\r\n",
        MARK + reply() + MARK + b"*",
        b"-" + b"x" * 200,
    ],
)
def test_what_was_not_asked_for_is_seen(data: bytes) -> None:
    parser = Parser()
    parser.feed(data)
    assert parser.status == resp.UNEXPECTED


@given(st.integers(0, 10**9), st.integers(1, 6))
@settings(max_examples=few_or_many(150, 500))
def test_spoiled_replies_write_nowhere_else(seed: int, spoiled: int) -> None:
    rng = np.random.default_rng(seed)
    data = np.frombuffer(MARK + reply() + MARK, np.uint8).copy()
    data[rng.integers(0, len(data), spoiled)] = rng.choice(
        np.frombuffer(b"0123456789$*-\r\n:+\0\xff", np.uint8), spoiled
    )
    parser = Parser()
    parser.feed(data.tobytes())
    assert parser.status in (resp.RUNNING, resp.DONE, resp.UNEXPECTED)
    assert not parser.buffer[-8:].any()
    assert set(parser.state) <= {Tier.PENDING, Tier.REMOTE, Tier.ABSENT}


@pytest.mark.parametrize(
    ("seq", "status"),
    [(10**18 - 1, resp.DONE), (2**63 - 1, resp.DONE), (2**63, resp.UNEXPECTED), (10**19, resp.UNEXPECTED)],
)
def test_every_seq_below_two_to_the_63_is_read(seq: int, status: int) -> None:
    parser, mark = Parser(), b"*2\r\n" + b"$%d\r\n%d\r\n" % (len(str(seq)), seq) * 2
    parser.feed(mark + reply() + mark)
    assert parser.status == status
    if status == resp.DONE:
        assert parser.marks.tolist() == [[seq, seq]]
