"""A graph of a new structure is made into a session in a process of its own first, which may be killed."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from tests.engine.scenes import eventually
from tests.predict import onnx_models as om
from tests.predict.conftest import FEATURES, TABLES
from tierstore.config import load_settings
from tierstore.errors import Closed, InvalidInput, LoadCancelled, Overloaded, StorageError
from tierstore.kernels import child_environment
from tierstore.predict import sandbox
from tierstore.predict.graphs import inspect
from tierstore.predict.runtime import Runtime
from tierstore.predict.session import DenseCounts

MIB = 1 << 20
ENDLESS = om.folding(5000, 400)  # minutes


@pytest.fixture
def started(monkeypatch) -> list[subprocess.Popen[bytes]]:
    """The processes that were started."""
    processes = []

    def start(*args):
        processes.append(real(*args))
        return processes[-1]

    real = sandbox._start
    monkeypatch.setattr(sandbox, "_start", start)
    return processes


def runtime(**settings) -> Runtime:
    return Runtime(load_settings(None, **settings))


def load(runtime: Runtime, model: bytes, **options):
    return runtime.load(model, FEATURES, TABLES, DenseCounts(), **options)


def linear(weight: float) -> bytes:
    return om.linear({"user_id": np.full(4, weight)}, bias=weight)


def test_a_structure_is_tried_once_whatever_the_weights(started):
    of = runtime()
    for weight in (1.0, 2.0, 3.0):
        load(of, linear(weight))
    assert [process.returncode for process in started] == [0]
    load(of, om.linear({"item_id": np.ones(8)}))
    assert len(started) == 2


def test_what_was_accepted_before_is_not_tried_and_others_of_its_structure_are_not_either(started):
    of = runtime()
    load(of, linear(1.0), accepted=True)
    load(of, linear(2.0))
    assert not started


def test_a_structure_is_all_but_the_values_of_weights():
    def structure(change) -> bytes:
        return inspect(om.changed(om.folding(2, 8), change)).structure

    same = structure(lambda proto: None)
    assert inspect(om.folding(2, 8, seed=1)).structure == same
    assert inspect(om.folding(2, 9)).structure != same
    assert inspect(om.folding(3, 8)).structure != same
    longer = structure(lambda proto: setattr(proto.graph.initializer[0], "raw_data", bytes(1 << 20)))
    assert longer != same  # more constants would be computed ahead
    assert inspect(om.swelling(1)).structure != inspect(om.swelling(2)).structure  # sizes are no weights
    texts = [
        om.concatenating(1),
        om.changed(om.concatenating(1), lambda p: p.graph.initializer[0].string_data.append(b"")),
    ]
    assert len({inspect(text).structure for text in texts}) == 2


def test_one_that_is_not_ready_in_time_is_refused_and_its_process_killed(started, monkeypatch):
    monkeypatch.setattr(sandbox, "CREATE_S", 0.5)
    of = runtime()
    for _ in range(2):
        with pytest.raises(InvalidInput, match=r"cannot be made ready to run within 0\.5 s"):
            load(of, ENDLESS)
    assert [process.returncode for process in started] == [-signal.SIGKILL] * 2


def test_one_that_takes_too_much_memory_is_refused(started):
    of = runtime(dense_memory=32 * MIB)
    with pytest.raises(InvalidInput, match="takes more than 288 MiB of memory"):
        of.sandbox.check(om.concatenating(28), b"", lambda: None, waits=True)
    assert [process.returncode for process in started] == [-signal.SIGKILL]


def test_what_onnx_runtime_refuses_is_refused_as_by_itself():
    with pytest.raises(InvalidInput, match=r"ONNX Runtime refuses the model: .*NoSuchOperator"):
        load(runtime(), om.build([om.node("NoSuchOperator", "x", "y")], {"x": (om.FLOAT, [1])}, {"y": (om.FLOAT, [1])}))


@pytest.mark.parametrize("end", ["cancel", "end_all", "close"])
def test_the_sandbox_ends_when_the_load_is_cancelled_or_the_service_stops(started, end):
    of = runtime()
    errors: list[BaseException] = []
    cancelled = threading.Event()

    def may_go_on() -> None:
        if cancelled.is_set():
            raise LoadCancelled("the load was cancelled")

    def make() -> None:
        try:
            load(of, ENDLESS, may_go_on=may_go_on)
        except BaseException as error:  # noqa: BLE001 - looked at below
            errors.append(error)

    thread = threading.Thread(target=make)
    thread.start()
    eventually(lambda: started, "the process")
    cancelled.set() if end == "cancel" else getattr(of.limits, end)()
    thread.join(60)
    assert [type(error) for error in errors] == [LoadCancelled if end == "cancel" else Closed]
    assert [process.returncode for process in started] == [-signal.SIGKILL]


def test_more_at_once_wait_or_are_refused_and_known_structures_go_on(started):
    of = runtime()
    load(of, linear(1.0))
    for _ in range(sandbox.AT_ONCE):
        of.sandbox._slots.acquire()
    with pytest.raises(Overloaded, match="2 dense parts of new structures are being tried; try again"):
        load(of, om.linear({"item_id": np.ones(8)}), waits=False)
    load(of, linear(2.0), waits=False)

    looks: list[None] = []

    def one_is_done() -> None:
        looks.append(None)
        if len(looks) == 3:
            of.sandbox._slots.release()

    load(of, om.linear({"item_id": np.ones(8)}), may_go_on=one_is_done)
    assert len(started) == 2


@pytest.mark.parametrize(
    ("does", "error", "says"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", InvalidInput, r"crashes on the graph \(SIGSEGV\)"),
        ("os.kill(os.getpid(), signal.SIGKILL)", Overloaded, r"was killed \(was memory short\?\)"),
        ("sys.exit('no such module')", StorageError, "ended with status 1; it said: no such module"),
    ],
)
def test_a_process_that_ends_without_an_answer_is_an_error_that_says_how(monkeypatch, does, error, says):
    def start(graph: int, said: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", f"import os, signal, sys; {does}"]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said, bufsize=0)

    monkeypatch.setattr(sandbox, "_start", start)
    with pytest.raises(error, match=says):
        load(runtime(), linear(1.0))


def test_a_process_that_cannot_be_started_is_an_error_that_says_so(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    with pytest.raises(StorageError, match=r"cannot start a process \(/nonexistent/python\): No such file"):
        load(runtime(), linear(1.0))


def test_a_file_in_memory_that_cannot_be_made_is_an_error_that_says_so(monkeypatch):
    def fail(name: str) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", fail)
    with pytest.raises(StorageError, match="cannot make a file in memory for a graph: Too many open files"):
        load(runtime(), linear(1.0))


def test_no_process_outlives_one_that_was_killed():
    program = """
import sys
from tests.predict import onnx_models as om
from tests.predict.test_sandbox import ENDLESS, load, runtime
from tierstore.predict import sandbox
real = sandbox._start
def start(*args):
    process = real(*args)
    print(process.pid, flush=True)
    return process
sandbox._start = start
load(runtime(), ENDLESS)
"""
    parent = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, env=child_environment(), cwd=Path(__file__).parents[2]
    )
    assert parent.stdout is not None
    with parent:
        pid = int(parent.stdout.readline())
        os.kill(pid, 0)
        parent.kill()

    def has_ended() -> bool:
        try:
            return not Path(f"/proc/{pid}/cmdline").read_bytes()
        except FileNotFoundError:
            return True

    eventually(has_ended, "its end")


def test_the_sandbox_needs_little():
    """Neither the store nor its kernels: it starts in the time that NumPy and ONNX Runtime take."""
    program = "import sys, tierstore.predict.sandbox_process; print(*sys.modules)"
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    assert {name.split(".")[0] for name in found.split()} & {"numpy", "numba", "onnx", "pydantic", "xxhash"} == set()
