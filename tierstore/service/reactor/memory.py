"""The memory of one reactor, and system calls for setting it up that the standard library lacks. Any thread."""

from __future__ import annotations

import os
from typing import Any

import numpy.typing as npt

from tierstore.config import Settings
from tierstore.kernels import sysio
from tierstore.kernels.records import TEXT
from tierstore.lookup import answer_values, binding, by_plan, json_answer
from tierstore.reactor import layout as kernel
from tierstore.reactor import loop as reactor_loop
from tierstore.service.limits import slow_clients
from tierstore.service.reactor.streams import most_message
from tierstore.wire import request_record
from tierstore.wire.http1 import head as http1_head
from tierstore.wire.http2 import layout as http2_layout
from tierstore.wire.json import scan as json_scan

_LINE = 64  # bytes of a cache line


def areas() -> dict[str, int]:
    """Bytes of each area of a reactor's own memory, by its field of a `Reactor`."""
    sizes = {
        "events": kernel.EVENTS * sysio.EVENT_BYTES,
        "messages": kernel.MESSAGES * kernel.MESSAGE_BYTES,
        "buffer": kernel.BUFFER_BYTES + _LINE,
        "answer": kernel.HEAD_ROOM + by_plan.MOST_WORK_BYTES + _LINE,
        "data": json_scan.DATA_BYTES,
        "text": json_answer.HEAD_ROOM + kernel.MOST_TEXT_BYTES,
        "states": by_plan.MOST_KEYS + _LINE,
        "scratch": by_plan.SCRATCH_BYTES,
        "date": _LINE,
        "message": kernel.MESSAGE_BYTES,
        "record": request_record.RECORD_BYTES,
        "structure": request_record.MOST_STRUCTURE_BYTES,
        "bound": binding.RUN_BYTES,
        "values": answer_values.VALUES.bytes,
        "codes": 8 * by_plan.MOST_KEYS,
        "headers": http2_layout.WORK_BYTES,
        "frames": kernel.FRAMES_BYTES,
        "pieces": http2_layout.PIECES * TEXT.bytes,
        "found": http1_head.HEAD.bytes,
        "call": kernel.ANSWERED_CALL.bytes,
        "again": kernel.TURNS.bytes,
    }
    return {field: -(-size // _LINE) * _LINE for field, size in sizes.items()}


def limits_of(settings: Settings, threads: int, connections: int, descriptors: int) -> npt.NDArray[Any]:
    """The limits of requests and connections for `threads` reactors."""
    return kernel.LIMITS.make(
        most_connections=connections,
        most_body=min(settings.max_request, settings.max_inflight),
        most_upload=max(settings.max_request, settings.max_delta),
        most_message=most_message(settings),
        most_answer=settings.max_response,
        most_inflight=settings.max_inflight,
        idle_ns=int(settings.idle_timeout_s * 1e9),
        arrival_ns=int(settings.arrival_timeout_s * 1e9),
        stall_ns=int(slow_clients.STALL_S * 1e9),
        pressed_stall_ns=int(slow_clients.PRESSED_STALL_S * 1e9),
        most_wait_ns=int(settings.max_queue_s * 1e9),
        finish_ns=int(slow_clients.ENDING_S * 1e9),
        turn_off_ns=int(min(slow_clients.TURN_OFF_S, settings.idle_timeout_s) * 1e9),
        slowest_rate=slow_clients.SLOWEST_RATE,
        reactors=threads,
        most_descriptors=descriptors,
        pool_threads=settings.lookup_threads,
        pool_queue=settings.lookup_queue,
        traces=settings.traces,
    )


def register(epoll: int, fd: int, mask: int, data: int) -> None:
    """`epoll_ctl` with 64 bits of data, which the standard library does not offer."""
    failed = reactor_loop.watch(epoll, fd, mask, data)
    if failed:
        raise OSError(-failed, os.strerror(-failed))
