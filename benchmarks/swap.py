"""Versions, rows and graphs changed under predict load: `python -m benchmarks.swap [--tiny] [--json FILE]`.

Callers over HTTP ask for scores of 200 items (8 features of dim 16 into 256 → 128 → 1), each at its own pace, so that
the service has about a third of the load that it can bear. First nothing else happens; then snapshots are loaded,
activated, rolled back and activated again, and deltas bring other rows and another graph; then it is quiet again.

Every state has a number. All rows that are asked for hold it, the graph has it as a constant, and an answer has the
least and the greatest number among its rows, and the graph's. So an answer of two states is seen, and one that says it
is of another version too: `mixed` counts them. `failed` counts every answer that is not one of status 200.

Times are from when a request was sent, by the process that also asks for the changes. p99 during the changes is compared with
p99 of the quiet before and after, and so is that of the requests under way during one kind of change.
"""

from __future__ import annotations

import asyncio
import importlib.util
import io
import itertools
import json
import re
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import tierstore
from benchmarks import report
from benchmarks.machine import describe
from benchmarks.options import parser_of
from benchmarks.predict_service import MODEL, Client, Served, closed_loop, predict_request

FEATURES = tuple(f"feature{number}" for number in range(8))
DIM, ITEMS, HOT, WIDTHS = 16, 200, 5_000, (256, 128)
CALLERS = 4
SHARE = 0.35  # of what the service can bear
MARK = 1.5
STEP = 100  # numbers of a version: 100 for version 1, 101 after its first delta
_PAUSE_S = 0.15  # between changes


def graph(number: int) -> bytes:
    """A score an item; and least and greatest row, and the graph's own number."""
    from onnx import TensorProto, helper, numpy_helper

    draw = np.random.default_rng(number)
    inputs = [f"{name}_id" for name in FEATURES]
    sizes = (DIM * len(FEATURES), *WIDTHS, 1)
    constants = [
        numpy_helper.from_array((draw.standard_normal(pair) / pair[0] ** 0.5).astype(np.float32), f"w{i}")
        for i, pair in enumerate(itertools.pairwise(sizes))
    ]
    constants.append(numpy_helper.from_array(np.full((1, 1), number, np.float32), "own"))
    constants.append(numpy_helper.from_array(np.full((1,), 1, np.int64), "columns"))
    nodes = [helper.make_node("Concat", inputs, ["h0"], axis=1)]
    for i in range(len(sizes) - 1):
        nodes.append(helper.make_node("MatMul", [f"h{i}", f"w{i}"], [f"m{i}"]))
        nodes.append(helper.make_node("Relu", [f"m{i}"], [f"h{i + 1}"]))
    nodes += [
        helper.make_node("ReduceMin", ["h0"], ["least"], axes=[1], keepdims=1),
        helper.make_node("ReduceMax", ["h0"], ["greatest"], axes=[1], keepdims=1),
        helper.make_node("Sub", ["least", "least"], ["zero"]),
        helper.make_node("Add", ["zero", "own"], ["owns"]),
        helper.make_node("Concat", [f"h{len(sizes) - 1}", "least", "greatest", "owns"], ["answer"], axis=1),
    ]
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", DIM]) for name in inputs]
    out = helper.make_tensor_value_info("answer", TensorProto.FLOAT, ["batch", 4])
    made = helper.make_graph(nodes, MODEL, ports, [out], constants)
    model: bytes = helper.make_model(
        made, opset_imports=[helper.make_opsetid("", 17)], ir_version=9
    ).SerializeToString()
    return model


def write_snapshot(where: Path, version: int, rows: int, delta_seq: int) -> Path:
    keys = np.arange(rows, dtype=np.int64)
    source = where / str(version)
    with tierstore.SnapshotWriter(source, model=MODEL, version=version, delta_seq=delta_seq) as writer:
        writer.table("item", dim=DIM).write(keys, np.full((rows, DIM), version * STEP, np.float32))
        for name in FEATURES:
            writer.feature(f"{name}_id", table="item")
        writer.warmup("item", keys)
        writer.dense(graph(version * STEP))
    return source


def delta(seq: int, version: int, number: int) -> bytes:
    """Other rows for all keys that are asked for, and another graph."""
    sink = io.BytesIO()
    with tierstore.DeltaWriter(sink, model=MODEL, seq=seq, base_version=version) as writer:
        writer.upsert("item", np.arange(HOT, dtype=np.int64), np.full((HOT, DIM), number, np.float32))
        writer.dense(graph(number))
    return sink.getvalue()


