"""The verbs of a store over the network: `Client` talks to a running service, `AsyncClient` does so from asyncio.

Needs neither the engine nor its drivers, so it works where no store is. Whatever the service refuses
comes back as the error of `tierstore.errors` that the embedded store would have raised.
"""

from __future__ import annotations

from tierstore.client.aio import AsyncClient
from tierstore.client.remote import RemoteModel
from tierstore.client.sync import Client

__all__ = ["AsyncClient", "Client", "RemoteModel"]
