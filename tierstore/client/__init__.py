"""The verbs of a store over the network: `Client` for threads, `AsyncClient` for asyncio.

Needs neither the engine nor its drivers. A refusal of the service is raised as the error of `tierstore.errors` that the
embedded store would have raised.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tierstore.client.sync import Client
from tierstore.client.sync_models import RemoteModel

if TYPE_CHECKING:
    from tierstore.client.aio import AsyncClient
    from tierstore.client.aio_models import AsyncRemoteModel

__all__ = ["AsyncClient", "AsyncRemoteModel", "Client", "RemoteModel"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'tierstore.client' has no attribute {name!r}")
    from tierstore.client import aio  # asyncio is imported for it alone

    return getattr(aio, name)
