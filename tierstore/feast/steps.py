"""Steps of the online store: each is a call of the client, or a pause.

Generators, which `run` and `run_async` carry out with a client of their kind. A generator belongs to one call of the
store. What a write has been acknowledged for is durable; a write that is cut off has written whole deltas or none.
"""

from __future__ import annotations

import asyncio
import io
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from tierstore.client import AsyncClient, Client
from tierstore.errors import Conflict, NotFound, NotReady, Overloaded
from tierstore.feast.rows import (
    Answer,
    Keys,
    Row,
    Rows,
    answers,
    decode_times,
    encode_times,
    entity_keys_of,
    event_time_of,
    rows_to_write,
)
from tierstore.feast.views import HeldView, check_unchanged, is_of_feast
from tierstore.formats.delta.writer import DeltaWriter
from tierstore.formats.snapshot.writer import SnapshotWriter

Call = Callable[[Any], Any]  # of a client, of either kind
Result = TypeVar("Result")
Steps = Generator[Call | float, Any, Result]

REQUEST_BYTES = 16 << 20  # rows of one look-up, or of one delta
REQUEST_KEYS = 1 << 16
RACES = 100  # deltas of other writers that one of ours gives way to
PATIENCE_S = 300.0  # with a service that takes no deltas for a while, as it still folds those before


def run(steps: Steps[Result], client: Client) -> Result:
    """Carry the steps out, in this thread."""
    done: Any = None
    error: BaseException | None = None
    while True:
        try:
            step = steps.send(done) if error is None else steps.throw(error)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        done, error = None, None
        try:
            if isinstance(step, float):
                time.sleep(step)
            else:
                done = step(client)
        except Exception as raised:  # noqa: BLE001  the generator decides
            error = raised


async def run_async(steps: Steps[Result], client: AsyncClient) -> Result:
    """Carry the steps out, in this task."""
    done: Any = None
    error: BaseException | None = None
    while True:
        try:
            step = steps.send(done) if error is None else steps.throw(error)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        done, error = None, None
        try:
            done = await (asyncio.sleep(step) if isinstance(step, float) else step(client))
        except Exception as raised:  # noqa: BLE001  the generator decides
            error = raised


# --- reading and writing


def read(view: HeldView, entity_keys: Sequence[Any]) -> Steps[list[Answer]]:
    """The rows of some keys, in their order, a request at most `REQUEST_BYTES` of them."""
    keys = entity_keys_of(view, entity_keys)
    found: list[Answer] = []
    for part in _parts(view, len(keys)):
        looked_up = yield from _looked_up(view, keys[part], [view.field, view.times])
        (vectors, has_vector), (times, has_time) = looked_up[view.field], looked_up[view.times]
        found += answers(view, vectors, has_vector, decode_times(times), has_time, datetime.now(UTC))
    return found


def write(
    view: HeldView, data: Sequence[Row], progress: Callable[[int], Any] | None, *, round_float64: bool
) -> Steps[None]:
    """Write the rows that are not older than those of their keys that the service has."""
    rows = rows_to_write(view, data, round_float64=round_float64)
    if progress is not None and len(data) > len(rows):
        progress(len(data) - len(rows))
    seq = None
    for part in _parts(view, len(rows)):
        seq = yield from _write_part(view, rows[part], seq)
        if progress is not None:
            progress(len(rows[part]))


def _write_part(view: HeldView, rows: Rows, seq: int | None) -> Steps[int | None]:
    """Write rows as one delta. Returns the newest delta that is known then; `seq`: the same before, if it is known.

    The times are those of delta `seq` or of a later one, and the delta is numbered `seq` + 1: where another writer was
    first, the service refuses it, and the times are read once more.
    """
    races, until = 0, time.monotonic() + PATIENCE_S
    while True:
        if seq is None:
            seq = (yield from _status(view))["watermark"]
        looked_up = yield from _looked_up(view, rows.keys, [view.times])
        times, found = looked_up[view.times]
        newer = rows[~found | (rows.times >= decode_times(times))]
        if not len(newer):
            return seq
        delta = _delta(view, newer, seq + 1)
        try:
            yield partial(_send, delta=delta, model=view.model)
            return seq + 1
        except Conflict as error:
            races += 1
            if races > RACES:
                error.add_note(f"feature view {view.name!r}: other writers were first {races} times; write again")
                raise
            seq = None
        except Overloaded as error:
            if time.monotonic() + error.retry_after_s > until:
                raise
            yield float(error.retry_after_s)


