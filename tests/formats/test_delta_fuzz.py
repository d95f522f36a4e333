"""Whatever the bytes, `read_delta` answers with a delta or a DeltaError, and soon."""

from __future__ import annotations

import io
import itertools
import random
import time

import numpy as np
import pyarrow as pa
import pytest

from tierstore.errors import DeltaError
from tierstore.formats.delta.frames import BadFrames, split_streams
from tierstore.formats.delta.reader import read_delta
from tierstore.formats.delta.writer import DeltaWriter

CASES = 4000
LONGEST_S = 5.0


def fixed_size() -> bytes:
    writer = DeltaWriter(io.BytesIO(), model="ctr", seq=5, event_time="2026-11-20T00:00:00Z", base_version=3)
    writer.upsert("item", np.arange(10), np.ones((10, 4)))
    writer.delete("item", [3, 4, 77])
    writer.upsert("word", ["a", "b"], np.ones((2, 3), np.float16))
    writer.delete("only", ["a"])
    writer.dense(b"onnx!")
    return writer.to_bytes()


def compressed_lists(codec: str) -> bytes:
    schema = pa.schema(
        [("key", pa.dictionary(pa.int32(), pa.string())), ("vector", pa.list_(pa.float32()))],
        metadata={"model": "ctr", "seq": "5", "event_time": "2026-11-20"},
    )
    keys = pa.array(["a", "b"] * 20).dictionary_encode()
    vectors = pa.array([[1.0, 2.0], None] * 20, pa.list_(pa.float32()))
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, schema, options=pa.ipc.IpcWriteOptions(compression=codec)) as writer:
        writer.write_batch(pa.record_batch([keys, vectors], schema=schema), custom_metadata={"table": "item"})
    return sink.getvalue()


def damaged(whole: bytes, random_: random.Random) -> bytes:
    data = bytearray(whole)
    kind = random_.random()
    if kind < 0.2:
        return bytes(data[: random_.randrange(len(data))])
    if kind < 0.3:
        return bytes(data) + random_.randbytes(random_.randrange(1, 64))
    if kind < 0.4:  # a hole, or a piece twice
        return bytes(data[: random_.randrange(len(data))] + data[random_.randrange(len(data)) :])
    for _ in range(random_.choice([1, 1, 1, 2, 4, 16])):
        at = random_.randrange(len(data))
        data[at] = random_.choice([0, 0x7F, 0x80, 0xFF, random_.randrange(256), data[at] ^ (1 << random_.randrange(8))])
    return bytes(data)


@pytest.mark.parametrize(
    "make",
    [fixed_size, lambda: compressed_lists("zstd"), lambda: compressed_lists("lz4")],
    ids=["fixed", "zstd", "lz4"],
)
def test_damaged_bytes_never_do_more_than_be_refused(make: object) -> None:
    whole = make()  # type: ignore[operator]
    read_delta(whole)
    random_ = random.Random(11)
    refused = 0
    for _ in range(CASES):
        data = damaged(whole, random_)
        started = time.monotonic()
        try:
            read_delta(data)
        except DeltaError:
            refused += 1
        assert time.monotonic() - started < LONGEST_S
    assert CASES // 2 < refused < CASES


def test_every_single_byte_changed() -> None:
    whole = compressed_lists("zstd")
    for at in range(len(whole)):
        for value in (0, 0xFF, whole[at] ^ 1, whole[at] ^ 0x80):
            data = bytearray(whole)
            data[at] = value
            try:
                read_delta(data)
            except DeltaError:
                continue


def test_random_bytes_that_begin_like_a_stream() -> None:
    random_ = random.Random(7)
    for _ in range(500):
        data = (
            b"\xff\xff\xff\xff"
            + random_.randrange(1, 200).to_bytes(4, "little")
            + random_.randbytes(random_.randrange(300))
        )
        with pytest.raises(DeltaError):
            read_delta(data)


def test_frames_are_split_where_the_writer_ended_them() -> None:
    first, second = fixed_size(), compressed_lists("lz4")
    parts, _ = split_streams(memoryview(first), 1 << 20)
    assert parts[0][0] == 0
    assert parts[-1][1] == len(first)
    assert all(before[1] == after[0] for before, after in itertools.pairwise(parts))
    assert len(split_streams(memoryview(first + second), 1 << 20)[0]) == len(parts) + 1


def test_compressed_buffers_count_at_their_full_size() -> None:
    data = memoryview(compressed_lists("zstd"))
    needed = next(size for size in range(1 << 12) if _splits(data, size))
    assert needed >= 40 * 4 + 20 * 2 * 4 + 41 * 4  # indices, numbers, offsets


def _splits(data: memoryview, max_decoded_bytes: int) -> bool:
    try:
        split_streams(data, max_decoded_bytes)
    except BadFrames:
        return False
    return True
