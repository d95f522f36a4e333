"""The admin application, made by a thread while look-ups are answered already."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

from tierstore.service.context import Service
from tierstore.service.http.messages import ERROR, Receive, Response, Scope

if TYPE_CHECKING:
    from fastapi import FastAPI


class AdminApplication:
    """The application of `routes`. FastAPI takes long to import, and no look-up needs it: it is imported only here."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._making: asyncio.Task[FastAPI] | None = None

    def begin(self) -> asyncio.Task[FastAPI]:
        """Begin to make it, unless that has begun. If it failed, such as for lack of descriptors, it is tried again."""
        making = self._making
        if making is None or (making.done() and (making.cancelled() or making.exception() is not None)):
            making = self._making = asyncio.create_task(asyncio.to_thread(self._make))
        return making

    async def __call__(self, scope: Scope, receive: Receive) -> Response:
        app = await asyncio.shield(self.begin())
        status, fields, chunks = 0, {}, []

        async def send(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                fields.update(message["headers"])
            else:
                chunks.append(message.get("body", b""))

        try:
            await app(scope, receive, send)
        except Exception as error:
            if scope.get(ERROR) is not error:  # otherwise it has been answered
                raise
        fields.pop(b"content-length", None)
        return Response(status, chunks, fields.pop(b"content-type", b""), [*fields.items()])

    def _make(self) -> FastAPI:
        from tierstore.service.admin.routes import make_app

        return make_app(self._service)
