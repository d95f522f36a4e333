"""The trace that the caller of this package is in, for what it sends to others: W3C Trace Context, by
OpenTelemetry where a program uses it.

Imports nothing of OpenTelemetry: a program that has not imported it has no trace. Any thread, any task.
"""

from __future__ import annotations

import sys
from typing import Any


def current_trace() -> dict[str, str]:
    """Headers that say in which span the calling code is (`traceparent`, and what else the program's propagators
    write); empty outside of one.
    """
    trace: Any = sys.modules.get("opentelemetry.trace")
    if trace is None or not trace.get_current_span().get_span_context().is_valid:
        return {}
    from opentelemetry import propagate

    headers: dict[str, str] = {}
    propagate.inject(headers)
    return {name: value for name, value in headers.items() if value.isascii() and value.isprintable()}


def header_lines(headers: dict[str, str]) -> str:
    """Headers as lines of HTTP/1."""
    return "".join(f"{name}: {value}\r\n" for name, value in headers.items())
