"""Sealed patches: rows that deltas have changed, in files that kernels read like the base.

Changes are durable in RocksDB, but there each key costs a driver call under the interpreter lock. So each change is also written as a patch: one
sealed file for each table, sorted, with a mark behind each row that says whether the key is deleted, and the filter of its keys beside it. RocksDB's
record `patches` names the valid patches, and is written in the same atomic step as the rows: a patch that it does not name is left over from a crash.
Four patches of like size are merged into one, up to a size limit, so a day has a few dozen.

Patches are copies, and nothing waits until they are on the drive. If one is missing or damaged, as after a restore, RocksDB answers until the patches
are rebuilt from it.

`Patches` is for the one writer of a tier; any thread may use the result of `of`, whose files stay open while it is kept.
"""

from __future__ import annotations

import itertools
import json
import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from tierstore.errors import Corruption, StorageError
from tierstore.formats import files
from tierstore.kernels import overlay_index
from tierstore.kernels.codec import address_of
from tierstore.tiers.background import yield_to_requests
from tierstore.tiers.disk import bloom, sealed_rows
from tierstore.tiers.disk.layout import PATCH
from tierstore.tiers.disk.merge import Changes
from tierstore.tiers.disk.sealed_file import check_still, open_sealed, read_blocks, write_sealed_parts
from tierstore.tiers.disk.sealed_table import SealedTable
from tierstore.tiers.disk.sst import Entries, Records
from tierstore.types import Keys, Rows

log = logging.getLogger(__name__)

FOLDER = "patches"
RECORD = "patches"
BITS_A_KEY = 10
LIKE_SIZED = 4  # patches that are merged into one
MOST_BYTES = 512 << 20  # the largest merged patch: merging it takes a background thread some ten seconds
LEAST_COPIED = 1 << 18  # keys that one call of `rebuild` copies in any case: a quarter of a second
_MANY = 32
_SMALLEST = 1024  # keys: smaller patches count as of one size
_PIECE_BYTES = 4 << 20  # of rows that are merged at a time
_KEPT_KEYS = 1 << 20  # of a patch that is written, until their number is known, for its filter; more are read back
_NONE = np.empty(0, np.int64)
_ENDED = 1 << 63  # above all keys

Marked = tuple[Keys, Rows]  # rows with the mark behind them
EntriesFrom = Callable[[int, int, int | None], Iterator[Changes]]  # of a table's id, the bytes of a row, the first key
Trust = tuple[bool, tuple["Patch", ...]]  # the valid patches, and whether they are complete


