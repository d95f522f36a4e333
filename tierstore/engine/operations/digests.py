"""Digests of every row that is served, at one seq, by which two nodes are compared without sending their rows.

The rows of a table are put into buckets by the hash of their keys, and each bucket has a digest; if two nodes differ
in one, the digest of each row in it shows which keys do. Here too a bucket's digest is the sum of its rows'
digests, so their order does not count.

On a thread of low priority while the model serves; it only reads, in one `full_scan`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from tierstore.arguments import number_or_none, whole_number
from tierstore.engine.model import Model
from tierstore.engine.operations.full_scan import FullScan, check_goes_on, full_scan
from tierstore.engine.operations.low_priority import low_priority
from tierstore.errors import InvalidInput
from tierstore.formats.keys import partition_of
from tierstore.formats.row_times import live_at
from tierstore.kernels.digest import row_digests
from tierstore.tiers.background import Pace

MOST_BUCKETS = 65536  # of a table
MOST_LISTED = 1 << 20  # rows of a table whose digests are listed
Digests = npt.NDArray[np.uint64]


def digests(
    model: Model,
    version: int | str | None,
    seq: int | None,
    buckets: int,
    listed: Mapping[str, Sequence[int]] | None,
    expired_at_s: int | None,
) -> dict[str, Any]:
    """Digests of all rows of a version (a number or a label; None: the active one).

    Args:
        seq: the expected seq; if the version is at another one nothing is read. None: any.
        buckets: the number of buckets for the rows of each table, 1 to `MOST_BUCKETS`.
        listed: by table, the buckets whose rows are listed in place of digests of buckets; others are not read.
        expired_at_s: seconds since 1970; rows that are expired then count as absent, removed or not.

    Returns `{"model", "version", "seq", "dense", "tables"}`. `dense`: a hash of the dense parts, None without one.
    `tables`, None at another seq: for each table `rows`, and `digests`, 16 hex digits for each bucket; for a table
    whose rows are listed `keys`, their codes, and `digests` of each row.
    """
    buckets = whole_number("buckets", buckets, 1, MOST_BUCKETS)
    seq, expired_at_s = number_or_none("seq", seq, 0), number_or_none("expired_at_s", expired_at_s, 0)
    throttle = model.state.shared.throttle

    def work(stops: Any) -> dict[str, Any]:
        pace = Pace(lambda: throttle.share)

        def goes_on() -> None:
            pace.sleep()
            check_goes_on("comparison", model, scan.version.number, stops)

        refusals = model.state.shared.placement.refusals
        with full_scan(model, version, lambda view: refusals.check("compare_unnamed")) as scan:
            found: dict[str, Any] = {"model": model.name, "version": scan.version.number, "seq": scan.seq}
            found["dense"] = _digest_of(scan.graphs)
            at_another = seq is not None and scan.seq != seq
            tables = None if at_another else _tables(scan, buckets, listed, expired_at_s, goes_on)
            return found | {"tables": tables}

    return low_priority(throttle, "comparison", work, None)


def _tables(
    scan: FullScan,
    buckets: int,
    listed: Mapping[str, Sequence[int]] | None,
    expired_at_s: int | None,
    goes_on: Any,
) -> dict[str, dict[str, Any]]:
    if unknown := set(listed or ()) - scan.tables.keys():
        raise InvalidInput(f"no table {min(unknown)!r}; there are {', '.join(sorted(scan.tables))}")
    found: dict[str, dict[str, Any]] = {}
    for name, batches in scan.tables.items():
        if listed is not None and name not in listed:
            continue
        ttl_s = scan.version.specs[name].ttl_s
        wanted = None if listed is None else _buckets(name, listed[name])
        sums, rows, keys_listed, of_rows = np.zeros(buckets, np.uint64), 0, [_NO_KEYS], [_NO_DIGESTS]
        for keys, stored, times in batches:
            goes_on()
            if expired_at_s is not None and times is not None and ttl_s is not None:
                stays = live_at(times, expired_at_s, ttl_s)
                keys, stored = keys[stays], stored[stays]
            bucket = partition_of(keys, buckets)
            if wanted is not None:
                there = np.isin(bucket, wanted)
                keys_listed.append(keys[there].copy())
                of_rows.append(row_digests(keys[there], stored[there]))
                rows += int(np.count_nonzero(there))
                if rows > MOST_LISTED:
                    raise InvalidInput(f"expected buckets of at most {MOST_LISTED} rows, got more in table {name!r}")
                continue
            rows += len(keys)
            np.add.at(sums, bucket, row_digests(keys, stored))
        if wanted is None:
            found[name] = {"rows": rows, "digests": as_hex(sums)}
        else:
            found[name] = {"rows": rows, "keys": np.concatenate(keys_listed).tolist(),
                           "digests": as_hex(np.concatenate(of_rows))}  # fmt: skip
    return found


_NO_KEYS, _NO_DIGESTS = np.empty(0, np.int64), np.empty(0, np.uint64)


def as_hex(values: Digests) -> str:
    return values.astype(">u8").tobytes().hex()


def _buckets(table: str, listed: Sequence[int]) -> npt.NDArray[np.int64]:
    """The numbers of buckets, ascending. InvalidInput for anything else than a sequence of integers."""
    if not isinstance(listed, (list, tuple, range, np.ndarray)):
        raise InvalidInput(f"listed: {table}: expected numbers of buckets, got {type(listed).__name__}")
    return np.array(sorted({whole_number(f"listed: {table}", bucket, -(1 << 63)) for bucket in listed}), np.int64)


def _digest_of(graphs: Mapping[str, bytes]) -> str | None:
    """A digest of all graphs; the graph's own if there is only the one without a name."""
    digests = {head: xxhash.xxh3_64_hexdigest(graph) for head, graph in sorted(graphs.items())}
    if digests.keys() <= {""}:
        return digests.get("")
    return xxhash.xxh3_64_hexdigest(json.dumps(digests).encode())
