"""Words of the domain: key types, storage dtypes, tables, features, and where a key was answered.

Immutable values only; any thread may use them.

Keys inside the store are always `int64` arrays, called *codes*: an `int64` key is itself, a `uint64`
key is its bit pattern, a string key is the bit pattern of its XXH3-64 (seed 0). Every code is legal.
Rows inside the store are `uint8[n, row_bytes]`, in the table's storage dtype (little-endian).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Literal

import numpy as np
import numpy.typing as npt

from tierstore.errors import InvalidInput

Keys = npt.NDArray[np.int64]
Rows = npt.NDArray[np.uint8]
States = npt.NDArray[np.uint8]
Vectors = npt.NDArray[np.float32] | npt.NDArray[np.float16]

BaseKind = Literal["sealed", "rocksdb"]  # what holds a version's rows as loaded; its deltas are RocksDB's in any case

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


def check_name(kind: str, name: object) -> str:
    """Return `name` if it may name a model, table or feature; it becomes a path and a metric label."""
    if not isinstance(name, str) or NAME.fullmatch(name) is None:
        raise InvalidInput(
            f"{kind} name {name!r} is not allowed: use 1 to 64 of A-Z a-z 0-9 _ -, starting with a letter or digit"
        )
    return name


def check_sequence(keys: object, kind: str) -> None:
    """InvalidInput for one key where several are expected, and for what has no order that answers could follow."""
    if isinstance(keys, (set, frozenset, Mapping)):
        raise InvalidInput(f"expected a sequence of {kind} keys, came a {type(keys).__name__}, which has no order")
    if isinstance(keys, (str, bytes, bytearray, int, float, np.generic)):
        raise InvalidInput(f"expected a sequence of {kind} keys, came a single {type(keys).__name__}")


class KeyType(StrEnum):
    INT64 = "int64"
    UINT64 = "uint64"
    STRING = "string"


class StorageDtype(StrEnum):
    """How a row is stored. `int8` rows carry a float32 scale and a float32 offset before the codes."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    INT8 = "int8"

    @property
    def code(self) -> int:
        """The number by which kernels and disk records know this dtype."""
        return _CODES[self]

    def row_bytes(self, dim: int) -> int:
        """Bytes of one stored row of `dim` numbers."""
        return _WIDTH[self] * dim + (8 if self is StorageDtype.INT8 else 0)


_CODES = {StorageDtype.FLOAT32: 0, StorageDtype.FLOAT16: 1, StorageDtype.BFLOAT16: 2, StorageDtype.INT8: 3}
_WIDTH = {StorageDtype.FLOAT32: 4, StorageDtype.FLOAT16: 2, StorageDtype.BFLOAT16: 2, StorageDtype.INT8: 1}


class Combiner(StrEnum):
    """How an embedding bag is pooled. `mean` divides by the sum of weights, `sqrtn` by the root of the sum of their squares."""

    SUM = "sum"
    MEAN = "mean"
    SQRTN = "sqrtn"


class Tier(IntEnum):
    """Where a key was answered: the values of a look-up's `state` array."""

    PENDING = 0  # not answered yet: what each tier leaves to the next
    OVERLAY = 1  # a delta that is not folded yet
    DEVICE = 2
    HOST = 3
    DISK = 4
    REMOTE = 5
    ABSENT = 6  # known not to exist: the table's default was answered

    @property
    def label(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class TableSpec:
    """A table: key → row of `dim` numbers. `default` answers keys that the table does not hold."""

    name: str
    key: KeyType
    dim: int
    dtype: StorageDtype
    default: Literal["zeros", "mean"] | tuple[float, ...] = "zeros"

    @property
    def row_bytes(self) -> int:
        return self.dtype.row_bytes(self.dim)


@dataclass(frozen=True, slots=True)
class FeatureSpec:
    """A named input that reads a table. With a combiner, its bags are pooled to one vector each.

    `padding_key` (in the table's key type) never counts: it answers zeros, is not found, and adds
    nothing to a bag, its weight included.
    """

    name: str
    table: str
    combiner: Combiner | None = None
    padding_key: int | str | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a long job is. `done` and `total` count rows within `phase`."""

    phase: str
    done: int = 0
    total: int = 0


ProgressFn = Callable[[Progress], None]


@dataclass(slots=True)
class DeltaResult:
    """What became of a delta: `applied` is False for one that was already held."""

    model: str
    seq: int
    applied: bool


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What `verify` read back. `problems` is empty when all is well."""

    versions: int = 0
    rows: int = 0
    bytes_read: int = 0
    deltas: int = 0
    problems: tuple[str, ...] = field(default=())

    @property
    def ok(self) -> bool:
        return not self.problems
