"""The service: a data plane that knows no transport, and the transports. `app` is all of it for ASGI servers."""

from typing import Any


def __getattr__(name: str) -> Any:
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tierstore.service.application import app

    return app
