"""Routes for snapshots that are sent in pieces. Part of the admin interface (`routes.py`)."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from fastapi import FastAPI, Path, Query, Request
from pydantic import Field

from tierstore.errors import InvalidInput
from tierstore.service.admin.exports import ModelName, Strict
from tierstore.service.context import Service
from tierstore.service.error_status import HttpError
from tierstore.service.http.messages import Disconnected, principal_of, read_body
from tierstore.service.limits.worker_pool import Reservation
from tierstore.service.spool import MOST_FILES, PIECE_BYTES

SCHEME = "upload:"  # source of a load: what was sent
UploadId = Annotated[
    str, Path(pattern="^[0-9a-f]{32}$", description="a digest of what is sent, which the client makes")
]


class FileSent(Strict):
    """A file of a snapshot."""

    name: str = Field(description="its path within the snapshot, parts between slashes")
    bytes: int = Field(ge=0)


class UploadRequest(Strict):
    """Declare what will be sent."""

    files: list[FileSent] = Field(min_length=1, max_length=MOST_FILES)


def add_uploads(app: FastAPI, service: Service) -> None:
    """Add the routes. All of them are safe to repeat."""
    spool, pool = service.spool, service.admin_pool

    @app.put("/admin/models/{model}/uploads/{upload}", tags=["snapshots"])
    async def declare(model: ModelName, upload: UploadId, request: UploadRequest) -> dict[str, Any]:
        """Declare an upload, or ask how far one has come: `files` has the bytes of each that are there.

        Once all are, load `upload:<id>`.
        """
        sizes = {file.name: file.bytes for file in request.files}
        if len(sizes) != len(request.files):
            raise InvalidInput("files: a name comes twice")
        there = await pool.run(spool.declare, model, upload, sizes)
        return await pool.run(there.document)

    @app.get("/admin/models/{model}/uploads", tags=["snapshots"])
    async def of_model(model: ModelName) -> dict[str, Any]:
        """What is being sent, or was and is not loaded yet."""
        return {"uploads": await pool.run(lambda: [each.document() for each in spool.all(model)])}

    @app.get("/admin/models/{model}/uploads/{upload}", tags=["snapshots"])
    async def state(model: ModelName, upload: UploadId) -> dict[str, Any]:
        """How far an upload has come."""
        return await pool.run(spool.of(model, upload).document)

    @app.delete("/admin/models/{model}/uploads/{upload}", tags=["snapshots"])
    async def discard(model: ModelName, upload: UploadId) -> dict[str, Any]:
        """Remove what was sent. Else it goes once it is loaded, or `load_retention_s` after the last piece."""
        there = spool.of(model, upload)
        document = await pool.run(there.document)
        await pool.run(spool.discard, there)
        return document

    _add_pieces(app, service)


def _add_pieces(app: FastAPI, service: Service) -> None:
    @app.put(
        "/admin/models/{model}/uploads/{upload}/files/{number}",
        tags=["snapshots"],
        openapi_extra={
            "requestBody": {
                "required": True,
                "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
            }
        },
    )
    async def piece(
        model: ModelName,
        upload: UploadId,
        number: Annotated[
            int, Path(ge=0, lt=MOST_FILES, description="which file, in the order in which they were declared")
        ],
        request: Request,
        offset: Annotated[
            int, Query(ge=0, le=1 << 62, description="where the piece begins, a multiple of `piece_bytes`")
        ],
        sha256: Annotated[str, Query(pattern="^[0-9a-f]{64}$", description="of the piece")],
    ) -> dict[str, int]:
        """Send a piece: `piece_bytes` of a file, or what is left at its end.

        Answers with the bytes of the file that are on the drive.
        """
        there = service.spool.of(model, upload)
        holding = Reservation(service.delta_bytes)
        headers = {name.lower(): value for name, value in request.scope["headers"]}
        try:
            body = await read_body(request.receive, headers, PIECE_BYTES, holding)
            service.rates.admit(principal_of(request.scope), model, len(body))
            return {
                "bytes": await service.admin_pool.run(partial(service.spool.write, there, number, offset, body, sha256))
            }
        except Disconnected:
            raise HttpError(400, "the body ended early") from None
        finally:
            holding.release()
