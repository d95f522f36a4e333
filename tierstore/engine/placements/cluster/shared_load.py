"""A load in the cluster: that it goes on, which node writes which part of it, and what is there of each part.

Any thread of any node may call anything. Leases only keep nodes from doing the same work at a time: rows that two of
them write are the same rows. What is late changes nothing: each tag refuses rows of a load that has ended
(`tiers/cluster/write.py`), and nothing is noted of it here. A node that is killed keeps its leases for `CLAIM_S`, and
goes on at once if it starts again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from tierstore.engine.placements.cluster import scripts
from tierstore.engine.placements.cluster.shared_model import SharedModel, _natural, _pairs
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
    """The load of one version, under the hash tag of its model. `owner`: this node, also after a restart.

    For one load: that with the token of the last `claim`.
    """

    def __init__(self, shared: SharedModel, number: int, owner: str) -> None:
        self._shared, self._cluster, self._number, self._owner = shared, shared._cluster, number, owner
        self._loader, self._progress = f"{shared._base}loader:{number}", f"{shared._base}load:{number}"
        self._token = ""

    # --- who loads

    def claim(self, token: str) -> bool:
        """Whether the load `token` goes on, and no other one of this version; again before `CLAIM_S` is over."""
        self._token = token
        return self._hold(self._loader, token)

    def claim_part(self, part: int | str) -> bool:
        """Whether this node is the one that writes a part now; again before `CLAIM_S` is over."""
        return self._hold(f"{self._loader}:{part}", self._owner)

    def release(self) -> None:
        """End a load that has not begun."""
        self._let_go(self._loader, self._token)

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
        self._note([file, rows])

    def finish_part(self, part: int, tables: Mapping[str, PartTable], files: Iterable[str]) -> None:
        """Note that all rows of a part are in the cluster; its `files` are not needed any more."""
        self._note([f"{_PART}{part}", json.dumps({name: [*of] for name, of in tables.items()})], files)
        self.release_part(part)

    def begin_again(self, before: LoadState, short: Mapping[str, list[int]]) -> None:
        """Have all parts written again, for the tags that lack rows."""
        self._note([_ROUND, before.round + 1, _SHORT, json.dumps(short)], (f"{_PART}{part}" for part in before.parts))

    def _note(self, fields: list[Any], gone: Iterable[str] = ()) -> None:
        """Set and remove fields; nothing if the load has ended."""
        keys = [self._shared._versions, self._progress]
        self._shared._run(scripts.NOTE, keys, self._number, self._token, len(fields), *fields, *gone)

    def end(self) -> None:
        """Remove what is there of the load beside its rows."""
        keys = [self._shared._versions, self._progress, self._loader, f"{self._loader}:{FINISH}"]
        self._shared._run(scripts.END, keys, self._number, self._token)


def _tables(document: Any) -> dict[str, PartTable]:
    found = {}
    for name, (rows, digest, mean, expired, tags) in document.items():
        numbers = [_natural(count) for count in tags]
        if _natural(rows) != sum(numbers):
            raise ValueError(f"table {name!r}: expected {rows} rows over all tags, got {sum(numbers)}")
        found[str(name)] = PartTable(rows, int(digest), [float(of) for of in mean], _natural(expired), numbers)
    return found