@dataclass
class Seen:
    """What came of the requests: (sent, answered) on the monotonic clock, and what was wrong."""

    spans: list[tuple[float, float]] = field(default_factory=list)
    failed: int = 0
    mixed: int = 0
    numbers: set[int] = field(default_factory=set)

    def check(self, status: int, head: bytes, body: bytes) -> None:
        if status != 200:
            self.failed += 1
            return
        length = re.search(rb"inference-header-content-length: (\d+)", head, re.I)
        assert length is not None
        said = json.loads(body[: int(length[1])])
        rows = np.frombuffer(body[int(length[1]) :], np.float32).reshape(-1, 4)[:, 1:]
        number = int(rows[0, 0])
        self.numbers.add(number)
        self.mixed += bool((rows != number).any()) or number // STEP != int(said["model_version"])


class Load:
    """Callers that go on until told to stop."""

    def __init__(self, served: Served, messages: list[bytes], interval_s: float) -> None:
        self.seen = Seen()
        self._served, self._messages, self._interval_s = served, messages, interval_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._all()))

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    async def _all(self) -> None:
        await asyncio.gather(*(self._caller(number) for number in range(CALLERS)))

    async def _caller(self, number: int) -> None:
        client = await Client.to(self._served.port)
        draw = np.random.default_rng(number)
        await asyncio.sleep(self._interval_s * number / CALLERS)
        while not self._over.is_set():
            sent = time.perf_counter()
            status, head, body = await client.answer(self._messages[draw.integers(len(self._messages))])
            answered = time.perf_counter()
            self.seen.spans.append((sent, answered))
            self.seen.check(status, head, body)
            if not status:
                client = await Client.to(self._served.port)
            # from the end of one to the start of the next: a slow answer is not followed by a burst
            rest_s = max(self._interval_s / 4, self._interval_s - (answered - sent))
            await asyncio.sleep(rest_s * draw.uniform(0.7, 1.3))
        client.close()


class Admin:
    """Changes, and when each was under way."""

    def __init__(self, served: Served) -> None:
        self._base = f"http://127.0.0.1:{served.port}/admin"
        self.spans: list[tuple[str, float, float]] = []

    def _call(self, path: str, body: bytes | None = None, kind: str = "application/json") -> Any:
        request = urllib.request.Request(self._base + path, body, {"Content-Type": kind})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read())

    def post(self, what: str, path: str, document: dict[str, Any]) -> None:
        with self._timed(what):
            self._call(f"/models/{MODEL}/{path}", json.dumps(document).encode())

    def delta(self, data: bytes, what: str = "delta with a graph") -> None:
        with self._timed(what):
            self._call(f"/models/{MODEL}/deltas", data, "application/vnd.apache.arrow.stream")

    def load(self, source: Path, *, activate: bool = False) -> None:
        with self._timed("load with activation" if activate else "load"):
            document = json.dumps({"source": str(source), "activate": activate}).encode()
            job = self._call(f"/models/{MODEL}/snapshots", document)["job"]
            while (state := self._call(f"/jobs/{job}"))["state"] in ("queued", "running"):
                time.sleep(0.05)
            if state["state"] != "done":
                raise SystemExit(f"the load ended as {state['state']}: {state['error']}")

    def _timed(self, what: str) -> Any:
        return _Timed(self.spans, what)


class _Timed:
    def __init__(self, spans: list[tuple[str, float, float]], what: str) -> None:
        self._spans, self._what = spans, what

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._spans.append((self._what, self._began, time.perf_counter()))
        time.sleep(_PAUSE_S)


