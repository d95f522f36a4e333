"""The strings of a snapshot's keys, sorted into files: what a version keeps of string keys beside its rows. See `tasks.py`.

Runs of rows hold hashes only, so the keys of the shards are read once more. Each file has as many strings as fit in memory,
sorted; what reads them merges the files, which are few. Strings of rows that are expired at the load are there too.

In a helper process, one task at a time, on its main thread. After a crash the files are made again.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa

from tierstore.formats import files
from tierstore.formats.keys import are_own
from tierstore.formats.names import strings_file
from tierstore.formats.snapshot.reader import Snapshot
from tierstore.ingest.runs import ReportRows
from tierstore.ingest.tasks import SortedStrings, SortStrings
from tierstore.tiers.disk.strings_file import StringsFile, merged_strings, opened, write_ascending, write_strings
from tierstore.types import Keys, Partitions

_BESIDE_BYTES = 32  # of a string: its place, its hash, and its place in the order, with room to sort
_BATCH_ROWS = 1 << 17
_MOST_FILES = 4  # of a task: whoever looks for a string reads a block of each


def sort_strings(snapshot: Snapshot, task: SortStrings, report: ReportRows) -> SortedStrings:
    """Write the strings of some shards as sorted files; as none, once they take more than `most_bytes`."""
    own = None if task.own is None else Partitions.parse(task.own)
    made: list[StringsFile] = []
    held: list[tuple[Keys, pa.Array]] = []
    held_bytes = 0

    def flush() -> None:
        nonlocal held_bytes
        hashes = np.concatenate([of for of, _ in held])
        strings = pa.concat_arrays([of for _, of in held])
        held.clear()
        held_bytes = 0
        path = Path(task.folder) / strings_file(task.table, task.number, len(made))
        made.append(write_strings(path, strings, hashes))

    for shard in task.shards:
        for hashes, strings in snapshot.shard_strings(task.table, shard, _BATCH_ROWS):
            read = len(hashes)
            if own is not None:
                mine = are_own(hashes, own)
                hashes, strings = hashes[mine], strings.filter(pa.array(mine))
            if len(hashes):
                held.append((hashes, strings))
                held_bytes += strings.nbytes + _BESIDE_BYTES * len(hashes)
            if held_bytes >= task.run_bytes:
                flush()
                if files.tree_bytes(task.folder) > task.most_bytes:  # those of all tasks
                    return SortedStrings([], too_many=True)
            report(read)
    if held:
        flush()
    if len(made) > _MOST_FILES:
        folder = Path(task.folder)
        with opened(folder, made) as parts:
            merged = merged_strings([part.all() for part in parts])
            one = write_ascending(folder / strings_file(task.table, task.number, len(made)), merged)
        for of in made:
            files.remove_file(folder / of.name, durable=False)
        made = [one]
    return SortedStrings([(of.name, of.xxh3, of.bytes, of.strings) for of in made])
