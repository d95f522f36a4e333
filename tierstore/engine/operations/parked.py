"""A person's operations on parked messages: list, show, retry, skip. Any thread.

`skip` applies a delta without rows under the seq, so that the log has no gap and every replica that does the same has
the same log. Its event time is that of the message.
"""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from tierstore.access.audit import Audit
from tierstore.engine.events.changes import audited
from tierstore.engine.model import Model
from tierstore.engine.placement import ModelVerbs
from tierstore.errors import Conflict, NotFound
from tierstore.formats.delta.writer import DeltaWriter
from tierstore.kafka.messages import read_checked
from tierstore.kafka.parked import Parked, ParkedFiles, check_retry
from tierstore.types import DeltaResult


class ParkedMessages(ABC):
    """The verbs of a store for parked messages."""

    parked_files: ParkedFiles

    @property
    @abstractmethod
    def audit(self) -> Audit: ...

    @abstractmethod
    def model(self, name: str) -> Model: ...

    @abstractmethod
    def placed(self, model: Model) -> ModelVerbs: ...

    @abstractmethod
    def apply_delta(self, source: bytes, *, model: str | None, seq: int | None) -> DeltaResult: ...

    def parked(self, all_states: bool = False) -> list[dict[str, Any]]:
        """Messages of a source that could not be applied; with `all_states` also those that were retried or skipped."""
        return [asdict(record) for record in self.parked_files.list(all_states=all_states)]

    def parked_message(self, name: str) -> dict[str, Any]:
        """A parked message, by its id, without its payload. NotFound."""
        return asdict(self.parked_files.get(name))

    def parked_payload(self, name: str) -> bytes:
        """The bytes of a parked message, as they came."""
        return self.parked_files.payload(name)

    def retry_parked(self, name: str) -> dict[str, Any]:
        """Apply a parked message now. Returns it, with `applied`.

        If it fails it stays parked: DeltaError, Conflict, SequenceGap, NotReady.
        """
        files, record = self.parked_files, self.parked_files.get(name)
        payload = files.payload(name)
        check_retry(record)
        with audited(self.audit, "retry parked", record.model, lambda: None, seq=record.seq, parked=name):
            result = self.apply_delta(payload, model=record.model, seq=record.seq)
            return {**asdict(files.resolve(name, "retried")), "applied": result.applied}

    def skip_parked(self, name: str) -> dict[str, Any]:
        """Give a parked message up: a delta without rows gets its seq. Conflict if an earlier delta is still to
        come.
        """
        record = self.parked_files.get(name)
        if record.state != "parked":
            raise NotFound(f"{name} was {record.state} already")
        with audited(self.audit, "skip parked", record.model, lambda: None, seq=record.seq, parked=name):
            applied = False
            if record.model is not None and record.kind == "delta":
                model = self.model(record.model)
                applied = _fill(record, model, self.placed(model))
            return {**asdict(self.parked_files.resolve(name, "skipped")), "applied": applied}


def _fill(record: Parked, model: Model, placed: ModelVerbs) -> bool:
    """Apply an empty delta under the seq; False if the log has another one."""
    assert record.seq is not None
    last = model.log.last
    if last is not None and record.seq <= last:
        return False
    if last is not None and record.seq > last + 1:
        raise Conflict(
            f"{record.id} is delta {record.seq} of {model.name!r}, and {last + 1} is next: apply, retry or skip that "
            "one first"
        )
    sink = io.BytesIO()
    moment = datetime.fromtimestamp(record.timestamp_ms / 1000, UTC)
    DeltaWriter(sink, model=model.name, seq=record.seq, event_time=moment).close()
    data = sink.getvalue()
    return placed.apply_delta(read_checked(data, model.name, record.seq), data).applied
