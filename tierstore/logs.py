"""The log on standard error or in a file: lines for people, or one JSON object a line for log collectors.

Any thread may log.

What looks like a secret is cut out of every line: clients put theirs into paths, ids and
sources, and errors repeat them.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from datetime import UTC, datetime
from logging.handlers import WatchedFileHandler
from pathlib import Path
from typing import Any, Literal, cast, get_args

from tierstore.errors import ConfigError
from tierstore.log_limits import Limited

LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]
# a token, credentials of an Authorization header, and what stands before the host of a URL; a password there may hold
# slashes, which a host with its port, and a path behind it, looks like
_SECRET = re.compile(
    r"(tierstore_[0-9a-f]{12}_)[A-Za-z0-9_-]+|((?i:bearer|basic)\s+)[^\s\"',;]+|(://)(?:[^\s\"'/]+"
    r"|(?!(?:[\w-]+\.[\w.-]{0,250}|localhost|\[[^\]\s]{0,60}\]):\d{1,5}/)[^\s\"'/@]{0,100}:[^\s\"']{1,300})(?=@)"
)


def without_secrets(text: str) -> str:
    """`text` with `…` in place of tokens, of what follows `Bearer` or `Basic`, and of users and passwords in URLs."""
    return _SECRET.sub(lambda match: f"{match[match.lastindex or 0]}…", text)


class _AsText(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return without_secrets(super().format(record))


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
        clean = {name: without_secrets(value) if isinstance(value, str) else value for name, value in line.items()}
        return json.dumps(clean, ensure_ascii=False)


_OURS = logging.getLogger("tierstore")


def configure(form: LogFormat, level: LogLevel, file: Path | None = None) -> None:
    """Log everything from `level` up in this form, to `file` or else to standard error.

    Replaces what was set up before.
    """
    try:
        handler = logging.StreamHandler(sys.stderr) if file is None else WatchedFileHandler(file, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"log_file: cannot write {file}: {error.strerror or error}") from error
    text = _AsText("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(_AsJson() if form == "json" else text)
    handler.addFilter(Limited())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    _OURS.setLevel(logging.NOTSET)


def reopen() -> None:
    """Open files of the log anew: what was renamed is written to no more, as before the next line in any case."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, WatchedFileHandler):
            handler.close()  # opens its file with the next line


def current_level() -> LogLevel:
    """The lowest level of this package's lines that is logged."""
    name = logging.getLevelName(_OURS.getEffectiveLevel()).lower()
    return cast(LogLevel, name) if name in get_args(LogLevel) else "debug"


def set_level(level: LogLevel) -> None:
    """Log this package's lines from `level` up, from now on."""
    _OURS.setLevel(level.upper())
