"""The strings of a version's string keys, where it keeps them: for export, `hot`, `explain`, `verify`, and no look-up.

Those of the snapshot are in files of their own (`tiers/disk/strings_file.py`), those of folded deltas in RocksDB, in
one step with their rows, and those of other deltas in the overlays. The newest one of a code counts. Whether a key
exists its row says: strings of keys that were deleted or have expired may stay until the next load.

Any thread; it only reads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from itertools import chain
from operator import itemgetter

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from tierstore.engine.data.overlay import Overlay, OverlayTable
from tierstore.engine.versions.info import VersionInfo
from tierstore.engine.versions.version import Version
from tierstore.errors import Corruption
from tierstore.formats.colliding import CollidingKeys, hash_arrow
from tierstore.formats.row_times import Times
from tierstore.tiers.disk.strings_file import MissingStrings, Strings, merged_strings, opened
from tierstore.tiers.disk.tier import DiskTier
from tierstore.types import Keys, KeyType, Rows

_LOAD_AGAIN = "load its snapshot again to export it"
_WHY = {
    None: f"an earlier release has loaded it, and kept only their hashes; {_LOAD_AGAIN}",
    MissingStrings.OFF: f"it was loaded with string_keys_size=0, which keeps only hashes; set that, and {_LOAD_AGAIN}",
    MissingStrings.SIZE: "they would have taken more than string_keys_size allowed as it was loaded, so that it keeps "
    f"only their hashes; raise that, and {_LOAD_AGAIN}",
    MissingStrings.ROOM: "the disk had no room for them as it was loaded, so that it keeps only their hashes; free "
    f"some space, and {_LOAD_AGAIN}",
    MissingStrings.BUILT: "it was loaded from a built version, which has only their hashes: build that again with this "
    "release, with string_keys_size (`begin_build`: string_keys) and room for them, or load the snapshot itself, to "
    "export it",
}
# as `hash_arrow`, but of no array: Arrow imports pandas for the first one
_EMPTY = int(np.uint64(xxhash.xxh3_64_intdigest(b"")).view(np.int64))


def why_missing(info: VersionInfo, table: str) -> str | None:
    """Why a version does not have the strings of a table's keys; None if it has them, or the keys are no strings."""
    if info.specs[table].key is not KeyType.STRING or table in info.strings_ids:
        return None
    kept = info.strings.get(table)
    return _WHY[None if kept is None else kept.missing]


def tables_of_hashes(info: VersionInfo) -> dict[str, str]:
    """Why a version that this release has loaded keeps no strings, by table."""
    return {name: _WHY[kept.missing] for name, kept in info.strings.items() if kept.missing is not None}


def standing_strings(
    info: VersionInfo, disk: DiskTier, table: str, changed: OverlayTable | None, stack: contextlib.ExitStack
) -> Strings:
    """All strings of a table by ascending code, as of now, and those of overlays in `changed`; `stack` closes files.

    Corruption, which names the file; StorageError.
    """
    files = stack.enter_context(opened(info.where.strings, info.strings[table].files))
    stored = disk.strings(info.strings_ids[table])
    stack.callback(stored.close)  # type: ignore[attr-defined]
    first = next(stored, None)  # only now its iterator is positioned
    parts: list[Strings] = [file.all() for file in files]
    parts.append(chain(() if first is None else (first,), stored))
    if changed is not None and changed.strings is not None and len(changed.keys):
        parts.append(iter([(changed.keys, changed.strings)]))
    return merged_strings(parts)


def with_strings(
    table: str,
    rows: Iterator[tuple[Keys, Rows, Times | None]],
    strings: Strings,
    colliding: CollidingKeys,
) -> Iterator[tuple[Keys, pa.Array, Rows, Times | None]]:
    """Rows by ascending code with the strings of their keys: codes, large_string [n], rows, times.

    A row that a key has left under its hash, as it moved to a code of its own, is passed over. Corruption for a row
    whose string is not there, or has another hash.
    """
    listed = sorted(colliding.entries(), key=itemgetter(1))
    listed_codes = np.array([code for _, code in listed], np.int64)
    listed_strings, nothing = (pa.array(of, pa.large_string()) for of in ([text for text, _ in listed], [""]))
    ahead, texts = np.empty(0, np.int64), listed_strings.slice(0, 0)
    for keys, stored, times in rows:
        pieces = [(ahead, texts)]
        while not len(ahead) or ahead[-1] < keys[-1]:
            if (more := next(strings, None)) is None:
                break
            ahead = more[0]
            pieces.append(more)
        ahead = np.concatenate([codes for codes, _ in pieces])
        texts = pa.concat_arrays([piece for _, piece in pieces])
        own, found = _places(ahead, keys)
        of_listed, is_listed = _places(listed_codes, keys)
        own = np.where(is_listed, len(ahead) + of_listed, own)
        found |= is_listed
        own[~found] = len(ahead) + len(listed)
        of_keys = pa.concat_arrays([texts, listed_strings, nothing]).take(pa.array(own))
        hashes = hash_arrow(of_keys)
        codes = colliding.codes_of(of_keys, hashes)
        left = found & (hashes == keys) & (codes != keys)
        if (wrong := ~left & (~found | (codes != keys))).any():
            row = int(np.argmax(wrong))
            raise Corruption(
                f"table {table!r}: {np.count_nonzero(wrong)} rows of a batch have no string that is their key's, such "
                f"as that of hash {int(keys[row]) % 2**64:016x}: an earlier release has applied deltas to the version; "
                f"{_LOAD_AGAIN}"
            )
        if left.any():
            keys, stored, of_keys = keys[~left], stored[~left], of_keys.filter(pa.array(~left))
            times = None if times is None else times[~left]
        if len(keys):
            yield keys, of_keys, stored, times
            at = int(np.searchsorted(ahead, keys[-1], "right"))
            ahead, texts = ahead[at:], texts.slice(at)


def _places(ascending: Keys, codes: Keys) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Where each of `codes` would be among others, and whether it is there."""
    places = np.searchsorted(ascending, codes)
    there = places < len(ascending)
    there[there] = ascending[places[there]] == codes[there]
    return places, there


def find_strings(
    version: Version, overlays: Sequence[Overlay], table: str, codes: Sequence[int], colliding: CollidingKeys
) -> dict[int, str]:
    """The strings of a few codes, by code, under the overlays of a view, newest first, and its colliding keys.

    Without those that are not kept. Corruption, StorageError.
    """
    info, disk = version.info, version.rows.disk
    listed = {code: text for text, code in colliding.entries()}
    if table not in info.strings_ids or disk is None:
        return {code: listed[code] for code in codes if code in listed}
    wanted = np.unique(np.array(codes, np.int64))
    found: dict[int, str] = {}
    with opened(info.where.strings, info.strings[table].files) as files:
        for file in files:
            found |= file.find(wanted)
    changed = zip(wanted.tolist(), disk.strings_of(info.strings_ids[table], wanted), strict=True)
    found |= {code: text for code, text in changed if text or code == _EMPTY}
    for overlay in reversed(overlays):
        part = overlay.tables.get(table)
        if part is not None and part.strings is not None:
            at, there = _places(part.keys, wanted)
            found |= zip(wanted[there].tolist(), part.strings.take(pa.array(at[there])).to_pylist(), strict=True)
    return found | {code: text for code, text in listed.items() if code in wanted}
