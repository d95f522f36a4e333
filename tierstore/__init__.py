"""tierstore: a tiered embedding store service.

    import tierstore

    with tierstore.open("data/", host_budget="4GiB") as store:
        store.load_snapshot("snapshots/ctr/20261120")
        rows = store.model("ctr").lookup("item_id", keys)

Names are imported on first use, so that `import tierstore` stays cheap for a trainer that only writes
snapshots and deltas.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from tierstore import onnx as onnx
    from tierstore import torch as torch
    from tierstore.client import AsyncClient, Client, RemoteModel
    from tierstore.engine.model import Model
    from tierstore.engine.store import Store
    from tierstore.engine.store import open_store as open
    from tierstore.engine.view import View
    from tierstore.errors import (
        Closed,
        ConfigError,
        Conflict,
        Corruption,
        DeadlineExceeded,
        DeltaError,
        DiskFull,
        Forbidden,
        InferenceError,
        InvalidInput,
        LoadCancelled,
        Locked,
        MissingExtra,
        NotFound,
        NotReady,
        Overloaded,
        SequenceGap,
        SnapshotError,
        StorageError,
        TierstoreError,
        TooLarge,
        Unreachable,
    )
    from tierstore.formats.writers import DeltaWriter, SnapshotWriter, TableWriter
    from tierstore.imports.tables import Feature, TableSource, import_table, import_tables
    from tierstore.ingest.building import build_snapshot
    from tierstore.types import DeltaResult, Progress

__all__ = [
    "AsyncClient",
    "Client",
    "Closed",
    "ConfigError",
    "Conflict",
    "Corruption",
    "DeadlineExceeded",
    "DeltaError",
    "DeltaResult",
    "DeltaWriter",
    "DiskFull",
    "Feature",
    "Forbidden",
    "InferenceError",
    "InvalidInput",
    "LoadCancelled",
    "Locked",
    "MissingExtra",
    "Model",
    "NotFound",
    "NotReady",
    "Overloaded",
    "Progress",
    "RemoteModel",
    "SequenceGap",
    "SnapshotError",
    "SnapshotWriter",
    "StorageError",
    "Store",
    "TableSource",
    "TableWriter",
    "TierstoreError",
    "TooLarge",
    "Unreachable",
    "View",
    "build_snapshot",
    "import_table",
    "import_tables",
    "open",
]
_HOMES = {
    "AsyncClient": ("tierstore.client", "AsyncClient"),
    "Client": ("tierstore.client", "Client"),
    "DeltaResult": ("tierstore.types", "DeltaResult"),
    "DeltaWriter": ("tierstore.formats.writers", "DeltaWriter"),
    "Feature": ("tierstore.imports.tables", "Feature"),
    "build_snapshot": ("tierstore.ingest.building", "build_snapshot"),
    "import_table": ("tierstore.imports.tables", "import_table"),
    "import_tables": ("tierstore.imports.tables", "import_tables"),
    "TableSource": ("tierstore.imports.tables", "TableSource"),
    "Model": ("tierstore.engine.model", "Model"),
    "Progress": ("tierstore.types", "Progress"),
    "RemoteModel": ("tierstore.client", "RemoteModel"),
    "SnapshotWriter": ("tierstore.formats.writers", "SnapshotWriter"),
    "Store": ("tierstore.engine.store", "Store"),
    "TableWriter": ("tierstore.formats.writers", "TableWriter"),
    "View": ("tierstore.engine.view", "View"),
    "open": ("tierstore.engine.store", "open_store"),
}


def __getattr__(name: str) -> Any:
    if name in ("onnx", "torch"):
        return import_module(f"tierstore.{name}")
    if name not in __all__:
        raise AttributeError(f"module 'tierstore' has no attribute {name!r}")
    if name in ("open", "Store"):
        import_module("tierstore.kernels.ahead").prepare()  # else each kernel is compiled where it is imported
    module, attribute = _HOMES.get(name, ("tierstore.errors", name))
    value = getattr(import_module(module), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
