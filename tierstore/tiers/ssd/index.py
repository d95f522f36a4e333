"""The index of the cache on SSD: which keys it holds and where, and reading them from its file.

Free functions of arrays and addresses, nogil. One thread at a time, which holds the lock of the table, changes the index and the fingerprints; `pack`
and `read` need no lock.

A *slot* of the file holds a key (int64), a checksum, and the row, each at a multiple of 8 bytes. Slots are numbered through the file: `per_segment`
of them in each segment, from its beginning, without gaps.

The index has buckets of 16 entries, uint64: the slot's number plus one (38 bits), 24 bits of the key's hash, 2 bits of heat; 0 is no entry. A key is
in one of two buckets, so that buckets fill evenly. Of two keys of a bucket with the same hash bits only one is held. So an entry is a guess: the key
in the slot decides. The slot's checksum covers the table's number as well; it proves that the slot still belongs to this table, and was not being
written while it was read.
"""

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np
from numba import types

from tierstore.kernels import compiled
from tierstore.kernels.atomics import copy_bytes, prefetch
from tierstore.kernels.hashing import mix
from tierstore.kernels.raw import fold_multiply, load_u64, store_u64
from tierstore.kernels.sysio import NOWAIT, WILL_NEED, advise, read_at
from tierstore.tiers.disk.sealed_blocks import CUT, read_whole
from tierstore.types import Tier

WAYS = 16  # entries of a bucket
HEAD_BYTES = 16  # of a slot: key and checksum
MAX_BUCKETS = 1 << 31
HELD, EVICTED = range(2)  # places of the counters, int64[2]

_AHEAD = 8  # keys whose bucket is prefetched ahead
_TAG = np.uint64(((1 << 24) - 1) << 2)
_HEAT = np.uint64(3)  # the most heat
_NONE = np.uint64(0)
_SLOT_AT = np.uint64(26)
_U64 = np.uint64
# digits of pi's fractional part: any odd numbers with mixed bits would do
_S0, _S1 = _U64(0x243F6A8885A308D3), _U64(0x13198A2E03707345)
_DISK = np.uint8(Tier.DISK)

_INDEX = types.uint64[::1]
_KEYS = types.Array(types.int64, 1, "C", readonly=True)
_I64S = types.int64[::1]


