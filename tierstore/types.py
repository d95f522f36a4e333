"""The types of the domain: key types, storage dtypes, tables, features, and the tier that answered a key.

Immutable values only; any thread may use them.

Keys inside the store are always `int64` arrays, called *codes*: an `int64` key is itself, a `uint64`
key is its bit pattern, a string key is the bit pattern of its XXH3-64 (seed 0). Every code is legal.
Rows inside the store are `uint8[n, row_bytes]`, in the table's storage dtype (little-endian).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from enum import IntEnum, StrEnum
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, Self

from tierstore.errors import InvalidInput

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Keys = npt.NDArray[np.int64]
    KeysLike = npt.ArrayLike  # integers or strings: a list, an array, an Arrow array, a column of a frame, a tensor
    Rows = npt.NDArray[np.uint8]
    States = npt.NDArray[np.uint8]
    Vectors = npt.NDArray[np.float32] | npt.NDArray[np.float16]
else:
    from tierstore.lazy import np

    Keys = KeysLike = Rows = States = Vectors = Any

BaseKind = Literal[
    "sealed", "rocksdb"
]  # what stores a version's rows as loaded; RocksDB stores its deltas in both cases

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
MAX_PARTITIONS = 1024
MOST_HEADS = 64  # of a version, beside the one without a name
_PARTITIONS = re.compile(r"([0-9]{1,4}(?:-[0-9]{1,4})?(?:,[0-9]{1,4}(?:-[0-9]{1,4})?)*)/([0-9]{1,4})", re.ASCII)


def model_and_head(name: str) -> tuple[str, str]:
    """(model, head) of a name by which requests ask: `ctr.cvr` is the head `cvr` of `ctr`; of `ctr` it has no name.

    Names have no dots, so a head and a model cannot have one name.
    """
    model, _, head = name.partition(".")
    return (model, head) if head else (name, "")


def head_name(model: str, head: str) -> str:
    """The name by which requests ask for a head of a model."""
    return f"{model}.{head}" if head else model


@dataclass(slots=True, eq=False)
class GpuArray:
    """A C-contiguous array in a GPU's memory, to be read or written after the work in the caller's stream."""

    array: Any  # of any library; kept, as the memory is its
    address: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @classmethod
    def of(cls, backend: Any, array: Any) -> GpuArray:
        """An array from `empty` or `adopt` of a `Backend`."""
        return cls(array, backend.address_of(array), tuple(array.shape), array.dtype)

    def __len__(self) -> int:
        return self.shape[0]

    def __dlpack_device__(self) -> tuple[int, int]:
        """Where it lies, as arrays of other libraries say it: kDLCUDA."""
        return 2, 0


class KeyType(StrEnum):
    INT64 = "int64"
    UINT64 = "uint64"
    STRING = "string"


class StorageDtype(StrEnum):
    """How a row is stored. Before the codes, `int8` rows carry a float32 scale and offset, `int4` rows float16 ones."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    INT8 = "int8"
    INT4 = "int4"

    @property
    def code(self) -> int:
        """The number of this dtype in kernels and in records on disk."""
        return _CODES[self]

    def row_bytes(self, dim: int) -> int:
        """Bytes of one stored row of `dim` numbers."""
        return _HEAD_BYTES.get(self, 0) + (_BITS[self] * dim + 7) // 8


_CODES = dict(zip(StorageDtype, range(5), strict=True))  # the order of the members is on disk
_BITS = dict(zip(StorageDtype, (32, 16, 16, 8, 4), strict=True))  # of a number
_HEAD_BYTES = {StorageDtype.INT8: 8, StorageDtype.INT4: 4}


class Combiner(StrEnum):
    """How an embedding bag is pooled.

    `mean` divides by the sum of weights, `sqrtn` by the root of the sum of their squares.
    """

    SUM = "sum"
    MEAN = "mean"
    SQRTN = "sqrtn"


