"""Look-ups over HTTP with traffic as in the wild: `python -m benchmarks.wild_lookup [--tiny | --quick | --full] [--json FILE]`.

Ranking services send requests of which hardly one is as long as another, each with an id of its own, with few or all of
a model's features, with bags, and now and then on a new connection. The first part is the state that production is in
(`benchmarks/production.py`): memory for a tenth of the rows, an hour of deltas folded, a delta beside each turn; by two traces, and beside a
service that gets the same requests, has all rows in memory and never changes. With `--quick` it is the only one.

    production  1 to 26 features, items and clicks of heavy-tailed numbers, bags, an id each, a tenth on new connections

In four more all rows are in memory. Each is against the same number of keys in requests that are all alike, or against another server:

    sizes     1 to 3,000 keys, one feature, an id each, against always 1,500 without an id
    wild      1 to 26 features, items and clicks of heavy-tailed numbers, bags with offsets, an id each, a tenth on new
              connections; against requests that are all of one size on connections that stay, of half the features and of one
    redis     sizes at random around 64, 1,024 and 4,096, an id each, against Redis MGET of the same keys
    strings   1,024 string keys a request against 1,024 integers

Contenders take turns, each with requests drawn anew. Figures are the server's processor time, by its own clock, as
medians over the rounds. `ratio a key` is that of the first contender of a part to the one in the row, as the median of
each round's. `by reactors` is the share that reactors answered, without Python; `handed on` counts why they did not, where
the service says that; one `other_request` a turn is the reading of these counts. Every answer's status
and size are checked, and one in 20 value by value.
"""

from __future__ import annotations

import functools
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import production
from benchmarks.machine import describe
from benchmarks.options import parser_of
from benchmarks.ready import wait_for_reactors, wait_until_warm
from benchmarks.report import headline, markdown, write
from benchmarks.wild_traffic import (
    MANY,
    Clients,
    Request,
    Spent,
    counters,
    heavy_tailed,
    named,
    ranking,
    single,
    write_features,
)  # fmt: skip
from benchmarks.wire_lookup import Server, child, connect, cpu_s, mget, read_exactly, redis
from benchmarks.wire_table import MODEL, ROW_BYTES, keys_of, vectors_of

REDIS = {64: 2.5, 1024: 12.0, 4096: 20.0}  # at least so many times our processor time
NEW_SHARE = 0.1
PARTS = ("production", "sizes", "wild", "redis", "strings")


@dataclass(frozen=True)
class Plan:
    rows: int
    rounds: int
    requests: int  # a turn
    connections: tuple[int, ...] = (1, 8)


PLANS = {
    "tiny": Plan(20_000, 1, 40, (8,)),
    "quick": Plan(300_000, 5, 150),
    "default": Plan(1_000_000, 7, 400),
    "full": Plan(1_000_000, 21, 800),
}


class Keys:
    """Keys of rows at random, each drawing new ones."""

    def __init__(self, rows: int, seed: int) -> None:
        self._rng, self._rows = np.random.default_rng(seed), rows

    def rows(self, count: int) -> np.ndarray:
        return self._rng.integers(0, self._rows, count)

    def __call__(self, count: int) -> np.ndarray:
        return keys_of(self.rows(count))


# --- traffic


def of_sizes(keys: Keys, sizes: Sequence[int]) -> list[Request]:
    return [single(keys(size)) for size in sizes]


def at_random(rng: np.random.Generator, most: int, count: int) -> list[int]:
    """Sizes from 1 to `most`, in random order: one from each of `count` ranges as wide, so that no turn has larger ones."""
    edges = np.linspace(1, most + 1, count + 1)
    drawn = rng.uniform(edges[:-1], edges[1:]).astype(int)
    return rng.permutation(drawn).tolist()


