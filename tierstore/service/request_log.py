"""Which requests are logged, over every transport: those that failed, slow ones, or all of them.

Look-ups that reactors answer are not logged: they never come to Python. Any thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from tierstore.config import Settings
from tierstore.errors import TierstoreError
from tierstore.log_limits import LIMITED, LineLimit
from tierstore.logs import without_secrets
from tierstore.service.error_status import message_of
from tierstore.service.stats import Timings

logger = logging.getLogger(__name__)

LINES_A_SECOND = 10  # of one kind


class RequestLog:
    """Writes at most LINES_A_SECOND of failures with one status, and as many of slow requests; the next line says how many were left out."""

    def __init__(self, settings: Settings, clock: Callable[[], float] = time.monotonic) -> None:
        self._all = settings.access_log
        self._slow_ms = settings.slow_request_ms
        self.of_successes = self._all or self._slow_ms > 0  # whether requests that did not fail may be logged
        self._limit = LineLimit(LINES_A_SECOND, 1 / LINES_A_SECOND, clock)

    def logs(self, began_ns: int) -> bool:
        """Whether a request that came at `began_ns` and succeeds now is to be logged, as far as its time says."""
        return self._all or 0 < self._slow_ms <= (time.perf_counter_ns() - began_ns) / 1e6

    def note(
        self,
        method: str,
        path: str,
        status: int,
        began_ns: int,
        *,
        request_id: str | None,
        client: Callable[[], str | None],
        error: BaseException | None = None,
        spent: Timings | None = None,
        said: str | None = None,
    ) -> None:
        """Log a request that came at `began_ns` (`time.perf_counter_ns`), if it is to be logged.

        `status` is HTTP's, `said` the name of the status in the line if it has another one. `client` gives the client's
        address, as long as the request is not answered. `error` is why it failed, and `spent` where its time went.
        """
        ms = (time.perf_counter_ns() - began_ns) / 1e6
        failed, slow = status >= 500, 0 < self._slow_ms <= ms
        if failed or slow:
            level = logging.WARNING
        elif self._all:
            level = logging.INFO
        elif status >= 400 and logger.isEnabledFor(logging.DEBUG):
            level = logging.DEBUG
        else:
            return
        left_out = self._limit.admit(status if failed else "slow") if failed or slow else 0
        if left_out is None:
            return
        fields: dict[str, Any] = {
            "method": method[:16],
            "path": one_line(path),
            "status": said or status,
            "ms": round(ms, 3),
            "id": None if request_id is None else one_line(request_id),
            "client": client(),
        }
        if spent is not None and slow:
            fields |= {
                "queued_ms": round(spent.queued_ns / 1e6, 3),
                "lookup_ms": round(spent.lookup_ns / 1e6, 3),
                "dense_ms": round(spent.dense_ns / 1e6, 3),
            }
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
    """What a client sent, in one line and not too long. Secrets go before it is cut: half of one may not look like one."""
    return repr(without_secrets(text)[:256])[1:-1]


def _text(fields: dict[str, Any], *, slow: bool) -> str:
    parts = [f"{name} {fields[name]}" for name in ("id", "client") if fields[name] is not None]
    parts += [f"{name[:-3]} {value} ms" for name, value in fields.items() if name.endswith("_ms")]
    if fields.get("left_out"):
        parts.append(f"{fields['left_out']} like it left out")
    line = f"{'slow: ' if slow else ''}{fields['method']} {fields['path']}: {fields['status']} in {fields['ms']} ms"
    line += f" ({', '.join(parts)})" if parts else ""
    return f"{line}: {fields['reason']}" if "reason" in fields else line
