"""Child processes of the demo: the service itself and the load generator, started and ended by their own ids.

Each child's output goes to a file; nothing here reads a pipe, so a chatty child cannot block. A child
is its own session, so that Ctrl-C reaches the demo alone, which then ends its children in order.

Threads: used from the demo's main thread. After a `kill -9` of the demo, the load generator ends by
itself (its standard input closes); the service would go on and must be stopped by hand.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

import tierstore
from tierstore.config import ENV_PREFIX
from tierstore.errors import NotReady

URL = re.compile(r"https?://[^\s/'\"]+:[1-9]\d*")
STOP_S = 15.0


class Child:
    """A running `python -m …`. A context manager: leaving it stops the process.

    `settings` reach it as environment variables (`drain_s="0"` as TIERSTORE_DRAIN_S).
    """

    def __init__(self, name: str, arguments: Sequence[str], directory: Path, **settings: str) -> None:
        self.name, self.log = name, directory / f"{name}.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *arguments],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=directory,
                env=_environment(settings),
                start_new_session=True,
            )

    def output(self) -> str:
        """What it has printed so far."""
        return self.log.read_text(errors="replace")

    def wait_for(self, pattern: re.Pattern[str], timeout_s: float) -> str:
        """The first match of `pattern` in its output. Raises NotReady with the output when it ends or time runs out."""
        deadline = time.monotonic() + timeout_s
        while True:
            ended = self.process.poll() is not None
            found = pattern.search(self.output())
            if found:
                return found.group()
            if ended or time.monotonic() > deadline:
                why = f"ended with {self.process.returncode}" if ended else f"said nothing of it for {timeout_s:.0f} s"
                raise NotReady(f"expected the {self.name} to start, but it {why}; its output:\n{self.output()[-4000:]}")
            time.sleep(0.02)

    def close_input(self, timeout_s: float = STOP_S) -> int:
        """Close its standard input, which tells it to finish, and wait for it. Returns its exit status."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        return self.process.wait(timeout_s)

    def stop(self) -> None:
        """Ask it to end (SIGTERM), and end it if it has not after a while."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()


def start_service(directory: Path, *, port: int, host_budget: str) -> Child:
    """`tierstore serve` with its data under `directory`, reading snapshots from there. `service_url` says when it answers."""
    arguments = ["serve", "--data", str(directory / "data"), "--port", str(port), "--source-root", str(directory)]
    return Child("service", ["tierstore", *arguments, "--host-budget", host_budget], directory, drain_s="0")


def service_url(service: Child, timeout_s: float = 300.0) -> str:
    """The address that the service prints once it listens (a first start compiles its kernels). Raises NotReady if it does not."""
    return service.wait_for(URL, timeout_s)


def _environment(settings: Mapping[str, str]) -> dict[str, str]:
    """This process's, with `settings` in place of the user's settings of a real store, and this very package importable."""
    kept = {name: value for name, value in os.environ.items() if not name.upper().startswith(ENV_PREFIX)}
    package = str(Path(tierstore.__file__).resolve().parent.parent)
    paths = [package, *filter(None, kept.get("PYTHONPATH", "").split(os.pathsep))]
    ours = {ENV_PREFIX + name.upper(): value for name, value in settings.items()}
    return {**kept, **ours, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