def wild(
    keys: Callable[[int], np.ndarray],
    rng: np.random.Generator,
    count: int,
    vectors: Callable[[np.ndarray], np.ndarray] = vectors_of,
) -> list[Request]:
    """Requests as the world sends them: most short, some very long."""
    features = rng.permutation(np.resize(np.arange(1, MANY + 1), count))
    items, clicks = heavy_tailed(rng, 50, 1500, count), heavy_tailed(rng, 30, 250, count)
    return [
        ranking(keys, int(f), int(i), int(c), rng.geometric(0.4, i) - 1, vectors)
        for f, i, c in zip(features, items, clicks, strict=True)
    ]


def alike(keys: Keys, mean: float, count: int, features: int) -> list[Request]:
    """Requests of about `mean` keys, all of one size. Of several features they are of every kind, as `wild` has."""
    if features == 1:
        return of_sizes(keys, [round(mean)] * count)
    # As many items as give so many keys: a bag of one and a half tags, or a key, for each.
    kinds = [sum(1 for number in range(features) if number % 4 == kind) for kind in range(4)]
    clicks = 50
    items = max(1, round((mean - kinds[1] - kinds[3] * clicks) / (1.5 * kinds[0] + kinds[2])))
    tags = np.resize([1, 2], items)
    return [ranking(keys, features, items, clicks, tags) for _ in range(count)]


# --- measuring


@dataclass
class Contender:
    """What is asked in a turn, drawn anew for each, and how."""

    name: str
    turn: Callable[[Sequence[Any]], Spent]
    draw: Callable[[], Sequence[Any]]
    port: int = 0  # where the service counts what its reactors answer
    close: Callable[[], None] = lambda: None


def of_service(
    name: str, service: Server, draw: Callable[[], list[Request]], connections: int, **how: Any
) -> Contender:
    clients = Clients(service.pid, service.port, connections, **how)
    return Contender(name, clients.turn, draw, service.port, clients.close)


def alternate(
    part: str, contenders: list[Contender], rounds: int, connections: int, **about: Any
) -> list[dict[str, Any]]:
    """A row for each contender; `ratio`s are of the first to each, of a key and of a request."""
    spent: dict[str, list[Spent]] = {one.name: [] for one in contenders}
    counted: dict[str, dict[str, float]] = {one.name: {} for one in contenders}
    for number in range(-1, rounds):  # one to warm up
        for one in contenders:
            requests = one.draw()
            before = counters(one.port) if one.port else {}
            taken = one.turn(requests)
            if number < 0:
                continue
            spent[one.name].append(taken)
            for name, value in (counters(one.port) if one.port else {}).items():
                mine = counted[one.name]
                mine[name] = mine.get(name, 0.0) + value - before.get(name, 0.0)
    first = spent[contenders[0].name]
    made = []
    for one in contenders:
        mine = spent[one.name]
        requests, keys = sum(taken.requests for taken in mine), sum(taken.keys for taken in mine)
        row = {
            "part": part, **about, "connections": connections, "requests": one.name, "keys_a_request": keys / requests,
            "cpu_us": statistics.median(taken.us_a_request for taken in mine),
            "cpu_ns_a_key": statistics.median(taken.us_a_key for taken in mine) * 1e3,
            "ratio_a_key": statistics.median(a.us_a_key / b.us_a_key for a, b in zip(first, mine, strict=True)),
        }  # fmt: skip
        if one.port:
            row["by_reactors"] = counted[one.name].get("answers", 0.0) / requests
            reasons = {name: value for name, value in counted[one.name].items() if "." in name and value}
            said = ", ".join(f"{name.partition('.')[2]} {value:.0f}" for name, value in reasons.items())
            row["handed_on"] = said or None
        made.append(row)
        one.close()
    return made


