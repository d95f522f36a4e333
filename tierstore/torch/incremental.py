"""dynamicemb's incremental dumps as deltas. Pure functions of tensors: dynamicemb is not imported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tierstore.errors import InvalidInput
from tierstore.formats.delta.writer import DeltaWriter

Collections = Mapping[str, Mapping[str, Any]]


def add_incremental_dump(delta: DeltaWriter, dump: Any, *, evicted: Collections | None = None) -> int:
    """Add what dynamicemb's `incremental_dump` returned to a delta. Returns how many rows and deletes that are.

    >>> with tierstore.DeltaWriter("deltas/41821.arrow", model="ctr", seq=41821) as delta:
    ...     add_incremental_dump(delta, incremental_dump(model, threshold), evicted=evicted)

    The tables have the names that they have there; a name in two collections is refused.

    Args:
        dump: `{collection: {table: (keys [n], values [n, dim])}}`, or the pair of this and the scores, as it returns
            them. None, which it returns where there is no such table, has no rows.
        evicted: `{collection: {table: keys}}`, keys that were evicted since the dump before. They are deleted, unless
            the dump has them: such a key has come back.
    """
    if isinstance(dump, tuple):
        dump = dump[0]
    tables, gone = _by_table("dump", dump or {}), _by_table("evicted", evicted or {})
    for name, pair in tables.items():
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise InvalidInput(f"dump of table {name!r}: expected keys and values, got {type(pair).__name__}")
    count = 0
    for name, keys in gone.items():  # first: of a key that is there twice the later counts
        delta.delete(name, _flat(name, keys))
        count += len(keys)
    for name, (keys, values) in tables.items():
        if len(keys) or name not in gone:
            delta.upsert(name, _flat(name, keys), values)
            count += len(keys)
    return count


def _by_table(what: str, collections: Collections) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for collection, tables in collections.items():
        if not isinstance(tables, Mapping):
            raise InvalidInput(f"{what}: expected tables in collection {collection!r}, got {type(tables).__name__}")
        for name, of in tables.items():
            if name in found:
                raise InvalidInput(f"{what}: two collections have a table {name!r}: rename one of them")
            found[name] = of
    return found


def _flat(name: str, keys: Any) -> Any:
    """Keys of a table on the CPU, as NumPy has them."""
    if not hasattr(keys, "detach") or keys.ndim != 1:
        raise InvalidInput(f"keys of table {name!r}: expected a tensor [n], got {type(keys).__name__}")
    return keys.detach().cpu().numpy()
