"""Default shares of the memory that this process may use, and a check that settings fit into it.

A control group ends a process that takes more, so what is not given says less there: the host tier gets half of what is
left beside the process itself and its load helpers, and deltas in memory, deltas that are decoded and loads an eighth
each. What is left then is for requests and the tensors of dense parts: bounds that are far above what is used, so they
count only where they are given.
"""

from __future__ import annotations

from collections.abc import Set
from typing import NamedTuple, Protocol

from pydantic import ByteSize

from tierstore.machine import memory_bytes, processors
from tierstore.sizes import size_text

PROCESS_BYTES = 350 << 20  # Python, libraries and compiled kernels of a service
HELPER_BYTES = 150 << 20  # of a load helper, before it holds any row
_MOST_HELPERS = 4
_HELPERS_PART = 6


class _Share(NamedTuple):
    """What a budget may be: at most so many bytes, and at most one of so many parts of what is left."""

    most: int
    parts: int

    @property
    def nbytes(self) -> ByteSize:
        return ByteSize(min(self.most, _left() // self.parts))


_HOST, _OVERLAYS, _LOADS = _Share(4 << 30, 2), _Share(256 << 20, 8), _Share(512 << 20, 8)
_DECODING = _Share(1 << 30, 8)
_ALWAYS = {"host_budget": _HOST, "overlay_budget": _OVERLAYS, "load_memory": _LOADS}
_IF_GIVEN = {"max_inflight": _Share(1 << 30, 16), "dense_memory": _Share(2 << 30, 16)}


def default_load_workers() -> int:
    """As many as processors, at most four, while they take a sixth of the memory at most."""
    return max(1, min(_MOST_HELPERS, processors(), memory_bytes() // _HELPERS_PART // HELPER_BYTES))


def default_host_budget() -> ByteSize:
    return _HOST.nbytes


def default_overlay_budget() -> ByteSize:
    return _OVERLAYS.nbytes


def default_load_memory() -> ByteSize:
    return _LOADS.nbytes


def decoding_bytes(overlay_budget: int) -> int:
    """For all deltas that are being decoded: one that fits into `overlay_budget` can be."""
    return max(_DECODING.nbytes, overlay_budget)


def _left() -> int:
    memory = memory_bytes()
    return max(memory - PROCESS_BYTES - default_load_workers() * HELPER_BYTES, memory // 4)


class _Budgets(Protocol):
    load_workers: int

    @property
    def model_fields_set(self) -> Set[str]: ...


def why_too_much(settings: _Budgets) -> str | None:
    """Which settings do not fit into the memory that this process may use, and what would; None if all do."""
    counted = _ALWAYS | {name: share for name, share in _IF_GIVEN.items() if name in settings.model_fields_set}
    given = {name: int(getattr(settings, name)) for name in counted}
    memory, helpers = memory_bytes(), settings.load_workers * HELPER_BYTES
    total = PROCESS_BYTES + helpers + sum(given.values()) + decoding_bytes(given["overlay_budget"])
    if total <= memory:
        return None
    larger = [
        f"{name} {size_text(given[name])}, where {size_text(share.nbytes)} fits"
        for name, share in counted.items()
        if given[name] > share.nbytes
    ]
    if settings.load_workers > (workers := default_load_workers()):
        larger.append(f"load_workers {settings.load_workers}, where {workers} fits")
    return (
        f"this process may use {size_text(memory)} of memory, and its settings allow it {size_text(total)}, of which "
        f"{size_text(PROCESS_BYTES)} are the process itself and {size_text(helpers)} its load helpers: a load, or "
        f"deltas, may get it killed. Too much is {'; '.join(larger) or 'what the process takes by itself'}"
    )
