"""Makes sessions of ONNX Runtime. It imports next to nothing, for the processes in which graphs are tried.

`make_session`: any thread, one session at a time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from tierstore.errors import ConfigError, Overloaded
from tierstore.threads import Timer

CREATE_S = 60.0  # to make a graph ready; after that ONNX Runtime stops before its next pass over the graph
_TICK_S = 0.1
_SMALLEST_FOLDED = 1 << 20
_FOLDED_RATIO = 4  # 8-bit weights become 32-bit ones
_FATAL = 4  # of ONNX Runtime's log levels: errors are raised, and logged by us
_creating = threading.Lock()  # what is registered counts for the whole process


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """What a session is made with, by ONNX Runtime's names; `entries` are of the session's configuration.

    `memory_bytes` is what its tensors may use of CPU memory, all its runs together, without
    its weights; None: no limit.
    """

    providers: list[Any]
    memory_bytes: int | None
    entries: dict[str, str]
    intra_op_num_threads: int = 1
    inter_op_num_threads: int = 1
    graph_optimization_level: str = "ORT_ENABLE_ALL"
    enable_cpu_mem_arena: bool = True


def make_session(
    onnxruntime: Any, model: bytes, settings: SessionSettings, may_go_on: Callable[[], None] = lambda: None
) -> Any:
    """A session. Constants are computed ahead only where the result is of a size that weights may have.

    While another session is being made `may_go_on` is called, which may raise; Overloaded
    where that one takes too long.
    """
    options = _options(onnxruntime, settings)
    folded = max(_SMALLEST_FOLDED, _FOLDED_RATIO * len(model))
    options.add_session_config_entry("optimization.constant_folding_max_output_size_in_bytes", str(folded))
    with _turn(may_go_on):
        if settings.memory_bytes is not None:
            options.add_session_config_entry("session.use_env_allocators", "1")
            options.add_session_config_entry("session.use_device_allocator_for_initializers", "1")
            # each session gets the arena that was registered last. Releases that register one only once refuse another:
            # then all sessions share the first one, and its limit
            with suppress(Exception):
                _register_arena(onnxruntime, settings.memory_bytes)
        timer = Timer(CREATE_S, lambda: options.set_load_cancellation_flag(True))
        timer.daemon = True
        timer.start()
        try:
            return onnxruntime.InferenceSession(model, options, providers=settings.providers)
        finally:
            timer.cancel()


def _options(onnxruntime: Any, settings: SessionSettings) -> Any:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = _FATAL
    options.intra_op_num_threads, options.inter_op_num_threads = (
        settings.intra_op_num_threads,
        settings.inter_op_num_threads,
    )
    if settings.inter_op_num_threads > 1:
        options.execution_mode = onnxruntime.ExecutionMode.ORT_PARALLEL
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, settings.graph_optimization_level)
    options.enable_cpu_mem_arena = settings.enable_cpu_mem_arena
    # it keeps a pattern for every combination of input shapes, without limit: batches have many sizes
    options.enable_mem_pattern = False
    for key, value in settings.entries.items():
        try:
            options.add_session_config_entry(key, value)
        except Exception as error:
            raise ConfigError(f"dense_options: ONNX Runtime refuses {key}={value!r}: {brief(error)}") from error
    return options


@contextmanager
def _turn(may_go_on: Callable[[], None]) -> Iterator[None]:
    until_s = time.monotonic() + CREATE_S
    while not _creating.acquire(timeout=_TICK_S):
        may_go_on()
        if time.monotonic() > until_s:
            raise Overloaded(
                f"another dense part has been made ready for more than {CREATE_S:g} s, and this one waits for it; try "
                "again later"
            )
    try:
        yield
    finally:
        _creating.release()


def _register_arena(onnxruntime: Any, memory_bytes: int) -> None:
    info = onnxruntime.OrtMemoryInfo(
        "Cpu", onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, onnxruntime.OrtMemType.DEFAULT
    )
    onnxruntime.create_and_register_allocator(info, onnxruntime.OrtArenaCfg({"max_mem": memory_bytes}))


def brief(error: BaseException) -> str:
    """ONNX Runtime's message, without its prefix, on one line of bounded length."""
    text = " ".join(str(error).split())
    if text.startswith("[ONNXRuntimeError]"):
        text = text.split(" : ", 3)[-1]
    return text if len(text) <= 300 else text[:299] + "…"
