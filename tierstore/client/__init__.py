"""The verbs of a store over the network: `Client` for threads, `AsyncClient` for asyncio.

Needs neither the engine nor its drivers. A refusal of the service is raised as the error of `tierstore.errors` that the
embedded store would have raised.
"""

from __future__ import annotations

from tierstore.client.aio import AsyncClient
from tierstore.client.remote_models import AsyncRemoteModel, RemoteModel
from tierstore.client.sync import Client

__all__ = ["AsyncClient", "AsyncRemoteModel", "Client", "RemoteModel"]
