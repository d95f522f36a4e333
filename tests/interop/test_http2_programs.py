"""Programs of others that speak HTTP/2: h2spec, which asks for each rule of the protocol, nghttp, h2load and curl."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.certificates import Authority
from tests.service.conftest import eventually, settings_for
from tests.service.fake_store import FakeStore
from tests.service.http2_client import Client
from tierstore.service.server import ServerThread

CLIENTS = Path(__file__).parents[2] / ".clients"
DEADLINE_S = 200
ABOUT, INFER = "/v2", "/v2/models/ctr/infer"
# A port that speaks HTTP/1.1 too answers what is no preface as a wrong request of HTTP/1.1, and closes; h2spec expects no answer.
ANSWERED = {("http2/3.5", "Sends invalid connection preface")}
LOOK_UP = {"inputs": [{"name": "item_id", "datatype": "INT64", "shape": [2], "data": [7, 9]}]}
ROWS = [7.0, 14.0, 21.0, 28.0, 9.0, 18.0, 27.0, 36.0]


def program(name: str) -> str:
    found = shutil.which(name, path=f"{os.environ['PATH']}:{CLIENTS / 'bin'}")
    if found is None:
        pytest.skip(f"no {name} on the PATH or in .clients/bin")
    return found


def run(*command: str | Path) -> str:
    """What a program prints; fails where it does."""
    ran = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerThread]:
    with ServerThread(FakeStore(settings_for(tmp_path_factory.mktemp("http2")))) as server:  # type: ignore[arg-type]

        def begins() -> bool:
            with Client(server.port) as client:
                return client.next() is not None

        eventually(begins, "reactors have begun")
        yield server


@pytest.fixture(scope="module")
def served_with_tls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerThread]:
    root = tmp_path_factory.mktemp("http2-tls")
    (root / "certificates").mkdir()
    own = Authority(root / "certificates").issue("service", "IP:127.0.0.1")
    settings = settings_for(root, tls_cert=own.cert, tls_key=own.key)
    with ServerThread(FakeStore(settings)) as server:  # type: ignore[arg-type]
        yield server


@pytest.mark.parametrize("way", ["served", "served_with_tls"])
def test_h2spec_finds_every_rule_kept(request: pytest.FixtureRequest, tmp_path: Path, way: str) -> None:
    server: ServerThread = request.getfixturevalue(way)
    report = tmp_path / "report.xml"
    command = [program("h2spec"), "-h", "127.0.0.1", "-p", str(server.port), "-P", ABOUT, "-o", "5", "-j", str(report)]
    command += ["-t", "-k"] if way == "served_with_tls" else []
    ran = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    cases = list(ElementTree.parse(report).iter("testcase"))
    assert len(cases) > 140, ran.stdout + ran.stderr
    assert [case.attrib for case in cases if case.find("skipped") is not None] == []
    broken = {(case.attrib["package"], case.attrib["classname"]) for case in cases if len(case)}
    assert broken == ANSWERED, ran.stdout


def test_nghttp_gets_several_answers_of_one_connection(served: ServerThread) -> None:
    said = run(
        program("nghttp"), "--verbose", *[f"{served.url}{path}" for path in (ABOUT, "/v2/health/live", "/openapi.json")]
    )
    assert len(re.findall(r"recv .*:status: 200", said)) == 3
    assert "error_code=NO_ERROR" in said


@pytest.mark.parametrize("window_bits", [1, 16, 30])
def test_h2load_gets_all_its_answers_whatever_its_windows(served: ServerThread, window_bits: int) -> None:
    count = 40 if window_bits == 1 else 2000
    windows = [f"--window-bits={window_bits}", f"--connection-window-bits={max(window_bits, 16)}"]
    said = run(
        program("h2load"),
        f"--requests={count}",
        "--clients=4",
        "--max-concurrent-streams=10",
        *windows,
        f"{served.url}{ABOUT}",
    )
    assert f"{count} succeeded, 0 failed, 0 errored, 0 timeout" in said
    assert f"{count} 2xx" in said


@pytest.mark.parametrize(
    "more", [(), ("--compressed",), ("--header", "Expect: 100-continue"), ("--header", "TE: trailers")]
)
def test_curl_gets_a_look_up_answered(served: ServerThread, tmp_path: Path, more: tuple[str, ...]) -> None:
    sent = tmp_path / "sent"
    sent.write_text(json.dumps(LOOK_UP), encoding="utf-8")
    said = run(
        program("curl"), "--silent", "--show-error", "--http2-prior-knowledge", *more, "--data-binary", f"@{sent}",
        "--write-out", "\n%{http_version} %{http_code}", f"{served.url}{INFER}",
    )  # fmt: skip
    body, _, status = said.rpartition("\n")
    assert status == "2 200"
    assert json.loads(body)["outputs"][0]["data"] == ROWS
