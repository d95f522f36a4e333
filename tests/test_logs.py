"""The log: lines for a person, or an object a line, from the library and from a service."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import httpx
import pytest

from tests.service.conftest import settings_for
from tests.service.fake_store import FakeStore
from tierstore.config import ENV_PREFIX
from tierstore.log_limits import BURST, Limited
from tierstore.logs import LogFormat, configure
from tierstore.service.server import ServerThread

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


@pytest.mark.parametrize("form", ["text", "json"])
def test_what_looks_like_a_secret_is_cut_out_wherever_it_is(
    form: LogFormat, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a service logs what its clients send: in a path, in the request's id, in a body, in an error."""
    configure(form, "debug")
    random, settings = "Q" * 43, settings_for(tmp_path, access_log=True)
    token = f"tierstore_0123456789ab_{random}"
    with ServerThread(FakeStore(settings)) as server, httpx.Client(base_url=server.url) as http:  # type: ignore[arg-type]
        for method, path in (("GET", f"/v2/models/{token}"), ("PUT", f"/admin/models/ctr/labels/{token}")):
            http.request(method, path, headers={"X-Request-Id": token})
        http.post("/admin/models/ctr/snapshots", json={"source": "https://me:p@ss-word@host/x"})
    try:
        raise ValueError(f'"Basic dXNlcjpwYXNz" and redis://me:{random}@host:6379')
    except ValueError:
        logging.getLogger("tierstore.some").exception("Authorization: Bearer opaque")
    text = capsys.readouterr().err
    assert text.count("tierstore_0123456789ab_…") >= 4
    assert "https://me:…@host/x" in text
    assert "redis://me:…@host:6379" in text
    for part in (random[:9], "ss-word", "dXNlcjpwYXNz", "opaque"):
        assert part not in text
    if form == "json":
        assert all(json.loads(line) for line in text.splitlines())


def test_addresses_without_a_password_stay_whole(capsys: pytest.CaptureFixture[str]) -> None:
    configure("text", "info")
    address = "http://127.0.0.1:8000/a@b and user@host:1 and redis://me@h:6379"
    logging.getLogger("tierstore.some").info(address)
    assert address in capsys.readouterr().err


def test_less_than_the_level_is_not_told(capsys: pytest.CaptureFixture[str]) -> None:
    configure("json", "error")
    assert [json.loads(line)["level"] for line in logged(capsys)] == ["error"]


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
