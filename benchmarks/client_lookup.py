"""What a look-up costs its client: `python -m benchmarks.client_lookup [--full]`.

The service as it is, in a process of its own, every row in memory; from keys to an array of rows in this process, one
look-up after the other. Clients take turns within a round, so that whatever else the machine does meets all of them alike.
CPU is this process's own clock, wall the time of a look-up; both are medians over the rounds, ratios medians of each
round's ratio to `Client`. `httpx` is the same request by that library, received into one array, `tritonclient` the
protocol's own client where it is installed.
"""

from __future__ import annotations

import asyncio
import importlib.util
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import numpy as np

from benchmarks.machine import describe
from benchmarks.options import parser_of
from benchmarks.report import headline, markdown, write
from benchmarks.wire_lookup import http_request
from benchmarks.wire_table import FEATURE, MODEL, keys_of, vectors_of
from tierstore.client import AsyncClient, Client

VARIANTS = 16
KEYS_A_ROUND = 120_000
Way = Callable[[np.ndarray], np.ndarray]


@contextmanager
def ways(url: str, runner: asyncio.Runner) -> Iterator[dict[str, Way]]:
    """Clients by name; each takes keys and gives rows."""
    plain = Client(url)
    loop = runner.get_loop()
    of_asyncio, of_httpx = AsyncClient(url), httpx.Client(base_url=url)

    def by_httpx(keys: np.ndarray) -> np.ndarray:
        head, _, body = http_request(keys).partition(b"\r\n\r\n")
        length = head.rpartition(b": ")[2].decode()
        headers = {"Inference-Header-Content-Length": length, "Accept-Encoding": "identity"}
        with of_httpx.stream("POST", f"/v2/models/{MODEL}/infer", headers=headers, content=body) as answer:
            memory = np.empty(int(answer.headers["content-length"]), np.uint8)
            at = 0
            for chunk in answer.iter_raw():
                memory[at : at + len(chunk)] = np.frombuffer(chunk, np.uint8)
                at += len(chunk)
            skip = int(answer.headers["inference-header-content-length"])
        return memory[skip:].copy().view(np.float32).reshape(len(keys), -1)

    made: dict[str, Way] = {
        "Client": lambda keys: plain.lookup(MODEL, FEATURE, keys),
        "AsyncClient": lambda keys: loop.run_until_complete(of_asyncio.lookup(MODEL, FEATURE, keys)),
        "httpx": by_httpx,
    }
    if importlib.util.find_spec("tritonclient") is not None:
        import tritonclient.http as triton

        client = triton.InferenceServerClient(url.removeprefix("http://"))

        def by_triton(keys: np.ndarray) -> np.ndarray:
            given = triton.InferInput(FEATURE, [len(keys)], "INT64")
            given.set_data_from_numpy(keys)
            answer = client.infer(MODEL, [given], outputs=[triton.InferRequestedOutput(FEATURE)])
            return np.asarray(answer.as_numpy(FEATURE))

        made["tritonclient"] = by_triton
    try:
        yield made
    finally:
        plain.close()
        runner.run(of_asyncio.close())
        of_httpx.close()


def measure(made: dict[str, Way], rows: int, n: int, rounds: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(n)
    batches = [keys_of(rng.integers(0, rows, n)) for _ in range(VARIANTS)]
    calls = max(4, min(100, KEYS_A_ROUND // n))
    cpu: dict[str, list[float]] = {name: [] for name in made}
    wall: dict[str, list[float]] = {name: [] for name in made}
    for way in made.values():
        for keys in batches[:2]:
            np.testing.assert_array_equal(way(keys), vectors_of(keys))
    for _ in range(rounds):
        for name, way in made.items():
            used, began = time.process_time(), time.perf_counter()
            for call in range(calls):
                way(batches[call % VARIANTS])
            wall[name].append((time.perf_counter() - began) / calls * 1e6)
            cpu[name].append((time.process_time() - used) / calls * 1e6)
    return [
        {
            "keys": n, "client": name, "cpu_us": statistics.median(cpu[name]), "wall_us": statistics.median(wall[name]),
            "cpu_over_client": statistics.median(a / b for a, b in zip(cpu[name], cpu["Client"], strict=True)),
            "wall_over_client": statistics.median(a / b for a, b in zip(wall[name], wall["Client"], strict=True)),
        }
        for name in made
    ]  # fmt: skip


def main() -> None:
    options = parser_of(__file__, __doc__, "tiny", "full", rows=0, keys=[64, 1024, 4096, 16384, 49152]).parse_args()
    rows = options.rows or (2_000 if options.tiny else 1_000_000 if options.full else 200_000)
    rounds = 2 if options.tiny else 31 if options.full else 9
    with tempfile.TemporaryDirectory(prefix="client-") as where, asyncio.Runner() as runner:
        command = [sys.executable, "-m", "benchmarks.wire_servers", "store", "--where", where, "--rows", str(rows)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            try:
                with ways(f"http://127.0.0.1:{server.stdout.readline().split()[0]}", runner) as made:
                    results = [row for n in options.keys for row in measure(made, rows, n, rounds)]
            finally:
                server.terminate()
    at = {(row["keys"], row["client"]): row for row in results}
    headlines = []
    if (4096, "httpx") in at:
        value = at[4096, "httpx"]["cpu_over_client"]
        headlines.append(headline("httpx, client CPU of a look-up of 4,096 keys", "Client", value, at_least=2.0))
    document = {"benchmark": "client_lookup", "machine": describe(), "rows": rows, "headlines": headlines, "results": results}  # fmt: skip
    write(options.json, document)
    print(markdown(document))


if __name__ == "__main__":
    main()
