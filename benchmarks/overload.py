"""Overload: `python -m benchmarks.overload [--seconds S] [--rounds N] [--mixed] [--json FILE]`.

A service that predicts is asked as fast as it can answer, which is its capacity, and then with 1, 2 and 5 times as many
requests a second, whether or not it answers. What counts is that goodput (answers 200) does not fall when more is asked
than can be answered, that the latency of what is answered stays bounded, and that refusals come at once. Each load is
run with the settings' own bounds, with a short queue, and with a timeout in every request; answers that come too late
for it are no goodput. Then comes ten times the capacity with mixed sizes, new connections, clients that do not read, and
health checks beside it (`benchmarks.overload_mixed`; `--mixed`: only that).
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import overload_mixed, report
from benchmarks.machine import describe
from benchmarks.options import parser_of
from benchmarks.predict_service import ROWS, Served, closed_loop, open_loop, predict_request

WIDTHS = (2048, 1024)  # a request takes long, so that neither the clients nor the event loop are what is measured
ITEMS = 128
LOADS = (1, 2, 5)
CONNECTIONS = 1500
TIMEOUT_S = 0.25
SHORT_QUEUE = 16
VARIANTS: dict[str, tuple[dict[str, object], float | None]] = {
    "as it comes": ({}, None),
    f"queue of {SHORT_QUEUE}": ({"lookup_queue": SHORT_QUEUE}, None),
    f"timeout of {TIMEOUT_S:g} s": ({}, TIMEOUT_S),
}


def messages_of(timeout_s: float | None) -> list[bytes]:
    rng = np.random.default_rng(1)
    timeout_us = None if timeout_s is None else int(timeout_s * 1e6)
    return [predict_request(rng.integers(0, ROWS, ITEMS), timeout_us) for _ in range(64)]


async def measure(
    data: Path, variants: list[str], seconds: float, loads: tuple[int, ...], connections: int
) -> list[dict[str, Any]]:
    results = []
    for name in variants:
        settings, timeout_s = VARIANTS[name]
        with Served(data, **settings) as served:
            plain, messages = messages_of(None), messages_of(timeout_s)
            await closed_loop(served, plain, 8, seconds / 4)  # rows into memory
            full = await closed_loop(served, plain, 8, seconds)
            capacity = len(full.of(200)) / full.whole_s
            threads, resident = served.threads(), served.resident_bytes()
            for times in loads:
                got = await open_loop(served, messages, capacity * times, seconds, connections)
                good = got.of(200) if timeout_s is None else [s for s in got.of(200) if s <= timeout_s]
                refused = [*got.of(503), *got.of(504)]
                row: dict[str, Any] = {
                    "variant": name,
                    "load": times,
                    "capacity_per_s": capacity,
                    "goodput_per_s": len(good) / got.whole_s,
                    "goodput_ratio": len(good) / got.whole_s / capacity,
                    "answered": {str(status): len(of) for status, of in sorted(got.seconds.items())},
                    "accepted_p50_ms": got.quantile_ms(200, 0.5),
                    "accepted_p99_ms": got.quantile_ms(200, 0.99),
                    "refused_p50_ms": float(np.median(refused)) * 1e3 if refused else None,
                    "clients_late_p99_ms": float(np.quantile(got.late_s, 0.99)) * 1e3,
                    "more_threads": served.threads() - threads,
                    "more_resident_bytes": served.resident_bytes() - resident,
                }
                results.append(row)
                print(
                    f"| {name} | {times} | {row['goodput_per_s']:.0f} | {row['goodput_ratio']:.2f} "
                    f"| {row['accepted_p50_ms']:.0f} | {row['accepted_p99_ms']:.0f} "
                    f"| {row['refused_p50_ms'] or 0:.1f} | {row['answered']} "
                    f"| {row['clients_late_p99_ms']:.0f} | {row['more_threads']} | {row['more_resident_bytes'] >> 20} |",
                    flush=True,
                )
    return results


def main() -> None:
    parser = parser_of(
        __file__,
        __doc__,
        "tiny",
        seconds=(8.0, "of each load"),
        mixed=(False, "only the load of ten times the capacity with all that comes with it"),
        rounds=(5, "of the mixed loads, each between two closed loops"),
    )
    parser.add_argument("--probe", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.probe:
        overload_mixed.probe(int(options.probe[0]), float(options.probe[1]))
        return
    document: dict[str, Any] = {"machine": describe()}
    if importlib.util.find_spec("onnx") is None or importlib.util.find_spec("onnxruntime") is None:
        document |= {"results": [], "skipped": ["the extra `dense` is not installed"]}
    else:
        seconds, loads, connections = (0.3, (2,), 50) if options.tiny else (options.seconds, LOADS, CONNECTIONS)
        with tempfile.TemporaryDirectory(prefix="tierstore-bench-") as folder:
            data = Path(folder) / "data"
            overload_mixed.prepare(data, (32,) if options.tiny else WIDTHS)
            print(f"{describe()}; layers of {WIDTHS}\n")
            if not options.mixed:
                print(
                    f"Predicts of {ITEMS} items\n\n"
                    "| | load | goodput/s | of capacity | accepted p50, ms | p99, ms | refused p50, ms | answers | clients late p99, ms | threads + | MiB + |\n"
                    "|---|---|---|---|---|---|---|---|---|---|---|"
                )
                variants = [*VARIANTS][-1:] if options.tiny else [*VARIANTS]
                document["results"] = asyncio.run(measure(data, variants, seconds, loads, connections))
            print(
                f"\nPredicts of {overload_mixed.SIZES} items, {overload_mixed.READERS} clients that do not read\n\n"
                "| load | goodput / capacity, medians | that a core of the service | cores of service, clients | health p50, longest, ms | recovery, s | threads + | MiB + | answers | clients late, s |\n"
                "|---|---|---|---|---|---|---|---|---|---|"
            )
            mixed = overload_mixed.LOADS[:1] if options.tiny else overload_mixed.LOADS
            document["mixed"] = asyncio.run(
                overload_mixed.measure(data, seconds, mixed, 1 if options.tiny else options.rounds)
            )
    report.write(options.json, document)


if __name__ == "__main__":
    main()
