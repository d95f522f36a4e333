"""Documents beside the files of a build that many machines make: the record of the build, and the receipt of each task.

`_build.json` says what is built; `begin_build` writes it. `<folder>/_<table>.json` is the receipt of a partition of a table: which files it
is. It is written after them, so that they count only when all are there. A commit removes both. Functions of a target; any thread.
"""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tierstore.errors import StorageError
from tierstore.formats.snapshot.built import BuiltFile, OtherFile
from tierstore.formats.targets import Target

BUILD_RECORD = "_build.json"

D = TypeVar("D", "BuildRecord", "Receipt")


class _Document(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class BuildRecord(_Document):
    """`_build.json`. `began_s`: rows that were too old by then are not in the version."""

    format: int = 1
    partitions: int
    began_s: int
    template: str  # the digest of the template, but for its `created_at`
    manifest: dict[str, Any]


class Receipt(_Document):
    """What a task has made. `sums` of the vectors, `dim` numbers; `rows` are in `files`, `expired` were too old.

    strings: the files with the strings of its keys; None where they are not kept.
    """

    rows: int = Field(ge=0)
    expired: int = Field(ge=0)
    sums: tuple[float, ...]
    digest: int = Field(ge=0)
    colliding: tuple[tuple[str, int], ...]
    files: tuple[BuiltFile, ...]
    strings: tuple[OtherFile, ...] | None = None

    @classmethod
    def of_nothing(cls, dim: int) -> Receipt:
        return cls(rows=0, expired=0, sums=(0.0,) * dim, digest=0, colliding=(), files=())


def folder_of(partition: int) -> str:
    return f"partition-{partition:04}"


def receipt_name(partition: int, table: str) -> str:
    return f"{folder_of(partition)}/_{table}.json"


def receipt_of(target: Target, partition: int, table: str) -> Receipt | None:
    return _parsed(Receipt, target, receipt_name(partition, table))


def build_record(target: Target, out: str) -> BuildRecord:
    record = _parsed(BuildRecord, target, BUILD_RECORD)
    if record is None:
        raise StorageError(f"{out} has no {BUILD_RECORD}: it was removed, or the build is committed")
    return record


def _parsed(kind: type[D], target: Target, name: str) -> D | None:
    content = target.read(name)
    if content is None:
        return None
    try:
        return kind.model_validate_json(content)
    except ValidationError as error:
        raise StorageError(f"{name} is damaged: remove it, and write the partition again: {error}") from error
