"""What a predict costs besides its look-ups and ONNX Runtime: `python -m benchmarks.predict_share [--tiny] [--json FILE]`.

Predicts of 200 items, 16 features of dim 16 into a ranking network of 256 → 512 → 256 → 128 → 1, over HTTP in the binary
form and over gRPC, in turn, by one service process. All rows are in memory. One caller, and then two (two cores).

    own share   (total - queue - lookup - dense) / (total - queue), of the service's `tierstore_predict_seconds_total`
    own µs      the same in microseconds a predict
    CPU share   of the process's CPU, what is neither look-up nor ONNX Runtime: with the transports' own work, which
                `total` leaves out in part. Of one caller only: with two, wall time holds waiting
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import re
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import report
from benchmarks.machine import describe
from benchmarks.predict_service import MODEL, Served, closed_loop, load, predict_request

WIDTHS = (512, 256, 128)
FEATURES = tuple(f"feature{number:02}" for number in range(16))
DIM, ITEMS, ROWS = 16, 200, 50_000
MARK = 0.25
_PARTS = ("total", "queue", "lookup", "dense")


def seconds_of(served: Served) -> dict[str, float]:
    """The service's own figures, and how many predicts they are of."""
    with urllib.request.urlopen(f"http://127.0.0.1:{served.port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    found = {}
    for part in _PARTS:
        match = re.search(rf'^tierstore_predict_seconds_total{{[^}}]*part="{part}"[^}}]*}} (\S+)', text, re.M)
        found[part] = float(match[1]) if match else 0.0
    match = re.search(r"^tierstore_predicts_total{[^}]*} (\S+)", text, re.M)
    return {**found, "count": float(match[1]) if match else 0.0}


def grpc_turn(served: Served, keys: list[np.ndarray], features: Sequence[str], callers: int, seconds: float) -> None:
    """Ask over gRPC for so long, each caller again as soon as it is answered."""
    import grpc

    from benchmarks.wire_grpc import METHOD, OPTIONS
    from tierstore.service.rpc.protobuf import message_class

    made = []
    for drawn in keys:
        asked = message_class("inference.ModelInferRequest")(
            model_name=MODEL, raw_input_contents=[drawn.tobytes()] * len(features)
        )
        for name in features:
            asked.inputs.add(name=f"{name}_id", datatype="INT64", shape=[len(drawn)])
        made.append(asked.SerializeToString())
    channels = [grpc.insecure_channel(f"127.0.0.1:{served.grpc_port}", options=OPTIONS) for _ in range(callers)]
    calls = [channel.unary_unary(METHOD) for channel in channels]
    until_s, number = time.perf_counter() + seconds, 0
    while time.perf_counter() < until_s:
        for future in [call.future(made[(number + i) % len(made)]) for i, call in enumerate(calls)]:
            future.result()
        number += callers
    for channel in channels:
        channel.close()


def http_turn(served: Served, messages: list[bytes], callers: int, seconds: float) -> None:
    outcome = asyncio.run(closed_loop(served, messages, callers, seconds))
    if set(outcome.seconds) != {200}:
        raise SystemExit(f"answers with status {set(outcome.seconds)}")


def figures(before: dict[str, float], after: dict[str, float], cpu_s: float, callers: int) -> dict[str, float | None]:
    """Of one turn, a predict."""
    spent = {name: after[name] - before[name] for name in after}
    count = spent["count"]
    work_s = spent["total"] - spent["queue"]
    own_s = work_s - spent["lookup"] - spent["dense"]
    return {
        "own_share": own_s / work_s,
        "own_us": own_s / count * 1e6,
        "lookup_us": spent["lookup"] / count * 1e6,
        "dense_us": spent["dense"] / count * 1e6,
        "cpu_us": cpu_s / count * 1e6,
        "cpu_share": 1 - (spent["lookup"] + spent["dense"]) / cpu_s if callers == 1 and cpu_s else None,
        "predicts": count,
    }


def measure(served: Served, features: Sequence[str], rounds: int, seconds: float) -> list[dict[str, Any]]:
    rng = np.random.default_rng(1)
    keys = [rng.zipf(1.2, ITEMS).astype(np.int64) % ROWS for _ in range(64)]
    messages = [predict_request(drawn, features=features) for drawn in keys]
    ways: dict[str, Callable[[int, float], None]] = {
        "HTTP": lambda callers, s: http_turn(served, messages, callers, s),
        "gRPC": lambda callers, s: grpc_turn(served, keys, features, callers, s),
    }
    turns: dict[tuple[str, int], list[dict[str, float | None]]] = {}
    for number in range(rounds + 1):
        for callers in (1, 2):
            for name, way in ways.items():
                before, cpu_s = seconds_of(served), served.cpu_s()
                way(callers, seconds)
                cpu_s = served.cpu_s() - cpu_s
                if number:  # the first brings plans, connections and buffers
                    turn = figures(before, seconds_of(served), cpu_s, callers)
                    turns.setdefault((name, callers), []).append(turn)
    return [
        {"transport": name, "callers": callers}
        | {
            figure: None if of[0][figure] is None else statistics.median(turn[figure] for turn in of)  # type: ignore[type-var]
            for figure in of[0]
        }
        for (name, callers), of in turns.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="only to see that it runs")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=1.0, help="of a turn")
    parser.add_argument("--json", type=Path, default=Path("build/predict_share.json"))
    options = parser.parse_args()
    document: dict[str, Any] = {"benchmark": "predict_share", "machine": describe()}
    missing = [name for name in ("onnx", "onnxruntime", "grpc") if importlib.util.find_spec(name) is None]
    if missing:
        document["skipped"] = [f"needs {', '.join(missing)}: pip install 'tierstore[dense,grpc]'"]
    else:
        features = FEATURES[:2] if options.tiny else FEATURES
        with tempfile.TemporaryDirectory(prefix="tierstore-bench-") as folder:
            data = Path(folder) / "data"
            load(data, WIDTHS, features, DIM, rows=1000 if options.tiny else ROWS, budget="256MiB", warm=True)
            with Served(data, grpc_port=0, host_budget="256MiB") as served:
                rounds, seconds = (1, 0.1) if options.tiny else (options.rounds, options.seconds)
                results = measure(served, features, rounds, seconds)
        what = f"predict of {ITEMS} items, {len(features)} features of dim {DIM}"
        document["headlines"] = [
            report.headline(
                f"{what}, {row['transport']}, {row['callers']} at once: outside look-up and ONNX Runtime",
                "the predict's time, queue apart", row["own_share"], at_most=MARK,
            )
            for row in results
        ]  # fmt: skip
        document["results"] = results
    report.write(options.json, document)
    print(report.markdown(document))


if __name__ == "__main__":
    main()