def redis_contender(server: Server, draw: Callable[[], list[np.ndarray]], connections: int) -> Contender:
    """MGET of these keys, each on one of the connections in turn. What comes back must have the size of all rows."""
    links = [connect(server.port) for _ in range(connections)]
    row = len(b"$%d\r\n\r\n" % ROW_BYTES) + ROW_BYTES

    def turn(batches: Sequence[np.ndarray]) -> Spent:
        space = memoryview(bytearray(max(len(keys) for keys in batches) * row + 32))
        before = cpu_s(server.pid)
        for first in range(0, len(batches), connections):
            wave = batches[first : first + connections]
            for link, keys in zip(links, wave, strict=False):
                link.sendall(mget(keys))
            for link, keys in zip(links, wave, strict=False):
                answer = space[: len(b"*%d\r\n" % len(keys)) + len(keys) * row]
                read_exactly(link, answer)
                if bytes(answer[-2:]) != b"\r\n" or answer[0] != ord("*"):
                    raise RuntimeError(f"Redis answered {bytes(answer[:100])!r}")
        return Spent(cpu_s(server.pid) - before, len(batches), sum(map(len, batches)))

    def close() -> None:
        for link in links:
            link.close()

    return Contender("Redis MGET", turn, draw, close=close)


def sizes_part(service: Server, plan: Plan) -> list[dict[str, Any]]:
    rng, rows = np.random.default_rng(1), []
    for connections in plan.connections:
        keys = Keys(plan.rows, connections)

        def random(keys: Keys = keys) -> list[Request]:
            return of_sizes(keys, at_random(rng, 3000, plan.requests))

        def fixed(keys: Keys = keys) -> list[Request]:
            return of_sizes(keys, [1500] * plan.requests)

        contenders = [
            of_service("1 to 3,000 keys, ids", service, random, connections),
            of_service("1 to 3,000 keys", service, random, connections, ids=False),
            of_service("1,500 keys", service, fixed, connections, ids=False),
            of_service("1,500 keys, ids", service, fixed, connections),
        ]
        rows += alternate("sizes", contenders, plan.rounds, connections)
    return rows


