"""Ranking requests through the client, whole and in shards: `python -m benchmarks.client_predict [--quick | --full]`.

One request scores 700 items of one user: 20 features a item, each a look-up, through `Client.predict` at a service of its
own process (a model without a dense part answers the features' rows, which is the heaviest answer a ranking request has;
`--dim` sets how heavy). Ways of sending take turns, call by call, so that whatever else the machine does meets all of them
alike; figures are over all calls. p99 of the client in shards is to be below that of one request.
"""

from __future__ import annotations

import argparse
import logging
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import tierstore
from benchmarks.machine import describe
from benchmarks.report import headline, markdown, write
from tierstore.client import Client
from tierstore.client.face import SPLIT_ITEMS
from tierstore.config import load_settings

MODEL = "rank"
ITEMS, FEATURES = 700, 20
WARM_CALLS = 20


def keys_of(rows: np.ndarray) -> np.ndarray:
    """Keys of these rows: distinct, spread over all 64 bits."""
    with np.errstate(over="ignore"):
        return rows.astype(np.int64) * np.int64(-7046029254386353131)


def vectors_of(keys: np.ndarray, dim: int) -> np.ndarray:
    """float32[n, dim], known from the key, so that answers can be checked."""
    return (keys & 0xFFFF).astype(np.float32)[:, None] + np.arange(dim, dtype=np.float32)


def serve(where: Path, rows: int, dim: int) -> None:
    """A service whose rows are all in memory; prints its port."""
    from tierstore.service.server import serve as run

    budget = f"{max(64, rows * (4 * dim + 16) * 2 >> 20)}MiB"
    source, data = where / "snapshot", where / "data"
    keys = keys_of(np.arange(rows))
    with tierstore.SnapshotWriter(source, model=MODEL, version=1) as writer:
        writer.table("item", dim=dim).write(keys, vectors_of(keys, dim))
        for number in range(FEATURES):
            writer.feature(f"f{number:02}", table="item")
        writer.warmup("item", keys)
    with tierstore.open(data, host_budget=budget) as store:
        store.load_snapshot(source)
    logging.disable(logging.INFO)
    settings = load_settings(None, data=data, host_budget=budget, port=0, drain_s=0)
    run(settings, announce=lambda url: print(url, flush=True))


def requests(rows: int, count: int) -> list[dict[str, np.ndarray]]:
    """Requests whose keys follow Zipf's law, as rankings' do; the first feature is the user's, one key for all items."""
    rng = np.random.default_rng(1)
    made = []
    for _ in range(count):
        request = {}
        for number in range(FEATURES):
            n = 1 if number == 0 else ITEMS
            request[f"f{number:02}"] = keys_of(rng.zipf(1.2, n) % rows)
        made.append(request)
    return made


def timed(
    ways: dict[str, Callable[[dict[str, np.ndarray]], Any]], made: list[dict[str, np.ndarray]], calls: int
) -> dict[str, list[float]]:
    """Seconds of every call, ways in turn."""
    took: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(-WARM_CALLS, calls):
        for name, way in ways.items():
            request = made[number % len(made)]
            began = time.perf_counter()
            way(request)
            if number >= 0:
                took[name].append(time.perf_counter() - began)
    return took


def check(client: Client, request: dict[str, np.ndarray], dim: int) -> None:
    answer = client.predict(MODEL, request)
    for name, keys in request.items():
        np.testing.assert_array_equal(answer[name], vectors_of(keys, dim))


def measure(url: str, rows: int, dim: int, calls: int, sizes: list[int]) -> list[dict[str, Any]]:
    made = requests(rows, 16)
    clients = {"one request": Client(url, split_items=None)}
    clients |= {f"{-(-ITEMS // size)} shards": Client(url, split_items=size) for size in sizes}
    for client in clients.values():
        check(client, made[0], dim)
    took = timed(
        {name: lambda request, c=client: c.predict(MODEL, request) for name, client in clients.items()}, made, calls
    )  # type: ignore[misc]
    for client in clients.values():
        client.close()
    whole = np.array(took["one request"])
    results = []
    for name, seconds in took.items():
        mine = np.array(seconds)
        results.append(
            {
                "way": name, "dim": dim, "items": ITEMS, "features": FEATURES, "calls": calls,
                "p50_us": float(np.percentile(mine, 50)) * 1e6, "p99_us": float(np.percentile(mine, 99)) * 1e6,
                "p50_over_one": float(np.percentile(mine, 50) / np.percentile(whole, 50)),
                "p99_over_one": float(np.percentile(mine, 99) / np.percentile(whole, 99)),
            }
        )  # fmt: skip
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--tiny", action="store_true", help="to see that it runs; its figures mean nothing")
    size.add_argument("--full", action="store_true", help="more calls, more rows")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=int, default=0)
    parser.add_argument("--dim", type=int, nargs="+", default=[16])
    parser.add_argument("--shards", type=int, nargs="+", default=[SPLIT_ITEMS], help="most items of a shard")
    parser.add_argument("--json", type=Path, default=Path("build/client_predict.json"))
    options = parser.parse_args()
    rows = options.rows or (2_000 if options.tiny else 1_000_000 if options.full else 200_000)
    calls = 20 if options.tiny else 3_000 if options.full else 600
    if options.serve:
        serve(options.serve, rows, options.dim[0])
        return
    results: list[dict[str, Any]] = []
    for dim in options.dim:
        with tempfile.TemporaryDirectory(prefix="client-") as where:
            command = [
                sys.executable,
                "-m",
                "benchmarks.client_predict",
                "--serve",
                where,
                "--rows",
                str(rows),
                "--dim",
                str(dim),
            ]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
                assert server.stdout is not None
                try:
                    results += measure(server.stdout.readline().strip(), rows, dim, calls, options.shards)
                finally:
                    server.terminate()
    headlines = [
        headline(
            f"predict of {ITEMS} items, dim {row['dim']}, {row['way']}, p99",
            "one request",
            row["p99_over_one"],
            at_most=1.0,
        )
        for row in results
        if row["way"] != "one request"
    ]
    document = {
        "benchmark": "client_predict",
        "machine": describe(),
        "rows": rows,
        "headlines": headlines,
        "results": results,
    }
    write(options.json, document)
    print(markdown(document))


if __name__ == "__main__":
    main()
