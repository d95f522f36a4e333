"""How the memory that this process may use is shared out by default, and whether settings fit into it.

A control group ends a process that takes more, so what is not given says less there: the host tier gets half of what is
left beside the process itself and its load helpers, and deltas in memory, deltas that are decoded and loads an eighth
each.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from pydantic import ByteSize

from tierstore.machine import memory_bytes, processors

PROCESS_BYTES = 350 << 20  # Python, libraries and compiled kernels of a service
HELPER_BYTES = 150 << 20  # of a load helper, before it holds any row
_HOST, _OVERLAYS, _LOADS, _DECODING = 4 << 30, 256 << 20, 512 << 20, 1 << 30  # where there is enough
_MOST_HELPERS = 4
_PART = 8
_HELPERS_PART = 6


def default_load_workers() -> int:
    """As many as processors, at most four, while they take a sixth of the memory at most."""
    return max(1, min(_MOST_HELPERS, processors(), memory_bytes() // _HELPERS_PART // HELPER_BYTES))


def default_host_budget() -> ByteSize:
    return ByteSize(min(_HOST, _left() // 2))


def default_overlay_budget() -> ByteSize:
    return ByteSize(min(_OVERLAYS, _left() // _PART))


def default_load_memory() -> ByteSize:
    return ByteSize(min(_LOADS, _left() // _PART))


def decoding_bytes() -> int:
    """For all deltas that are being decoded."""
    return min(_DECODING, _left() // _PART)


def _left() -> int:
    memory = memory_bytes()
    return max(memory - PROCESS_BYTES - default_load_workers() * HELPER_BYTES, memory // 4)


class _Budgets(Protocol):
    host_budget: ByteSize
    overlay_budget: ByteSize
    load_memory: ByteSize
    load_workers: int


def why_too_much(settings: _Budgets) -> str | None:
    """Which settings do not fit into the memory that this process may use, and what would; None if all do."""
    memory = memory_bytes()
    given: Mapping[str, int] = {
        "host_budget": settings.host_budget, "overlay_budget": settings.overlay_budget,
        "load_memory": settings.load_memory, "load_workers": settings.load_workers,
    }  # fmt: skip
    fits: Mapping[str, int] = {
        "host_budget": default_host_budget(), "overlay_budget": default_overlay_budget(),
        "load_memory": default_load_memory(), "load_workers": default_load_workers(),
    }  # fmt: skip
    helpers = settings.load_workers * HELPER_BYTES
    total = PROCESS_BYTES + helpers + settings.host_budget + settings.overlay_budget + settings.load_memory
    if total <= memory:
        return None
    larger = [f"{name} {_shown(name, given[name])}, where {_shown(name, fits[name])} fits" for name in given
              if given[name] > fits[name]]  # fmt: skip
    return (
        f"this process may use {_size(memory)} of memory, and its settings allow it {_size(total)}, of which "
        f"{_size(PROCESS_BYTES)} are the process itself and {_size(helpers)} its load helpers: a load, or deltas, may "
        f"get it killed. Too much is {'; '.join(larger) or 'what the process takes by itself'}"
    )


def _shown(name: str, value: int) -> str:
    return str(value) if name == "load_workers" else _size(value)


def _size(nbytes: int) -> str:
    return ByteSize(nbytes).human_readable(separator=" ")
