"""Which model a snapshot or a delta is of, read from the thing itself. Functions of files and bytes; any thread."""

from __future__ import annotations

import json
from pathlib import Path

from tierstore.errors import InvalidInput


def snapshot_model(source: str | Path) -> str:
    """The model that a snapshot, or a built version, which can be read here is of. InvalidInput where it cannot."""
    root = Path(str(source).removeprefix("file://"))
    built = root / "built.json"
    path = built if built.is_file() else root / "snapshot.json"
    try:
        document = json.loads(path.read_bytes())
        return str((document["manifest"] if path is built else document)["model"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidInput(
            f"cannot tell from {path} which model the snapshot is of; name it (model=, --model): {error}"
        ) from error


def delta_model(data: bytes) -> str:
    """The model that a delta names in its Arrow schema. InvalidInput for anything that is not a delta."""
    import pyarrow as pa

    try:
        return str(pa.ipc.open_stream(data).schema.metadata[b"model"].decode())
    except (pa.ArrowException, OSError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise InvalidInput(
            f"expected a delta: an Arrow IPC stream whose schema metadata has `model`: {error}"
        ) from error
