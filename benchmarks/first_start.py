"""How long the first start takes, with no kernel compiled, and the second.

    python -m benchmarks.first_start [--rows 100000]

A copy of the package is started in an environment without compiled kernels and without HOME, over a model that was loaded
before. Times are in seconds from the start of the process: until the service is ready, has answered a look-up over HTTP with
the right rows, and has its reactors; and until a program has opened the store and looked rows up.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np

import tierstore
from benchmarks.wire_lookup import cpu_s

ROOT = Path(__file__).parents[1]
PROGRAM = """
import sys, numpy as np, tierstore
with tierstore.open(sys.argv[1]) as store:
    rows = store.model("ctr").lookup("item", np.arange(0, 1000, 10))
    assert (rows[:, 0] == np.arange(0, 1000, 10)).all()
    print("right", flush=True)
"""


def install(folder: Path) -> dict[str, str]:
    """Copy the package, as pip leaves it. Returns the environment that runs the copy."""
    shutil.copytree(ROOT / "tierstore", folder / "tierstore", ignore=shutil.ignore_patterns("__pycache__"))
    compileall.compile_dir(folder / "tierstore", quiet=2)
    kept = {"PATH": os.environ["PATH"], "PYTHONPATH": str(folder)}
    return {**kept, "XDG_CACHE_HOME": str(folder / "cache")}


def load(data: Path, rows: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        with tierstore.SnapshotWriter(f"{folder}/1", model="ctr", version=1) as writer:
            keys = np.arange(rows)
            writer.table("item", dim=32).write(keys, np.repeat(keys[:, None], 32, 1).astype(np.float32))
            writer.feature("item", table="item")
        with tierstore.open(data) as store:
            store.load_snapshot(f"{folder}/1")


def ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/v2/health/ready", timeout=60):
            return True
    except urllib.error.HTTPError as error:
        error.close()
        return False


def serve(data: Path, env: dict[str, str], log: Path) -> dict[str, float]:
    """Start the service, measure, and stop it."""
    command = [sys.executable, "-m", "tierstore", "serve", "--port", "0", "--grpc-port", "off", "--data", str(data)]
    start_s, seconds = time.monotonic(), {}
    with (
        log.open("w") as errors,
        subprocess.Popen(command, env=env, cwd=data, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        assert process.stdout is not None
        try:
            url = re.search(r"http://\S+", process.stdout.readline())
            assert url is not None, log.read_text()
            while not ready(url[0]):
                time.sleep(0.01)
            seconds["ready"] = time.monotonic() - start_s
            seconds["processor time until then"] = cpu_s(process.pid)
            keys = np.arange(0, 1000, 10)
            with tierstore.Client(url[0]) as client:
                assert (client.lookup("ctr", "item", keys)[:, 0] == keys).all()
                seconds["right answer"] = time.monotonic() - start_s
                while client.status()["service"].get("reactors") == "compiling" and time.monotonic() < start_s + 300:
                    time.sleep(0.1)
                assert (client.lookup("ctr", "item", keys)[:, 0] == keys).all()
                seconds["reactors"] = time.monotonic() - start_s
        finally:
            process.terminate()
            process.wait(60)
    return seconds


def in_process(data: Path, env: dict[str, str]) -> dict[str, float]:
    start_s = time.monotonic()
    subprocess.run([sys.executable, "-c", PROGRAM, str(data)], env=env, cwd=data, check=True, stdout=subprocess.DEVNULL)
    return {"right answer": time.monotonic() - start_s}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=100_000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "data").mkdir()
        load(folder / "data", arguments.rows)
        env = install(folder / "service")
        results = {"service, first start": serve(folder / "data", env, folder / "log")}
        log = (folder / "log").read_text()
        results["service, second start"] = serve(folder / "data", env, folder / "log")
        results["in process, first start"] = in_process(folder / "data", install(folder / "program"))
    print(log)
    print(json.dumps({what: {k: round(v, 2) for k, v in of.items()} for what, of in results.items()}, indent=2))


if __name__ == "__main__":
    main()
