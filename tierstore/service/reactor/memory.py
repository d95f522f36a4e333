"""The memory of one reactor, and what the standard library lacks to set one up. Any thread."""

from __future__ import annotations

import os

import numpy as np
import numpy.typing as npt

from tierstore.config import Settings
from tierstore.kernels import binding, h2words, lookupplan, reactor, request_record, sysio
from tierstore.kernels import reactor_words as kernel
from tierstore.service.limits import slow_clients
from tierstore.service.reactor.streams import most_message

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


def limits_of(settings: Settings, threads: int, connections: int, descriptors: int) -> npt.NDArray[np.int64]:
    """What bounds the requests and the connections of `threads` reactors, as their words."""
    limits = np.zeros(kernel.LIMIT_WORDS, np.int64)
    for word, value in {
        kernel.MOST_CONNECTIONS: connections,
        kernel.MOST_BODY: min(settings.max_request, settings.max_inflight),
        kernel.MOST_MESSAGE: most_message(settings),
        kernel.MOST_ANSWER: settings.max_response,
        kernel.MOST_INFLIGHT: settings.max_inflight,
        kernel.IDLE_NS: int(settings.idle_timeout_s * 1e9),
        kernel.ARRIVAL_NS: int(settings.arrival_timeout_s * 1e9),
        kernel.STALL_NS: int(slow_clients.STALL_S * 1e9),
        kernel.PRESSED_STALL_NS: int(slow_clients.PRESSED_STALL_S * 1e9),
        kernel.MOST_WAIT_NS: int(settings.max_queue_s * 1e9),
        kernel.FINISH_NS: int(slow_clients.ENDING_S * 1e9),
        kernel.SLOWEST_RATE: slow_clients.SLOWEST_RATE,
        kernel.REACTORS: threads,
        kernel.MOST_DESCRIPTORS: descriptors,
        kernel.POOL_THREADS: settings.lookup_threads,
        kernel.POOL_QUEUE: settings.lookup_queue,
        kernel.TRACES: settings.traces,
    }.items():
        limits[word] = value
    return limits


def register(epoll: int, fd: int, mask: int, data: int) -> None:
    """`epoll_ctl` with 64 bits of data, which the standard library does not offer."""
    failed = reactor.watch(epoll, fd, mask, data)
    if failed:
        raise OSError(-failed, os.strerror(-failed))
