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
    from tierstore.client import AsyncClient, Client
    from tierstore.engine.model import Model
    from tierstore.engine.store import Store
    from tierstore.engine.store import open_store as open
    from tierstore.engine.view import View
    from tierstore.errors import TierstoreError
    from tierstore.formats.writers import DeltaWriter, SnapshotWriter

_HOMES = {
    "AsyncClient": ("tierstore.client", "AsyncClient"),
    "Client": ("tierstore.client", "Client"),
    "DeltaWriter": ("tierstore.formats.writers", "DeltaWriter"),
    "Model": ("tierstore.engine.model", "Model"),
    "SnapshotWriter": ("tierstore.formats.writers", "SnapshotWriter"),
    "Store": ("tierstore.engine.store", "Store"),
    "TierstoreError": ("tierstore.errors", "TierstoreError"),
    "View": ("tierstore.engine.view", "View"),
    "open": ("tierstore.engine.store", "open_store"),
}
__all__ = ["AsyncClient", "Client", "DeltaWriter", "Model", "SnapshotWriter", "Store", "TierstoreError", "View", "open"]


def __getattr__(name: str) -> Any:
    try:
        module, attribute = _HOMES[name]
    except KeyError:
        raise AttributeError(f"module 'tierstore' has no attribute {name!r}") from None
    value = getattr(import_module(module), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
