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

__version__ = "0.2.0"

if TYPE_CHECKING:
    from tierstore import onnx as onnx
    from tierstore import torch as torch
    from tierstore.client import AsyncClient, AsyncRemoteModel, Client, RemoteModel
    from tierstore.client.rollout import rollout
    from tierstore.engine.model import Model
    from tierstore.engine.operations.restore import restore
    from tierstore.engine.reads.view import View
    from tierstore.engine.store import Store
    from tierstore.engine.store import open_store as open
    from tierstore.errors import (
        Closed,
        ConfigError,
        Conflict,
        Corruption,
        DeadlineExceeded,
        DeltaError,
        DiskFull,
        Fenced,
        Forbidden,
        InferenceError,
        InvalidInput,
        LoadCancelled,
        Locked,
        MissingExtra,
        NotFound,
        NotReady,
        Overloaded,
        RateLimited,
        RemoteUnavailable,
        RolloutFailed,
        RunLimit,
        SequenceGap,
        SnapshotError,
        StorageError,
        TierstoreError,
        TooLarge,
        Unauthorized,
        Unreachable,
        WrongPartition,
    )
    from tierstore.formats.delta.writer import DeltaWriter
    from tierstore.formats.snapshot.writer import SnapshotWriter, TableWriter
    from tierstore.imports.deltas import RowsColumns, rows_delta
    from tierstore.imports.hashes import hash_like, row_numbers
    from tierstore.imports.tables import Feature, TableSource, import_table, import_tables
    from tierstore.ingest.build import build_snapshot
    from tierstore.ingest.partitioned import PartitionedBuild, begin_build
    from tierstore.kafka.writer import KafkaDeltaWriter
    from tierstore.types import BackupReport, DeltaResult, Progress

__all__ = [
    "AsyncClient",
    "AsyncRemoteModel",
    "BackupReport",
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
    "Fenced",
    "Forbidden",
    "InferenceError",
    "InvalidInput",
    "KafkaDeltaWriter",
    "LoadCancelled",
    "Locked",
    "MissingExtra",
    "Model",
    "NotFound",
    "NotReady",
    "Overloaded",
    "PartitionedBuild",
    "Progress",
    "RateLimited",
    "RemoteModel",
    "RemoteUnavailable",
    "RolloutFailed",
    "RowsColumns",
    "RunLimit",
    "SequenceGap",
    "SnapshotError",
    "SnapshotWriter",
    "StorageError",
    "Store",
    "TableSource",
    "TableWriter",
    "TierstoreError",
    "TooLarge",
    "Unauthorized",
    "Unreachable",
    "View",
    "WrongPartition",
    "begin_build",
    "build_snapshot",
    "hash_like",
    "import_table",
    "import_tables",
    "open",
    "restore",
    "rollout",
    "row_numbers",
    "rows_delta",
]
_HOMES = {
    "AsyncClient": ("tierstore.client", "AsyncClient"),
    "AsyncRemoteModel": ("tierstore.client", "AsyncRemoteModel"),
    "Client": ("tierstore.client", "Client"),
    "BackupReport": ("tierstore.types", "BackupReport"),
    "DeltaResult": ("tierstore.types", "DeltaResult"),
    "DeltaWriter": ("tierstore.formats.delta.writer", "DeltaWriter"),
    "Feature": ("tierstore.imports.tables", "Feature"),
    "begin_build": ("tierstore.ingest.partitioned", "begin_build"),
    "PartitionedBuild": ("tierstore.ingest.partitioned", "PartitionedBuild"),
    "build_snapshot": ("tierstore.ingest.build", "build_snapshot"),
    "RowsColumns": ("tierstore.imports.deltas", "RowsColumns"),
    "rows_delta": ("tierstore.imports.deltas", "rows_delta"),
    "hash_like": ("tierstore.imports.hashes", "hash_like"),
    "row_numbers": ("tierstore.imports.hashes", "row_numbers"),
    "import_table": ("tierstore.imports.tables", "import_table"),
    "import_tables": ("tierstore.imports.tables", "import_tables"),
    "TableSource": ("tierstore.imports.tables", "TableSource"),
    "KafkaDeltaWriter": ("tierstore.kafka.writer", "KafkaDeltaWriter"),
    "Model": ("tierstore.engine.model", "Model"),
    "Progress": ("tierstore.types", "Progress"),
    "RemoteModel": ("tierstore.client", "RemoteModel"),
    "SnapshotWriter": ("tierstore.formats.snapshot.writer", "SnapshotWriter"),
    "restore": ("tierstore.engine.operations.restore", "restore"),
    "rollout": ("tierstore.client.rollout", "rollout"),
    "Store": ("tierstore.engine.store", "Store"),
    "TableWriter": ("tierstore.formats.snapshot.writer", "TableWriter"),
    "View": ("tierstore.engine.reads.view", "View"),
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
