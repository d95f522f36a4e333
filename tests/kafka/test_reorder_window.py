"""The reorder window: what it holds, what it forgets, and from where everything that it does not have is read again."""

from __future__ import annotations

import random
import tracemalloc

import pytest

from tierstore.errors import DeltaError
from tierstore.kafka.messages import KafkaMessage, MessageHeaders, digest_of, headers_of, split
from tierstore.kafka.reorder_window import MESSAGE_BYTES, ReorderWindow


def message(offset: int, value: bytes, partition: int = 0, **headers: object) -> KafkaMessage:
    return KafkaMessage(partition, offset, value, [(name, str(text).encode()) for name, text in headers.items()], 0)


def put(window: ReorderWindow, offset: int, seq: int, value: bytes = b"x" * 100, partition: int = 0) -> bool:
    headers = MessageHeaders("ctr", seq, 1, 1, digest_of(value))
    return window.add(message(offset, value, partition), headers) is not None


def test_the_lowest_offset_that_is_needed() -> None:
    window = ReorderWindow(1 << 20)
    for offset, seq in ((5, 9), (6, 7), (7, 8)):
        assert put(window, offset, seq)
    assert not put(window, 8, 9)  # held already
    (first,) = window.at("ctr", 9)
    assert (window.needed(0, 9), window.needed(0, 9, without=[first]), window.needed(1, 4)) == (5, 6, 4)
    for seq in (9, 7, 8):
        window.remove(window.at("ctr", seq)[0])
    assert (window.needed(0, 9), window.nbytes, window.models()) == (9, 0, [])


def test_parts_in_any_order_and_a_second_attempt() -> None:
    window, data = ReorderWindow(1 << 20), bytes(range(250))
    parts = list(split("ctr", 4, data, 100))
    messages = [KafkaMessage(0, offset, bytes(value), headers, 0) for offset, (headers, value) in enumerate(parts)]
    for one in (messages[2], messages[0]):
        held = window.add(one, headers_of(one))
    assert held is not None
    assert not held.complete
    assert window.add(messages[0], headers_of(messages[0])) is None
    window.add(messages[1], headers_of(messages[1]))
    assert (held.complete, held.data(), held.first_offset) == (True, data, 0)


def test_a_second_attempt_without_a_digest_replaces_the_first() -> None:
    window = ReorderWindow(1 << 20)
    for offset, (part, value) in enumerate([(1, b"old1"), (2, b"old2"), (1, b"new1"), (2, b"new2"), (3, b"new3")]):
        held = window.add(message(offset, value), MessageHeaders("ctr", 4, part, 3, None))
    assert held is not None
    assert (held.complete, held.data(), window.needed(0, 9)) == (True, b"new1new2new3", 2)


@pytest.mark.parametrize("seed", range(20))
def test_what_it_forgets_is_read_again(seed: int) -> None:
    """A reader with a small window gets every delta, whatever the order."""
    chance = random.Random(seed)
    topic = [(seq, partition) for seq in range(1, 60) for partition in (0, 1) if partition == seq % 2]
    chance.shuffle(topic)
    lanes = {partition: [seq for seq, its in topic if its == partition] for partition in (0, 1)}
    window, positions, applied = ReorderWindow(6 * (100 + MESSAGE_BYTES)), {0: 0, 1: 0}, 0
    for _ in range(2000):
        partition = chance.choice([one for one in lanes if positions[one] < len(lanes[one])] or [0])
        if positions[partition] < len(lanes[partition]):
            seq = lanes[partition][positions[partition]]
            if seq > applied:
                put(window, positions[partition], seq, b"%100d" % seq, partition)
            positions[partition] += 1
        while ready := window.at("ctr", applied + 1):
            window.remove(ready[0])
            applied += 1
        for one, lane in lanes.items():  # nothing that is missing lies before what is needed
            assert all(seq <= applied for seq in lane[: window.needed(one, positions[one])])
        if all(positions[one] == len(lane) for one, lane in lanes.items()):
            positions |= window.read_again("ctr")
        assert window.nbytes <= 7 * (100 + MESSAGE_BYTES)
    assert applied == 59


@pytest.mark.parametrize(
    ("headers", "why"),
    [
        ({"model": "ctr", "seq": 0}, "from 1 to"),
        ({"model": "ctr", "seq": "+4"}, "from 1 to"),
        ({"model": "../ctr", "seq": 4}, "model"),
        ({"model": "ctr", "seq": 4, "part": 1}, "of that many"),
        ({"model": "ctr", "seq": 4, "part": 3, "parts": 2}, "of that many"),
        ({"part": 1, "parts": 2}, "expected `model`"),
        ({"model": "ctr", "seq": 4, "digest": "0" * 16}, "changed on its way"),
        ({"model": "ctr", "seq": 4, "digest": "what"}, "16 hex digits"),
        ({}, "expected headers"),
    ],
)
def test_bad_headers(headers: dict[str, object], why: str) -> None:
    with pytest.raises(DeltaError, match=why):
        headers_of(message(0, b"value", 0, **headers))


def test_deltas_that_pass_while_a_gap_is_open_leave_nothing_behind() -> None:
    window = ReorderWindow(1 << 20)
    put(window, 0, 1_000_000)  # what it waits for does not come
    tracemalloc.start()
    try:
        for offset in range(1, 20_000):
            put(window, offset, offset)
            window.remove(window.at("ctr", offset)[0])
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 100_000
    assert window.needed(0, 20_000) == 0
