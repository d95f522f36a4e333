"""Identifies snapshots and deltas: the model and version that their files name. Pure functions; any thread."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tierstore.errors import DeltaError, SnapshotError, shown


def snapshot_model(source: str | Path) -> str:
    """The model of a snapshot or built version, read from its own file. SnapshotError where it cannot be read."""
    return str(_read(source, "model"))


def snapshot_version(source: str | Path) -> int:
    """The version of a snapshot or built version, as `snapshot_model`."""
    return int(_read(source, "version"))


def path_text(where: str | Path) -> str:
    """A path or URL as text. SnapshotError for anything else."""
    if not isinstance(where, (str, Path)) or not str(where):
        raise SnapshotError(f"expected a path or a URL, got {shown(where)}")
    if "\0" in str(where):
        raise SnapshotError("a path cannot hold a NUL character")
    return str(where)


def delta_model(data: bytes) -> str:
    """The model that a delta names in its Arrow schema. DeltaError for anything that is not a delta."""
    import pyarrow as pa

    try:
        return str(pa.ipc.open_stream(data).schema.metadata[b"model"].decode())
    except (pa.ArrowException, OSError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise DeltaError(f"expected a delta: an Arrow IPC stream whose schema metadata has `model`: {error}") from error


def _read(source: str | Path, name: str) -> Any:
    root = Path(path_text(source).removeprefix("file://"))
    if "://" not in str(source) and not root.is_dir():
        raise SnapshotError(
            f"there is no folder {root} here, so the {name} of the snapshot in it cannot be read; where only the "
            f"service has it, name the {name} ({name}=, --{name})"
        )
    built = root / "built.json"
    path = built if built.is_file() else root / "snapshot.json"
    try:
        document = json.loads(path.read_bytes())
        return document.get("manifest", document)[name]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SnapshotError(
            f"cannot read the {name} of the snapshot from {path}; name it ({name}=, --{name}): {error}"
        ) from error
