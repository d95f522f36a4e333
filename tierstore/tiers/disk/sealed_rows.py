"""Look-ups of rows on disk: sealed patches, with the rows that deltas changed, over a sealed base.

A patch is a sealed file of one table with a mark behind each row: 0, or DELETED. If several patches have a key, the newest wins. A filter in memory
says which keys deltas may have changed, and each patch has a filter of its keys; so an unchanged key is read from the base at once, and a changed one
from the patch that has it.

Free functions of records and addresses, nogil; any thread. The caller keeps alive what the records point to.
"""

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np
from numba import types

from tierstore.kernels import FIRST, compiled
from tierstore.kernels.atomics import acquire_i64, copy_bytes
from tierstore.kernels.raw import i64_at, load_i64, load_u8, u32_at
from tierstore.tiers.disk import bloom, sealed_blocks
from tierstore.tiers.disk.layout import base_at, patch_at
from tierstore.types import Tier

DELETED = 1  # the mark behind a patch's row
MARK_BYTES = 1
# where the rows that deltas changed are: BASE_ALONE, do not look; SOME, some may be missing in the patches; ALL, all are in the patches
BASE_ALONE, SOME, ALL = range(3)

_PENDING, _ABSENT, _DISK = np.uint8(Tier.PENDING), np.uint8(Tier.ABSENT), np.uint8(Tier.DISK)
_KEYS = types.Array(types.int64, 1, "C", readonly=True)


@nb.njit
def _perhaps_changed(changed, keys, perhaps):
    """Mark and count the `keys` that a delta may have changed; `changed` is the address of the address of the filter's layers."""
    layers, found = acquire_i64(changed), 0
    if layers != 0:
        for i in range(load_i64(layers, 0)):
            words = nb.carray(u32_at(load_i64(layers, 1 + 2 * i)), (load_i64(layers, 2 + 2 * i),))
            found += bloom.probe(keys, words, perhaps)
    return found


@nb.njit
def _look_up(files, keys, wanted, rows, row_bytes, state, trouble, window):
    return sealed_blocks.look_up(
        keys, wanted, rows, row_bytes, state, trouble,
        nb.carray(i64_at(files.fences_at), (files.fences,)), nb.carray(i64_at(files.part_starts_at), (files.parts + 1,)),
        nb.carray(i64_at(files.ends_at), (files.files,)), nb.carray(i64_at(files.rows_at), (files.files,)),
        nb.carray(i64_at(files.fds_at), (files.files,)), files.per_block, files.block_bytes, window,
    )  # fmt: skip


@nb.njit
def _look_up_changed(patches, count, keys, perhaps, rows, row_bytes, state, window):
    """Answer the keys marked in `perhaps` that a patch has, and clear their marks.

    If a patch has a key but cannot answer it, the state stays PENDING and the mark is cleared too: no older patch may answer it. Returns the number
    of marks left.
    """
    n, left = keys.size, 0
    wanted, places = np.empty(n, np.int64), np.empty(n, np.int64)  # the keys that no patch has answered yet
    for i in range(n):
        wanted[left], places[left] = keys[i], i
        left += perhaps[i]
    tried, found, trouble = np.empty(left, np.bool_), np.empty(left, np.uint8), np.empty(left, np.int32)
    marked = np.empty(left * (row_bytes + MARK_BYTES), np.uint8)
    at = nb.int64(marked.ctypes.data)
    for i in range(count):
        if left == 0:
            break
        patch, some = patch_at(load_i64(patches, i)), False
        words = nb.carray(u32_at(patch.filter_at), (patch.filter_words,))
        for k in range(left):
            tried[k] = bloom.holds(wanted[k], words)
            some |= tried[k]
            found[k] = _PENDING
        if not some:
            continue
        _look_up(patch.files, wanted[:left], tried, at, row_bytes + MARK_BYTES, found, trouble, window)
        still = 0
        for k in range(left):
            if tried[k] and found[k] != _ABSENT:
                if found[k] == _DISK:
                    row = at + k * (row_bytes + MARK_BYTES)
                    deleted = load_u8(row, row_bytes) == DELETED
                    state[places[k]] = _ABSENT if deleted else _DISK
                    if not deleted:
                        copy_bytes(rows + places[k] * row_bytes, row, row_bytes)
                perhaps[places[k]] = False
            else:
                wanted[still], places[still] = wanted[k], places[k]
                still += 1
        left = still
    return left if marked.size >= 0 else 0


@nb.njit
def read(base, patches, count, changes, keys, rows, row_bytes, state, trouble, window):
    """Answer `keys` (int64[n], distinct, by part and then ascending), whose states are PENDING: rows[i] and DISK, or ABSENT.

    `patches`: the address of the addresses of `count` patches, newest first. `changes`: BASE_ALONE, SOME or ALL. `rows`: the address of n rows of
    `row_bytes`; `window` as for `sealed_blocks.look_up`.

    These keys stay PENDING: with SOME, a key that may have changed and is in no patch; with a window of 0, a key that needs a wait for the drive; a
    key whose patch is damaged. `trouble` (int32[n], zeros) gets the errors of base blocks. Returns the number of such blocks.
    """
    n = keys.size
    wanted = np.zeros(n, np.bool_)
    left = 0
    if changes != BASE_ALONE:
        left = _perhaps_changed(base.changed_at, keys, wanted)
    if left > 0 and count > 0:
        perhaps = wanted.copy()
        left = _look_up_changed(patches, count, keys, wanted, rows, row_bytes, state, window)
        for k in range(n):  # keys that no patch had are in the base, or in RocksDB
            wanted[k] = not perhaps[k] or (wanted[k] and changes == ALL)
    else:
        for k in range(n):
            wanted[k] = changes != SOME or not wanted[k]
    if base.files == 0:
        for k in range(n):
            if wanted[k]:
                state[k] = _ABSENT
        return 0
    return _look_up(base, keys, wanted, rows, row_bytes, state, trouble, window)


@compiled(
    types.int64(*[types.int64] * 4, _KEYS, types.int64, types.int64, types.uint8[::1], types.int32[::1], types.int64),
    when=FIRST,
)  # fmt: skip
def look_up(
    base: Any, patches: Any, count: Any, changes: Any, keys: Any, rows: Any, row_bytes: Any, state: Any, trouble: Any,
    window: Any,
) -> Any:  # fmt: skip
    """`read` with the base by address."""
    return read(base_at(base), patches, count, changes, keys, rows, row_bytes, state, trouble, window)
