"""Ranking requests through the client, whole and in shards: `python -m benchmarks.client_predict [--tiny | --full]`.

One request is of 700 items of one user: 20 features, a look-up each, through `Client.predict` at a service of its own
process. Part `rows` is a model without a dense part, which answers the features' rows; the others have one, which answers a
score an item: `light` a network of 320 → 256 → 64 → 1, `ranking` one of 320 → 1024 → 512 → 256 → 1, as large as published
click models' (DLRM's and DeepFM's are of hundreds to a thousand units a layer). Ways of sending take turns, call by call, so that whatever else the
machine does meets all of them alike; figures are over all calls. p99 in shards is to be below that of one request.
"""

from __future__ import annotations

import importlib.util
import itertools
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
from benchmarks.options import HIDDEN, parser_of
from benchmarks.ready import SETTINGS
from benchmarks.report import headline, markdown, write
from tierstore.client import Client
from tierstore.config import load_settings

MODEL = "rank"
ITEMS, FEATURES = 700, 20
WARM_CALLS = 20
PARTS: dict[str, tuple[int, ...]] = {"rows": (), "light": (256, 64), "ranking": (1024, 512, 256)}


def keys_of(rows: np.ndarray) -> np.ndarray:
    """Keys of these rows: distinct, spread over all 64 bits."""
    with np.errstate(over="ignore"):
        return rows.astype(np.int64) * np.int64(-7046029254386353131)


def vectors_of(keys: np.ndarray, dim: int) -> np.ndarray:
    """float32[n, dim], known from the key, so that answers can be checked."""
    return (keys & 0xFFFF).astype(np.float32)[:, None] + np.arange(dim, dtype=np.float32)


def graph(dim: int, widths: tuple[int, ...]) -> bytes:
    """A ranking model: [the items' features; the user's] → layers of these widths → one score an item."""
    from onnx import TensorProto, helper, numpy_helper

    draw = np.random.default_rng(0)
    sizes = {"w1": ((FEATURES - 1) * dim, widths[0]), "wu": (dim, widths[0])}
    sizes |= {f"w{i}": pair for i, pair in enumerate(itertools.pairwise((*widths, 1)), 2)}
    held = [
        numpy_helper.from_array(draw.normal(0, shape[0] ** -0.5, shape).astype(np.float32), name)
        for name, shape in sizes.items()
    ]
    items = [f"f{number:02}" for number in range(1, FEATURES)]
    last = len(widths) + 1
    steps = [
        ("Concat", items, "x"), ("MatMul", ["x", "w1"], "h1"), ("MatMul", ["f00", "wu"], "hu"),
        ("Add", ["h1", "hu"], "s1"), ("Relu", ["s1"], "r1"),
    ]  # fmt: skip
    for i in range(2, last + 1):
        steps.append(("MatMul", [f"r{i - 1}", f"w{i}"], "score" if i == last else f"s{i}"))
        if i < last:
            steps.append(("Relu", [f"s{i}"], f"r{i}"))
    nodes = [helper.make_node(kind, given, [made], **({"axis": 1} if kind == "Concat" else {})) for kind, given, made in steps]  # fmt: skip

    def info(name: str, shape: list[Any]) -> Any:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)

    ports = [info("f00", [1, dim]), *(info(name, ["batch", dim]) for name in items)]
    made = helper.make_graph(nodes, "rank", ports, [info("score", ["batch", 1])], held)
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    return bytes(model.SerializeToString())


def serve(where: Path, rows: int, dim: int, widths: tuple[int, ...]) -> None:
    """A service whose rows are all in memory; prints its address."""
    from tierstore.service.server import serve as run

    budget = f"{max(64, rows * (4 * dim + 16) * 2 >> 20)}MiB"
    source, data = where / "snapshot", where / "data"
    keys = keys_of(np.arange(rows))
    with tierstore.SnapshotWriter(source, model=MODEL, version=1) as writer:
        writer.table("item", dim=dim).write(keys, vectors_of(keys, dim))
        for number in range(FEATURES):
            writer.feature(f"f{number:02}", table="item")
        writer.warmup("item", keys)
        if widths:
            writer.dense(graph(dim, widths))
    with tierstore.open(data, host_budget=budget) as store:
        store.load_snapshot(source)
    logging.disable(logging.INFO)
    settings = load_settings(None, data=data, host_budget=budget, port=0, drain_s=0, **SETTINGS)
    run(settings, announce=lambda url, *_: print(url, flush=True))


