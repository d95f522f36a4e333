"""The admin route that changes how much is logged, until the process ends. Handlers run on the event loop."""

from __future__ import annotations

from fastapi import FastAPI
from pydantic import BaseModel, Field

from tierstore.engine.events.changes import audited
from tierstore.logs import LogLevel, current_level, set_level
from tierstore.service.admin.exports import Strict
from tierstore.service.context import Service


class LogLevelRequest(Strict):
    """Log from another level up."""

    level: LogLevel = Field(description="lowest level that is logged")


class LoggedFrom(BaseModel):
    """`before` is the level that was logged until now."""

    level: LogLevel
    before: LogLevel


def add_log_level(app: FastAPI, service: Service) -> None:
    """Add the route to the application."""

    def change(level: LogLevel) -> LoggedFrom:
        before = current_level()
        with audited(service.store.audit, "log level", None, lambda: {"level": current_level()}):
            set_level(level)
        return LoggedFrom(level=level, before=before)

    @app.post("/admin/log-level", tags=["service"])
    async def log_level(request: LogLevelRequest) -> LoggedFrom:
        """Log from this level up, from now until the process ends; the setting `log_level` is for its next start."""
        answer: LoggedFrom = await service.change(change, request.level, pool=service.admin_pool)
        return answer
