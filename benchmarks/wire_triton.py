"""Look-ups as Triton's own tool sends them, against tierstore and Triton: `python -m benchmarks.wire_triton [--json FILE]`.

`perf_analyzer` (Triton's C++ client) asks both servers in turn, for 64, 1,024 and 4,096 keys and for sizes of a
heavy-tailed distribution, 1 and 8 requests at a time, over HTTP and over gRPC, which tierstore speaks on one port. Triton answers with
`numpy.take` in its Python backend, of the same rows; its keys are the rows' numbers, so it has nothing to find. tierstore is
asked for `found` beside the rows, as the tool asks for every output that a model has. Both have all rows in memory.
With keys in the JSON (`"data": […]`), and with the rows there too, a connection of this program asks, for the rows alone.

Figures are medians over the rounds, ratios medians of each round's ratio. Server CPU is that of all the server's
processes, the one of Triton's backend among them, by their own clocks; requests a second are what the tool says, which
shares the machine's cores with the server.

Both peers come from `make bench-triton`. Without them there is nothing to measure, and the report says why.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import describe
from benchmarks.options import parser_of
from benchmarks.ready import wait_for_reactors, wait_until_warm
from benchmarks.report import headline, markdown, write
from benchmarks.triton_peer import Analyzer, Packages, Peer, Turn, Unavailable, triton, write_data
from benchmarks.wild_traffic import Link, Request, heavy_tailed, rest_of, tensor
from benchmarks.wire_lookup import VARIANTS, child, connect, http_frame, read_http
from benchmarks.wire_table import FEATURE, ROW_BYTES, keys_of, vectors_of

VENV = Path(".clients/triton")
SIZES = (64, 1024, 4096)
AT_ONCE = (1, 8)
IN_JSON = {"JSON": True, "JSON both ways": False}  # keys as JSON; whether the rows come binary
PROTOCOLS = ("HTTP", "gRPC", *IN_JSON)
# Triton's processor time is at least so many times ours
CPU = {
    "HTTP": {64: 5.0, 1024: 3.0, 4096: 2.0},
    "gRPC": {64: 6.0, 1024: 4.0, 4096: 3.0},
    "JSON": {16: 5.0, 64: 5.0, 1024: 3.0},
    "JSON both ways": {16: 4.0, 64: 6.0, 1024: 8.0},
}
OURS, THEIRS = "tierstore", "Triton"


def check(peer: Peer, keys: np.ndarray, rows: np.ndarray) -> None:
    """Have it answer these keys, with exactly the vectors of these rows."""
    expected = vectors_of(keys_of(rows))
    given, wanted = (
        tensor(FEATURE, "INT64", len(keys), keys.nbytes),
        {"name": FEATURE, "parameters": {"binary_data": True}},
    )
    asked = Request(rest_of([given], [wanted]), keys.tobytes(), len(keys), len(keys) * ROW_BYTES, lambda: [expected])
    link = Link(peer.http)
    link.send(asked.bytes("check"))
    answer = np.frombuffer(link.answer(), np.float32).reshape(expected.shape)
    np.testing.assert_array_equal(answer, expected)
    link.close()


def ask_in_json(peer: Peer, batches: list[np.ndarray], window_s: float, *, binary: bool) -> Turn:
    """Send these keys in turn as JSON, each batch once the one before is answered."""
    requests = []
    for keys in batches:
        given = {"name": FEATURE, "datatype": "INT64", "shape": [len(keys)], "data": keys.tolist()}
        requests.append(
            http_frame({"inputs": [given], "outputs": [{"name": FEATURE, "parameters": {"binary_data": binary}}]})
        )
    took: list[float] = []
    with connect(peer.http) as connection:
        used, began = peer.cpu_s(), time.perf_counter()
        for request in itertools.cycle(requests):
            sent = time.perf_counter()
            connection.sendall(request)
            read_http(connection)
            took.append(time.perf_counter() - sent)
            if sent - began > window_s:
                break
        used, passed = peer.cpu_s() - used, time.perf_counter() - began
    p50, p99 = np.percentile(took, [50, 99])
    return Turn(used / len(took) * 1e6, len(took) / passed, p50 * 1e6, p99 * 1e6)


def measure(
    analyzer: Analyzer, peers: list[Peer], rows: int, sizes: list[int], rounds: int, window_s: float, folder: Path,
    protocols: list[str], connections: tuple[int, ...] = AT_ONCE,
) -> list[dict[str, Any]]:  # fmt: skip
    rng = np.random.default_rng(1)
    made = []
    traffic = {f"{n:,}": np.full(VARIANTS, n) for n in sizes}
    traffic["1 to 3,000"] = heavy_tailed(rng, 300, 3000, 16 * VARIANTS)
    for name, lengths in traffic.items():
        drawn = [rng.integers(0, rows, n) for n in lengths.tolist()]
        files, sent = {}, {}
        for peer in peers:
            asked = [keys_of(one) if peer.name == OURS else one for one in drawn]
            files[peer.name] = write_data(folder / f"{peer.name}.json", asked)
            check(peer, asked[0], drawn[0])
            sent[peer.name] = asked
        for protocol, at_once in itertools.product(protocols, connections):
            if protocol in IN_JSON and at_once > 1:
                continue
            turns: dict[str, list[Turn]] = {peer.name: [] for peer in peers}
            for number in range(-1, rounds):  # one to warm up
                for peer in peers:
                    if protocol in IN_JSON:
                        turn = ask_in_json(peer, sent[peer.name], 2 * window_s, binary=IN_JSON[protocol])
                    else:
                        turn = analyzer.turn(peer, files[peer.name], at_once, window_s, grpc=protocol == "gRPC")
                    if number >= 0:
                        turns[peer.name].append(turn)
            for peer in peers:
                row: dict[str, Any] = {"protocol": protocol, "keys": name, "at_once": at_once, "server": peer.name}
                for figure in ("cpu_us", "requests_per_s", "p50_us", "p99_us"):
                    row[figure] = statistics.median(getattr(turn, figure) for turn in turns[peer.name])
                if len(peers) > 1:
                    pairs = list(zip(turns[peer.name], turns[OURS], strict=True))
                    row["cpu_over_tierstore"] = statistics.median(one.cpu_us / ours.cpu_us for one, ours in pairs)
                    row["tierstore_requests_over_it"] = statistics.median(
                        ours.requests_per_s / one.requests_per_s for one, ours in pairs
                    )
                made.append(row)
                print(", ".join(f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items()), flush=True)  # fmt: skip
    return made


def headlines(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The figures that have a mark."""
    made = []
    for row in results:
        if row["server"] != THEIRS:
            continue
        client = "sockets" if row["protocol"] in IN_JSON else "perf_analyzer"
        name = f"{client} over {row['protocol']}, {row['keys']} keys, {row['at_once']} at a time"
        at_least = next((mark for size, mark in CPU[row["protocol"]].items() if row["keys"] == f"{size:,}"), None)
        if at_least is not None:
            made.append(headline(f"{name}, server CPU of Triton", OURS, row["cpu_over_tierstore"], at_least=at_least))
        made.append(headline(f"{name}, requests a second", THEIRS, row["tierstore_requests_over_it"], at_least=1))
    return made


