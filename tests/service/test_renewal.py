"""What a service takes up while it runs: on SIGHUP its certificate and the files of its log, and another log level when an admin asks."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import signal
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from tests.certificates import Authority
from tests.service.conftest import eventually, settings_for
from tierstore.access.audit import read
from tierstore.access.roles import Role
from tierstore.access.tokens import TokenFile
from tierstore.cli.app import application
from tierstore.engine.store import Store
from tierstore.errors import Forbidden
from tierstore.service.server import ServerThread

ROOT = Path(__file__).parents[2]


@pytest.fixture
def level() -> Iterator[logging.Logger]:
    """The logger whose level is set; as before at the end."""
    ours = logging.getLogger("tierstore")
    before = ours.level
    yield ours
    ours.setLevel(before)


def test_sighup_renews_what_is_read_and_written_and_stops_nothing(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    served, log = authority.issue("served"), tmp_path / "log.json"
    options = ["--data", tmp_path / "data", "--port", 0, "--tls-cert", served.cert, "--tls-key", served.key]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TIERSTORE_")}
    environment |= {"TIERSTORE_LOG_FILE": str(log), "TIERSTORE_LOG_FORMAT": "json", "TIERSTORE_HOST_BUDGET": "4MiB"}
    environment |= {"TIERSTORE_GRPC_PORT": "off", "TIERSTORE_DRAIN_S": "0"}
    command = [sys.executable, "-m", "tierstore", "serve", *map(str, options)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        found = re.search(r"https://127\.0\.0\.1:([0-9]+)", process.stdout.readline())
        assert found is not None
        port = int(found[1])
        try:
            first = ssl.get_server_certificate(("127.0.0.1", port))
            assert log.read_text(encoding="utf-8") == ""
            log.rename(tmp_path / "log.1")
            stat = served.cert.stat()
            renewed = authority.issue("served again")
            for new, old in zip(renewed, served, strict=True):
                shutil.copy(new, old)
            os.utime(served.cert, ns=(stat.st_atime_ns, stat.st_mtime_ns))
            process.send_signal(signal.SIGHUP)
            eventually(lambda: log.exists() and "SIGHUP" in log.read_text(encoding="utf-8"), "a new file of the log")
            second = eventually(
                lambda: (now := ssl.get_server_certificate(("127.0.0.1", port))) != first and now, "a new certificate"
            )
            assert second.strip() in renewed.cert.read_text(encoding="ascii")
            assert "SIGHUP" not in (tmp_path / "log.1").read_text(encoding="utf-8")
            lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
            assert all(line["level"] in ("info", "warning") for line in lines)
            assert httpx.get(f"https://127.0.0.1:{port}/v2/health/live", verify=False).status_code == 200
        finally:
            process.terminate()
        assert process.wait(60) == 0


def test_an_admin_changes_the_log_level_and_the_audit_says_so(tmp_path: Path, level: logging.Logger) -> None:
    settings = settings_for(tmp_path)
    tokens = TokenFile(settings.data / "tokens.json")
    secrets = {role: tokens.create(role)[1] for role in (Role.ADMIN, Role.WRITER)}
    level.setLevel("INFO")
    with Store(settings) as store, ServerThread(store) as server:
        for role, wanted in ((Role.WRITER, 1), (Role.ADMIN, 0)):
            environment = {"TIERSTORE_TOKEN": secrets[role], "TIERSTORE_URL": server.url}
            done = CliRunner().invoke(application(), ["log-level", "debug", "--json"], env=environment)
            assert (done.exit_code != 0) == wanted, done.output
            assert isinstance(done.exception, Forbidden) == wanted
        assert json.loads(done.stdout) == {"level": "debug", "before": "info"}
        assert level.isEnabledFor(logging.DEBUG)
        odd = httpx.post(
            f"{server.url}/admin/log-level",
            json={"level": "loud"},
            headers={"authorization": f"Bearer {secrets[Role.ADMIN]}"},
        )
        assert (odd.status_code, level.level) == (400, logging.DEBUG)
        assert "'debug', 'info', 'warning' or 'error'" in odd.text
    (line,) = [line for line in read(settings.data) if line["what"] == "log level"]
    assert (line["outcome"], line["before"], line["after"]) == ("done", {"level": "info"}, {"level": "debug"})
    assert [one["outcome"] for one in read(settings.data) if one["what"] == "POST /admin/log-level"] == [
        "refused", "failed",
    ]  # fmt: skip
