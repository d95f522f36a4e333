"""Micro-batching: `python -m benchmarks.micro_batching [--seconds S] [--json FILE]`.

Small predict requests over HTTP on 1 to 64 connections, by a service that joins none, one that joins those which wait
for a thread, and one that has each wait a moment for others. All of them run, and are asked in turn. Processor time a
request is the service's own; throughput is what these cores, the clients among them, allow.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import report
from benchmarks.machine import describe
from benchmarks.options import parser_of
from benchmarks.predict_service import ROWS, Outcome, Served, closed_loop, load, predict_request

MODELS = {"small": (64, 32), "large": (1024, 512)}
MAX_ITEMS = 64
VARIANTS: dict[str, dict[str, object]] = {
    "off": {},
    "no delay": {"batch_max_items": MAX_ITEMS},
    "1 ms": {"batch_max_items": MAX_ITEMS, "batch_delay_us": 1000},
}


def figures(outcomes: list[Outcome]) -> dict[str, float]:
    """Medians over rounds."""

    def median(values: list[float]) -> float:
        return statistics.median(values)

    return {
        "requests_per_s": median([len(of.of(200)) / of.whole_s for of in outcomes]),
        "cpu_us_a_request": median([of.cpu_s / max(1, len(of.of(200))) * 1e6 for of in outcomes]),
        "p50_ms": median([of.quantile_ms(200, 0.5) for of in outcomes]),
        "p99_ms": median([of.quantile_ms(200, 0.99) for of in outcomes]),
    }


async def measure(
    data: Path, model: str, variants: list[str], points: list[tuple[int, int]], rounds: int, seconds: float
) -> list[dict[str, Any]]:
    results = []
    with contextlib.ExitStack() as stack:
        served = {}
        for name in variants:
            own = data.with_name(name.replace(" ", "-"))
            shutil.copytree(data, own)  # each holds its own open
            served[name] = stack.enter_context(Served(own, **VARIANTS[name]))
        for items, connections in points:
            rng = np.random.default_rng(items)
            messages = [predict_request(rng.integers(0, ROWS, items)) for _ in range(256)]
            got: dict[str, list[Outcome]] = {name: [] for name in served}
            for number in range(rounds + 1):
                for name, service in served.items():
                    outcome = await closed_loop(service, messages, connections, seconds)
                    if number:  # the first brings rows and plans into memory
                        got[name].append(outcome)
            for name, outcomes in got.items():
                wrong = {status for of in outcomes for status in of.seconds} - {200}
                if wrong:
                    raise SystemExit(f"answers with status {wrong}")
                row = {
                    "model": model,
                    "items": items,
                    "connections": connections,
                    "batching": name,
                    **figures(outcomes),
                }
                for figure in ("requests_per_s", "cpu_us_a_request"):
                    ratios = [
                        figures([one])[figure] / figures([off])[figure]
                        for one, off in zip(outcomes, got["off"], strict=True)
                    ]
                    row[f"{figure}_ratio"] = statistics.median(ratios)
                results.append(row)
                print(
                    f"| {model} | {items} | {connections} | {name} | {row['requests_per_s']:.0f} | {row['requests_per_s_ratio']:.2f} "
                    f"| {row['cpu_us_a_request']:.0f} | {row['cpu_us_a_request_ratio']:.2f} "
                    f"| {row['p50_ms']:.2f} | {row['p99_ms']:.2f} |",
                    flush=True,
                )
    return results


def main() -> None:
    options = parser_of(
        __file__, __doc__, "tiny", seconds=(0.5, "of a turn"), rounds=5, items=[1, 4, 16], connections=[1, 4, 16, 64]
    ).parse_args()
    document: dict[str, Any] = {"machine": describe(), "results": []}
    if importlib.util.find_spec("onnx") is None or importlib.util.find_spec("onnxruntime") is None:
        document["skipped"] = ["the extra `dense` is not installed"]
    else:
        points = [(items, connections) for items in options.items for connections in options.connections]
        rounds, seconds, models = options.rounds, options.seconds, MODELS
        if options.tiny:
            points, rounds, seconds, models = [(2, 4)], 1, 0.1, {"small": MODELS["small"]}
        print(f"{describe()}; 3 features of dim 16; batches of at most {MAX_ITEMS} items\n")
        print(
            "| layers | items | connections | batching | requests/s | to off | CPU µs a request | to off | p50, ms | p99, ms |"
        )
        print("|---|---|---|---|---|---|---|---|---|---|")
        for model, widths in models.items():
            with tempfile.TemporaryDirectory(prefix="tierstore-bench-") as folder:
                data = Path(folder) / "data"
                load(data, widths, rows=1000 if options.tiny else ROWS)
                variants = ["off", "no delay"] if options.tiny else [*VARIANTS]
                document["results"] += asyncio.run(measure(data, model, variants, points, rounds, seconds))
    report.write(options.json, document)


if __name__ == "__main__":
    main()
