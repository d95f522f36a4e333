"""The state that production is in: a table ten times its memory, an hour of deltas behind, and one every few seconds.

For benchmarks that ask the same of two services: `production` has memory for a tenth of the rows and takes deltas, `memory` has all rows in
memory and nothing changes there. `Trace` says which rows are asked for, and which ones deltas change: those that are asked for often.

    Zipf       popularity by rank to the power of -1.2, over all rows; a tenth of the rows change their rank while as many
               requests for a row come as there are rows
    ads reuse  rows are asked for as often as in the published statistics of production ads models (`access_traces`), with the
               same drift; a fifth of the rows are asked for at all, so that memory has room for half of them
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import tierstore
from benchmarks.access_traces import draw, meta_weights, zipf_weights
from benchmarks.changing import Changing, Counts, Service, Vectors, difference, told
from benchmarks.predict_service import Served
from benchmarks.ready import wait_for_reactors
from benchmarks.wild_traffic import Clients, Request, Spent
from benchmarks.wire_table import keys_of, rows_of

TABLE, TRACES = "item", ("Zipf", "ads reuse")
HOUR = 60  # deltas
DELTA_SHARE = 200  # a delta changes at most one row in so many
DELTA_EVERY_S = 2.0
_ALPHA, _DRIFT, _ASKED_FOR = 1.2, 0.1, 5
_BOOKKEEPING = 16  # bytes of a row in memory beside it, about
_AHEAD = 3_000_000


class Trace:
    """Rows in the order in which they are asked for; after `_AHEAD` of them the same again."""

    def __init__(self, name: str, rows: int) -> None:
        weights = zipf_weights(rows, _ALPHA) if name == "Zipf" else meta_weights(rows // _ASKED_FOR)
        drawn = draw(weights, rows + _AHEAD, drift=_DRIFT, seed=11)
        self._before, self._ahead, self._at = drawn[:rows], drawn[rows:], 0
        self._rng, self._most = np.random.default_rng(12), rows // DELTA_SHARE
        self.hottest = np.argsort(-np.bincount(self._before, minlength=rows), kind="stable")  # all rows

    def __call__(self, count: int) -> np.ndarray:
        self._at += count
        return self._ahead.take(np.arange(self._at - count, self._at), mode="wrap")

    def changed(self) -> np.ndarray:
        """Rows of a delta, each once, by the popularity of late."""
        now = self._ahead.take(np.arange(self._at - len(self._before), self._at), mode="wrap")
        of_late = now if self._at >= len(self._before) else np.concatenate([self._before, self._ahead[: self._at]])
        return np.unique(self._rng.choice(of_late[-len(self._before) :], self._most))


@dataclass
class Side:
    """One of the two services, its table, and how it is asked. With `changes` a delta comes every DELTA_EVERY_S that it is asked."""

    name: str
    table: Changing
    turn: Callable[[Sequence[Request]], Spent]
    changes: bool
    cpu_s: list[float] = field(default_factory=list)  # a round each
    waits_s: list[float] = field(default_factory=list)
    turns_s: float = 0.0
    deltas: int = 0
    counts: Counts = field(default_factory=dict)


class Current:
    """The table of the service that is asked now: what the rows of requests, which both get, are there."""

    table: Changing

    def vectors(self, keys: np.ndarray) -> np.ndarray:
        return self.table.expected(rows_of(keys))

    def stamp(self) -> int:
        return self.table.stamp


@contextmanager
def services(
    root: Path, snapshot: Path, rows: int, row_bytes: int, *, compiled: bool = True
) -> Iterator[dict[str, Served]]:
    """`production` and `memory`, of a snapshot that names all its rows as warm, hottest first, in directories below `root`."""
    needed = rows * (row_bytes + _BOOKKEEPING)
    everything = needed * 2 + (16 << 20)
    with tierstore.open(root / "production", host_budget=everything, load_workers=1) as store:
        store.load_snapshot(snapshot)
    shutil.copytree(root / "production", root / "memory", ignore=shutil.ignore_patterns("LOCK"))
    with (
        Served(root / "production", host_budget=needed // 10) as production,
        Served(root / "memory", host_budget=everything) as memory,
    ):
        if compiled:
            wait_for_reactors(production.port)
            wait_for_reactors(memory.port)
        yield {"production": production, "memory": memory}
    for name in ("production", "memory"):
        shutil.rmtree(root / name)


def compare(
    sides: Sequence[Side], current: Current, trace: Trace, draw: Callable[[], Sequence[Request]], rounds: int
) -> list[dict[str, Any]]:
    """A row for each side; ratios are those of the first to the last, of all rounds: where few have a delta, its cost counts all the same."""
    keys: list[int] = []
    requests = 0
    for number in range(-1, rounds):  # one to warm up
        messages = draw()
        keys.append(sum(one.keys for one in messages))
        requests += len(messages) * (number >= 0)
        for side in sides:
            current.table, service = side.table, side.table.service
            before, used, began = service.counts(), service.settled_cpu_s(), time.perf_counter()
            with ThreadPoolExecutor(1) as beside:
                due = side.changes and side.turns_s >= side.deltas * DELTA_EVERY_S
                delta = beside.submit(side.table.change, trace.changed()) if due else None
                taken = side.turn(messages)
                if delta is not None:
                    delta.result()
            took_s, used = time.perf_counter() - began, service.settled_cpu_s() - used
            if number < 0:
                continue
            side.cpu_s.append(used)
            side.deltas += due
            side.waits_s += taken.waits_s
            side.turns_s += took_s
            for name, value in difference(service.counts(), before).items():
                side.counts[name] = side.counts.get(name, 0.0) + value
    base, made = sides[-1], []
    p50_base, p99_base = np.percentile(base.waits_s, (50, 99))
    for side in sides:
        p50, p99 = np.percentile(side.waits_s, (50, 99))
        row: dict[str, Any] = {"service": side.name, "keys_a_request": sum(keys[1:]) / requests}
        row["cpu_ns_a_key"] = sum(side.cpu_s) / sum(keys[1:]) * 1e9
        row |= {"p50_us": float(p50) * 1e6, "p99_us": float(p99) * 1e6, "cpu_ratio": sum(side.cpu_s) / sum(base.cpu_s)}
        row |= {"p50_ratio": float(p50 / p50_base), "p99_ratio": float(p99 / p99_base)}
        found = told(side.counts, requests)
        row |= {"hit_rate": 1 - found["from_disk"], **found}
        row["s_between_deltas"] = side.turns_s / side.deltas if side.deltas else None
        made.append(row)
    return made


def measure(
    root: Path,
    rows: int,
    model: str,
    write_more: Callable[[tierstore.SnapshotWriter], None],
    vectors: Vectors,
    draw: Callable[[Callable[[int], np.ndarray], Callable[[np.ndarray], np.ndarray]], Sequence[Request]],
    rounds: int,
    *,
    compiled: bool,
    new_share: float = 0.0,
    traces: Sequence[str] = TRACES,
) -> list[dict[str, Any]]:
    """`compare` by each trace, of a model whose features (`write_more`) are all of one table, with these `vectors`.

    `draw` makes the requests of a turn. It is given what gives so many keys, and what says what their rows are. `new_share` of them
    come on new connections.
    """
    results, numbers = [], np.arange(rows)
    first = vectors(numbers, np.zeros(rows, np.int64))
    for name in traces:
        trace, current, snapshot = Trace(name, rows), Current(), root / "snapshot"
        with tierstore.SnapshotWriter(snapshot, model=model, version=1) as writer:
            writer.table(TABLE, dim=first.shape[1]).write(keys_of(numbers), first)
            writer.warmup(TABLE, keys_of(trace.hottest))
            write_more(writer)
        with services(root, snapshot, rows, first[0].nbytes, compiled=compiled) as served, ExitStack() as stack:
            sides = []
            for label, one in served.items():
                clients = Clients(one.pid, one.port, 1, new_share=new_share, stamp=current.stamp)
                stack.callback(clients.close)
                table = Changing(Service(one.pid, one.port), model, TABLE, rows, keys_of, vectors)
                sides.append(Side(label, table, clients.turn, changes=label == "production"))
            for _ in range(HOUR):
                sides[0].table.change(trace.changed())
            sides[0].table.service.wait_until_folded()

            def requests(trace: Trace = trace, current: Current = current) -> Sequence[Request]:
                return draw(lambda count: keys_of(trace(count)), current.vectors)

            found = compare(sides, current, trace, requests, rounds)
        shutil.rmtree(snapshot)
        results += [{"part": "production", "trace": name, **row} for row in found]
    return results