class Tier(IntEnum):
    """Where a key was answered: the values of a look-up's `state` array."""

    PENDING = 0  # not answered yet: for the next tier to answer
    OVERLAY = 1  # a delta that is not folded yet
    DEVICE = 2
    HOST = 3
    DISK = 4
    REMOTE = 5
    ABSENT = 6  # the key does not exist: the answer is the table's default

    @property
    def label(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class TableSpec:
    """A table: key → row of `dim` numbers. `default` answers keys that the table does not hold.

    `ttl_s`: rows that were not written for so many seconds expire; None: they never do.
    """

    name: str
    key: KeyType
    dim: int
    dtype: StorageDtype
    default: Literal["zeros", "mean"] | tuple[float, ...] = "zeros"
    ttl_s: int | None = None

    @property
    def row_bytes(self) -> int:
        return self.dtype.row_bytes(self.dim)


@dataclass(frozen=True, slots=True)
class KeyHash:
    """How a feature makes one of `mod` row numbers of a key of the type `key`: `formats/key_hash.py`.

    Keys may share a row.
    """

    mod: int
    seed: int | None = None
    key: KeyType = KeyType.INT64

    def document(self) -> dict[str, Any]:
        """As a manifest and a status have it."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class TrainerHash:
    """How a feature makes row numbers of keys as a trainer does: `formats/trainer_hash.py` says what each function is.

    With `mask`, that key has row 0 and hashed ones have 1 to `mod` - 1. With `alternate_sign`, rows from `mod` on are
    those of hashes below 0. None: the function's own.
    """

    function: str
    mod: int
    key: KeyType = KeyType.INT64
    seed: int | None = None
    salt: tuple[int, int] | None = None
    mask: int | str | None = None
    prefix: str | None = None
    namespace: str | None = None
    bits: int | None = None
    absolute: bool | None = None
    alternate_sign: bool | None = None

    def document(self) -> dict[str, Any]:
        """As a manifest and a status have it, without what is the function's own."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True, slots=True)
class FeatureSpec:
    """A named input that reads a table. With a combiner, its bags are pooled to one vector each.

    `padding_key` (in the table's key type) never counts: it answers zeros, is not found, and adds nothing to a bag, its
    weight included. With a `hash` requests have keys of its type, and the table's keys are row numbers.
    """

    name: str
    table: str
    combiner: Combiner | None = None
    padding_key: int | str | None = None
    hash: KeyHash | TrainerHash | None = None

    def key_type(self, table: TableSpec) -> KeyType:
        """The type of the keys in requests; `table` is the one that it reads."""
        return table.key if self.hash is None else self.hash.key


@dataclass(frozen=True)
class Partitions:
    """Which partitions of `count` a version has: `own` are (first, last) of ranges that ascend and do not touch."""

    count: int
    own: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, count: int, numbers: Iterable[int]) -> Self:
        """The partitions with these numbers. InvalidInput for one that is out of range, or where there is none."""
        ordered = sorted(set(numbers))
        if not 1 <= count <= MAX_PARTITIONS or not ordered or not 0 <= ordered[0] <= ordered[-1] < count:
            raise InvalidInput(
                f"expected partitions 0 to N - 1 of N, at most {MAX_PARTITIONS}, got {ordered} of {count}"
            )
        begins = [ordered[0], *(after for before, after in pairwise(ordered) if after > before + 1)]
        ends = [*(before for before, after in pairwise(ordered) if after > before + 1), ordered[-1]]
        return cls(count, tuple(zip(begins, ends, strict=True)))

    @classmethod
    def parse(cls, text: str) -> Self:
        """Partitions from a text such as `0-15/64` or `0-15,40/64`: ranges, and of how many. InvalidInput."""
        match = _PARTITIONS.fullmatch(text.replace(" ", ""))
        if match is None:
            raise InvalidInput(f"expected partitions and of how many, such as 0-15/64 or 0-15,40/64, got {text!r}")
        ranges = [[int(end) for end in part.split("-")] for part in match[1].split(",")]
        count = int(match[2])
        if any(not ends[0] <= ends[-1] < count for ends in ranges):
            raise InvalidInput(f"expected ranges of 0 to {count - 1}, the lower end first, got {text!r}")
        return cls.of(count, (number for ends in ranges for number in range(ends[0], ends[-1] + 1)))

    @classmethod
    def of_document(cls, document: Any) -> Self:
        """From what `document` gave. ValueError, TypeError or LookupError."""
        count, own = int(document["count"]), [(int(first), int(last)) for first, last in document["own"]]
        ends = [(0, -2), *own]  # ranges that ascend and do not touch are never more than there are partitions
        if not all(
            before + 1 < first <= last < count <= MAX_PARTITIONS for (_, before), (first, last) in pairwise(ends)
        ):
            raise ValueError(f"expected ranges of at most {MAX_PARTITIONS} partitions, got {str(document)[:200]}")
        return cls.of(count, (number for first, last in own for number in range(first, last + 1)))

    def document(self) -> dict[str, Any]:
        """`{"count", "own": [[first, last], …]}`, as status documents and records have it."""
        return {"count": self.count, "own": [list(ends) for ends in self.own]}

    @cached_property
    def is_own(self) -> npt.NDArray[np.bool_]:
        """bool[count]: which of all partitions these are."""
        mask = np.zeros(self.count, np.bool_)
        for first, last in self.own:
            mask[first : last + 1] = True
        return mask

    @property
    def numbers(self) -> list[int]:
        """The numbers of these partitions, ascending."""
        numbers: list[int] = np.flatnonzero(self.is_own).tolist()
        return numbers

    @property
    def are_all(self) -> bool:
        """Whether every key is in one of these."""
        return self.own == ((0, self.count - 1),)

    @property
    def part(self) -> float:
        """The part of all keys that these have: more than 0, at most 1."""
        return len(self.numbers) / self.count

    @property
    def ranges(self) -> str:
        """`0-15,40`"""
        return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in self.own)

    def __str__(self) -> str:
        return f"{self.ranges}/{self.count}"


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a long job. `done` and `total` count rows of the current `phase`.

    `waits_for`: what a storage does not give at this moment, and why; it is tried again.
    """

    phase: str
    done: int = 0
    total: int = 0
    waits_for: str | None = None


ProgressFn = Callable[[Progress], None]


@dataclass(slots=True)
class DeltaResult:
    """The result of applying a delta: `applied` is False if the store already had it.

    `send_as`: of one that it had and that a rollback has undone, the seq under which to send it to have it applied.
    """

    model: str
    seq: int
    applied: bool
    send_as: int | None = None


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What `verify` read back. `problems` is empty if everything is right.

    `golden`: a line for each version that has golden examples.
    """

    versions: int = 0
    rows: int = 0
    bytes_read: int = 0
    deltas: int = 0
    problems: tuple[str, ...] = field(default=())
    golden: tuple[str, ...] = field(default=())

    @property
    def ok(self) -> bool:
        return not self.problems


@dataclass(frozen=True, slots=True)
class ExportReport:
    """What `export` wrote: a snapshot of `model` numbered `version`, with all deltas up to `seq`,
    of `rows` rows in all tables.
    """

    model: str
    version: int
    seq: int
    rows: int


@dataclass(frozen=True, slots=True)
class BackupReport:
    """What `backup` or `restore` has copied of a model: the active version, the newest delta, files and bytes.

    `new_bytes` are those that the place did not have before.
    """

    model: str
    version: int | None
    seq: int
    files: int
    bytes: int
    new_bytes: int
