"""The metadata of a delta: what its Arrow schemas say of it. Pure functions; any thread may call them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import pyarrow as pa

from tierstore.arguments import check_name
from tierstore.errors import DeltaError
from tierstore.formats.names import MAX_ORDINAL
from tierstore.formats.times import parse_time

_DECIMAL = re.compile(r"[0-9]{1,19}")


@dataclass(frozen=True, slots=True)
class DeltaMetadata:
    """The schema metadata of a delta's streams, which is the same in each."""

    model: str
    seq: int
    event_time: datetime
    base_version: int | None
    parts: int


def metadata_of(metadata: Mapping[bytes, bytes]) -> DeltaMetadata:
    """A schema's metadata, checked. DeltaError where it is invalid."""

    def text(name: str) -> str | None:
        value = metadata.get(name.encode())
        try:
            return None if value is None else value.decode()
        except UnicodeDecodeError:
            raise DeltaError(f"bad delta: schema metadata {name!r} is not UTF-8") from None

    def number(name: str) -> int | None:
        value = text(name)
        if value is None:
            return None
        if _DECIMAL.fullmatch(value) is None or not 1 <= int(value) <= MAX_ORDINAL:
            raise DeltaError(
                f"bad delta: schema metadata {name!r}: expected a decimal number from 1 to {MAX_ORDINAL}, got {value!r}"
            )
        return int(value)

    model, seq, event_time = text("model"), number("seq"), text("event_time")
    if model is None or seq is None or event_time is None:
        raise DeltaError("bad delta: expected schema metadata `model`, `seq` and `event_time`")
    try:
        return DeltaMetadata(
            check_name("model", model), seq, parse_time(event_time), number("base_version"), number("parts") or 1
        )
    except DeltaError:
        raise
    except ValueError as error:
        raise DeltaError(f"bad delta: {error}") from error


def read_event_time(path: Path) -> datetime:
    """When the delta in a file happened: its first message alone is read, of one that was accepted. DeltaError."""
    try:
        with pa.OSFile(str(path)) as file:
            return metadata_of(pa.ipc.open_stream(file).schema.metadata or {}).event_time
    except (pa.ArrowException, OSError) as error:
        raise DeltaError(f"cannot read the delta {path}: {error}") from error