def _send(client: Any, delta: bytes, model: str) -> Any:
    return client.apply_delta(delta, model=model)


def _looked_up(view: HeldView, keys: Keys, features: Sequence[str]) -> Steps[dict[str, Any]]:
    wanted = dict.fromkeys(features, keys)
    try:
        return (yield lambda client: client.lookup_many(view.model, wanted, return_found=True))  # type: ignore[no-any-return]
    except (NotFound, NotReady) as error:
        raise _not_applied(view, error) from error


def _status(view: HeldView) -> Steps[dict[str, Any]]:
    """The document of the view's model, which serves."""
    try:
        document = (yield lambda client: client.status(view.model))["models"][view.model]
    except NotFound as error:
        raise _not_applied(view, error) from error
    if document["active_version"] is None:
        raise _not_applied(view, NotReady(f"model {view.model!r} has no active version"))
    return document  # type: ignore[no-any-return]


def _not_applied(view: HeldView, error: Exception) -> NotFound:
    return NotFound(f"feature view {view.name!r} is not in the service, run `feast apply` first: {error}")


def _parts(view: HeldView, rows: int) -> Iterator[slice]:
    size = max(1, min(REQUEST_KEYS, REQUEST_BYTES // (4 * sum(view.dims.values()))))
    return (slice(begin, begin + size) for begin in range(0, rows, size))


def _delta(view: HeldView, rows: Rows, seq: int) -> bytes:
    file = io.BytesIO()
    newest = event_time_of(int(rows.times.max()))  # so that none expires in the service before it is too old
    with DeltaWriter(file, model=view.model, seq=seq, event_time=newest) as delta:
        key = view.key.value
        if not rows.is_null.all():
            delta.upsert(view.field, rows.keys[~rows.is_null], rows.vectors[~rows.is_null], key=key)
        if rows.is_null.any():
            delta.delete(view.field, rows.keys[rows.is_null], key=key)
        delta.upsert(view.times, rows.keys, encode_times(rows.times), key=key)
    return file.getvalue()


# --- models


def ensure(view: HeldView) -> Steps[None]:
    """Make the model of a view, empty, unless it is there. Conflict for one of another form."""
    status = yield from _model(view.model)
    if status is None or not (status["versions"] or status["active_version"]):
        newest = 0 if status is None else status["log"]["last"] or 0  # deltas of a model of that name that was dropped
        try:
            yield lambda client: _load_empty(client, view, newest)
        except Conflict:  # somebody else may just have made it
            status = yield from _model(view.model)
            if status is None or status["active_version"] is None:
                raise
        else:
            return
    if status["active_version"] is None:
        numbers = ", ".join(str(version["version"]) for version in status["versions"])
        raise Conflict(
            f"feature view {view.name!r}: its model {view.model!r} has the versions {numbers} and serves none: "
            "activate one (tierstore activate) or drop them (tierstore drop)"
        )
    check_unchanged(view, status)


def drop(model: str) -> Steps[None]:
    """Drop the model of a view with all of its rows, if it is there. Conflict for one that no view has made."""
    status = yield from _model(model)
    if status is None:
        return
    if status["active_version"] is not None:
        if not is_of_feast(status):
            raise Conflict(f"model {model!r} was not made for a feature view: expected it not to be dropped by Feast")
        yield lambda client: client.deactivate(model)
    for version in status["versions"]:
        yield partial(_drop_version, model=model, number=version["version"])


def _model(model: str) -> Steps[dict[str, Any] | None]:
    try:
        return (yield lambda client: client.status(model))["models"][model]  # type: ignore[no-any-return]
    except NotFound:
        return None


def _drop_version(client: Any, model: str, number: int) -> Any:
    return client.drop(model, number)


def _load_empty(client: Client, view: HeldView, newest: int) -> None:
    """Load a snapshot without rows that begins after delta `newest`. The files are sent if the service is elsewhere."""
    with tempfile.TemporaryDirectory(prefix="tierstore-feast-") as folder:
        where = Path(folder) / "snapshot"
        with SnapshotWriter(where, model=view.model, version=1, delta_seq=newest) as snapshot:
            for name, dim in view.dims.items():
                snapshot.table(name, dim=dim, key=view.key.value, ttl_s=view.ttl_s)
                snapshot.feature(name, table=name)
        client.load_snapshot(where, model=view.model)
