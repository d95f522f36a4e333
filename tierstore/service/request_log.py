"""The log of requests, for every transport: failed, refused or slow ones, or all; and the traces that are reported.

Look-ups that reactors answer are not logged: Python does not see them. Any thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from tierstore.config import Settings
from tierstore.errors import RateLimited, TierstoreError
from tierstore.log_limits import LIMITED, LineLimit
from tierstore.logs import without_secrets
from tierstore.service.error_status import message_of
from tierstore.service.stats import Timings
from tierstore.service.traces import Traces

logger = logging.getLogger(__name__)

LINES_A_SECOND = 10  # of one kind
REFUSED_EVERY_S = 10.0  # for requests without valid credentials: clients repeat them while they have the wrong token
_NOT_LET_IN = (401, 403)


@dataclass(frozen=True, slots=True)
class LoggedRequest:
    """A request as the log names it, which came at `began_ns` (`time.perf_counter_ns`).

    `client` gives the client's address, until the request is answered. `headers` are those that may name its trace, in
    small letters.
    """

    method: str
    path: str
    began_ns: int
    client: Callable[[], str | None]
    request_id: str | None = None
    headers: Iterable[tuple[bytes, bytes]] = ()


class RequestLog:
    """Writes at most LINES_A_SECOND of failures with one status, and as many of slow requests; fewer of those without
    valid credentials.

    The next line says how many were left out.
    """

    def __init__(
        self, settings: Settings, clock: Callable[[], float] = time.monotonic, traces: Traces | None = None
    ) -> None:
        self._all = settings.access_log
        self._slow_ms = settings.slow_request_ms
        self._traces = traces
        # whether `note` wants requests that did not fail
        self.of_successes = self._all or self._slow_ms > 0 or traces is not None
        self._limit = LineLimit(LINES_A_SECOND, 1 / LINES_A_SECOND, clock)
        self._refused_limit = LineLimit(LINES_A_SECOND, REFUSED_EVERY_S, clock)

    def logs(self, began_ns: int) -> bool:
        """Whether a request that came at `began_ns` and succeeds now should be logged, judged by its time."""
        return self._all or 0 < self._slow_ms <= (time.perf_counter_ns() - began_ns) / 1e6

    def note(
        self,
        request: LoggedRequest,
        status: int,
        *,
        said: str | None = None,
        error: BaseException | None = None,
        spent: Timings | None = None,
    ) -> None:
        """Log a request, if it should be logged, and report its span.

        `status` is HTTP's, `said` the name of the status in the line if it has another one. `error` is why it failed,
        and `spent` where its time went.
        """
        method, path, request_id = request.method, request.path, request.request_id
        if self._traces is not None:
            name, attributes = _span_of(method, path, status, said)
            why = (message_of(error) if error is not None else str(said or status)) if status >= 500 else None
            self._traces.request(request.headers, name, request.began_ns, attributes, spent, why)
        ms = (time.perf_counter_ns() - request.began_ns) / 1e6
        failed, slow = status >= 500, 0 < self._slow_ms <= ms
        refused = status in _NOT_LET_IN or isinstance(error, RateLimited)
        level = logging.WARNING if failed or slow or refused else logging.INFO if self._all else logging.DEBUG
        if level == logging.DEBUG and (status < 400 or not logger.isEnabledFor(logging.DEBUG)):
            return
        left_out: int | None = 0
        if refused:
            left_out = self._refused_limit.admit(status)
        elif failed or slow:
            left_out = self._limit.admit(status if failed else "slow")
        if left_out is None:
            return
        fields: dict[str, Any] = {
            "method": method[:16],
            "path": one_line(path),
            "status": said or status,
            "ms": round(ms, 3),
            "id": None if request_id is None else one_line(request_id),
            "client": request.client(),
        }
        if spent is not None and slow:
            fields |= _spent_ms(spent)
        if error is not None:
            fields["reason"] = message_of(error)
        if left_out:
            fields["left_out"] = left_out
        logger.log(
            logging.ERROR if failed and error is not None and not isinstance(error, TierstoreError) else level,
            "%s",
            _text(fields, slow=slow),
            exc_info=error if failed and not isinstance(error, TierstoreError) else None,
            extra={"fields": {name: value for name, value in fields.items() if value is not None}, LIMITED: True},
        )


def one_line(text: str) -> str:
    """A client's text in one line and not too long.

    Secrets are removed before it is cut: half of one may not look like one.
    """
    return repr(without_secrets(text)[:256])[1:-1]


def _span_of(method: str, path: str, status: int, said: str | None) -> tuple[str, dict[str, Any]]:
    """A request's span, its name and attributes, in the words of OpenTelemetry's conventions for HTTP and gRPC."""
    if said is None:
        method, path = method[:16], one_line(path)
        attributes = {"http.request.method": method, "url.path": path, "http.response.status_code": status}
        return f"{method} {path}", attributes
    service, _, verb = path[1:].rpartition("/")
    return path[1:], {"rpc.system": "grpc", "rpc.service": service, "rpc.method": verb, "rpc.grpc.status": said}


def _spent_ms(spent: Timings) -> dict[str, float]:
    """Where a request's time went: waiting for a thread; rows from memory; rows that memory lacked; the graph."""
    parts = (spent.queued_ns, spent.lookup_ns - spent.disk_ns, spent.disk_ns, spent.dense_ns)
    names = ("queued_ms", "memory_ms", "disk_ms", "dense_ms")
    return {name: round(ns / 1e6, 3) for name, ns in zip(names, parts, strict=True)}


def _text(fields: dict[str, Any], *, slow: bool) -> str:
    parts = [f"{name} {fields[name]}" for name in ("id", "client") if fields[name] is not None]
    parts += [f"{name[:-3]} {value} ms" for name, value in fields.items() if name.endswith("_ms")]
    if fields.get("left_out"):
        parts.append(f"{fields['left_out']} like it left out")
    line = f"{'slow: ' if slow else ''}{fields['method']} {fields['path']}: {fields['status']} in {fields['ms']} ms"
    line += f" ({', '.join(parts)})" if parts else ""
    return f"{line}: {fields['reason']}" if "reason" in fields else line
