"""Readers that take no lock and tell nobody: epoch-based reclamation, the words of it.

A reader writes the generation that it has seen into a word of its own, then takes what is published, and writes 0 when
it is done. A publisher stores the address of something new and raises the generation. What was replaced may be let go
once no reader's word is from before (`held_below`). With the fence between a reader's word and its look at what is
published, either the publisher sees the word, or the reader sees the new address (Fraser, "Practical lock-freedom",
2004, calls it epoch-based; RCU is the kernel's name for the like).
"""

from __future__ import annotations

from typing import Any

from numba import njit, types

from tierstore.kernels.atomics import acquire_i64, add_at, fence_all, release_i64


@njit("int64(int64, int64, int64)", cache=True, nogil=True)
def publish(place: Any, address: Any, generation: Any) -> Any:
    """Store `address` at `place` and raise the generation, both addresses of int64. Returns the new generation."""
    release_i64(place, address)
    new = add_at(generation, 1) + 1
    fence_all()
    return new


@njit(types.boolean(*[types.int64] * 4), cache=True, nogil=True)
def held_below(words: Any, count: Any, stride: Any, generation: Any) -> Any:
    """Whether one of `count` words, `stride` words apart, is of a generation before the one named. 0 is none."""
    for i in range(count):
        seen = acquire_i64(words + 8 * stride * i)
        if 0 < seen < generation:
            return True
    return False


@njit("int64(int64, int64)", cache=True, nogil=True)
def add(address: Any, value: Any) -> Any:
    """Add to the int64 at an address as one step, for Python beside compiled threads. Returns what was there before."""
    return add_at(address, value)
