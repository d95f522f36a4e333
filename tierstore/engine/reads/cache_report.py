"""The report on a table's caches: the hit rate by minute and by size, and the keys that are looked up most.

Only reads; any thread, under a view that the caller holds.
"""

from __future__ import annotations

import contextlib
from itertools import pairwise
from typing import Any

from tierstore.arguments import whole_number
from tierstore.engine.reads.view import View
from tierstore.engine.versions.kept_strings import find_strings
from tierstore.errors import NotFound, StorageError
from tierstore.formats.colliding import NONE
from tierstore.types import KeyType, Tier

MOST_HOTTEST = 1000


def cache_report(view: View, table: str, limit: int) -> dict[str, Any]:
    """`{"table", "key", "rows", "hit_rate", "curve", "bytes", "hottest", "history"}` of a table of a served version.

    `hottest`: at most `limit` entries `{"key", "share"}`. Before look-ups are counted these are the keys that were hot
    when the version was last served, and their share is None. For string keys `key` is the string, or the hash, 16 hex
    digits, where the version does not have it. NotFound for an unknown table.
    """
    limit = whole_number("limit", limit, 1, MOST_HOTTEST)
    version = view.open_version
    if not isinstance(table, str) or table not in version.tables:
        raise NotFound(f"no table {table!r}; version {view.version} has {', '.join(sorted(version.tables))}")
    insight = version.tables[table].counts.insight
    hottest: list[tuple[int, float | None]] = list(insight.counts.hottest(limit))
    if not hottest:
        hottest = [(int(key), None) for keys in version.kept_hot_keys(table, Tier.HOST)[:1] for key in keys[:limit]]
    kind, strings = version.specs[table].key, dict[int, str]()
    if kind is KeyType.STRING:
        with contextlib.suppress(StorageError):  # `verify` names the file
            codes, colliding = [code for code, _ in hottest], view.colliding.get(table, NONE)
            strings = find_strings(version, view.overlays, table, codes, colliding)
    return {
        "table": table,
        "version": view.version,
        "key": kind.value,
        **insight.status(),
        "hottest": [{"key": strings.get(code, _shown(code, kind)), "share": share} for code, share in hottest],
        "history": _with_causes(insight.history()),
    }


def _shown(code: int, kind: KeyType) -> int | str:
    if kind is KeyType.INT64:
        return code
    unsigned = code & (1 << 64) - 1
    return unsigned if kind is KeyType.UINT64 else f"{unsigned:016x}"


def _with_causes(minutes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each minute with the changes in it: `switch` to another version, `deltas` that were applied."""
    return [
        now | {"switch": now["version"] != before["version"], "deltas": max(0, now["seq"] - before["seq"])}
        for before, now in pairwise([*minutes[:1], *minutes])
    ]
