"""Jobs that write a model's state elsewhere: exports and backups. Part of the admin interface (`routes.py`)."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from fastapi import FastAPI, Path
from pydantic import BaseModel, ConfigDict, Field

from tierstore.engine.operations.backup import MOST_KEPT
from tierstore.formats.names import MAX_ORDINAL, DataDirectory
from tierstore.service.admin.allowed_places import resolve_target
from tierstore.service.context import Service
from tierstore.types import MAX_PARTITIONS, NAME

ModelName = Annotated[str, Path(pattern=f"^{NAME.pattern}$", description="name of the model")]
backups_target = partial(resolve_target, new=False)


class Strict(BaseModel):
    """A body in which nothing unknown may be."""

    model_config = ConfigDict(extra="forbid", strict=True)


class ExportRequest(Strict):
    """Write what is served now as a snapshot, or as a built version."""

    directory: str = Field(description="a directory or URL to be made below export_root; a relative path begins there")
    version: int | str | None = Field(None, description="number or label of a version that is served; default: active")
    as_version: int | None = Field(None, ge=1, le=MAX_ORDINAL, description="number of the snapshot; default: its own")
    partitions: int | None = Field(
        None, ge=1, le=MAX_PARTITIONS, description="write a built version, in so many partitions; default: a snapshot"
    )


class BackupRequest(Strict):
    """Back a model up."""

    directory: str = Field(description="a directory or URL below export_root, new or with earlier backups")
    keep: int = Field(1, ge=1, le=MOST_KEPT, description="how many backups of the model stay there, the newest")


class JobStarted(BaseModel):
    """The job of a load, an export or a backup; follow it at /admin/jobs/{id}."""

    job: str


def add_exports(app: FastAPI, service: Service) -> None:
    """Add exports and backups; they write below `export_root`, by default in the data directory."""
    settings = service.settings
    root = settings.export_root or DataDirectory(settings.data).exports

    @app.post("/admin/models/{model}/exports", status_code=202, tags=["snapshots"])
    async def export(model: ModelName, request: ExportRequest) -> JobStarted:
        """Write what is served now, base and deltas at one seq, as a snapshot or a built version, in the background."""
        service.store.model(model)
        where = await service.admin_pool.run(resolve_target, request.directory, root)
        wanted = {"version": request.version, "as_version": request.as_version, "partitions": request.partitions}
        return JobStarted(job=service.jobs.submit_export(model, where, wanted).id)

    @app.post("/admin/models/{model}/backups", status_code=202, tags=["snapshots"])
    async def backup(model: ModelName, request: BackupRequest) -> JobStarted:
        """Back a model up as it is at one moment, all its versions and its log, in the background."""
        service.store.model(model)
        where = await service.admin_pool.run(backups_target, request.directory, root)
        return JobStarted(job=service.jobs.submit_export(model, where, {"keep": request.keep}, "backup").id)
