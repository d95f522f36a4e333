"""Envelopes of rows in messages: Kafka Connect's `{schema, payload}`, Debezium's change event, and the fields by which
Debezium says that a row was deleted. Pure functions.

Debezium: debezium.io, "New Record State Extraction" (`__deleted`, `__op`), and of each connector "Data change events"
(`before`, `after`, `op`). Kafka Connect: its JsonConverter with `schemas.enable`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from tierstore.config.sources import Envelope
from tierstore.errors import DeltaError

DELETED, FLAT_OP, OP = "__deleted", "__op", "op"
MARKS = (DELETED, FLAT_OP, OP)  # fields of a row that may say that it was deleted
_NO_ROW = {"t": "its table was truncated", "m": "it is a message of the database's log"}
_WRITES = ("c", "r", "u")  # created, read by a snapshot of the database, updated
_SHOWN = 60


class Content(NamedTuple):
    """What a message holds of a row, mostly a dict. is_deleted: whether it says that the row is gone; then there may be
    nothing of it.
    """

    row: Any
    is_deleted: bool


def unwrapper(envelope: Envelope) -> Callable[[Any], Content]:
    """What takes a row out of the content of a message. DeltaError for one that has no such form, or no row."""
    return {"none": _flat, "connect": _of_connect, "debezium": _of_debezium}[envelope]


def key_unwrapper(envelope: Envelope) -> Callable[[Any], Any]:
    """What takes a key out of a message's own key: of Connect's JsonConverter it has a schema too."""
    return _as_it_is if envelope == "none" else payload


def _as_it_is(found: Any) -> Any:
    return found


def payload(found: Any) -> Any:
    """What lies in `{schema, payload}`; anything else as it is: other converters write no schema."""
    return found["payload"] if isinstance(found, dict) and found.keys() == {"schema", "payload"} else found


def hint(found: Mapping[str, Any]) -> str:
    """Which setting takes the row out of what has no vector, for an error; empty where none does."""
    if found.keys() == {"schema", "payload"}:
        return "; kafka_rows_envelope = connect takes it out of Kafka Connect's `payload`, debezium also out of `after`"
    if found.keys() >= {"before", "after", "op"}:
        return "; kafka_rows_envelope = debezium takes it out of Debezium's `after`"
    return ""


def _flat(found: Any) -> Content:
    """A row whose own fields say whether it was deleted."""
    if not isinstance(found, dict):
        return Content(found, False)
    deleted, op = found.get(DELETED), found.get(FLAT_OP)
    if deleted not in (None, True, False, "true", "false"):
        raise DeltaError(f"field {DELETED!r}: expected true or false, got {str(deleted)[:_SHOWN]!r}")
    if isinstance(op, str) and op in _NO_ROW:
        raise DeltaError(f"field {FLAT_OP!r} is {op!r}, which is no row: {_NO_ROW[op]}")
    return Content(found, deleted in (True, "true") or "d" in (op, found.get(OP)))


def _of_connect(found: Any) -> Content:
    row = payload(found)
    return Content(None, True) if row is None else _flat(row)


def _of_debezium(found: Any) -> Content:
    """The row of a change event: `after`, or where it was deleted `before`, of which the database may log the key
    alone, or nothing.
    """
    event = payload(found)
    if event is None:
        return Content(None, True)
    if not isinstance(event, dict) or not isinstance(op := event.get("op"), str):
        names = ", ".join(map(repr, list(event)[:10])) if isinstance(event, dict) else type(event).__name__
        raise DeltaError(
            f"expected Debezium's `op`, `before` and `after` (kafka_rows_envelope = debezium), got {names}"
        )
    if op == "d":
        return Content(event.get("before"), True)
    if op not in _WRITES:
        why = _NO_ROW.get(op, f"expected one of {', '.join(_WRITES)}, or d")
        raise DeltaError(f"Debezium's `op` is {op[:_SHOWN]!r}, which is no row: {why}")
    if not isinstance(row := event.get("after"), dict):
        raise DeltaError(f"expected the row in Debezium's `after`, got {type(row).__name__}")
    return Content(row, False)
