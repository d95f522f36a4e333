"""The verbs of a store over the network: `Client` for threads, `AsyncClient` for asyncio.

Needs neither the engine nor its drivers. A refusal of the service is raised as the error of `tierstore.errors` that the
embedded store would have raised.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tierstore.client.remote_models import AsyncRemoteModel, RemoteModel
from tierstore.client.sync import Client

if TYPE_CHECKING:
    from tierstore.client.aio import AsyncClient

__all__ = ["AsyncClient", "AsyncRemoteModel", "Client", "RemoteModel"]


def __getattr__(name: str) -> Any:
    if name != "AsyncClient":
        raise AttributeError(f"module 'tierstore.client' has no attribute {name!r}")
    from tierstore.client.aio import AsyncClient  # asyncio is imported for it alone

    return AsyncClient
