"""String keys that share their hash with another key of their table: their strings are kept,
each under a code of its own.

The code of a string key is its hash, and look-ups know no string of a table but those of these few keys: where a
key's hash equals one of theirs, the string decides. The code of any other key is its hash.

Immutable values and pure functions over immutable arrays; any thread may use them. On disk they are a record of the
version, which is written in one step with the rows (`to_record`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from itertools import chain

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tierstore.kernels.partitions import partitions_of
from tierstore.kernels.xxh3 import hash_strings
from tierstore.types import Keys

RECORD = "colliding_keys"
_FEW = 16  # up to which comparing with each is faster than searching
_LOWEST, _HIGHEST = -(1 << 63), (1 << 63) - 1


class CollidingKeys:
    """The colliding keys of one table: distinct strings, and their distinct codes (int64). May be empty."""

    __slots__ = ("_codes", "_hashes", "_strings")

    def __init__(self, entries: Iterable[tuple[str, int]] = ()) -> None:
        listed = list(entries)
        texts = [text for text, _ in listed]
        # none: without `array`, which imports pandas where there is one
        self._strings = pa.array(texts, pa.large_string()) if texts else pa.nulls(0, pa.large_string())
        self._codes = np.array([code for _, code in listed], np.int64)
        self._hashes: Keys = np.unique(hash_arrow(self._strings))

    def __len__(self) -> int:
        return len(self._codes)

    @property
    def hashes(self) -> Keys:
        """The hashes that these keys share, int64, ascending; not to be changed."""
        return self._hashes

    def entries(self) -> list[tuple[str, int]]:
        """(string, code) of each, in the order of construction."""
        return list(zip(self._strings.to_pylist(), self._codes.tolist(), strict=True))

    def codes_of(self, strings: pa.Array, hashes: Keys) -> Keys:
        """Codes of any keys of the table: large_string[n] without nulls, and their hashes
        int64[n], which are not changed.
        """
        at = _where(hashes, self._hashes)
        if not at.size:
            return hashes
        place, is_colliding = self._find(strings.take(pa.array(at)))
        codes = hashes.copy()
        codes[at[is_colliding]] = self._codes[place[is_colliding]]
        return codes

    def changed(
        self, hashes: Keys, strings_at: Callable[[npt.NDArray[np.int64]], pa.Array], partitions: int = 1
    ) -> tuple[Keys, CollidingKeys]:
        """Codes of the keys that one delta changes, and the colliding keys including those of the delta.

        `hashes`, ascending, are those of distinct strings; two strings that collide have equal ones. `strings_at` gives
        the strings at some positions. A key that has not collided before may have a row under its hash. It moves to a
        code of its own, and that row stays, because it may be another key's: the delta has the key's whole new row.
        Each new code is in the same one of so many `partitions` as its hash, by which nodes are chosen.
        """
        twice = hashes[1:][hashes[1:] == hashes[:-1]]
        if not twice.size and not len(self):
            return hashes, self
        at = _where(hashes, np.unique(np.concatenate([self._hashes, self._codes, twice])))
        if not at.size:
            return hashes, self
        strings = strings_at(at)
        place, is_colliding = self._find(strings)
        used_codes = {*self._hashes.tolist(), *self._codes.tolist()}
        new: list[tuple[str, int]] = []
        for i in np.flatnonzero(~is_colliding).tolist():
            near = int(hashes[at[i]])
            code = free_code(near, lambda c: c in used_codes or _is_in(hashes, c), partitions=partitions)
            used_codes.add(code)
            new.append((strings[i].as_py(), code))
        codes = hashes.copy()
        codes[at[is_colliding]] = self._codes[place[is_colliding]]
        codes[at[~is_colliding]] = [code for _, code in new]
        return codes, CollidingKeys([*self.entries(), *new]) if new else self

    def _find(self, strings: pa.Array) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """(which of these keys each string is, whether it is one)."""
        place = pc.index_in(strings, value_set=self._strings).fill_null(-1).to_numpy()
        return place, place >= 0


def free_code(
    near: int, is_used: Callable[[int], bool], low: int = _LOWEST, high: int = _HIGHEST, *, partitions: int = 1
) -> int:
    """A code from `low` to `high` that is not used, close to `near`, and in its partition of so many.

    ValueError where there is none.
    """
    home = _partition_of(near, partitions)
    for code in chain(range(near + 1, high + 1), range(near - 1, low - 1, -1)):
        if _partition_of(code, partitions) == home and not is_used(code):
            return code
    raise ValueError(f"no code is free from {low} to {high}")


def _partition_of(code: int, partitions: int) -> int:
    return int(partitions_of(np.array([code], np.int64), partitions)[0])


def hash_arrow(strings: pa.Array) -> Keys:
    """XXH3-64 of each string of a valid `large_string` array without nulls, wherever a slice begins in its buffers."""
    if len(strings) == 0:
        return np.empty(0, np.int64)
    _, offsets_buffer, data_buffer = strings.buffers()
    offsets = np.frombuffer(offsets_buffer, np.int64)[strings.offset : strings.offset + len(strings) + 1]
    data = np.frombuffer(data_buffer, np.uint8) if data_buffer is not None else np.empty(0, np.uint8)
    return hash_strings(data, offsets)


def to_record(tables: Mapping[str, CollidingKeys]) -> dict[str, bytes]:
    """The version's record of colliding keys; empty where there are none."""
    document = {name: keys.entries() for name, keys in tables.items() if len(keys)}
    return {RECORD: json.dumps(document).encode()} if document else {}


def from_record(value: bytes | None) -> dict[str, CollidingKeys]:
    """The colliding keys by table, from the record of `to_record`. ValueError where it cannot be read."""
    if value is None:
        return {}
    try:
        return {
            str(name): CollidingKeys((str(text), int(code)) for text, code in entries)
            for name, entries in json.loads(value).items()
        }
    except (AttributeError, TypeError, OverflowError, ValueError) as error:
        raise ValueError(f"its record {RECORD!r} cannot be read: {error}") from error


def _where(hashes: Keys, ascending: Keys) -> npt.NDArray[np.int64]:
    """The positions of `hashes` that are in `ascending`, which mostly has two or three: so every step counts."""
    if len(ascending) > _FEW:
        at = np.minimum(np.searchsorted(ascending, hashes), len(ascending) - 1)
        return np.flatnonzero(ascending[at] == hashes)
    one_of_them = np.zeros(len(hashes), np.bool_)
    for each in ascending:
        one_of_them |= hashes == each
    return np.flatnonzero(one_of_them)


def _is_in(ascending: Keys, code: int) -> bool:
    at = int(np.searchsorted(ascending, code))
    return at < len(ascending) and int(ascending[at]) == code


NONE = CollidingKeys()
