"""What a request costs the service by where its rows are: `python -m benchmarks.tier_costs [--tiny | --quick | --full] [--json FILE]`.

One service, and one table of dim 16; memory has room for a tenth of its rows, and the system's cache has its files. Look-ups of 64, 1,024
and 4,096 keys and predictions of 100 items (8 features into 128 into 1), over HTTP and gRPC, one connection, in these states:

    memory            all rows are in memory
    1%, 5%, 20% disk  so many of the keys are not: each one that nobody has asked for lately
    1% changed        so many are not, and were changed by deltas that are folded since
    1% new            so many are of a delta of 1,000 rows just before, which comes with every 20th request

States take turns, a round each. CPU is the processor time of the service's process for a request, with all that it does behind it
(reading, putting rows into its cache, folding), as the median of the rounds; `over memory` is the median of each round's ratio.
`delta us` is what of `1% new` is the deltas' own, a twentieth of what one costs: as many of them sent alone, as far apart.
p50 and p99 are over all rounds, of the client, and leave out the wait for the deltas themselves. `from disk` and `from overlay` are shares of
the keys by the service's count, `compiled` is the share of requests that reactors answered, and `handed on` says why they did not.
Answers are checked: the size of each, and the values of one in 20.
"""

from __future__ import annotations

import functools
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import tierstore
from benchmarks import networks, report
from benchmarks.changing import Changing, Counts, Service, difference, small_vectors, told
from benchmarks.machine import describe
from benchmarks.options import parser_of
from benchmarks.predict_service import Served
from benchmarks.ready import wait_for_reactors
from benchmarks.wild_traffic import CHECKED, Link, Request, rest_of, tensor
from benchmarks.wire_grpc import Frames
from benchmarks.wire_table import keys_of
from tests.service import http2_client as h2
from tierstore.service.rpc.protobuf import message_class

MODEL, TABLE, DIM = "tiers", "item", networks.DIM
FEATURES = networks.FEATURES
ITEMS = 100
DELTA_ROWS, DELTA_EVERY = 1000, 20
WARM_UP = 3  # requests before a turn
TOLERANCE = 1e-4
_ROW_BYTES = 4 * DIM + 16  # in memory, with its key and bookkeeping, and some more
vectors = functools.partial(small_vectors, dim=DIM)
_Message = message_class("inference.ModelInferRequest")
_Answer = message_class("inference.ModelInferResponse")


@dataclass(frozen=True)
class Plan:
    rows: int
    rounds: int
    keys: tuple[int, ...]  # of the look-ups
    requests: int  # a turn, of 256 keys; in proportion of others

    @property
    def resident(self) -> int:
        return self.rows // 10


PLANS = {
    "tiny": Plan(100_000, 1, (64,), 40),
    "quick": Plan(400_000, 3, (64, 1024, 4096), 320),
    "default": Plan(2_000_000, 7, (64, 1024, 4096), 480),
    "full": Plan(4_000_000, 15, (64, 1024, 4096), 640),
}


