"""The demo's service: a real `tierstore serve` in a process of its own.

Its output goes to a file, so that nothing blocks on a pipe. It has its own session: Ctrl-C reaches the demo alone,
which then stops the service.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import tierstore
from tierstore.config import ENV_PREFIX
from tierstore.errors import NotReady

_URL = re.compile(r"https?://[^\s/'\"]+:[1-9]\d*")
_STOP_S = 15.0


class ServiceProcess:
    """`tierstore serve` with its data in `directory`, reading snapshots from there.

    As a context manager it is stopped.
    """

    def __init__(self, directory: Path, *, port: int, host_budget: str) -> None:
        arguments = ["--data", str(directory / "data"), "--port", str(port), "--source-root", str(directory)]
        # The user's own settings are meant for another store.
        environment = {name: value for name, value in os.environ.items() if not name.upper().startswith(ENV_PREFIX)}
        package = str(Path(tierstore.__file__).resolve().parents[1])
        paths = [package, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
        own = {f"{ENV_PREFIX}DRAIN_S": "0", "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
        self._log = directory / "service.log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tierstore", "serve", *arguments, "--host-budget", host_budget],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=directory,
                env={**environment, **own},
                start_new_session=True,
            )

    def url(self, timeout_s: float = 300.0) -> str:
        """The address that it prints once it listens (a first start compiles kernels). NotReady if it does not."""
        deadline = time.monotonic() + timeout_s
        while True:
            ended = self.process.poll()
            output = self._log.read_text(errors="replace")
            if found := _URL.search(output):
                return found.group()
            if ended is not None or time.monotonic() > deadline:
                why = f"did not within {timeout_s:.0f} s" if ended is None else f"ended with {ended}"
                raise NotReady(f"expected the service to start, but it {why}; its output:\n{output[-4000:]}")
            time.sleep(0.02)

    def __enter__(self) -> ServiceProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        try:
            self.process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
