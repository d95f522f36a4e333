"""A bulk load by the names of its options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tierstore.formats.snapshot.reader import Snapshot
from tierstore.ingest.bulkload import BulkLoad
from tierstore.ingest.load_plan import FileSpec, LoadWork


def bulk_load(snapshot: Snapshot, out: Path, **options: Any) -> BulkLoad:
    """A load whose options are fields of its two records."""
    of_files = {name: options.pop(name) for name in FileSpec.__dataclass_fields__ if name in options}
    return BulkLoad(snapshot, out, FileSpec(**of_files), LoadWork(**options))
