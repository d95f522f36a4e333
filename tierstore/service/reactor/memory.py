"""The memory of one reactor, and what the standard library lacks to set one up. Any thread."""

from __future__ import annotations

import os

from tierstore.kernels import binding, h2words, lookupplan, reactor, request_record, sysio
from tierstore.kernels import reactor_words as kernel

_LINE = 64  # bytes of a cache line


def areas() -> tuple[int, ...]:
    """Bytes of each area of a reactor's own memory: events, messages, received bytes, an answer, states, scratch, date; then a request's
    record, its structure, its run, the values of its answer, the codes of its strings; and of HTTP/2 a header list, and frames that leave."""
    sizes = (
        kernel.EVENTS * sysio.EVENT_BYTES,
        kernel.MESSAGES * 8 * kernel.MESSAGE_WORDS,
        kernel.BUFFER_BYTES + _LINE,
        kernel.HEAD_ROOM + lookupplan.MOST_WORK_BYTES + _LINE,
        lookupplan.MOST_KEYS + _LINE,
        lookupplan.SCRATCH_BYTES,
        4096,
        request_record.RECORD_BYTES,
        request_record.MOST_STRUCTURE_BYTES,
        binding.RUN_BYTES,
        binding.VALUES_BYTES,
        8 * lookupplan.MOST_KEYS,
        h2words.WORK_BYTES,
        kernel.FRAMES_BYTES,
    )
    return tuple(-(-size // _LINE) * _LINE for size in sizes)


def register(epoll: int, fd: int, mask: int, data: int) -> None:
    """`epoll_ctl` with 64 bits of data, which the standard library does not offer."""
    failed = reactor.watch(epoll, fd, mask, data)
    if failed:
        raise OSError(-failed, os.strerror(-failed))