def wild_part(service: Server, plan: Plan) -> list[dict[str, Any]]:
    rng, rows = np.random.default_rng(2), []
    for connections in plan.connections:
        keys = Keys(plan.rows, 10 + connections)
        sample = wild(keys, rng, max(2000, plan.requests))
        mean = sum(one.keys for one in sample) / len(sample)
        draw = functools.partial(wild, keys, rng, plan.requests)
        contenders = [
            of_service("wild", service, draw, connections, new_share=NEW_SHARE),
            of_service("wild, connections stay", service, draw, connections),
            of_service("wild, connections stay, no ids", service, draw, connections, ids=False),
        ]
        for features in (MANY // 2, 1):
            name = f"one size, {features} feature{'s' * (features > 1)}"
            draw = functools.partial(alike, keys, mean, plan.requests, features)
            contenders.append(of_service(name, service, draw, connections, ids=False))
        rows += alternate("wild", contenders, plan.rounds, connections)
    return rows


def redis_part(service: Server, other: Server, plan: Plan) -> list[dict[str, Any]]:
    rng, rows = np.random.default_rng(3), []
    for around in REDIS:
        for connections in plan.connections:
            keys = Keys(plan.rows, 20 + connections)

            def batches(around: int = around, keys: Keys = keys) -> list[np.ndarray]:
                return [keys(around // 2 + size) for size in at_random(rng, around, plan.requests)]

            def requests(batches: Callable[[], list[np.ndarray]] = batches) -> list[Request]:
                return [single(batch) for batch in batches()]

            contenders = [
                redis_contender(other, batches, connections),
                of_service("tierstore, ids", service, requests, connections),
            ]
            rows += alternate("redis", contenders, plan.rounds, connections, keys_around=around)
    return rows


def strings_part(service: Server, plan: Plan) -> list[dict[str, Any]]:
    rows = []
    for connections in plan.connections:
        keys = Keys(plan.rows, 30 + connections)

        def strings(keys: Keys = keys) -> list[Request]:
            return [named(keys_of(drawn), drawn) for drawn in (keys.rows(1024) for _ in range(plan.requests))]

        def integers(keys: Keys = keys) -> list[Request]:
            return of_sizes(keys, [1024] * plan.requests)

        contenders = [
            of_service("1,024 strings, ids", service, strings, connections),
            of_service("1,024 integers, ids", service, integers, connections),
        ]
        rows += alternate("strings", contenders, plan.rounds, connections)
    return rows


def changed_vectors(rows: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Whole numbers, as those of rows that were never changed."""
    return vectors_of(keys_of(rows) + 7919 * times)


def production_part(where: Path, plan: Plan, *, compiled: bool) -> list[dict[str, Any]]:
    rng = np.random.default_rng(4)

    def draw(keys: Callable[[int], np.ndarray], vectors: Callable[[np.ndarray], np.ndarray]) -> list[Request]:
        return wild(keys, rng, plan.requests, vectors)

    return production.measure(
        where, plan.rows, MODEL, write_features, changed_vectors, draw, plan.rounds, compiled=compiled, new_share=NEW_SHARE,
        traces=production.TRACES if compiled else production.TRACES[:1],
    )  # fmt: skip


def headlines(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The figures that have a mark."""
    made = []
    for row in results:
        if row["part"] == "production":
            continue
        what, by = row["requests"], f"{row['connections']} connection{'s' * (row['connections'] > 1)}, server CPU a key"
        if what == "wild":
            made.append(
                headline(f"wild traffic, {by}: answered by reactors", "all of it", row["by_reactors"], at_least=0.99)
            )
        elif what.startswith("one size"):
            made.append(headline(f"wild traffic, {by}", what, row["ratio_a_key"], at_most=1.3))
        elif what == "1,500 keys":
            made.append(headline(f"1 to 3,000 keys at random, ids, {by}", what, row["ratio_a_key"], at_most=1.2))
        elif what == "tierstore, ids":
            name = f"Redis MGET, sizes around {row['keys_around']:,}, {by}"
            made.append(headline(name, "tierstore", row["ratio_a_key"], at_least=REDIS[row["keys_around"]]))
        elif what == "1,024 integers, ids":
            made.append(headline(f"1,024 string keys, {by}", "1,024 integers", row["ratio_a_key"], at_most=2))
    return made


def resident_parts(
    stack: ExitStack, where: str, plan: Plan, chosen: Sequence[str], skipped: list[str], *, compiled: bool
) -> list[dict[str, Any]]:
    """The parts whose rows are all in memory."""
    results: list[dict[str, Any]] = []
    command = [sys.executable, "-m", "benchmarks.wire_servers", "wild", "--where", where, "--rows", str(plan.rows)]
    pid, (port, *_) = stack.enter_context(child(*command))
    wait_until_warm(port)
    if compiled:
        wait_for_reactors(port)
    service = Server("tierstore", pid, port, lambda *_: [])
    if "sizes" in chosen:
        results += sizes_part(service, plan)
    if "wild" in chosen:
        results += wild_part(service, plan)
    if "strings" in chosen:
        results += strings_part(service, plan)
    if "redis" in chosen:
        if shutil.which("redis-server") is None:
            skipped.append("redis: redis-server is not installed")
        else:
            results += redis_part(service, stack.enter_context(redis(plan.rows)), plan)
    return results


def main() -> None:
    parser = parser_of(__file__, __doc__, "tiny", "quick", "full", rounds=int)
    parser.add_argument("--part", nargs="+", choices=PARTS, help="some of the parts")
    options = parser.parse_args()
    plan = PLANS[next((name for name in ("tiny", "quick", "full") if getattr(options, name)), "default")]
    if options.rounds:
        plan = Plan(plan.rows, options.rounds, plan.requests, plan.connections)
    chosen = options.part or (PARTS[:1] if options.quick else PARTS)
    skipped: list[str] = []
    results: list[dict[str, Any]] = []
    with ExitStack() as stack:
        where = stack.enter_context(tempfile.TemporaryDirectory(prefix="wild-"))
        if "production" in chosen:
            results += production_part(Path(where), plan, compiled=not options.tiny)
        if set(chosen) != {"production"}:
            results += resident_parts(stack, where, plan, chosen, skipped, compiled=not options.tiny)
    document = {
        "benchmark": "wild_lookup", "machine": describe(), "rows": plan.rows, "rounds": plan.rounds, "requests_a_turn": plan.requests,
        "headlines": headlines(results), "results": results, "skipped": skipped,
    }  # fmt: skip
    write(options.json, document)
    print(markdown(document))


if __name__ == "__main__":
    main()
