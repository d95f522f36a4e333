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
import sys
import sysconfig
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.wire_lookup import cpu_s
from benchmarks.wire_table import FEATURE, MODEL

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
    metrics: int = 0
    model: str = MODEL  # that is asked

    def cpu_s(self) -> float:
        return sum(cpu_s(pid) for pid in self.pids)

    def served(self) -> int:
        """Requests that it has answered, by its own count."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.http}/v2/models/{self.model}/stats", timeout=30) as answer:
            (stats,) = json.load(answer)["model_stats"]
        return int(stats["inference_stats"]["success"]["count"])


@dataclass(frozen=True)
class Packages:
    """A virtual environment with Triton's packages: of its Python nothing is run."""

    venv: Path
    packages: Path

    @classmethod
    def at(cls, venv: Path) -> Packages:
        found = [path for path in venv.absolute().glob("lib/python3*/site-packages") if (path / "pytriton").is_dir()]
        if not found:
            raise Unavailable(f"there are no packages of Triton in {venv}; `make bench-triton` tries to install them")
        return cls(venv.absolute(), found[0])

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
            str(self._program), "-m", peer.model, "--input-data", str(data), "--concurrency-range", str(at_once),
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
def serving(
    packages: Packages,
    models: Path,
    folder: Path,
    *,
    arguments: Sequence[str] = (),
    python: Path | None = None,
    variables: Mapping[str, str] | None = None,
) -> Iterator[Peer]:
    """Triton's server over a model repository. Raises Unavailable.

    Its Python backend runs in `python`, by default this program's, with these further `variables` of the environment.

    `folder` takes the backend, with the program for this version of Python beside it, and the server's log.
    """
    server = packages.packages / "pytriton" / "tritonserver"
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = server / "python_backend_stubs" / version / "triton_python_backend_stub"
    if not stub.exists():
        raise Unavailable(f"Triton: there is no {stub}")
    backends, log = folder / "backends", folder / "triton.log"
    shutil.copytree(server / "backends" / "python", backends / "python")
    shutil.copy(stub, backends / "python")
    http, grpc, metrics = free_port(), free_port(), free_port()
    ours = sysconfig.get_config_var("LIBDIR")
    environment = packages.environment(str(packages.packages / "nvidia_pytriton.libs"), ours)
    environment["PATH"] = os.pathsep.join([str((python or Path(sys.executable)).parent), environment["PATH"]])
    environment |= variables or {}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                str(server / "bin" / "tritonserver"), "--model-repository", str(models), "--backend-directory", str(backends),
                "--http-address", "127.0.0.1", "--http-port", str(http), "--grpc-address", "127.0.0.1", "--grpc-port", str(grpc),
                "--metrics-address", "127.0.0.1", "--metrics-port", str(metrics), *arguments,
            ],
            stdout=output, stderr=subprocess.STDOUT, env=environment,
        )  # fmt: skip
    try:
        until = time.monotonic() + START_S
        while not answers_ready(http):
            if process.poll() is not None or time.monotonic() > until:
                said = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
                raise Unavailable(f"Triton did not start: {said[-1] if said else 'it said nothing'}")
            time.sleep(0.1)
        yield Peer("Triton", (process.pid, *children(process.pid)), http, grpc, metrics)
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


@contextmanager
def triton(packages: Packages, table: np.ndarray, folder: Path) -> Iterator[Peer]:
    """Triton's server, with `triton_model.py` over this table. Raises Unavailable."""
    write_take(folder / "models", table, MODEL)
    with serving(packages, folder / "models", folder, arguments=["--allow-metrics", "0"]) as peer:
        yield peer


def write_take(models: Path, table: np.ndarray, name: str) -> None:
    """A model `name` of `triton_model.py` over this table, in a model repository."""
    model = models / name
    (model / "1").mkdir(parents=True)
    shutil.copy(SCRIPT, model / "1" / "model.py")
    np.save(model / "table.npy", table)
    (model / "config.pbtxt").write_text(
        f'backend: "python"\nmax_batch_size: 0\n'
        f'input [{{ name: "{FEATURE}" data_type: TYPE_INT64 dims: [-1] }}]\n'
        f'output [{{ name: "{FEATURE}" data_type: TYPE_FP32 dims: [-1, {table.shape[1]}] }}]\n'
        f'parameters [{{ key: "table" value: {{ string_value: "{model / "table.npy"}" }} }}]\n'
        "instance_group [{ count: 1 kind: KIND_CPU }]\n",
        encoding="utf-8",
    )


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