def write(root: Path, plan: Plan) -> None:
    rows = np.arange(plan.rows)
    with tierstore.SnapshotWriter(root / "snapshot", model=MODEL, version=1) as snapshot:
        table = snapshot.table(TABLE, dim=DIM)
        for part in np.array_split(rows, -(-len(rows) // 250_000)):
            table.write(keys_of(part), vectors(part, np.zeros(len(part), np.int64)))
        snapshot.warmup(TABLE, keys_of(rows[: plan.resident // 2]))
        for name in FEATURES:
            snapshot.feature(name, table=TABLE)
        snapshot.dense(networks.hidden_layer(FEATURES))
    with tierstore.open(root / "data", host_budget="64MiB", load_workers=1) as store:
        store.load_snapshot(root / "snapshot")
    shutil.rmtree(root / "snapshot")


# --- what is asked


@dataclass(frozen=True)
class Asked:
    """Rows of each feature, [features, n]; a prediction where `scores`."""

    rows: np.ndarray
    scores: bool

    @property
    def answer_bytes(self) -> int:
        return self.rows.shape[1] * 4 if self.scores else self.rows.size * 4 * DIM

    @property
    def given(self) -> list[tuple[str, np.ndarray]]:
        return [(name, keys_of(rows)) for name, rows in zip(FEATURES, self.rows, strict=False)]

    @property
    def wanted(self) -> list[str]:
        return ["score"] if self.scores else [name for name, _ in self.given]

    def over_http(self, number: int) -> bytes:
        inputs = [tensor(name, "INT64", len(keys), keys.nbytes) for name, keys in self.given]
        outputs = [{"name": name, "parameters": {"binary_data": True}} for name in self.wanted]
        data = b"".join(keys.tobytes() for _, keys in self.given)
        return Request(rest_of(inputs, outputs), data, 0, 0, list, MODEL).bytes(str(number))

    def over_grpc(self, number: int) -> bytes:
        made = _Message(model_name=MODEL, id=str(number), raw_input_contents=[keys.tobytes() for _, keys in self.given])
        for name, keys in self.given:
            made.inputs.add(name=name, datatype="INT64", shape=[len(keys)])
        for name in self.wanted:
            made.outputs.add(name=name)
        message: bytes = made.SerializeToString()
        return message


class OverHttp:
    """One connection."""

    name, message = "HTTP", staticmethod(Asked.over_http)

    def __init__(self, port: int) -> None:
        self._link = Link(port)
        self.close, self.send = self._link.close, self._link.send

    def read(self) -> memoryview:
        return self._link.answer()

    @staticmethod
    def values(read: memoryview) -> np.ndarray:
        return np.frombuffer(read, np.float32)


class OverGrpc(Frames):
    """One connection. Answers may differ in their length, as those of reactors and of Python do."""

    name, message = "gRPC", staticmethod(Asked.over_grpc)

    def __init__(self, port: int) -> None:
        super().__init__(port)
        self._buffer = memoryview(bytearray(1 << 20))

    def read(self) -> memoryview:  # type: ignore[override]
        """The message of an answer."""
        at = got = 0
        parts = []
        while True:
            while got < at + 9 or got < at + 9 + int.from_bytes(self._buffer[at : at + 3], "big"):
                count = self._socket.recv_into(self._buffer[got:])
                if not count:
                    raise ConnectionError("the server closed the connection")
                got += count
            start, end = at + 9, at + 9 + int.from_bytes(self._buffer[at : at + 3], "big")
            kind, flags = self._buffer[at + 3], self._buffer[at + 4]
            at = end
            if kind == h2.DATA:
                parts.append(self._buffer[start:end])
            if kind in (h2.GOAWAY, h2.RST_STREAM):
                raise RuntimeError(f"a frame of kind {kind}: {bytes(self._buffer[start:end])!r}")
            if flags & h2.END_STREAM and kind == h2.HEADERS:
                self._credit = h2.credit(0, got)
                return memoryview(b"".join(parts))[5:]

    @staticmethod
    def values(read: memoryview) -> np.ndarray:
        return np.frombuffer(_Answer.FromString(bytes(read)).raw_output_contents[0], np.float32)


Way = OverHttp | OverGrpc


class Walk:
    """Rows of a range, one after the other; from its beginning again only if it `repeats`."""

    def __init__(self, first: int, end: int, *, repeats: bool = False) -> None:
        self._first, self._length, self._at, self._repeats = first, end - first, 0, repeats

    def __call__(self, count: int) -> np.ndarray:
        if self._at + count > self._length and not self._repeats:
            raise RuntimeError("all rows on disk were asked for: a table of more rows is needed (--rows)")
        made = self._first + (self._at + np.arange(count)) % self._length
        self._at += count
        return made


@dataclass
class State:
    """What a share of the keys is; the others are in memory. `take(count)` gives such rows."""

    name: str
    share: float = 0.0
    take: Callable[[int], np.ndarray] | None = None
    deltas: Walk | None = None  # rows of the deltas that come while it is measured


@dataclass
class Taken:
    """What came of the rounds."""

    cpu_us: list[float] = field(default_factory=list)
    delta_us: list[float] = field(default_factory=list)
    waits_s: list[float] = field(default_factory=list)
    counts: Counts = field(default_factory=dict)


class Bench:
    """The states of the one table, and requests of each."""

    def __init__(self, plan: Plan, service: Service) -> None:
        self.plan, self.service = plan, service
        self.table = Changing(service, MODEL, TABLE, plan.rows, keys_of, vectors)
        self._rng = np.random.default_rng(7)
        # half of what memory has room for: what comes into the cache meanwhile pushes none of them out
        self._hot, end, part = plan.resident // 2, plan.rows, plan.rows // 20
        cold, changed = Walk(self._hot, end - 3 * part), Walk(end - 3 * part, end - part)
        new = Walk(end - part, end, repeats=True)
        for rows in np.array_split(np.arange(end - 3 * part, end - part), max(1, part // 2500)):
            self.table.change(rows)
        for _ in range(part // DELTA_ROWS):  # from then on every delta meets rows that were changed before
            self.table.change(new(DELTA_ROWS))
        service.wait_until_folded()
        self.states = [
            State("memory"),
            *(State(f"{share:.0%} disk", share, cold) for share in (0.01, 0.05, 0.2)),
            State("1% changed", 0.01, changed),
            State("1% new", 0.01, None, new),
        ]

    def draw(self, state: State, shape: tuple[int, int], count: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Rows of so many requests, and of the deltas before every 20th of them."""
        size, changes = shape[0] * shape[1], []
        take, drawn = state.take, []
        for number in range(count):
            rows = self._rng.integers(0, self._hot, size)
            some = int((number + 1) * size * state.share) - int(number * size * state.share)
            if state.deltas is not None and number % DELTA_EVERY == 0:
                changes.append(state.deltas(DELTA_ROWS))
                take = Walk(0, DELTA_ROWS, repeats=True)
            if take is not None:
                taken = take(some)
                rows[self._rng.choice(size, some, replace=False)] = (
                    taken if state.deltas is None else changes[-1][taken]
                )
            drawn.append(rows.reshape(shape))
        return drawn, changes

    def turn(self, way: Way, state: State, shape: tuple[int, int], scores: Any, count: int, into: Taken) -> None:
        drawn, changes = self.draw(state, shape, count + WARM_UP)
        asked = [Asked(rows, scores is not None) for rows in drawn]
        messages = [way.message(one, number) for number, one in enumerate(asked)]
        kept = []
        deltas = iter(changes)
        waits_s, sent = [], 0
        for number, (one, message) in enumerate(zip(asked, messages, strict=True)):
            if number == WARM_UP:
                before, used, started = self.service.counts(), self.service.settled_cpu_s(), time.perf_counter()
            if state.deltas is not None and number % DELTA_EVERY == 0:
                self.table.change(next(deltas))
                sent += number >= WARM_UP
            began = time.perf_counter()
            way.send(message)
            read = way.read()
            waits_s.append(time.perf_counter() - began)
            if len(read) < one.answer_bytes:
                raise RuntimeError(f"expected {one.answer_bytes} bytes of tensors, got {len(read)}")
            if number % CHECKED == 0:
                kept.append((way.values(read).copy(), self._expected(one)))
        took_s, used = time.perf_counter() - started, self.service.settled_cpu_s() - used
        for name, value in difference(self.service.counts(), before).items():
            into.counts[name] = into.counts.get(name, 0.0) + value
        into.cpu_us.append(used / count * 1e6)
        into.waits_s += waits_s[WARM_UP:]
        for values, rows in kept:
            self._check(values, rows, scores)
        if state.deltas is not None:
            into.delta_us.append(self._deltas_alone(state.deltas, sent, took_s / sent) / count * 1e6)

    def _deltas_alone(self, rows: Walk, count: int, apart_s: float) -> float:
        """Processor time of so many deltas."""
        used, began = self.service.settled_cpu_s(), time.perf_counter()
        for number in range(count):
            time.sleep(max(0.0, began + number * apart_s - time.perf_counter()))
            self.table.change(rows(DELTA_ROWS))
        return self.service.settled_cpu_s() - used

    def _expected(self, asked: Asked) -> np.ndarray:
        return self.table.expected(asked.rows.ravel()).reshape(*asked.rows.shape, DIM)

    @staticmethod
    def _check(values: np.ndarray, rows: np.ndarray, scores: Any) -> None:
        if scores is None:
            np.testing.assert_array_equal(values, rows.ravel())
        else:
            (expected,) = scores.run(["score"], dict(zip(FEATURES, rows, strict=True)))
            np.testing.assert_allclose(values, expected.ravel(), rtol=TOLERANCE)

    def measure(self, ways: Sequence[Way], scores: Any) -> list[dict[str, Any]]:
        shapes: list[tuple[str, tuple[int, int], Any]] = [
            (f"look-up of {n:,} keys", (1, n), None) for n in self.plan.keys
        ]
        if scores is not None:
            shapes.append((f"prediction of {ITEMS} items", (len(FEATURES), ITEMS), scores))
        results = []
        for name, shape, of in shapes:
            count = max(self.plan.requests // 8, self.plan.requests * 256 // (shape[0] * shape[1]))
            count = max(DELTA_EVERY, count // DELTA_EVERY * DELTA_EVERY)
            for way in ways:
                taken = {state.name: Taken() for state in self.states}
                for _ in range(self.plan.rounds):
                    for state in self.states:
                        # those that take longest are measured well enough by fewer
                        self.turn(way, state, shape, of, count // (4 if state.share > 0.1 else 1), taken[state.name])
                for state_name, one in taken.items():
                    p50, p99 = np.percentile(np.array(one.waits_s) * 1e6, (50, 99))
                    over = (a / b for a, b in zip(one.cpu_us, taken["memory"].cpu_us, strict=True))
                    row = {"part": f"{name}, {way.name}", "state": state_name, "cpu_us": statistics.median(one.cpu_us)}
                    row["over_memory"] = statistics.median(over)
                    if one.delta_us:
                        row["delta_us"] = statistics.median(one.delta_us)
                    row |= {"p50_us": float(p50), "p99_us": float(p99)}
                    results.append(row | told(one.counts, len(one.waits_s)))
        return results


def main() -> None:
    parser = parser_of(__file__, __doc__, "tiny", "quick", "full", rows=int, rounds=int)
    options = parser.parse_args()
    plan = PLANS[next((name for name in ("tiny", "quick", "full") if getattr(options, name)), "default")]
    plan = Plan(options.rows or plan.rows, options.rounds or plan.rounds, plan.keys, plan.requests)
    with tempfile.TemporaryDirectory(prefix="tier-costs-") as folder, ExitStack() as stack:
        root = Path(folder)
        write(root, plan)
        budget = max(1 << 20, plan.resident * _ROW_BYTES)
        served = stack.enter_context(Served(root / "data", host_budget=budget, grpc_port=0))
        if not options.tiny:
            wait_for_reactors(served.port)
        import onnxruntime

        scores = onnxruntime.InferenceSession(networks.hidden_layer(FEATURES))
        ways: list[Way] = [OverHttp(served.port), OverGrpc(served.grpc_port)]
        for way in ways:
            stack.enter_context(closing(way))
        results = Bench(plan, Service(served.pid, served.port)).measure(ways, scores)
    document = {
        "benchmark": "tier_costs", "machine": describe(), "rows": plan.rows, "room_in_memory": plan.resident, "rounds": plan.rounds,
        "results": results,
    }  # fmt: skip
    report.write(options.json, document)
    print(report.markdown(document))


if __name__ == "__main__":
    main()
