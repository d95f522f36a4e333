"""A load in the cluster: that it goes on, which node writes which part of it, and what is there of each part.

Any thread of any node may call anything. Leases only keep nodes from doing the same work at a time: rows that two of
them write are the same rows, and each tag refuses those of a load that has ended (`tiers/remote/write.py`). A node that
is killed keeps its leases for `CLAIM_S`, and goes on at once if it starts again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from tierstore.engine.placements.cluster.shared_model import Commands, _natural, _pairs
from tierstore.tiers.answers import reading

CLAIM_S = 30.0
BEGIN, FINISH = "begin", "finish"  # what one node at a time does, beside the parts

_PART, _ROUND, _SHORT = "part:", "round", "short"
_reading = reading("what the cluster has of a load")


class PartTable(NamedTuple):
    """What a part of a load has of one table. `tags`: how many of its rows each tag has.

    `mean` and `expired` are of the whole table, `rows` and `digest` of the part.
    """

    rows: int
    digest: int
    mean: list[float]
    expired: int
    tags: list[int]


class LoadState(NamedTuple):
    """What is there of a load: by part what it has of each table, and by file how many rows were written.

    After rows were lost, parts are written again in another `round`, those of the tags in `short` (by table) alone.
    """

    parts: dict[int, dict[str, PartTable]]
    checkpoints: dict[str, int]
    round: int
    short: dict[str, list[int]] | None


class SharedLoad:
    """The load of one version, under the hash tag of its model. `owner`: this node, also after a restart."""

    def __init__(self, cluster: Commands, model: str, number: int, owner: str) -> None:
        self._cluster, self._owner = cluster, owner
        self._loader = f"{{ts:{model}}}:loader:{number}"
        self._progress = f"{{ts:{model}}}:load:{number}"

    # --- who loads

    def claim(self, token: str) -> bool:
        """Whether the load `token` goes on, and no other one of this version; again before `CLAIM_S` is over."""
        return self._hold(self._loader, token)

    def claim_part(self, part: int | str) -> bool:
        """Whether this node is the one that writes a part now; again before `CLAIM_S` is over."""
        return self._hold(f"{self._loader}:{part}", self._owner)

    def release(self, token: str) -> None:
        """End a load that has not begun."""
        self._let_go(self._loader, token)

    def release_part(self, part: int | str) -> None:
        self._let_go(f"{self._loader}:{part}", self._owner)

    def _hold(self, key: str, holder: str) -> bool:
        ms = int(CLAIM_S * 1000)
        while not self._cluster.call("SET", key, holder, "NX", "PX", ms):
            if (held := self._cluster.call("GET", key)) == holder.encode():
                if self._cluster.call("PEXPIRE", key, ms):
                    return True
            elif held is not None:
                return False
        return True

    def _let_go(self, key: str, holder: str) -> None:
        if self._cluster.call("GET", key) == holder.encode():
            self._cluster.call("UNLINK", key)

    # --- what is there

    @_reading
    def state(self) -> LoadState:
        fields = _pairs(self._cluster.call("HGETALL", self._progress))
        turn, short = _natural(fields.pop(_ROUND, 0)), json.loads(fields.pop(_SHORT, b"null"))
        parts = {_natural(name.removeprefix(_PART)): of for name, of in fields.items() if name.startswith(_PART)}
        files = {name: _natural(rows) for name, rows in fields.items() if not name.startswith(_PART)}
        return LoadState({part: _tables(json.loads(of)) for part, of in parts.items()}, files, turn, short)

    def checkpoint(self, file: str, rows: int) -> None:
        """Note how many rows of a part's built file are in the cluster."""
        self._cluster.call("HSET", self._progress, file, rows)

    def finish_part(self, part: int, tables: Mapping[str, PartTable], files: Iterable[str]) -> None:
        """Note that all rows of a part are in the cluster; its `files` are not needed any more."""
        self._cluster.call(
            "HSET", self._progress, f"{_PART}{part}", json.dumps({name: [*of] for name, of in tables.items()})
        )
        if names := [*files]:
            self._cluster.call("HDEL", self._progress, *names)
        self.release_part(part)

    def begin_again(self, before: LoadState, short: Mapping[str, list[int]]) -> None:
        """Have all parts written again, for the tags that lack rows."""
        self._cluster.call("HSET", self._progress, _ROUND, before.round + 1, _SHORT, json.dumps(short))
        self._cluster.call("HDEL", self._progress, *(f"{_PART}{part}" for part in before.parts))

    def end(self) -> None:
        self._cluster.call("UNLINK", self._progress, self._loader, f"{self._loader}:{FINISH}")


def _tables(document: Any) -> dict[str, PartTable]:
    found = {}
    for name, (rows, digest, mean, expired, tags) in document.items():
        numbers = [_natural(count) for count in tags]
        if _natural(rows) != sum(numbers):
            raise ValueError(f"table {name!r}: expected {rows} rows over all tags, got {sum(numbers)}")
        found[str(name)] = PartTable(rows, int(digest), [float(of) for of in mean], _natural(expired), numbers)
    return found
