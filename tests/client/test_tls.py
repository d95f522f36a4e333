"""Both clients over TLS: the same answers, and no service whose certificate is not trusted."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tierstore.errors import Unreachable

from .conftest import Make
from .fake_service import FakeService, rows


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with a key and its certificate for 127.0.0.1."""
    program = shutil.which("openssl")
    if program is None:
        pytest.skip("needs the program openssl to make a certificate")
    file = tmp_path_factory.mktemp("tls") / "both.pem"
    kind = "-x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=test"
    name = ["-addext", "subjectAltName=IP:127.0.0.1"]
    made = ["-keyout", str(file), "-out", f"{file}c"]
    subprocess.run([program, "req", *kind.split(), *name, *made], check=True, capture_output=True)
    file.write_text(file.read_text() + Path(f"{file}c").read_text())
    return file


@pytest.fixture
def secure(certificate: Path) -> Iterator[FakeService]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    with FakeService(context) as service:
        yield service


def test_large_requests_and_answers_pass(
    make: Make, secure: FakeService, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    client = make(secure.url, split_keys=40_000)
    for n in (3, 100_000):
        np.testing.assert_array_equal(client.lookup("m", "f", np.arange(n)), rows(np.arange(n)))
    assert secure.connections <= 4


def test_a_certificate_that_nobody_vouches_for_is_refused(make: Make, secure: FakeService) -> None:
    with pytest.raises(Unreachable, match="certificate"):
        make(secure.url, retries=0).lookup("m", "f", [1])
