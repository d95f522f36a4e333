"""The log on standard error: lines for people, or one JSON object a line for log collectors. Any thread may log."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, Literal

from tierstore.log_limits import Limited

LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]


class _AsJson(logging.Formatter):
    """`time` (ISO 8601, UTC, in microseconds), `level`, `logger`, `message`, the record's `fields` (set by
    `extra={"fields": {…}}`), and for an exception `error` with its traceback."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line.update(getattr(record, "fields", {}))
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def configure(form: LogFormat, level: LogLevel) -> None:
    """Log everything from `level` up in this form. Replaces what was set up before."""
    handler = logging.StreamHandler(sys.stderr)
    text = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(_AsJson() if form == "json" else text)
    handler.addFilter(Limited())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
