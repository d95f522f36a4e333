"""Triton Inference Server and its `perf_analyzer`, both from Python packages in a virtual environment of their own.

`make bench-triton` makes that environment. The package `nvidia-pytriton` carries the server with its Python backend,
and releases of `tritonclient` up to 2.50 carry the tool.
"""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.wire_lookup import cpu_s
from benchmarks.wire_table import DIM, FEATURE, MODEL

SCRIPT = Path(__file__).with_name("triton_model.py")
START_S = 120.0
TRIALS = 10  # windows of a turn, at most: it ends with the third in a row that is no more than ten times another


class Unavailable(Exception):
    """Triton or its load generator cannot run here; says why."""


@dataclass(frozen=True)
class Peer:
    """A running server: the processes whose time is its own, and where it listens."""

    name: str
    pids: tuple[int, ...]
    http: int
    grpc: int

    def cpu_s(self) -> float:
        return sum(cpu_s(pid) for pid in self.pids)

    def served(self) -> int:
        """Requests that it has answered, by its own count."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.http}/v2/models/{MODEL}/stats", timeout=30) as answer:
            (stats,) = json.load(answer)["model_stats"]
        return int(stats["inference_stats"]["success"]["count"])


@dataclass(frozen=True)
class Packages:
    """A virtual environment, and the libraries that its programs want."""

    venv: Path
    packages: Path
    version: str  # of its Python
    libraries: str  # of its Python

    @classmethod
    def at(cls, venv: Path) -> Packages:
        python = venv / "bin" / "python"
        if not python.exists():
            raise Unavailable(f"there is no {python}; `make bench-triton` tries to make it")
        asked = (
            "import sysconfig; g = sysconfig.get_config_var; "
            "print(sysconfig.get_path('purelib'), g('py_version_short'), g('LIBDIR'), sep='\\n')"
        )
        said = subprocess.run([str(python), "-c", asked], capture_output=True, text=True, check=True).stdout
        packages, version, libraries = said.split("\n")[:3]
        return cls(venv.absolute(), Path(packages), version, libraries)

    def environment(self, *libraries: str) -> dict[str, str]:
        path = [str(self.venv / "bin"), os.environ.get("PATH", "")]
        cleaned = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        return cleaned | {"PATH": os.pathsep.join(path), "LD_LIBRARY_PATH": os.pathsep.join(libraries)}


class Analyzer:
    """`perf_analyzer`, as it comes. Raises Unavailable where it does not start."""

    def __init__(self, packages: Packages) -> None:
        self._program = packages.venv / "bin" / "perf_analyzer"
        self._environment = packages.environment(str(packages.packages / "nvidia" / "cuda_runtime" / "lib"))
        if not self._program.exists():
            raise Unavailable(f"perf_analyzer: there is no {self._program}; `make bench-triton` tries to make it")
        tried = subprocess.run([str(self._program), "--version"], capture_output=True, text=True, env=self._environment)
        missing = re.search(r"\S+: cannot open shared object file", tried.stderr)
        if missing:
            raise Unavailable(f"perf_analyzer: {missing[0]} (libb64.so.0d is in Debian's package libb64-0d)")

    def turn(self, peer: Peer, data: Path, at_once: int, window_s: float, *, grpc: bool) -> Turn:
        """Ask with so many at once, each again as soon as it is answered."""
        table = data.with_suffix(".csv")
        table.unlink(missing_ok=True)
        command = [
            str(self._program), "-m", MODEL, "--input-data", str(data), "--concurrency-range", str(at_once),
            "-i", "grpc" if grpc else "http", "-u", f"127.0.0.1:{peer.grpc if grpc else peer.http}",
            "-p", str(round(window_s * 1000)), "-r", str(TRIALS), "-s", "999", "-f", str(table),
        ]  # fmt: skip
        served, used = peer.served(), peer.cpu_s()
        done = subprocess.run(command, capture_output=True, text=True, env=self._environment, timeout=300)
        used, served = peer.cpu_s() - used, peer.served() - served
        if done.returncode or not table.exists():
            raise RuntimeError(f"perf_analyzer against {peer.name}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
        with table.open(encoding="utf-8") as file:
            (row,) = csv.DictReader(file)
        return Turn(
            used / served * 1e6, float(row["Inferences/Second"]), float(row["p50 latency"]), float(row["p99 latency"])
        )


@dataclass(frozen=True)
class Turn:
    """What `perf_analyzer` says, and the server's processor time for a request."""

    cpu_us: float
    requests_per_s: float
    p50_us: float
    p99_us: float


def write_data(path: Path, batches: Sequence[np.ndarray]) -> Path:
    """A file for `--input-data`: requests with these keys, sent in turn."""
    entries = [{FEATURE: {"content": keys.tolist(), "shape": [len(keys)]}} for keys in batches]
    path.write_text(json.dumps({"data": entries}), encoding="utf-8")
    return path


@contextmanager
def triton(packages: Packages, table: np.ndarray, folder: Path) -> Iterator[Peer]:
    """Triton's server, with `triton_model.py` over this table. Raises Unavailable."""
    server = packages.packages / "pytriton" / "tritonserver"
    stub = server / "python_backend_stubs" / packages.version / "triton_python_backend_stub"
    if not stub.exists():
        raise Unavailable(f"Triton: there is no {stub}")
    backends, model = folder / "backends", folder / "models" / MODEL
    shutil.copytree(server / "backends" / "python", backends / "python")
    shutil.copy(stub, backends / "python")
    (model / "1").mkdir(parents=True)
    shutil.copy(SCRIPT, model / "1" / "model.py")
    np.save(folder / "table.npy", table)
    (model / "config.pbtxt").write_text(
        f'name: "{MODEL}"\nbackend: "python"\nmax_batch_size: 0\n'
        f'input [{{ name: "{FEATURE}" data_type: TYPE_INT64 dims: [-1] }}]\n'
        f'output [{{ name: "{FEATURE}" data_type: TYPE_FP32 dims: [-1, {DIM}] }}]\n'
        f'parameters [{{ key: "table" value: {{ string_value: "{folder / "table.npy"}" }} }}]\n'
        "instance_group [{ count: 1 kind: KIND_CPU }]\n",
        encoding="utf-8",
    )
    http, grpc = free_port(), free_port()
    log = folder / "triton.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                str(server / "bin" / "tritonserver"), "--model-repository", str(model.parent), "--backend-directory", str(backends),
                "--http-address", "127.0.0.1", "--http-port", str(http), "--grpc-address", "127.0.0.1", "--grpc-port", str(grpc),
                "--allow-metrics", "0",
            ],
            stdout=output, stderr=subprocess.STDOUT,
            env=packages.environment(str(packages.packages / "nvidia_pytriton.libs"), packages.libraries),
        )  # fmt: skip
    try:
        until = time.monotonic() + START_S
        while not answers_ready(http):
            if process.poll() is not None or time.monotonic() > until:
                said = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
                raise Unavailable(f"Triton did not start: {said[-1] if said else 'it said nothing'}")
            time.sleep(0.1)
        yield Peer("Triton", (process.pid, *children(process.pid)), http, grpc)
    finally:
        process.terminate()
        process.wait(60)


def children(pid: int) -> list[int]:
    """All processes below this one."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += [int(child), *children(int(child))]
    return found


def answers_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/health/ready", timeout=5) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
