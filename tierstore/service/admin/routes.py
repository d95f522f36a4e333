"""The admin interface, the metrics and the pages: a FastAPI application for every path outside the data plane.

Handlers run on the event loop. Calls that may block go to the admin pool, and calls that may wait for a switch to the
switch pool, so that deltas do not wait; metrics and the status have a thread of their own. Errors are problem+json
(RFC 9457).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Annotated, Any

from fastapi import Body, FastAPI, Path, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, Response
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException

from tierstore import __version__
from tierstore.access.roles import Role
from tierstore.errors import Conflict, NotFound, NotReady, TierstoreError
from tierstore.formats.names import MAX_ORDINAL
from tierstore.machine import memory_bytes, processors
from tierstore.service.admin.allowed_places import check_still_there, resolve_source
from tierstore.service.admin.explain import add_explain
from tierstore.service.admin.exports import JobStarted, ModelName, Strict, add_exports
from tierstore.service.admin.figures import add_figures
from tierstore.service.admin.health_metrics import resident_bytes
from tierstore.service.admin.log_level import add_log_level
from tierstore.service.admin.metrics import CONTENT_TYPE, Exposition
from tierstore.service.admin.pages import DOCS_POLICY, STATUS_PAGE, STATUS_POLICY, docs_page
from tierstore.service.admin.parked import add_parked
from tierstore.service.admin.replicas import add_samples
from tierstore.service.admin.uploads import SCHEME, add_uploads
from tierstore.service.context import Service
from tierstore.service.http import messages
from tierstore.service.http.deltas import DELTA_TYPE
from tierstore.service.http.messages import ERROR, principal_of, problem, problem_response
from tierstore.service.limits.worker_pool import WorkerPool
from tierstore.types import NAME

LabelName = Annotated[str, Path(pattern=f"^{NAME.pattern}$", description="a name that is not all digits")]
VersionNumber = Annotated[int, Path(ge=1, le=MAX_ORDINAL)]


class LoadRequest(Strict):
    """Load a snapshot."""

    source: str = Field(
        description="directory of the snapshot, a path or a file:// URL under the source roots; or `upload:<id>`"
    )
    activate: bool = Field(True, description="serve it once it is loaded, caught up and warm")


class ActivateRequest(Strict):
    """Serve a kept version."""

    version: int = Field(ge=1, le=MAX_ORDINAL)
    force: bool = Field(False, description="even if it is stale, that is, lacks deltas which are gone")
    expected_active: int | None = Field(None, ge=1, le=MAX_ORDINAL, description="409 where another version is active")


class RollbackRequest(Strict):
    """Serve the version that served last.

    Sent again without `expected_active` it goes back twice.

    With `to_seq` the active version stays, and all deltas above that seq are undone.
    """

    to_seq: int | None = Field(None, ge=0, le=MAX_ORDINAL, description="back to what it was right after this delta")
    expected_active: int | None = Field(None, ge=1, le=MAX_ORDINAL, description="409 where another version is active")
    force: bool = Field(False, description="even if it is stale, that is, lacks deltas which are gone")


class CanaryRequest(Strict):
    """Serve a kept version beside the active one, or change the share of the one that is."""

    version: int = Field(ge=1, le=MAX_ORDINAL)
    share: float = Field(0.05, ge=0, le=1, description="of the requests that name no version: 0.05 is 5%")
    force: bool = Field(False, description="even if it is stale, that is, lacks deltas which are gone")


class LabelRequest(Strict):
    """Let a label stand for a version that is served."""

    version: int = Field(ge=1, le=MAX_ORDINAL)


class CanaryBody(BaseModel):
    version: int
    share: float


class RoutingBody(BaseModel):
    """What is served: `labels` has `stable` and `canary` beside the free ones."""

    model: str
    active_version: int | None
    canary: CanaryBody | None
    labels: dict[str, int]


class Withdrawn(RoutingBody):
    withdrawn: int


class DeltaApplied(BaseModel):
    """`applied` is false for a delta that was held already; `send_as` is there if it was
    undone: the seq to send it under.
    """

    seq: int
    applied: bool
    send_as: int | None = None


class ActiveVersion(BaseModel):
    model: str
    active_version: int | None


def _theirs(answer: messages.Response) -> Response:
    """One of our responses as a response of FastAPI."""
    headers = {name.decode(): value.decode("latin-1") for name, value in answer.headers}
    return Response(b"".join(answer.chunks), answer.status, headers, answer.content_type.decode())


def _validation_problem(error: RequestValidationError) -> Response:
    faults = "; ".join(f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors()[:5])
    return _theirs(problem(400, faults))


def make_app(service: Service) -> FastAPI:
    """The application over `service`."""
    app = FastAPI(
        title="tierstore",
        version=__version__,
        description="Admin interface; the data plane is the Open Inference Protocol below /v2.",
        docs_url=None,  # FastAPI's pages load their scripts from other hosts
        redoc_url=None,
    )
    _add_error_handlers(app)
    _add_pages(app, service)
    _add_jobs(app, service)
    _describe_deltas(app)
    _add_models(app, service)
    _add_routing(app, service)
    add_samples(app, service)
    add_explain(app, service)
    add_parked(app, service)
    add_figures(app, service)
    add_log_level(app, service)
    return app


def _add_error_handlers(app: FastAPI) -> None:
    async def ours(request: Request, error: Exception) -> Response:
        request.scope[ERROR] = error
        return _theirs(problem_response(error))

    async def theirs(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if isinstance(error.__cause__, TierstoreError):  # FastAPI has caught it while it read the body
            return await ours(request, error.__cause__)
        detail = str(error.detail)
        if error.status_code in (404, 405):
            detail = f"no {request.method[:10]} {request.url.path[:80]}; /docs lists what there is"
        headers = {name.lower().encode(): value.encode("latin-1") for name, value in (error.headers or {}).items()}
        return _theirs(problem(error.status_code, detail, headers))

    async def malformed(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return _validation_problem(error)

    app.add_exception_handler(TierstoreError, ours)
    app.add_exception_handler(Exception, ours)
    app.add_exception_handler(HTTPException, theirs)
    app.add_exception_handler(RequestValidationError, malformed)


def _add_pages(app: FastAPI, service: Service) -> None:
    exposition = Exposition(service)

    @app.get("/", include_in_schema=False)
    async def status_page() -> HTMLResponse:
        return HTMLResponse(STATUS_PAGE, headers={"Content-Security-Policy": STATUS_POLICY})

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(docs_page(app.openapi()), headers={"Content-Security-Policy": DOCS_POLICY})

    @app.get("/metrics", include_in_schema=False)
    async def metrics() -> Response:
        return Response(await service.status_pool.run(exposition.text), media_type=CONTENT_TYPE)


def _add_jobs(app: FastAPI, service: Service) -> None:
    add_exports(app, service)
    add_uploads(app, service)

    @app.post("/admin/models/{model}/snapshots", status_code=202, tags=["snapshots"])
    async def load_snapshot(model: ModelName, request: LoadRequest) -> JobStarted:
        """Load a snapshot in the background: bulk load, verify, catch up, warm, and (`activate`) switch to it."""
        if request.source.startswith(SCHEME):
            sent = service.spool.of(model, request.source.removeprefix(SCHEME))
            where = await service.switch_pool.run(service.spool.whole, sent)
            job = service.jobs.submit(
                model, where, activate=request.activate, holding=lambda: service.spool.loading(sent)
            )
            return JobStarted(job=job.id)
        roots = service.settings.source_root
        source = await service.switch_pool.run(resolve_source, request.source, roots)
        job = service.jobs.submit(
            model, source, activate=request.activate, check=lambda: check_still_there(source, roots)
        )
        return JobStarted(job=job.id)

    @app.get("/admin/jobs", tags=["snapshots"])
    async def jobs() -> dict[str, Any]:
        """Loads, exports and backups that run, wait, or ended lately, the latest first."""
        return {"jobs": [job.document() for job in service.jobs.all()]}

    @app.get("/admin/jobs/{job}", tags=["snapshots"])
    async def job_state(job: str, request: Request) -> dict[str, Any]:
        """One load, export or backup.

        `rate` is in rows a second, of a backup in bytes, and `eta_s` to the end of the phase.
        """
        return service.jobs.get(job, principal_of(request.scope).models).document()

    @app.delete("/admin/jobs/{job}", status_code=202, tags=["snapshots"])
    async def cancel(job: str, request: Request) -> dict[str, Any]:
        """Ask a job to stop. It ends as failed; what a load had finished is kept for a time, see `load_retention_s`."""
        return service.jobs.cancel(job, principal_of(request.scope).models).document()

    @app.post("/admin/jobs/{job}/acknowledge", tags=["snapshots"])
    async def acknowledge(job: str, request: Request) -> dict[str, Any]:
        """Note that somebody knows of a failed load, which then is no problem in the status any more."""
        return service.jobs.acknowledge(job, principal_of(request.scope).models).document()


def _describe_deltas(app: FastAPI) -> None:
    @app.post(
        "/admin/models/{model}/deltas",
        tags=["deltas"],
        response_model_exclude_none=True,
        openapi_extra={
            "requestBody": {
                "required": True,
                "content": {DELTA_TYPE: {"schema": {"type": "string", "format": "binary"}}},
            }
        },
    )
    async def apply_delta(model: ModelName) -> DeltaApplied:
        """Apply a delta. Once this answers it is durable, and every request that starts sees it whole."""
        # described here, and answered by `http/deltas.py`: what comes here has a path that only looks like it
        raise NotFound("no such path; /docs lists what there is")


def _add_models(app: FastAPI, service: Service) -> None:
    store = service.store

    async def switch(model: str, call: Callable[[], Any]) -> ActiveVersion:
        try:
            await service.change(call)
        except NotReady as error:
            raise Conflict(str(error)) from error
        return ActiveVersion(model=model, active_version=store.model(model).active_version)

    @app.get("/admin/models", tags=["models"])
    async def models(request: Request) -> dict[str, Any]:
        """Every model, and the state of the service."""
        status = await service.status_pool.run(store.status)
        problems = status["problems"] + [problem._asdict() for problem in service.problems()]
        role = principal_of(request.scope).role
        state = _service_state(service, role) | {"problems": [one["text"] for one in problems if not one["model"]]}
        return {**status, "models": list(status["models"].values()), "problems": problems, "service": state}

    @app.get("/admin/models/{model}", tags=["models"])
    async def model_status(model: ModelName) -> dict[str, Any]:
        """Versions, watermarks, tables, tiers and where keys were answered."""
        status: dict[str, Any] = await service.status_pool.run(store.status, model)
        return dict(status["models"][model])

    @app.post("/admin/models/{model}/activate", tags=["models"])
    async def activate(model: ModelName, request: ActivateRequest) -> ActiveVersion:
        """Serve a kept version: it is opened, caught up and warmed, then switched to in one step."""
        version, force, expected = request.version, request.force, request.expected_active
        return await switch(model, lambda: store.activate(model, version, force=force, expected_active=expected))

    @app.post("/admin/models/{model}/rollback", tags=["models"])
    async def rollback(model: ModelName, request: Annotated[RollbackRequest | None, Body()] = None) -> ActiveVersion:
        """Serve the version that served last, or undo the deltas above `to_seq`."""
        options = {} if request is None else request.model_dump()
        return await switch(model, lambda: store.rollback(model, **options))

    @app.delete("/admin/models/{model}/versions/{version}", tags=["models"])
    async def drop(model: ModelName, version: VersionNumber) -> dict[str, Any]:
        """Delete a version. 409 for one that is served."""
        await service.change(store.drop, model, version)
        return {"model": model, "dropped": version}


def _add_routing(app: FastAPI, service: Service) -> None:
    store = service.store

    def routing(model: str) -> dict[str, Any]:
        served = store.model(model).served
        canary = CanaryBody(version=served.canary.version, share=served.share) if served.canary is not None else None
        active = served.active.version if served.active is not None else None
        return {"model": model, "active_version": active, "canary": canary, "labels": served.all_labels()}

    async def route(model: str, verb: Callable[[], Any], pool: WorkerPool = service.admin_pool) -> RoutingBody:
        await service.change(verb, pool=pool)
        return RoutingBody(**routing(model))

    @app.post("/admin/models/{model}/canary", tags=["models"])
    async def canary(model: ModelName, request: CanaryRequest) -> RoutingBody:
        """Serve a kept version to a share of the requests that name none: it is opened, caught up and warmed first.

        For the version that is the canary already only the share changes.
        """
        return await route(
            model,
            lambda: store.canary(model, request.version, float(request.share), force=request.force),
            service.switch_pool,
        )

    @app.post("/admin/models/{model}/promote", tags=["models"])
    async def promote(model: ModelName) -> RoutingBody:
        """Make the canary the active version, in one step. 409 where there is none."""
        return await route(model, lambda: store.promote(model), service.switch_pool)

    @app.post("/admin/models/{model}/withdraw", tags=["models"])
    async def withdraw(model: ModelName) -> Withdrawn:
        """Stop serving the canary; the version is kept. 409 where there is none."""
        number = await service.change(store.withdraw, model)
        return Withdrawn(**routing(model), withdrawn=number)

    @app.put("/admin/models/{model}/labels/{label}", tags=["models"])
    async def label(model: ModelName, label: LabelName, request: LabelRequest) -> RoutingBody:
        """Give a serving version a label, which it has until it stops serving. 409 for another version."""
        return await route(model, lambda: store.label(model, label, request.version))

    @app.delete("/admin/models/{model}/labels/{label}", tags=["models"])
    async def unlabel(model: ModelName, label: LabelName) -> RoutingBody:
        """Remove a label."""
        return await route(model, lambda: store.unlabel(model, label))


def _service_state(service: Service, role: Role | None) -> dict[str, Any]:
    """The state of the service; `role` is the caller's."""
    return {
        "version": __version__,
        "ready": service.ready,
        "uptime_s": time.time() - service.started_s,
        "reactors": service.reactors_state,
        "http2": service.http2_state,
        "requests": service.request_times.requests,
        "request_seconds": service.request_times.of_data_plane(),
        "last_minute": service.history.last_minute(),
        "process": {"processors": processors(), "resident_bytes": resident_bytes(), "memory_bytes": memory_bytes()},
        "lookup_threads": {"busy": service.lookup_pool.busy, "total": service.lookup_pool.threads},
        "lookup_queue": {"used": service.lookup_pool.waiting, "total": service.lookup_pool.queue_limit},
        "inflight_bytes": {"used": service.inflight.used_bytes, "total": service.inflight.limit_bytes},
        "access": {"tokens": service.access.tokens.required, "tls": service.tls is not None, "role": role},
        "source_roots": [str(root) for root in service.settings.source_root],
        "watch": None,  # if there is none
        **{name: source.status() for name, source in service.sources.items()},
    }
