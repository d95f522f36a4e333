"""String keys that share their hash with another key of their table: kept as they are, each under a code of its own.

A string key goes by its hash alone, and the strings of a table are not kept. These few are: where a key's hash is one of
theirs, its string decides. A key that is none of them goes by its hash, as ever.

Immutable values and pure functions over immutable arrays; any thread may use them. What lasts of them is a record of the
version, written in one step with the rows that it speaks of (`to_record`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from itertools import chain

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tierstore.kernels.xxh3 import hash_strings
from tierstore.types import Keys

RECORD = "colliding_keys"
_FEW = 16  # up to which comparing with each is faster than searching
_LOWEST, _HIGHEST = -(1 << 63), (1 << 63) - 1


class CollidingKeys:
    """Those of one table: distinct strings, and the distinct codes (int64) that they go by. May be empty."""

    __slots__ = ("_codes", "_hashes", "_strings")

    def __init__(self, entries: Iterable[tuple[str, int]] = ()) -> None:
        listed = list(entries)
        self._strings = pa.array([text for text, _ in listed], pa.large_string())
        self._codes = np.array([code for _, code in listed], np.int64)
        self._hashes: Keys = np.unique(hash_arrow(self._strings))

    def __len__(self) -> int:
        return len(self._codes)

    def entries(self) -> list[tuple[str, int]]:
        """(string, code) of each, in the order in which they came."""
        return list(zip(self._strings.to_pylist(), self._codes.tolist(), strict=True))

    def codes_of(self, strings: pa.Array, hashes: Keys) -> Keys:
        """Codes of any keys of the table: large_string[n] without nulls, and their hashes int64[n], which are not changed."""
        at = _where(hashes, self._hashes)
        if not at.size:
            return hashes
        place, known = self._find(strings.take(pa.array(at)))
        codes = hashes.copy()
        codes[at[known]] = self._codes[place[known]]
        return codes

    def changed(
        self, hashes: Keys, strings_at: Callable[[npt.NDArray[np.int64]], pa.Array]
    ) -> tuple[Keys, CollidingKeys]:
        """Codes of the keys that one delta changes, and the colliding keys with those that it brings.

        `hashes`, ascending, are of distinct strings; equal ones of two that collide. `strings_at` gives those at some
        positions. A key that is not known to collide until now may have a row under its hash. It moves away from there, and
        leaves what may be another's: the delta has all that is to be known of it.
        """
        twice = hashes[1:][hashes[1:] == hashes[:-1]]
        if not twice.size and not len(self):
            return hashes, self
        at = _where(hashes, np.unique(np.concatenate([self._hashes, self._codes, twice])))
        if not at.size:
            return hashes, self
        strings = strings_at(at)
        place, known = self._find(strings)
        taken = {*self._hashes.tolist(), *self._codes.tolist()}
        new: list[tuple[str, int]] = []
        for i in np.flatnonzero(~known).tolist():
            code = free_code(int(hashes[at[i]]), lambda c: c in taken or _is_in(hashes, c))
            taken.add(code)
            new.append((strings[i].as_py(), code))
        codes = hashes.copy()
        codes[at[known]] = self._codes[place[known]]
        codes[at[~known]] = [code for _, code in new]
        return codes, CollidingKeys([*self.entries(), *new]) if new else self

    def _find(self, strings: pa.Array) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """(which of these keys each string is, whether it is one)."""
        place = pc.index_in(strings, value_set=self._strings).fill_null(-1).to_numpy()
        return place, place >= 0


def free_code(near: int, is_taken: Callable[[int], bool], low: int = _LOWEST, high: int = _HIGHEST) -> int:
    """A code from `low` to `high` that nobody has, close to `near`. ValueError where there is none."""
    for code in chain(range(near + 1, high + 1), range(near - 1, low - 1, -1)):
        if not is_taken(code):
            return code
    raise ValueError(f"no code is free from {low} to {high}")


def hash_arrow(strings: pa.Array) -> Keys:
    """XXH3-64 of each string of a valid `large_string` array without nulls, wherever a slice begins in its buffers."""
    if len(strings) == 0:
        return np.empty(0, np.int64)
    _, offsets_buffer, data_buffer = strings.buffers()
    offsets = np.frombuffer(offsets_buffer, np.int64)[strings.offset : strings.offset + len(strings) + 1]
    data = np.frombuffer(data_buffer, np.uint8) if data_buffer is not None else np.empty(0, np.uint8)
    return hash_strings(data, offsets)


def to_record(tables: Mapping[str, CollidingKeys]) -> dict[str, bytes]:
    """The version's own record of them; none where there are none."""
    document = {name: keys.entries() for name, keys in tables.items() if len(keys)}
    return {RECORD: json.dumps(document).encode()} if document else {}


def from_record(value: bytes | None) -> dict[str, CollidingKeys]:
    """What `to_record` made the record of, by table. ValueError where it makes no sense."""
    if value is None:
        return {}
    try:
        return {
            str(name): CollidingKeys((str(text), int(code)) for text, code in entries)
            for name, entries in json.loads(value).items()
        }
    except (AttributeError, TypeError, OverflowError, ValueError) as error:
        raise ValueError(f"its record {RECORD!r} makes no sense: {error}") from error


def _where(hashes: Keys, ascending: Keys) -> npt.NDArray[np.int64]:
    """The positions of hashes that are one of some, which are few: mostly two or three, so that every step counts."""
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