def requests(rows: int, items: int, count: int) -> list[dict[str, np.ndarray]]:
    """Requests whose keys follow Zipf's law, as rankings' do; the first feature is the user's, one key for all items."""
    rng = np.random.default_rng(1)
    made = []
    for _ in range(count):
        request = {}
        for number in range(FEATURES):
            n = 1 if number == 0 else items
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


def check(clients: list[Client], request: dict[str, np.ndarray], dim: int) -> None:
    """All give the same answer, and rows are those of their keys."""
    answer, *others = (client.predict(MODEL, request) for client in clients)
    if not isinstance(answer, dict):
        assert answer.shape == (max(map(len, request.values())), 1)
        for other in others:
            np.testing.assert_allclose(other, answer, rtol=1e-4, atol=1e-5)
        return
    for name, keys in request.items():
        for one in (answer, *others):
            np.testing.assert_array_equal(one[name], vectors_of(keys, dim))


def measure(url: str, part: str, rows: int, dim: int, items: int, calls: int, sizes: list[int]) -> list[dict[str, Any]]:
    made = requests(rows, items, 16)
    clients = {"one request": Client(url, split_items=None)}
    clients |= {f"{-(-items // size)} shards": Client(url, split_items=size) for size in sizes}
    check(list(clients.values()), made[0], dim)
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
                "part": part, "way": name, "dim": dim, "items": items, "features": FEATURES, "calls": calls,
                "p50_us": float(np.percentile(mine, 50)) * 1e6, "p99_us": float(np.percentile(mine, 99)) * 1e6,
                "p50_over_one": float(np.percentile(mine, 50) / np.percentile(whole, 50)),
                "p99_over_one": float(np.percentile(mine, 99) / np.percentile(whole, 99)),
            }
        )  # fmt: skip
    return results


def main() -> None:
    parser = parser_of(
        __file__,
        __doc__,
        "tiny",
        "full",
        serve=(Path, HIDDEN),
        rows=0,
        items=ITEMS,
        dim=[16],
        shards=([350, 175], "most items of a shard"),
    )
    parser.add_argument("--part", choices=PARTS, help="that one alone")
    options = parser.parse_args()
    rows = options.rows or (2_000 if options.tiny else 1_000_000 if options.full else 200_000)
    calls = 20 if options.tiny else 3_000 if options.full else 400
    if options.serve:
        serve(options.serve, rows, options.dim[0], PARTS[options.part])
        return
    results: list[dict[str, Any]] = []
    parts, skipped = [options.part] if options.part else list(PARTS), []
    if importlib.util.find_spec("onnx") is None or importlib.util.find_spec("onnxruntime") is None:
        skipped.append("scores: the extra `dense` is not installed")
        parts = [part for part in parts if not PARTS[part]]
    for part, dim in itertools.product(parts[:2][-1:] if options.tiny else parts, options.dim):
        with tempfile.TemporaryDirectory(prefix="client-") as where:
            command = [sys.executable, "-m", "benchmarks.client_predict", "--serve", where, "--rows", str(rows)]
            more = ["--dim", str(dim), "--part", part]
            with subprocess.Popen([*command, *more], stdout=subprocess.PIPE, text=True) as server:
                assert server.stdout is not None
                try:
                    url = server.stdout.readline().strip()
                    results += measure(url, part, rows, dim, options.items, calls, options.shards)
                finally:
                    server.terminate()
    headlines = [
        headline(
            f"predict of {row['items']} items ({row['part']}), {row['way']}, p99",
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
        "skipped": skipped,
        "results": results,
    }
    write(options.json, document)
    print(markdown(document))


if __name__ == "__main__":
    main()
