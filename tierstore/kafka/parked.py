"""Parked messages: what was read from a topic and cannot be applied, one file each, until a person decides.

After a crash a file is there whole or not at all. One that was retried or skipped stays as a record
without its payload, so that the same message is not parked again when it is read again. Any thread; one
process holds the directory.
"""

from __future__ import annotations

import json
import logging
import threading
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import xxhash

from tierstore.errors import Corruption, InvalidInput, NotFound, StorageError
from tierstore.formats import files
from tierstore.formats.regular import read_regular
from tierstore.kafka.messages import digest_of

logger = logging.getLogger(__name__)

_SUFFIX = ".parked"
_SHOWN_REASON = 2000

State = Literal["parked", "retried", "skipped"]
Kind = Literal["delta", "row"]


@dataclass(frozen=True, slots=True)
class Parked:
    """A parked message, or the parts of a delta that came.

    offset is that of the first message, of `messages`. model and seq are None where the message does not say them.
    complete: whether the payload is a whole delta. kind: what the message was to be; a row has no seq. digest: XXH3-64
    of the payload of `nbytes` bytes. parked_at: ISO 8601.
    """

    id: str
    topic: str
    partition: int
    offset: int
    messages: int
    model: str | None
    seq: int | None
    complete: bool
    reason: str
    timestamp_ms: int
    parked_at: str
    digest: str
    nbytes: int
    state: State = "parked"
    kind: Kind = "delta"


class ParkedFiles:
    """The directory of parked messages; it is made with the first one."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        self._records: dict[str, Parked] = {}
        if directory.is_dir():
            files.sweep(directory)
            for path in sorted(directory.glob(f"*{_SUFFIX}")):
                try:
                    record, _ = self._read(path)
                except StorageError as error:
                    logger.error("%s", error)
                else:
                    self._records[record.id] = record

    def list(self, *, all_states: bool = False) -> list[Parked]:
        """In the order of their positions; with `all_states` those that were retried or skipped, too."""
        with self._lock:
            records = [record for record in self._records.values() if all_states or record.state == "parked"]
        return sorted(records, key=lambda record: (record.topic, record.partition, record.offset))

    def count(self, topic: str) -> int:
        """How many messages of a topic wait for a decision."""
        with self._lock:
            return sum(record.topic == topic and record.state == "parked" for record in self._records.values())

    def add(self, record: Parked, payload: bytes) -> bool:
        """Park a message, durably. False where it was parked before, whatever became of it."""
        with self._lock:
            if record.id in self._records:
                return False
            files.make_dir(self._directory)
            self._write(replace(record, reason=record.reason[:_SHOWN_REASON]), payload)
        return True

    def get(self, name: str) -> Parked:
        """NotFound for an id that there is not."""
        with self._lock:
            record = self._records.get(name)
        if record is None:
            raise NotFound(f"nothing is parked as {name!r}; `tierstore parked list` shows what is")
        return record

    def payload(self, name: str) -> bytes:
        """The bytes of a parked message. NotFound, or Corruption where they are not what was parked."""
        record = self.get(name)
        if record.state != "parked":
            raise NotFound(f"{name} was {record.state}: its payload is no longer here")
        return self._read(self._path(name))[1]

    def resolve(self, name: str, state: Literal["retried", "skipped"]) -> Parked:
        """Note what became of it, and free its payload."""
        record = replace(self.get(name), state=state)
        with self._lock:
            self._write(record, b"")
        return record

    def _path(self, name: str) -> Path:
        return self._directory / f"{name}{_SUFFIX}"

    def _write(self, record: Parked, payload: bytes) -> None:
        document = asdict(record)
        if record.kind == "delta":
            del document["kind"]  # releases before rows read those of deltas, without it
        head = json.dumps(document, ensure_ascii=True).encode()
        checksum = xxhash.xxh3_64_hexdigest(head + b"\n" + payload).encode()
        with files.publish(self._path(record.id)) as file:
            file.write(checksum + b" " + head + b"\n")
            file.write(payload)
        self._records[record.id] = record

    def _read(self, path: Path) -> tuple[Parked, bytes]:
        try:
            data = bytes(read_regular(path))
        except OSError as error:
            raise StorageError(f"cannot read {path}: {error}") from error
        checksum, _, content = data.partition(b" ")
        if xxhash.xxh3_64_hexdigest(content) != checksum.decode(errors="replace"):
            raise Corruption(f"{path} does not match its checksum: it was changed since it was written")
        head, _, payload = content.partition(b"\n")
        return Parked(**json.loads(head)), payload


def make_id(partition: int, offset: int, payload: bytes) -> str:
    """An id that is the same each time that the same message is read."""
    return f"{partition}-{offset}-{digest_of(payload)}"


def check_retry(record: Parked) -> None:
    """InvalidInput where the payload is not a whole delta."""
    if record.kind == "row":
        raise InvalidInput(
            f"{record.id} is a row: a later one of its key may have come since; produce the row again, and skip this "
            "one"
        )
    if not record.complete:
        raise InvalidInput(
            f"{record.id} holds only some parts of the delta: write that delta again (above max_delta, raise that "
            "first), load a snapshot, or skip it"
        )
