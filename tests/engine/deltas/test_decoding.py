"""Deltas that take much more memory than they have bytes: what they claim is reserved before it is decoded."""

from __future__ import annotations

import io

import numpy as np
import pyarrow as pa
import pytest

from tests.engine import scenes
from tierstore.engine.deltas import apply, incoming
from tierstore.errors import Conflict, Overloaded, TooLarge
from tierstore.formats.delta.reader import read_head

ROWS = 1 << 18


def bomb(seq: int, value: float = 0.0) -> bytes:
    dim = scenes.DIM["item"]
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(np.full(ROWS * dim, value, np.float32)), dim)
    batch = pa.record_batch({"key": pa.array(np.zeros(ROWS, np.int64)), "vector": vectors})
    head = {"model": "ctr", "seq": str(seq), "event_time": "2026-11-20T00:00:00Z"}
    sink = io.BytesIO()
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_stream(sink, batch.schema.with_metadata(head), options=options) as writer:
        writer.write_batch(batch, custom_metadata={"table": "item"})
    return sink.getvalue()


def test_what_a_delta_claims_is_reserved_before_it_is_decoded(store, tmp_path, monkeypatch):
    store.load_snapshot(scenes.write_snapshot(tmp_path))
    data = bomb(1)
    needed = read_head(data).decoded_bytes
    assert needed > 100 * len(data)
    decoding, decoded = store.shared.decoding, []
    read = incoming.read_delta

    def counted(*args: object, **options: object) -> object:
        decoded.append(decoding.used)
        return read(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(incoming, "read_delta", counted)
    with decoding.reserved(decoding.total - needed + 1), pytest.raises(Overloaded, match="being decoded"):
        store.apply_delta(data)
    assert decoded == []
    assert store.apply_delta(data).applied
    assert decoded == [needed]
    assert decoding.used == 0
    with decoding.reserved(decoding.total):
        assert not store.apply_delta(data).applied, "that one is there is seen by its digest"
    with pytest.raises(Conflict):
        store.apply_delta(bomb(1, 2.0))
    assert decoded == [needed, needed]
    assert decoding.used == 0


def test_deleted_rows_are_reserved_as_well(store, tmp_path):
    store.load_snapshot(scenes.write_snapshot(tmp_path))
    data = scenes.delta(1, {"item": ([1], scenes.vectors("item", 1, [1]))}, {"item": range(2, 100_000)})
    head, decoding = read_head(data), store.shared.decoding
    more = 99_999 * 4 * scenes.DIM["item"]
    with decoding.reserved(decoding.total - head.decoded_bytes - more + 1), pytest.raises(Overloaded):
        store.apply_delta(data)
    assert store.apply_delta(data).applied
    with pytest.raises(TooLarge), decoding.reserved(decoding.total + 1):
        pytest.fail("beyond all bounds")
    assert decoding.used == 0


def test_rows_that_are_gathered_and_encoded_are_reserved_as_well(store, tmp_path, monkeypatch):
    store.load_snapshot(scenes.write_snapshot(tmp_path))
    keys = range(100_000)
    data = scenes.delta(1, {"item": (keys, scenes.vectors("item", 1, keys))})
    rows = 100_000 * 4 * scenes.DIM["item"]
    head, decoding, used = read_head(data), store.shared.decoding, []
    encode = apply.encode_delta

    def counted(*args, **options):
        used.append(decoding.used)
        return encode(*args, **options)

    monkeypatch.setattr(apply, "encode_delta", counted)
    with (
        decoding.reserved(decoding.total - head.decoded_bytes - rows),
        pytest.raises(Overloaded, match="being decoded"),
    ):
        store.apply_delta(data)
    assert used == []
    assert store.apply_delta(data).applied
    assert used[0] >= head.decoded_bytes + 2 * rows
    assert decoding.used == 0


def test_a_delta_that_is_alone_may_have_what_it_takes(store, tmp_path, monkeypatch):
    store.load_snapshot(scenes.write_snapshot(tmp_path))
    data = scenes.delta(1, {"item": (range(1000), scenes.vectors("item", 1, range(1000)))})
    monkeypatch.setattr(store.shared.decoding, "total", read_head(data).decoded_bytes)
    assert store.apply_delta(data).applied
    assert store.shared.decoding.used == 0