def changes(admin: Admin, sources: list[Path], deltas: int) -> Callable[[], None]:
    """Each snapshot in turn, with deltas for it, and back to the one before and forth again.

    Deltas are made now: this process also measures, and would be late for answers while it makes one.
    """
    made, seq = [], 0
    for version in range(2, len(sources) + 2):
        mine = []
        for number in range(1, deltas + 1):
            seq += 1
            mine.append(delta(seq, version, version * STEP + number))
        seq += 1
        made.append((mine, delta(seq, version - 1, (version - 1) * STEP + STEP // 2)))

    def go() -> None:
        for version, (source, (mine, other)) in enumerate(zip(sources, made, strict=True), 2):
            admin.load(source)
            admin.post("activate", "activate", {"version": version})
            for data in mine:
                admin.delta(data)
            admin.post("roll back", "rollback", {})
            admin.delta(other)
            admin.post("activate again", "activate", {"version": version})

    return go


def measure(where: Path, rows: int, quiet_s: float, rounds: int, deltas: int) -> dict[str, Any]:
    sources = [write_snapshot(where / "snapshots", version, rows, 0) for version in range(1, rounds + 2)]
    data = where / "data"
    with tierstore.open(data, host_budget="256MiB", load_workers=1) as store:
        store.load_snapshot(sources[0])
    draw = np.random.default_rng(5)
    messages = [predict_request(draw.integers(0, HOT, ITEMS), FEATURES) for _ in range(64)]
    with Served(data, host_budget="256MiB", source_root=where, keep_versions=2) as served:
        asyncio.run(closed_loop(served, messages, CALLERS, min(1.0, quiet_s)))
        capacity = asyncio.run(closed_loop(served, messages, CALLERS, min(2.0, quiet_s)))
        interval_s = CALLERS / (capacity * SHARE)
        admin = Admin(served)
        change = changes(admin, sources[1:], deltas)
        with Load(served, messages, interval_s) as load:
            time.sleep(quiet_s)
            until = time.monotonic() + 60
            while not load.seen.spans and time.monotonic() < until:  # a tiny run on a busy machine
                time.sleep(0.01)
            began = time.perf_counter()
            change()
            ended = time.perf_counter()
            time.sleep(quiet_s)
        cpus = served.cpu_s()
    return result(load.seen, admin, began, ended, {"capacity_per_s": capacity, "server_cpu_s": cpus})


def latencies(took: np.ndarray) -> list[float | None]:
    """p50, p99 and the longest; None where a busy machine has answered nothing in a phase of a tiny run."""
    return np.quantile(took, (0.5, 0.99, 1.0)).tolist() if len(took) else [None, None, None]


def by_phase(begun: np.ndarray, answered: np.ndarray, admin: Admin, began: float, ended: float) -> list[dict[str, Any]]:
    """Milliseconds of the requests that were under way in quiet before and after, in all changes, and in each kind of them."""
    took, during = (answered - begun) * 1e3, (answered >= began) & (begun <= ended)
    phases = {"quiet, before": answered < began, "quiet, after": begun > ended, "all changes": during}
    for kind in dict.fromkeys(what for what, _, _ in admin.spans):
        of = [(answered >= a) & (begun <= b) for what, a, b in admin.spans if what == kind]
        phases[kind] = during & np.any(of, axis=0)
    _, quiet_p99, _ = latencies(took[~during])
    rows = []
    for name, which in phases.items():
        p50, p99, most = latencies(took[which])
        each = [b - a for what, a, b in admin.spans if what == name]
        rows.append(
            {
                "while": name, "times": len(each) or None, "seconds_each": float(np.mean(each)) if each else None,
                "requests": int(which.sum()), "p50_ms": p50, "p99_ms": p99, "max_ms": most,
                "p99_over_quiet": None if p99 is None or quiet_p99 is None else p99 / quiet_p99,
            }
        )  # fmt: skip
    return rows


def result(seen: Seen, admin: Admin, began: float, ended: float, more: dict[str, Any]) -> dict[str, Any]:
    rows = by_phase(*np.array(seen.spans).T, admin, began, ended)
    (changes,) = (row for row in rows if row["while"] == "all changes")
    return {
        "headlines": [
            report.headline("requests that failed", "all of them", float(seen.failed), at_most=0, unit="requests"),
            report.headline("answers of two states", "all of them", float(seen.mixed), at_most=0, unit="requests"),
            report.headline(
                "p99 while versions and graphs change", "p99 quiet", changes["p99_over_quiet"], at_most=MARK
            ),
        ],
        "results": rows,
        "requests": len(seen.spans),
        "states_seen": len(seen.numbers),
        **more,
    }


def main() -> None:
    options = parser_of(
        __file__, __doc__, "tiny", rows=300_000, rounds=4, quiet=(12.0, "seconds before, and after")
    ).parse_args()
    document: dict[str, Any] = {"benchmark": "swap", "machine": describe()}
    if importlib.util.find_spec("onnx") is None or importlib.util.find_spec("onnxruntime") is None:
        document["skipped"] = ["the extra `dense` is not installed"]
    else:
        rows, quiet_s, rounds, deltas = options.rows, options.quiet, options.rounds, 3
        if options.tiny:
            rows, quiet_s, rounds, deltas = 6_000, 0.2, 1, 1
        with tempfile.TemporaryDirectory(prefix="tierstore-bench-") as folder:
            document |= measure(Path(folder), rows, quiet_s, rounds, deltas)
    report.write(options.json, document)
    print(report.markdown(document))


if __name__ == "__main__":
    main()
