"""An exact index of the keys of a delta: key → row number; its look-ups; and the order in which a delta is kept.

Free functions of arrays without state, nogil. `build` writes an index once, so any number of threads may look keys up in it. It is rebuilt from its
keys after a restart; nothing here touches a disk.

An index is uint64[capacity], a power of two and at least twice the keys, probed linearly. A slot holds the upper half of the key's hash as a tag and
the row number in its lower half; a slot of all ones is empty. No key value is reserved. Most keys are not in a delta: a filter, small enough for the
processor's caches, rejects them by two bits of one word. A key that passes costs a line of the index; a key that is present costs another line, where
it is compared.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit, types

from tierstore.kernels import compiled
from tierstore.kernels.atomics import prefetch, stack_bytes
from tierstore.kernels.codec import AS_STORED, address_of, copy_row, decode_row
from tierstore.kernels.hashing import mix
from tierstore.kernels.raw import load_u8, load_u64, store_u8, store_u64
from tierstore.kernels.records import at, define
from tierstore.types import Keys, Rows, StorageDtype, Tier

Index = npt.NDArray[np.uint64]

MAX_KEYS = 0xFFFF_FFFE  # row numbers have 32 bits, and the empty slot takes one

_EMPTY = np.uint64(0xFFFF_FFFF_FFFF_FFFF)
_TAG = np.uint64(0xFFFF_FFFF_0000_0000)
_ROW = np.uint64(0xFFFF_FFFF)
_BLOCK = 32  # keys whose slots are prefetched before the first of them is probed
_BLOCK_BYTES = 8 * _BLOCK
_PREFETCH_BYTES = 512  # of a row
OVERLAY = define("Overlay", "the rows of one delta, found by key", {
    "index_at slots": "the address of the index, and the number of its slots",
    "filter_at filter_words": "the address of a filter of the keys, and the number of its uint64 words, a power of two",
    "keys_at deleted_at rows_at": "the addresses of the keys, the marks of deleted keys and the stored rows, each by row number",
    "row_bytes code": "the bytes of a stored row, and its dtype",
})  # fmt: skip
overlay_at = at(OVERLAY)
_PENDING, _OVERLAY, _ABSENT = int(Tier.PENDING), int(Tier.OVERLAY), int(Tier.ABSENT)

_KEYS = types.Array(types.int64, 1, "C", readonly=True)


class Part(NamedTuple):
    """Rows of a delta: `keys` int64[n], `rows` uint8[n, row_bytes] as stored, `deleted` bool[n]."""

    keys: Keys
    rows: Rows
    deleted: npt.NDArray[np.bool_]

    def contiguous(self) -> Part:
        return Part(*map(np.ascontiguousarray, self))

    @property
    def addresses(self) -> tuple[int, int, int]:
        return address_of(self.keys), address_of(self.rows), address_of(self.deleted)


@compiled(types.int64(_KEYS, types.uint64[::1]))
def _build(keys: Any, index: Any) -> Any:
    """Fill an index. Returns -1, or the first row whose key came before."""
    mask = np.uint64(len(index) - 1)
    for row in range(len(keys)):
        h = mix(keys[row])
        at, tag = h & mask, h & _TAG
        while index[at] != _EMPTY:
            if index[at] & _TAG == tag and keys[index[at] & _ROW] == keys[row]:
                return row
            at = (at + np.uint64(1)) & mask
        index[at] = tag | np.uint64(row)
    return -1


@njit(inline="always")
def _bits(h: Any) -> Any:
    """The two bits of its filter word that a key with this hash sets."""
    return (np.uint64(1) << (h >> np.uint64(58))) | (np.uint64(1) << ((h >> np.uint64(52)) & np.uint64(63)))


@compiled(types.void(_KEYS, types.uint64[::1]))
def _fill_filter(keys: Any, words: Any) -> Any:
    mask = np.uint64(len(words) - 1)
    for key in keys:
        h = mix(key)
        words[(h >> np.uint64(8)) & mask] |= _bits(h)


@njit
def answer_at(
    overlay: Any, out_code: Any, dim: Any, default: Any, out: Any, out_bytes: Any, keys: Any, n: Any, state: Any
) -> Any:
    """Answer those of `n` PENDING keys that the record of an overlay has. Returns their number. Addresses may have any alignment.

    The row of key i is written to `out`, i times `out_bytes` on. With AS_STORED rows are copied as they are stored, and nothing is written for a
    deleted key.
    """
    index, table_keys, deleted, rows = overlay.index_at, overlay.keys_at, overlay.deleted_at, overlay.rows_at
    row_bytes, code, mask = overlay.row_bytes, overlay.code, np.uint64(overlay.slots - 1)
    words, word_mask = overlay.filter_at, np.uint64(overlay.filter_words - 1)
    prefetch_bytes: Any = min(row_bytes, _PREFETCH_BYTES)
    hashes, places, found = stack_bytes(_BLOCK_BYTES), stack_bytes(_BLOCK_BYTES), stack_bytes(_BLOCK_BYTES)
    answered = 0
    for start in range(0, n, _BLOCK):
        stop = min(start + _BLOCK, n)
        perhaps = 0
        for i in range(start, stop):
            h = mix(np.int64(load_u64(keys, i)))
            bits = _bits(h)
            store_u64(found, i - start, _EMPTY)
            if (
                load_u64(words, np.int64((h >> np.uint64(8)) & word_mask)) & bits == bits
                and load_u8(state, i) == _PENDING
            ):
                store_u64(hashes, perhaps, h)
                store_u64(places, perhaps, np.uint64(i))
                prefetch(index + np.int64((h & mask) << np.uint64(3)))
                perhaps += 1
        hits = 0
        for k in range(perhaps):
            here, h = np.int64(load_u64(places, k)), load_u64(hashes, k)
            at, tag = h & mask, h & _TAG
            slot = load_u64(index, np.int64(at))
            while slot != _EMPTY:
                row = np.int64(slot & _ROW)
                if slot & _TAG == tag and load_u64(table_keys, row) == load_u64(keys, here):
                    store_u64(found, here - start, np.uint64(row))
                    hits += 1
                    for ahead in range(0, prefetch_bytes, 64):
                        prefetch(rows + row * row_bytes + ahead)
                    break
                at = (at + np.uint64(1)) & mask
                slot = load_u64(index, np.int64(at))
        if hits:
            for i in range(start, stop):
                row = np.int64(load_u64(found, i - start))
                if row >= 0 and load_u8(deleted, row) != 0:
                    if out_code != AS_STORED:
                        decode_row(out_code, out_code, default, out + i * out_bytes, dim)
                    store_u8(state, i, np.uint8(_ABSENT))
                elif row >= 0:
                    if out_code == AS_STORED:
                        copy_row(out + i * out_bytes, rows + row * row_bytes, row_bytes)
                    else:
                        decode_row(code, out_code, rows + row * row_bytes, out + i * out_bytes, dim)
                    store_u8(state, i, np.uint8(_OVERLAY))
            answered += hits
    return answered


@compiled(types.int64[::1](_KEYS))
def _dedup_last(keys: Any) -> Any:
    """Radix sort of (key, position), least significant byte first; bytes that all keys share are skipped."""
    n = len(keys)
    counts = np.zeros((8, 256), np.int64)
    codes = np.empty(n, np.uint64)
    order = np.empty(n, np.int64)
    for i in range(n):
        code = np.uint64(keys[i]) ^ np.uint64(0x8000_0000_0000_0000)  # unsigned order is then numeric order
        codes[i], order[i] = code, i
        for byte in range(8):
            counts[byte, (code >> np.uint64(8 * byte)) & np.uint64(255)] += 1
    codes_to, order_to = np.empty(n, np.uint64), np.empty(n, np.int64)
    for byte in range(8):
        shift = np.uint64(8 * byte)
        place = counts[byte]
        if n == 0 or place[(codes[0] >> shift) & np.uint64(255)] == n:
            continue
        total = 0
        for digit in range(256):
            place[digit], total = total, total + place[digit]
        for i in range(n):
            digit = (codes[i] >> shift) & np.uint64(255)
            at = place[digit]
            place[digit] = at + 1
            codes_to[at], order_to[at] = codes[i], order[i]
        codes, codes_to = codes_to, codes
        order, order_to = order_to, order
    kept = 0
    for i in range(n):
        if i + 1 == n or codes[i] != codes[i + 1]:  # the sort is stable: the last of equal keys came last
            order[kept] = order[i]
            kept += 1
    return order[:kept].copy()


@compiled(types.int64(_KEYS, _KEYS))
def _count_in_both(old: Any, new: Any) -> Any:
    i = j = n = 0
    while i < len(old) and j < len(new):
        a, b = old[i], new[j]
        n += a == b
        i += a <= b
        j += b <= a
    return n


@compiled("void(int64, int64, int64, int64, int64, int64, int64, int64, int64, int64, int64, int64)")
def _merge(
    old_keys: Any, old_rows: Any, old_marks: Any, old_n: Any,
    new_keys: Any, new_rows: Any, new_marks: Any, new_n: Any,
    keys: Any, rows: Any, marks: Any, row_bytes: Any,
) -> Any:  # fmt: skip
    """Merge two parts whose keys ascend; a key in both keeps its new row. All but the lengths are addresses."""
    i = j = n = 0
    while i < old_n or j < new_n:
        old, new = np.int64(0), np.int64(0)
        if i < old_n:
            old = np.int64(load_u64(old_keys, i))
        if j < new_n:
            new = np.int64(load_u64(new_keys, j))
        if j == new_n or (i < old_n and old < new):
            store_u64(keys, n, np.uint64(old))
            store_u8(marks, n, load_u8(old_marks, i))
            copy_row(rows + n * row_bytes, old_rows + i * row_bytes, row_bytes)
            i += 1
        else:
            store_u64(keys, n, np.uint64(new))
            store_u8(marks, n, load_u8(new_marks, j))
            copy_row(rows + n * row_bytes, new_rows + j * row_bytes, row_bytes)
            i += i < old_n and old == new
            j += 1
        n += 1


def merge(old: Part, new: Part) -> Part:
    """Merge two deltas: distinct keys ascending; a key in both gets its row of `new`.

    Each part: `keys` int64[n] distinct and ascending, `rows` uint8[n, row_bytes] of equal width, `deleted` bool[n].
    """
    if new.rows.shape[1] != old.rows.shape[1]:
        raise ValueError(f"rows are to be of one width, got {old.rows.shape[1]} and {new.rows.shape[1]} bytes")
    a, b = old.contiguous(), new.contiguous()
    n, row_bytes = len(a.keys) + len(b.keys) - _count_in_both(a.keys, b.keys), a.rows.shape[1]
    both = Part(np.empty(n, np.int64), np.empty((n, row_bytes), np.uint8), np.empty(n, np.bool_))
    _merge(*a.addresses, len(a.keys), *b.addresses, len(b.keys), *both.addresses, row_bytes)
    return both


def build(keys: Keys) -> Index:
    """Build an index over `keys`, int64[n], distinct: key → its row number.

    It must be used with these same keys. Raises ValueError for a key that occurs twice.
    """
    keys = np.ascontiguousarray(keys, np.int64)
    if len(keys) > MAX_KEYS:
        raise ValueError(f"an index holds up to {MAX_KEYS} keys, got {len(keys)}")
    index = np.full(1 << max(2 * len(keys) - 1, 0).bit_length(), _EMPTY, np.uint64)
    twice = _build(keys, index)
    if twice >= 0:
        raise ValueError(f"keys are to be distinct: {keys[twice]} in row {twice} was there before")
    return index


class Answering:
    """The rows of a delta, looked up by key. Constant; any thread may `answer`.

    `keys` int64[m] are the keys that `index` was built from; `rows` uint8[m, row_bytes] of `dtype`, `deleted` bool[m].
    """

    __slots__ = ("_arrays", "_dim", "words")

    def __init__(
        self, index: Index, keys: Keys, rows: Rows, deleted: npt.NDArray[np.bool_], dtype: StorageDtype, dim: int
    ) -> None:
        if not len(keys) == len(rows) == len(deleted) or rows.shape[1:] != (dtype.row_bytes(dim),):
            raise ValueError(
                f"keys, rows and deleted pair up: got {len(keys)}, {list(rows.shape)} and {len(deleted)} for {dtype}[{dim}]"
            )
        rows, keys = np.ascontiguousarray(rows), np.ascontiguousarray(keys)
        marks = np.ascontiguousarray(deleted).view(np.uint8)
        words = np.zeros(max(1, len(index) >> 3), np.uint64)  # 16 to 32 bits a key
        _fill_filter(keys, words)
        self._arrays, self._dim = (index, words, keys, rows, marks), dim  # keeps the arrays behind the words alive
        # for kernels: the addresses of the parts, see `answer_at`
        self.words = OVERLAY.make(
            index_at=address_of(index), slots=len(index), filter_at=address_of(words), filter_words=len(words),
            keys_at=address_of(keys), deleted_at=address_of(marks),
            rows_at=address_of(rows), row_bytes=rows.shape[1], code=dtype.code,
        )  # fmt: skip

    @property
    def index_bytes(self) -> int:
        """Bytes of memory that the index and its filter take."""
        index, words, *_ = self._arrays
        return index.nbytes + words.nbytes


def dedup_last(keys: Keys) -> Keys:
    """Positions of the last occurrence of each key of `keys`, int64[n], ascending by key: int64[m]."""
    keys = np.ascontiguousarray(keys, np.int64)
    if (keys[1:] > keys[:-1]).all():
        return np.arange(len(keys), dtype=np.int64)
    return np.asarray(_dedup_last(keys), np.int64)
