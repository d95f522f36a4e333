"""The record layouts of open sealed files, for kernels."""

from __future__ import annotations

from tierstore.kernels.records import at, define

BASE = define("Base", "the sealed files of a table: their block index and descriptors, for `sealed_blocks.look_up`", {
    "fences_at fences part_starts_at parts": "the index: the address and the number of fences, and those of the starts of parts",
    "ends_at rows_at fds_at files": "the addresses of each file's end, rows and descriptor, and the number of files",
    "per_block block_bytes": "the rows and the bytes of a block",
    "changed_at": "the address of what describes the filter of changed keys",
})  # fmt: skip
PATCH = define("Patch", "a sealed file of rows that deltas have changed (`sealed_rows.py`)", {
    "files": (BASE, "the file, as a base of one part; the filter of changed keys in it is not used"),
    "filter_at filter_words": "the address and the words of the filter of its keys",
})  # fmt: skip
base_at, patch_at = map(at, (BASE, PATCH))