class Patch:
    """An open patch. Constant; its file is closed with the last reference."""

    def __init__(self, path: Path, xxh3: str, size: int, words: bloom.Filter) -> None:
        """Raises StorageError or Corruption if it is not the file that was written."""
        opened = open_sealed(path, xxh3=xxh3, size=size)
        self.path, self.bytes, self.keys = path, size, opened.rows
        self.table_id, self.row_bytes = opened.table_id, opened.row_bytes - sealed_rows.MARK_BYTES
        self._table, self._filter = SealedTable([opened]), words
        weakref.finalize(self, self._table.close)
        self.awake, self.close_idle_files = self._table.awake, self._table.close_idle_files
        self._base = self._table.words(0)
        self._words = PATCH.make(files=address_of(self._base), filter_at=address_of(words), filter_words=len(words))
        self.address = address_of(self._words)

    @property
    def memory_bytes(self) -> int:
        return self._filter.nbytes + self._table.first_keys.nbytes

    @property
    def last_key(self) -> int:
        (file,) = self._table.files
        self.awake()
        keys, _ = read_blocks(file, len(file.first_keys) - 1, len(file.first_keys), None)
        return int(keys[-1])

    @property
    def entry(self) -> dict[str, Any]:
        """The patch's entry in the record."""
        file = self._table.files[0]
        return {"name": self.path.name, "bytes": file.size, "xxh3": file.xxh3, "filter": _digest(self._filter)}

    def parts(self, rows_at_once: int) -> Iterator[Marked]:
        """All its keys, ascending, with their marked rows. Corruption, StorageError."""
        self.awake()
        (file,), floor = self._table.files, None
        at_once = max(1, rows_at_once // file.per_block)
        for first in range(0, len(file.first_keys), at_once):
            keys, rows = read_blocks(file, first, min(first + at_once, len(file.first_keys)), floor)
            floor = int(keys[-1])
            yield keys, rows

    def check(self) -> None:
        """Read all of it back. Corruption, StorageError."""
        self.awake()
        check_still(self._table.files[0])
        for _ in self.parts(max(1, _PIECE_BYTES // self.row_bytes)):
            pass


class Patched(NamedTuple):
    """The patches of a table as kernels read them: `sealed_rows.SOME` or ALL, and the addresses of patches, newest first.

    `row_bytes` is that of all of them; None: they differ. Valid while it is kept.
    """

    changes: int
    addresses: npt.NDArray[np.int64]
    kept: tuple[Patch, ...]
    row_bytes: int | None

    def awake(self) -> None:
        """`SealedTable.awake`. A patch that cannot be opened leaves its keys to RocksDB."""
        for patch in self.kept:
            with suppress(StorageError):
                patch.awake()


NO_PATCHES = Patched(sealed_rows.SOME, _NONE, (), None)


class Patches:
    """The patches of one tier, in a folder of its directory."""

    def __init__(self, directory: Path) -> None:
        self._folder = directory / FOLDER
        self._patches: tuple[Patch, ...] = ()  # of all tables, newest first
        self._next = 1
        self._unnamed: list[Path] = []  # files that the next record no longer names
        self._whole = False  # whether the patches have all changed rows
        self._rebuilt: dict[int, int] | None = None  # by table id, the key below which `rebuild` has copied all
        self._served: tuple[bool, dict[int, Patched]] = False, {}  # replaced as a whole, as readers take no lock
        self.damaged = False  # set by any thread that could not read a patch
        self._using = threading.Lock()
        self._users = 0  # threads that read whole patches; guarded by _using

    def open(self, record_of: Callable[[str], bytes | None], *, changed: bool, remove_unnamed: bool) -> None:
        """Open the patches that a tier's record names; `record_of` reads its records. `changed`: whether deltas have changed a row.

        `remove_unnamed`: remove files that it does not name. RocksDB answers for patches that cannot be opened, until `rebuild`.
        """
        record, whole = record_of(RECORD), not changed
        entries: list[dict[str, Any]] = []
        opened: tuple[Patch, ...] = ()
        if record is not None:
            try:
                document = json.loads(record)
                if any(_digest_of(record_of(name)) != digest for name, digest in document["with"].items()):
                    raise ValueError("an earlier release has changed rows since")
                self._next, entries = int(document["next"]), document["files"]
                opened, whole = tuple(self._open(entry) for entry in entries), bool(document["whole"])
            except (StorageError, ValueError, KeyError, TypeError, AttributeError) as error:
                log.info("%s: changed rows are read from RocksDB until they are copied again: %s", self._folder, error)
                whole, opened, entries = False, (), []
        self._whole = whole
        self._publish(opened)
        if remove_unnamed and files.exists(self._folder):
            named = {name for entry in entries for name in (entry["name"], _filter_name(entry["name"]))}
            numbers = [int(path.stem) for path in self._folder.iterdir() if path.stem.isdigit()]
            self._next = max([self._next, *(number + 1 for number in numbers)])
            for path in self._folder.iterdir():
                if path.name not in named:
                    files.remove_file(path)

    def _open(self, entry: dict[str, Any]) -> Patch:
        path = self._folder / str(entry["name"])
        data = files.read_bytes(self._folder / _filter_name(path.name))
        if data is None or len(data) % 4 or not data:
            raise Corruption(f"{path}: its filter is missing")
        words = np.frombuffer(data, np.uint32).copy()
        if _digest(words) != entry["filter"]:
            raise Corruption(f"{path}: its filter does not match its checksum")
        return Patch(path, str(entry["xxh3"]), int(entry["bytes"]), words)

    def of(self, table_id: int, row_bytes: int) -> Patched:
        """The patches of a table as they are now, for rows of so many bytes. Any thread."""
        whole, tables = self._served
        found = tables.get(table_id) or (_ALL if whole else NO_PATCHES)
        return found if found.row_bytes == row_bytes or not found.kept else NO_PATCHES

    @property
    def is_whole(self) -> bool:
        """Whether the patches have all changed rows, as far as is known; if not, they must be rebuilt."""
        return self._whole and not self.damaged

    @property
    def published(self) -> object:
        """What readers find now: another object after each change of it."""
        return self._served

    @property
    def is_due(self) -> bool:
        """Whether `merge` has anything to do."""
        return any(map(_alike, self._by_table().values()))

    @property
    def are_many(self) -> bool:
        """Whether a table has so many patches that reads get slower or descriptors scarce."""
        return any(len(own) > _MANY for own in self._by_table().values())

    def _by_table(self) -> dict[int, list[Patch]]:
        of: dict[int, list[Patch]] = {}
        for patch in self._patches:
            of.setdefault(patch.table_id, []).append(patch)
        return of

    def _drop(self) -> None:
        """Let RocksDB answer for all patches."""
        self._unnamed += [patch.path for patch in self._patches]
        self._whole = self.damaged = False
        self._rebuilt = None
        self._publish(())

    def distrust(self) -> Trust:
        """Let RocksDB answer for everything that was changed. Returns a value for `trust`, which undoes it."""
        before = self._whole, self._patches
        self._whole = False
        self._publish(())
        return before

    def trust(self, before: Trust) -> None:
        self._whole, patches = before
        self._publish(patches)

    # --- changes, by the one writer

    def write(self, tables: Sequence[Entries], records: Records) -> tuple[list[Patch], Records]:
        """Write the patches of a change. Returns them, and the records to put into RocksDB with it; then call `add`, or `remove`.

        `records`: the change's own; they show whether another release has changed rows since. StorageError.
        """
        if self.damaged:
            self._drop()
        new: list[Patch] = []
        try:
            for table_id, keys, rows, deleted in tables:
                if len(keys):
                    new.append(self._write(table_id, [(keys, _marked(rows, deleted))]))
        except BaseException as error:
            self.remove(new)
            if not isinstance(error, StorageError):
                raise
            log.warning("changed rows are read from RocksDB until they can be copied: %s", error)
            new = []
            self._drop()
        return new, self._records((*new[::-1], *self._patches), records, self._whole)

    def add(self, new: list[Patch]) -> None:
        """Use these patches, now that RocksDB has the change. May be repeated."""
        self._publish((*new[::-1], *(patch for patch in self._patches if patch not in new)))
        unnamed, self._unnamed = self._unnamed, []
        self.remove_files(unnamed)

    def remove(self, patches: Iterable[Patch]) -> None:
        self.remove_files([patch.path for patch in patches])

    def remove_files(self, paths: Iterable[Path]) -> None:
        """Remove patches by their paths; the next start removes one that stays."""
        for path in paths:
            for file in (path, path.with_name(_filter_name(path.name))):
                try:
                    files.remove_file(file, durable=False)
                except StorageError as error:
                    log.warning("%s", error)

    def merge(self, give_up: Callable[[], bool]) -> None:
        """Merge patches of like size, for each table, until no four are left. Readers go on.

        Merged files are removed with the next change, whose record does not name them. `give_up` is called again and again: once it returns True, the
        running merge is dropped. StorageError; Corruption, then they are `damaged`.
        """
        for table_id in self._by_table():
            while run := _alike(self._by_table()[table_id]):
                if give_up():
                    return
                try:
                    merged = self._merged(run, give_up)
                except Corruption:
                    self.damaged = True
                    raise
                if merged is None:
                    return
                self._replace(run, merged)

    def _merged(self, run: Sequence[Patch], give_up: Callable[[], bool]) -> Patch | None:
        rows_at_once = _rows_at_once(run[0].row_bytes)
        try:
            with self._in_use():
                parts = _merge([patch.parts(rows_at_once) for patch in run])
                return self._write(run[0].table_id, _until(parts, give_up))
        except _GivenUp:
            return None

    def _replace(self, run: Sequence[Patch], by: Patch) -> None:
        at = self._patches.index(run[0])
        left = [patch for patch in self._patches if patch not in run]
        self._unnamed += [patch.path for patch in run]
        self._publish((*left[:at], by, *left[at:]))

    def rebuild(self, row_bytes: Mapping[int, int], entries: EntriesFrom, give_up: Callable[[], bool]) -> bool:
        """Make patches of everything in RocksDB, by table id. Returns whether all are there; then call `complete`.

        Once `give_up` returns True it ends soon. What it has copied stays, beneath the patches of changes that come meanwhile, and the next call goes on
        from there: each copies at least `LEAST_COPIED` keys, so that it ends however often it is given up. StorageError.
        """
        if self._rebuilt is None or self.damaged:
            self._drop()
            self._rebuilt = {}
        for table_id, size in row_bytes.items():
            while (low := self._rebuilt.get(table_id)) is None or low < _ENDED:
                if (patch := self._copy(table_id, size, low, entries, give_up)) is None:
                    self._rebuilt[table_id] = _ENDED
                    continue
                self._rebuilt[table_id] = patch.last_key + 1
                self._publish((*self._patches, patch))
                if give_up():
                    return False
        return True

    def _copy(
        self, table_id: int, size: int, low: int | None, entries: EntriesFrom, give_up: Callable[[], bool]
    ) -> Patch | None:
        """A patch of RocksDB's entries from the key `low` on; None if there are none."""
        most = max(1, MOST_BYTES // (size + 9))

        def parts(source: Iterator[Changes]) -> Iterator[Marked]:
            count = 0
            for keys, deleted, live in source:
                rows = np.zeros((len(keys), size), np.uint8)
                rows[~deleted] = live
                yield keys, _marked(rows, deleted)
                yield_to_requests()
                count += len(keys)
                if count >= most or (count >= LEAST_COPIED and give_up()):
                    return

        with closing(entries(table_id, size, low)) as source:  # type: ignore[type-var]
            copied = parts(source)
            first = next(copied, None)
            return None if first is None else self._write(table_id, itertools.chain([first], copied))

    def records_as_whole(self, records: Records) -> Records:
        """The records that say that the patches are complete."""
        return self._records(self._patches, records, whole=True)

    def complete(self) -> None:
        """The patches are complete: RocksDB has their `records_as_whole`."""
        self._whole, self._rebuilt = True, None
        self._publish(self._patches)

    def _write(self, table_id: int, parts: Iterable[Marked]) -> Patch:
        """Write a patch of at least one key, and its filter."""
        path = files.make_dir(self._folder) / f"{self._next}.rows"
        self._next += 1
        first = next(source := iter(parts))
        kept = [first[0]]
        noted = itertools.chain([first], _noted(source, kept))
        built = write_sealed_parts(path, table_id, first[1].shape[1], noted, durable=False)
        words = bloom.empty(built.entries, BITS_A_KEY)
        try:
            patch = Patch(path, built.xxh3, built.bytes, words)
            for keys in kept or (keys for keys, _ in patch.parts(_rows_at_once(patch.row_bytes))):
                bloom.add(words, np.ascontiguousarray(keys))
                yield_to_requests()
            with files.publish(path.with_name(_filter_name(path.name)), durable=False) as file:
                file.write(words.data)
            return patch
        except BaseException:
            self.remove_files([path])
            raise

    def _records(self, patches: Sequence[Patch], records: Records, whole: bool) -> Records:
        document = {
            "whole": whole,
            "next": self._next,
            "files": [patch.entry for patch in patches],
            "with": {name: _digest_of(value) for name, value in records.items()},
        }
        return {**records, RECORD: json.dumps(document).encode()}

    def _publish(self, patches: tuple[Patch, ...]) -> None:
        self._patches, changes = patches, sealed_rows.ALL if self._whole else sealed_rows.SOME
        tables = {
            table_id: Patched(
                changes, np.array([patch.address for patch in own], np.int64), tuple(own), _row_bytes(own)
            )
            for table_id, own in self._by_table().items()
        }
        self._served = self._whole, tables

    def close_idle_files(self) -> list[int]:
        """`SealedTable.close_idle_files` for all patches, unless a thread reads whole ones."""
        with self._using:
            return (
                []
                if self._users
                else [descriptor for patch in self._patches for descriptor in patch.close_idle_files()]
            )

    @contextmanager
    def _in_use(self) -> Iterator[None]:
        with self._using:
            self._users += 1
        try:
            yield
        finally:
            with self._using:
                self._users -= 1

    # --- what there is

    def check(self) -> None:
        """Read all of them back. Corruption, then they are `damaged`; StorageError."""
        try:
            with self._in_use():
                for patch in self._patches:
                    patch.check()
        except Corruption:
            self.damaged = True
            raise

    def stats(self) -> dict[str, int]:
        return {
            "patches": len(self._patches),
            "patch_keys": sum(patch.keys for patch in self._patches),
            "patch_bytes": sum(patch.bytes for patch in self._patches),
            "patch_memory_bytes": sum(patch.memory_bytes for patch in self._patches),
        }

    def close(self) -> None:
        """Drop the patches; their readers still have them."""
        self._whole = False
        self._publish(())


_ALL = Patched(sealed_rows.ALL, _NONE, (), None)


class _GivenUp(Exception):
    """Writing was stopped by `give_up`."""


def _until(parts: Iterator[Marked], give_up: Callable[[], bool]) -> Iterator[Marked]:
    for part in parts:
        if give_up():
            raise _GivenUp
        yield part
        yield_to_requests()


def _noted(parts: Iterable[Marked], kept: list[Keys]) -> Iterator[Marked]:
    """`parts`, whose keys are added to `kept`, which is emptied if they are more than `_KEPT_KEYS`."""
    count = 0
    for keys, rows in parts:
        count += len(keys)
        if count <= _KEPT_KEYS:
            kept.append(keys.copy())
        else:
            kept.clear()
        yield keys, rows


def _rows_at_once(row_bytes: int) -> int:
    return max(1024, _PIECE_BYTES // (row_bytes + 9))  # with the key and the mark


def _filter_name(name: str) -> str:
    return f"{name.split('.')[0]}.filter"


def _digest_of(record: bytes | None) -> str:
    return xxhash.xxh3_64_hexdigest(record or b"")


def _digest(words: bloom.Filter) -> str:
    return xxhash.xxh3_64_hexdigest(words.data)


def _marked(rows: Rows, deleted: npt.NDArray[np.bool_] | None) -> Rows:
    marked = np.zeros((len(rows), rows.shape[1] + sealed_rows.MARK_BYTES), np.uint8)
    marked[:, :-1] = rows
    if deleted is not None:
        marked[deleted] = 0
        marked[:, -1] = deleted
    return marked


def _row_bytes(patches: Sequence[Patch]) -> int | None:
    one, *others = {patch.row_bytes for patch in patches}
    return None if others else one


def _level(patch: Patch) -> int:
    """How many rounds of merging four smallest patches it takes to get a patch of this size."""
    return max(0, (patch.keys // _SMALLEST).bit_length() - 1) // 2


def _alike(patches: Sequence[Patch]) -> list[Patch]:
    """The newest patches, up to the last of four of like size or smaller; none if there are not so many."""
    run: list[Patch] = []
    if not patches or _row_bytes(patches) is None:
        return run
    for count in range(LIKE_SIZED, len(patches) + 1):
        level = _level(patches[count - 1])
        alike = [patch for patch in patches[:count] if _level(patch) >= level]
        if len(alike) >= LIKE_SIZED and sum(patch.bytes for patch in patches[:count]) <= MOST_BYTES:
            run = list(patches[:count])
    return run


def _merge(sources: Sequence[Iterator[Marked]]) -> Iterator[Marked]:
    """The keys of all sources, ascending; a key in several has the row of the first source that has it."""
    merged = sources[0]
    for older in sources[1:]:  # those that changed last are mostly the smallest, and are copied most often
        merged = _merge_two(older, merged)
    return merged


def _merge_two(old: Iterator[Marked], new: Iterator[Marked]) -> Iterator[Marked]:
    a, b = next(old, None), next(new, None)
    while a is not None and b is not None:
        upto = min(int(a[0][-1]), int(b[0][-1]))
        i, j = (int(np.searchsorted(part[0], upto, "right")) for part in (a, b))
        yield _merge_parts((a[0][:i], a[1][:i]), (b[0][:j], b[1][:j]))
        a = (a[0][i:], a[1][i:]) if i < len(a[0]) else next(old, None)
        b = (b[0][j:], b[1][j:]) if j < len(b[0]) else next(new, None)
    if a is not None:
        yield a
        yield from old
    if b is not None:
        yield b
        yield from new


def _merge_parts(old: Marked, new: Marked) -> Marked:
    if not len(old[0]) or not len(new[0]):
        return old if len(old[0]) else new
    parts = (overlay_index.Part(keys, rows, np.zeros(len(keys), np.bool_)) for keys, rows in (old, new))
    both = overlay_index.merge(*parts)
    return both.keys, both.rows
