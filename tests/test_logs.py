"""The log: lines for a person, or an object a line, from the library and from a service."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Literal

import pytest

from tierstore.config import ENV_PREFIX
from tierstore.log_limits import BURST, Limited
from tierstore.logs import configure, without_secrets

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    for handler in before[0]:
        root.removeHandler(handler)  # `force` would close it
    yield
    root.handlers[:], root.level = before


def logged(capsys: pytest.CaptureFixture[str]) -> list[str]:
    log = logging.getLogger("tierstore.some")
    log.info("loaded %d rows of “ü”\nin two lines", 5)
    try:
        raise ValueError("no such row")
    except ValueError:
        log.exception("lost")
    log.debug("not told")
    return capsys.readouterr().err.splitlines()


def test_an_object_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    configure("json", "info")
    first, second = map(json.loads, logged(capsys))
    assert datetime.fromisoformat(first.pop("time")).tzinfo is not None
    assert first == {"level": "info", "logger": "tierstore.some", "message": "loaded 5 rows of “ü”\nin two lines"}
    assert (second["level"], second["message"]) == ("error", "lost")
    assert second["error"].endswith("ValueError: no such row")


def test_what_a_line_says_apart(capsys: pytest.CaptureFixture[str]) -> None:
    configure("json", "info")
    logging.getLogger("tierstore.some").info("500 in 7 ms", extra={"fields": {"status": 500, "ms": 7.0}})
    line = json.loads(capsys.readouterr().err)
    assert (line["message"], line["status"], line["ms"]) == ("500 in 7 ms", 500, 7.0)


def test_lines_for_a_person(capsys: pytest.CaptureFixture[str]) -> None:
    configure("text", "info")
    lines = logged(capsys)
    assert lines[0].endswith("INFO tierstore.some: loaded 5 rows of “ü”")
    assert lines[-1] == "ValueError: no such row"


SECRETS = {
    f"GET /v2/models/tierstore_0123456789ab_{'Q' * 43}: 404": "GET /v2/models/tierstore_0123456789ab_…: 404",
    "asked by 127.0.0.1:1 (id Bearer Q-Q.Q=)": "asked by 127.0.0.1:1 (id Bearer …",
    "basic QQ==, bearer\tQQ": "basic …, bearer\t…",
    "source 'https://user:QQ@host/x' and s3://QQ:Q@Q@bucket": "source 'https://…@host/x' and s3://…@bucket",
    "redis://user:QQ/Q@host:1 and redis://:QQ/Q+/@h1:6379,h2:6379": "redis://…@host:1 and redis://…@h1:6379,h2:6379",
    "redis://admin:1234/QQ@h, http://localhost:80/a@b": "redis://…@h, http://localhost:80/a@b",
    "http://127.0.0.1:8000/a@b, c@d and /path//x@y": "http://127.0.0.1:8000/a@b, c@d and /path//x@y",
}


@pytest.mark.parametrize("form", ["json", "text"])
def test_no_secret_that_somebody_has_put_somewhere_is_in_a_line(
    capsys: pytest.CaptureFixture[str], form: Literal["json", "text"]
) -> None:
    configure(form, "info")
    for given, expected in SECRETS.items():
        try:
            raise ValueError(given)
        except ValueError:
            logging.getLogger("tierstore.some").exception("%s", given, extra={"fields": {"path": given}})
        told = capsys.readouterr().err
        if form == "json":
            line = json.loads(told)
            assert (line["message"], line["path"]) == (expected, expected)
            assert expected in line["error"]
        else:
            assert told.count(expected) == 2
        assert "QQ" not in told


def test_less_than_the_level_is_not_told(capsys: pytest.CaptureFixture[str]) -> None:
    configure("json", "error")
    assert [json.loads(line)["level"] for line in logged(capsys)] == ["error"]


@pytest.mark.thorough
def test_all_that_a_service_logs_is_of_the_form(tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if not name.upper().startswith(ENV_PREFIX)}
    env |= {"TIERSTORE_LOG_FORMAT": "json", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tierstore", "serve", "--port", "0", "--grpc-port", "off", "--data", "d"]
    with subprocess.Popen(
        command, cwd=tmp_path, env=env | {"TIERSTORE_DRAIN_S": "0.01"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as service:
        assert service.stdout is not None
        service.stdout.readline()
        service.send_signal(signal.SIGTERM)
        _, error = service.communicate(timeout=60)
    lines = [json.loads(line) for line in error.decode().splitlines()]
    assert any("stopping" in line["message"] for line in lines)
    assert all({"time", "level", "logger", "message"} <= line.keys() for line in lines)


def test_what_clients_repeat_fills_no_disk(capsys: pytest.CaptureFixture[str]) -> None:
    configure("text", "info")
    now = 0.0
    (handler,) = logging.getLogger().handlers
    handler.filters[:] = [Limited(lambda: now)]
    log = logging.getLogger("tierstore.some")

    def repeat(times: int) -> list[str]:
        for i in range(times):
            log.warning("request %d makes no sense", i)
        return capsys.readouterr().err.splitlines()

    assert len(repeat(BURST + 50)) == BURST
    assert repeat(10) == []
    log.warning("another line")
    log.info("told")
    assert len(capsys.readouterr().err.splitlines()) == 2
    now = 1.0
    (line,) = repeat(3)
    assert line.endswith("request 0 makes no sense (and 60 more like it that were not written)")
    now = 1e6
    assert len(repeat(2 * BURST)) == BURST


def test_long_lines_are_searched_for_secrets_in_little_time() -> None:
    began = time.thread_time()
    for text in ("://a:" * 20_000, "://" + "a" * 100_000, "://a:" + "b/" * 50_000, "bearer " * 10_000):
        without_secrets(text)
    assert time.thread_time() - began < 2
