"""The record layouts of open sealed files, for kernels."""

from __future__ import annotations

from tierstore.kernels.records import at, define

BASE = define("Base", "a sealed base: its block index and files, as `sealed_blocks.look_up` has them", {
    "fences_at fences part_starts_at parts": "the index",
    "ends_at rows_at fds_at files": "of files: where each ends, its rows, its descriptor; and how many",
    "per_block block_bytes": "of a block: its rows and bytes",
    "changed_at": "where the filter of changed keys is told",
})  # fmt: skip
PATCH = define("Patch", "a sealed file of rows that deltas have changed (`sealed_rows.py`)", {
    "files": (BASE, "the file, as a base of one part; its filter of changed keys is not used"),
    "filter_at filter_words": "the filter of its keys",
})  # fmt: skip
base_at, patch_at = map(at, (BASE, PATCH))