def main() -> None:
    parser = parser_of(
        __file__,
        __doc__,
        "tiny",
        "full",
        keys=list(SIZES),
        rounds=int,
        triton=(VENV, "the virtual environment of Triton and perf_analyzer"),
    )
    parser.add_argument("--protocol", nargs="+", choices=PROTOCOLS, default=list(PROTOCOLS))
    options = parser.parse_args()
    rows = 5_000 if options.tiny else 1_000_000
    rounds, window_s = (1, 0.2) if options.tiny else (11, 1.0) if options.full else (5, 0.5)
    rounds = options.rounds or rounds
    document: dict[str, Any] = {"benchmark": "wire_triton", "machine": describe(), "rows": rows, "rounds": rounds}  # fmt: skip
    skipped: list[str] = []
    try:
        packages = Packages.at(options.triton)
        analyzer = Analyzer(packages)
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="wire-triton-")))
            store = [sys.executable, "-m", "benchmarks.wire_servers", "store", "--where", str(folder / "store")]
            pid, (http, *_) = stack.enter_context(child(*store, "--rows", str(rows)))
            wait_until_warm(http)
            wait_for_reactors(http)
            peers = [Peer(OURS, (pid,), http, http)]
            try:
                peers.append(stack.enter_context(triton(packages, vectors_of(keys_of(np.arange(rows))), folder)))
            except Unavailable as reason:
                skipped.append(str(reason))
            few = (SIZES[:1], AT_ONCE[:1]) if options.tiny else (options.keys, AT_ONCE)
            results = measure(analyzer, peers, rows, few[0], rounds, window_s, folder, options.protocol, few[1])
        document |= {"headlines": headlines(results), "results": results}
    except Unavailable as reason:
        skipped.append(str(reason))
    document["skipped"] = skipped
    write(options.json, document)
    print(markdown(document))


if __name__ == "__main__":
    main()
