"""The servers that `wire_lookup` compares, each a process of its own: `python -m benchmarks.wire_servers echo|grpc-echo|store|wild …`.

`echo` is the limit of the transport: the service as it is, whose reactors answer as many ready bytes and look nothing up.
`grpc-echo` is grpcio's server doing the same. `store` is the service as it is, over a table whose rows are all in memory, and `wild` one whose model has
many features beside, and one with string keys. They print their ports when they answer.
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path
from typing import Any

import numpy as np

import tierstore
from benchmarks.ready import SETTINGS
from benchmarks.wire_table import DIM, FEATURE, MODEL, ROW_BYTES, keys_of, vectors_of
from tierstore.config import load_settings
from tierstore.service.process import tune_allocator


def serve_grpc_echo() -> None:
    from benchmarks.wire_grpc import echo_server

    tune_allocator()
    server, port = echo_server()
    print(port, flush=True)
    server.wait_for_termination()


def answer_ready_bytes() -> None:
    """Have reactors send as many bytes as an answer has, whatever they are, and look nothing up."""
    from tierstore.lookup import plans
    from tierstore.service.reactor.plan_index import PlanIndex

    plan = PlanIndex._variant

    def without_look_ups(*args: Any) -> Any:
        variant = plan(*args)
        if variant is not None:
            _, numbers = variant._kept  # calls come first
            words = int(variant.words["planned_calls"]) * plans.PLANNED.bytes // 8
            numbers[:words].view(plans.PLANNED.dtype)["kind"] = plans.CHECKED
        return variant

    PlanIndex._variant = without_look_ups  # type: ignore[method-assign, assignment]


def write_wild(writer: tierstore.SnapshotWriter, keys: np.ndarray, warm: int) -> None:
    """Many features of the table of the one, and as many rows under keys that are strings, the first of them `warm`."""
    from benchmarks.wild_traffic import NAMED, name_of, write_features

    write_features(writer)
    names = [name_of(row) for row in range(len(keys))]
    writer.table("named", dim=DIM, key="string").write(names, vectors_of(keys))
    writer.feature(NAMED, table="named")
    writer.warmup("named", names[:warm])


def serve_store(options: argparse.Namespace) -> None:
    """Load rows, all of them into memory but for those of `cold`, and serve them.

    The tables have a quarter more that nobody asks for: a cache as large as its table keeps nearly all of it, and a few in a
    thousand keys would be read from files.
    """
    from tierstore.service.server import serve

    where, rows, warm, wild = options.where, options.rows, not options.cold, options.server == "wild"
    budget = f"{max(64, rows * (ROW_BYTES + 16) * (4 if wild else 2) >> 20)}MiB"
    if not warm:
        budget = "1MiB"
    source, data = where / "snapshot", where / "data"
    keys = keys_of(np.arange(rows * 5 // 4))
    with tierstore.SnapshotWriter(source, model=MODEL, version=1) as writer:
        writer.table("item", dim=DIM).write(keys, vectors_of(keys))
        writer.feature(FEATURE, table="item")
        if warm:
            writer.warmup("item", keys[:rows])
        if wild:
            write_wild(writer, keys, rows)
    with tierstore.open(data, host_budget=budget) as store:
        store.load_snapshot(source)
    settings = load_settings(
        None,
        data=data,
        host_budget=budget,
        port=0,
        drain_s=0,
        allow_client_shm=options.shared_memory,
        threads=options.threads or None,
        tls_cert=options.tls,
        tls_key=options.tls,
        **SETTINGS,
    )
    logging.disable(logging.INFO)

    def announce(*places: str | None) -> None:
        print(*(place.rpartition(":")[2] for place in places if place), flush=True)

    serve(settings, announce=announce)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("server", choices=["echo", "grpc-echo", "store", "wild"])
    parser.add_argument("--where", type=Path)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--shared-memory", action="store_true")
    parser.add_argument("--threads", type=int, default=0, help="reactor threads; 0: as many as there are processors")
    parser.add_argument("--tls", type=Path, help="a file with a key and its certificate")
    parser.add_argument("--cold", action="store_true", help="keep no rows in memory")
    options = parser.parse_args()
    if options.server == "grpc-echo":
        serve_grpc_echo()
    else:
        if options.server == "echo":
            answer_ready_bytes()
        serve_store(options)
    sys.exit(0)


if __name__ == "__main__":
    main()
