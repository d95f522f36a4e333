"""The search for a request's plan, by its path and structure, and for the variant of it that answers now.

Free functions of addresses, nogil; nothing is written. Python fills the index (`service/reactor/plan_index.py`). Layouts are in `plans.py`.
"""

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np
from numba import types

from tierstore.kernels import HTTP, compiled
from tierstore.kernels.atomics import acquire_i64
from tierstore.kernels.raw import load_u8, load_u64
from tierstore.kernels.records import place
from tierstore.kernels.sysio import same_bytes
from tierstore.lookup.plans import (
    ANY_VERSION,
    BY_LABEL,
    ONLY_CANARY,
    SETS,
    STABLE,
    WAYS,
    entry_at,
    plan_at,
    view_at,
)

_U64 = np.uint64


@nb.njit
def hash_at(at, n, seed):
    """A 64-bit hash of `n` bytes: a plan's place in the index. Entries with equal hashes are told apart by comparing their bytes."""
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
def place_at(path, path_bytes, structure, structure_bytes, form):
    """The hash under which a plan is stored."""
    return hash_at(structure, structure_bytes, nb.int64(hash_at(path, path_bytes, form)))


@compiled(types.int64(*[types.int64] * 5), when=HTTP)
def place_of(path: Any, path_bytes: Any, structure: Any, structure_bytes: Any, form: Any) -> Any:
    """`place_at` for Python, which fills the index."""
    return nb.int64(place_at(path, path_bytes, structure, structure_bytes, form))


@nb.njit
def find_plan(index, path, path_bytes, structure, structure_bytes, form):
    """The plan for a request, or 0. `index` is the address of SETS of WAYS entries."""
    hashed = nb.int64(place_at(path, path_bytes, structure, structure_bytes, form))
    entry = entry_at(index, WAYS * (hashed & (SETS - 1)))
    for _ in range(WAYS):
        plan = plan_at(acquire_i64(place(entry, "plan")))
        if (
            plan != 0
            and entry.hash == hashed
            and plan.form == form
            and plan.path_bytes == path_bytes
            and plan.structure_bytes == structure_bytes
            and same_bytes(plan.structure_at, structure, structure_bytes) != 0
            and same_bytes(plan.path_at, path, path_bytes) != 0
        ):
            return plan
        entry = entry_at(entry, 1)
    return plan_at(0)


@nb.njit
def choose(plan, served, dice):
    """The (variant, view) that answer a request; (0, 0) where there is none. `dice` are 32 random bits, for the canary's share."""
    active, canary, wanted = served.active, served.canary, plan.wanted
    one, other = plan.variant, plan.other_variant
    view = active
    if wanted == ANY_VERSION:
        if canary != 0 and dice < served.share:
            view = canary
    elif wanted == ONLY_CANARY:
        view = canary
    elif wanted == BY_LABEL and plan.labelled != served.labels:
        view = view_at(0)
    elif wanted != STABLE and one != 0 and canary != 0 and one.token == canary.token:
        view = canary
    if view == 0:
        return 0, 0
    token = view.token
    if one != 0 and one.token == token:
        return one, view
    if other != 0 and other.token == token:
        return other, view
    return 0, 0
