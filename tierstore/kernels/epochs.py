"""Epoch-based reclamation for readers without locks: the words that readers and publishers share.

A reader writes the generation that it has seen into its own word, uses what is published, and writes 0 when it is done. A publisher stores the
address of something new and raises the generation. What was replaced may be freed when no reader's word is older (`held_below`). A fence separates
the reader's write to its word from its read of what is published, so either the publisher sees the word, or the reader sees the new address (Fraser,
"Practical lock-freedom", 2004; RCU in the Linux kernel is similar).
"""

from __future__ import annotations

from typing import Any

from numba import types

from tierstore.kernels import FIRST, compiled
from tierstore.kernels.atomics import acquire_i64, add_at, fence_all, release_i64


@compiled("int64(int64, int64, int64)", when=FIRST)
def publish(place: Any, address: Any, generation: Any) -> Any:
    """Store `address` at `place` and raise the generation, both addresses of int64. Returns the new generation."""
    release_i64(place, address)
    new = add_at(generation, 1) + 1
    fence_all()
    return new


@compiled(types.boolean(*[types.int64] * 4), when=FIRST)
def held_below(words: Any, count: Any, stride: Any, generation: Any) -> Any:
    """Whether one of `count` words, `stride` words apart, has a generation before the given one. 0 means no reader."""
    for i in range(count):
        seen = acquire_i64(words + 8 * stride * i)
        if 0 < seen < generation:
            return True
    return False


@compiled("int64(int64, int64)", when=FIRST)
def add(address: Any, value: Any) -> Any:
    """Atomically add to the int64 at an address, for Python beside compiled threads. Returns the value before."""
    return add_at(address, value)