@nb.njit(inline="always")
def _bucket(hashed, index):
    """The place of a key's first bucket, by its hash; with the hash from `_other`, of its second."""
    return nb.int64(((hashed >> _U64(32)) * _U64(index.size // WAYS)) >> _U64(32)) * WAYS


@nb.njit(inline="always")
def _other(hashed):
    return hashed * _S0


@nb.njit(inline="always")
def _find(index, hashed):
    """The place of the key's entry, or -1."""
    tag, start = (hashed << _U64(2)) & _TAG, _bucket(hashed, index)
    for _ in range(2):
        for at in range(start, start + WAYS):
            if index[at] != _NONE and index[at] & _TAG == tag:
                return at
        start = _bucket(_other(hashed), index)
    return -1


@nb.njit(inline="always")
def _place(index, hashed):
    """The place for the entry of a new key: in the emptier bucket; if both are full, over the entry with the least heat."""
    best, most_empty = nb.int64(-1), 0
    start = _bucket(hashed, index)
    for _ in range(2):
        empty, last = 0, nb.int64(-1)
        for at in range(start, start + WAYS):
            if index[at] == _NONE:
                empty, last = empty + 1, at
            elif most_empty == 0 and (best < 0 or index[at] & _HEAT < index[best] & _HEAT):
                best = at
        if empty > most_empty:
            best, most_empty = last, empty
        start = _bucket(_other(hashed), index)
    return best


@nb.njit(inline="always")
def _prefetch_ahead(index, keys, i):
    if i + _AHEAD < keys.size:
        hashed, base = mix(keys[i + _AHEAD]), nb.int64(index.ctypes.data)
        first, second = base + 8 * _bucket(hashed, index), base + 8 * _bucket(_other(hashed), index)
        prefetch(first)
        prefetch(first + 64)
        prefetch(second)
        prefetch(second + 64)


@compiled(types.int64(_INDEX, _KEYS, _I64S))
def find(index: Any, keys: Any, slots: Any) -> Any:
    """slots[i]: where the row of keys[i] may be, or -1. Counts heat. Returns how many were found."""
    found = 0
    for i in range(keys.size):
        _prefetch_ahead(index, keys, i)
        at = _find(index, mix(keys[i]))
        if at < 0:
            slots[i] = -1
            continue
        entry = index[at]
        slots[i] = nb.int64(entry >> _SLOT_AT) - 1
        if entry & _HEAT != _HEAT:
            index[at] = entry + _U64(1)
        found += 1
    return found


@compiled(types.void(_INDEX, _KEYS, types.int64, _I64S))
def put(index: Any, keys: Any, first: Any, counters: Any) -> Any:
    """Note that keys[i] is in slot `first + i`."""
    for i in range(keys.size):
        _prefetch_ahead(index, keys, i)
        hashed = mix(keys[i])
        at = _find(index, hashed)
        if at < 0:
            at = _place(index, hashed)
            counters[HELD if index[at] == _NONE else EVICTED] += 1
        index[at] = (_U64(first + i + 1) << _SLOT_AT) | ((hashed << _U64(2)) & _TAG)


@compiled(types.void(_INDEX, _KEYS, _I64S))
def drop(index: Any, keys: Any, counters: Any) -> Any:
    """Hold none of these keys any more.

    The first entry found may belong to another key with the same hash bits, which shares one bucket only; so all such entries are removed.
    """
    for i in range(keys.size):
        _prefetch_ahead(index, keys, i)
        hashed = mix(keys[i])
        at = _find(index, hashed)
        while at >= 0:
            index[at] = _NONE
            counters[HELD] -= 1
            at = _find(index, hashed)


@compiled(types.void(_INDEX, _KEYS, types.int64, types.int8[::1]))
def cool(index: Any, keys: Any, first: Any, heat: Any) -> Any:
    """heat[i]: the heat of keys[i], which is cleared; -1 if the key is no longer in slot `first + i`."""
    for i in range(keys.size):
        _prefetch_ahead(index, keys, i)
        at = _find(index, mix(keys[i]))
        heat[i] = -1
        if at >= 0 and nb.int64(index[at] >> _SLOT_AT) - 1 == first + i:
            heat[i] = nb.int8(index[at] & _HEAT)
            index[at] &= ~_HEAT


@compiled(types.void(_INDEX, _KEYS, types.boolean[::1]))
def note(seen: Any, keys: Any, before: Any) -> Any:
    """before[i]: whether keys[i] was noted lately. A word of `seen` has 16 hash bits of each of the last four keys that came to it."""
    for i in range(keys.size):
        hashed = mix(keys[i])
        at = nb.int64(((hashed >> _U64(32)) * _U64(seen.size)) >> _U64(32))
        word, bits = seen[at], (hashed & _U64(0xFFFF)) | _U64(1)
        before[i] = False
        for lane in range(4):
            if (word >> _U64(16 * lane)) & _U64(0xFFFF) == bits:
                before[i] = True
        if not before[i]:
            seen[at] = (word << _U64(16)) | bits


@compiled("uint64(int64, int64, int64)", inner=True)
def _checksum(slot: Any, slot_bytes: Any, table: Any) -> Any:
    """The checksum of the table's number, the key and the row in a slot at an address."""
    x = fold_multiply(load_u64(slot, 0) ^ mix(table) ^ _S0, _S1)
    for word in range(HEAD_BYTES >> 3, slot_bytes >> 3):
        x = fold_multiply(load_u64(slot, word) ^ _S1 ^ x, _S0 ^ _U64(word))
    return x


@compiled(types.void(_KEYS, *[types.int64] * 6))
def pack(keys: Any, rows: Any, stride: Any, row_bytes: Any, out: Any, slot_bytes: Any, table: Any) -> Any:
    """Fill slots of a table at the address `out`, which has zeros, with keys and the rows at `rows`, `stride` bytes apart."""
    for i in range(keys.size):
        slot = out + i * slot_bytes
        store_u64(slot, 0, _U64(keys[i]))
        copy_bytes(slot + HEAD_BYTES, rows + i * stride, row_bytes)
        store_u64(slot, 1, _checksum(slot, slot_bytes, table))


@compiled("boolean(int64, int64, int64, int64, int64, int64)", inner=True)
def _answer(slot: Any, slot_bytes: Any, table: Any, key: Any, row: Any, row_bytes: Any) -> Any:
    if np.int64(load_u64(slot, 0)) != key or load_u64(slot, 1) != _checksum(slot, slot_bytes, table):
        return False
    copy_bytes(row, slot + HEAD_BYTES, row_bytes)
    return True


@compiled(
    types.int64(
        types.int64,
        _I64S,
        _KEYS,
        types.int64,
        types.int64,
        types.int64,
        types.uint8[::1],
        _I64S,
        types.int64,
        types.int64,
    )
)
def read(
    fd: Any,
    slots: Any,
    keys: Any,
    rows: Any,
    stride: Any,
    row_bytes: Any,
    state: Any,
    layout: Any,
    buffer: Any,
    window: Any,
) -> Any:
    """Read `slots` (-1: none) into `rows`. state[i] becomes DISK if the slot holds keys[i] of this table, whole.

    `layout`: slots of a segment, its bytes, bytes of a slot, the table's number. `buffer`: the address of room for a slot. Slots outside of the page
    cache are read last, `window` of them at a time. Returns 0 or an error number.
    """
    per_segment, segment_bytes, slot_bytes, table = layout[0], layout[1], layout[2], layout[3]
    waiting, waits = np.empty(keys.size, np.int64), 0
    offsets = np.empty(keys.size, np.int64)
    for i in range(keys.size):
        if slots[i] < 0:
            continue
        offset = slots[i] // per_segment * segment_bytes + slots[i] % per_segment * slot_bytes
        if read_at(fd, buffer, slot_bytes, offset, NOWAIT) == slot_bytes:
            if _answer(buffer, slot_bytes, table, keys[i], rows + i * stride, row_bytes):
                state[i] = _DISK
            continue
        waiting[waits], offsets[waits] = i, offset  # whatever the reason, the read that waits will report it
        waits += 1
        if waits <= window:
            advise(fd, offset, slot_bytes, WILL_NEED)
    for n in range(waits):
        if n + window < waits:
            advise(fd, offsets[n + window], slot_bytes, WILL_NEED)
        wrong = read_whole(fd, buffer, slot_bytes, offsets[n])
        if wrong == 0:
            i = waiting[n]
            if _answer(buffer, slot_bytes, table, keys[i], rows + i * stride, row_bytes):
                state[i] = _DISK
        elif wrong != CUT:  # CUT: the cache was switched off meanwhile
            return wrong
    return 0
