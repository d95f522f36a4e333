"""The service: a data plane that is independent of transports, and the transports. `app` is the whole service for
ASGI servers.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tierstore.service.application import app

    return app
