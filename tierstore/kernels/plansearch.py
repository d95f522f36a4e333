"""How a plan is found: by the path of a request and the structure of what it describes, and the variant of it that answers now.

Free functions of addresses, nogil; nothing is written. Python fills the index (`service/reactor/plan_index.py`). The layouts are
those of `lookupplan.py`.
"""

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np
from numba import types

from tierstore.kernels import LAST, compiled
from tierstore.kernels.atomics import acquire_i64
from tierstore.kernels.lookupplan import (
    ACTIVE,
    ANY_VERSION,
    BY_LABEL,
    CANARY,
    FORM,
    LABELLED,
    LABELS,
    ONLY_CANARY,
    OTHER_VARIANT,
    PATH_AT,
    PATH_BYTES,
    SETS,
    SHARE,
    STABLE,
    STRUCTURE_AT,
    STRUCTURE_BYTES,
    TOKEN,
    VARIANT,
    VIEW_TOKEN,
    WANTED,
    WAYS,
    word,
)
from tierstore.kernels.raw import load_u8, load_u64
from tierstore.kernels.sysio import same_bytes

_U64 = np.uint64


@nb.njit
def hash_at(at, n, seed):  # type: ignore[no-untyped-def]
    """64 mixed bits of `n` bytes: a plan's place in the index. Equal bytes are told by comparing them."""
    h = _U64(seed) ^ (_U64(n) * _U64(0x9E3779B97F4A7C15))
    for i in range(n >> 3):
        h = (h ^ load_u64(at, i)) * _U64(0xFF51AFD7ED558CCD)
        h ^= h >> _U64(32)
    tail = _U64(0)
    for i in range(n & ~7, n):
        tail = (tail << _U64(8)) | _U64(load_u8(at, i))
    h = (h ^ tail) * _U64(0xC4CEB9FE1A85EC53)
    return h ^ (h >> _U64(29))


@nb.njit
def place_at(path, path_bytes, structure, structure_bytes, form):  # type: ignore[no-untyped-def]
    """The hash by which a plan is found."""
    return hash_at(structure, structure_bytes, nb.int64(hash_at(path, path_bytes, form)))


@compiled(types.int64(*[types.int64] * 5), when=LAST)
def place(path: Any, path_bytes: Any, structure: Any, structure_bytes: Any, form: Any) -> Any:
    """`place_at` for Python, which fills the index."""
    return nb.int64(place_at(path, path_bytes, structure, structure_bytes, form))


@nb.njit
def find_plan(index, path, path_bytes, structure, structure_bytes, form):  # type: ignore[no-untyped-def]
    """The address of the plan for a request, or 0. `index` is the address of SETS of WAYS entries."""
    place = nb.int64(place_at(path, path_bytes, structure, structure_bytes, form))
    entry = index + 16 * WAYS * (place & (SETS - 1))
    for _ in range(WAYS):
        plan = acquire_i64(entry + 8)
        if (
            plan != 0
            and word(entry, 0) == place
            and word(plan, FORM) == form
            and word(plan, PATH_BYTES) == path_bytes
            and word(plan, STRUCTURE_BYTES) == structure_bytes
            and same_bytes(word(plan, STRUCTURE_AT), structure, structure_bytes) != 0
            and same_bytes(word(plan, PATH_AT), path, path_bytes) != 0
        ):
            return plan
        entry += 16
    return 0


@nb.njit
def choose(plan, served, dice):  # type: ignore[no-untyped-def]
    """(variant, view) at addresses that answer a request; 0, 0 where there is no such. `dice` are 32 random bits."""
    active, canary, wanted = word(served, ACTIVE), word(served, CANARY), word(plan, WANTED)
    one, other = word(plan, VARIANT), word(plan, OTHER_VARIANT)
    view = active
    if wanted == ANY_VERSION:
        if canary != 0 and dice < word(served, SHARE):
            view = canary
    elif wanted == ONLY_CANARY:
        view = canary
    elif wanted == BY_LABEL and word(plan, LABELLED) != word(served, LABELS):
        view = nb.int64(0)
    elif wanted != STABLE and one != 0 and canary != 0 and word(one, TOKEN) == word(canary, VIEW_TOKEN):
        view = canary
    if view == 0:
        return 0, 0
    token = word(view, VIEW_TOKEN)
    if one != 0 and word(one, TOKEN) == token:
        return one, view
    if other != 0 and word(other, TOKEN) == token:
        return other, view
    return 0, 0
