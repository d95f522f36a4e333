"""Children to be killed: each does some work on a directory, and all that it changes there is recorded.

They are forked from one process that has imported everything and opened nothing, so that one starts at once. What is recorded
(`tools/disk_trace.py`) takes a C compiler; without one there are no records, and the rest works.

Of one thread.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

from tools.crash_work import DENSE, dense_part, warm_kernels
from tools.disk_trace import Operation, build, operations

ROOT = Path(__file__).parents[1]


class Nursery:
    """Under `root`, which has a directory `disk`: children run `work(root, **arguments)` of a module. A context manager."""

    def __init__(self, root: Path, module: str) -> None:
        self._root, self._trace, self._stderr = root, root / "trace", root / "stderr"
        recorder = build(root)
        self.records = recorder is not None  # whether operations are recorded
        preload = {"LD_PRELOAD": str(recorder)} if self.records else {}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tools.nursery", str(root), module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr.open("wb"),
            text=True,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)} | preload,
        )
        self._pid = 0

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()  # it kills the child, if there is one
        self._process.wait(30)

    def start(self, *, traced: bool, **arguments: Any) -> None:
        """Have a child begin its work; with `traced`, what it changes below `root/disk` is recorded."""
        self._trace.unlink(missing_ok=True)
        self._pid = self._say(json.dumps({"trace": str(self._trace) if traced else "", "arguments": arguments}))

    def kill(self) -> list[Operation]:
        """Kill the child, and return what it did, as far as that is recorded. AssertionError where it had ended already."""
        os.kill(self._pid, signal.SIGKILL)  # a zombie at worst: only the next line has it reaped
        status = os.waitstatus_to_exitcode(self._say(""))
        if status != -signal.SIGKILL:
            raise AssertionError(f"the child failed: {self._stderr.read_text()}")
        return operations(self._trace)

    def _say(self, line: str) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())


# --- the process that children are forked from


def main(root: Path, module: str) -> None:
    """Fork a child for each line of stdin, print its pid, and reap it at the next line."""
    work = importlib.import_module(module).work
    warm_kernels()
    if DENSE:
        dense_part(0)
        import onnxruntime  # noqa: F401 - once, for all children
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if not pid:
            try:
                if trace := order["trace"]:
                    os.environ |= {"DISK_TRACE": trace, "DISK_TRACE_ROOT": f"{root}/disk"}  # load helpers too
                    ctypes.CDLL(None).trace_to(trace.encode(), f"{root}/disk".encode())
                work(root, **order["arguments"])
            except BaseException:  # noqa: BLE001
                traceback.print_exc()
            finally:
                os._exit(1)
        print(pid, flush=True)
        if not sys.stdin.readline():  # nobody is left to kill the child
            os.kill(pid, signal.SIGKILL)
        print(os.waitpid(pid, 0)[1], flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
