"""Both clients over TLS: the same answers, and no service whose certificate is not trusted."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.certificates import Authority
from tests.client.conftest import Make
from tests.client.fake_service import FakeService, rows
from tierstore.client.settings import Address
from tierstore.client.unreachable import not_connected
from tierstore.errors import InvalidInput, Unreachable


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


def test_the_authority_may_be_named(make: Make, secure: FakeService, certificate: Path) -> None:
    assert make(secure.url, ca=certificate).ready()
    assert make(secure.url, ca=str(certificate), token="t").ready()


def test_a_service_may_ask_for_the_clients_own_certificate(make: Make, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    own, mine = authority.issue("service"), authority.issue("client")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*own)
    context.load_verify_locations(authority.ca)
    context.verify_mode = ssl.CERT_REQUIRED
    both = tmp_path / "both.pem"
    both.write_text(mine.cert.read_text() + mine.key.read_text())
    with FakeService(context) as service:
        assert make(service.url, ca=authority.ca, cert=mine.cert, key=mine.key).ready()
        assert make(service.url, ca=authority.ca, cert=both).ready()
        # an alert, which a reset may overtake
        with pytest.raises(Unreachable, match=r"asks for a certificate that it trusts: cert= and key=|connection"):
            make(service.url, ca=authority.ca, retries=0).ready()


def test_files_that_cannot_be_used_are_named(make: Make, certificate: Path, tmp_path: Path) -> None:
    nothing = tmp_path / "nothing.pem"
    nothing.write_text("")
    for url, options, match in (
        ("https://127.0.0.1:1", {"ca": tmp_path / "none.pem"}, "ca .*none.pem: expected a file of certificates"),
        ("https://127.0.0.1:1", {"cert": nothing}, "cert .*nothing.pem, key None: expected a certificate and its key"),
        ("https://127.0.0.1:1", {"key": certificate}, "key: expected the certificate that it belongs to"),
        ("http://127.0.0.1:1", {"ca": certificate}, "ca, cert and key are for https, got the url 'http://127.0.0.1:1'"),
        ("unix:/run/x.sock", {"cert": certificate}, "are for https, got the url 'unix:/run/x.sock'"),
    ):
        with pytest.raises(InvalidInput, match=match):
            make(url, **options)


def test_a_token_leaves_this_machine_with_tls_alone(make: Make) -> None:
    for url in ("http://10.0.0.1:8000", "http://embeddings.example", "http://localhost.example"):
        make(url)
        with pytest.raises(
            InvalidInput, match=f"token: it would cross the network in clear to {url}; use an https url"
        ):
            make(url, token="secret")
        make(url, token="secret", allow_insecure_token=True)
    for url in ("http://127.0.0.1:8000", "http://localhost", "http://[::1]:1", "https://embeddings.example", "unix:/x"):
        make(url, token="secret")


@pytest.mark.parametrize(
    ("url", "path"),
    [("unix:/run/x.sock", "/run/x.sock"), ("unix:///run/x.sock", "/run/x.sock"), ("unix:x.sock", "x.sock")],
)
def test_a_socket_in_the_file_system_is_an_address(url: str, path: str) -> None:
    address = Address.parse(url)
    assert (address.socket, address.authority, address.tls) == (path, "localhost", False)
    for wrong in ("unix:", "unix://", "unix://run/x.sock", "unix:/run/\0"):
        with pytest.raises(InvalidInput):
            Address.parse(wrong)


def test_a_password_in_an_address_is_refused_and_not_shown(make: Make) -> None:
    for url in ("http://ann:secret@127.0.0.1:8000", "https://secret@embeddings.example"):
        with pytest.raises(InvalidInput, match=r"a user or a password.*token=.*TIERSTORE_TOKEN") as raised:
            make(url)
        assert "secret" not in str(raised.value)


def test_a_certificate_that_nobody_vouches_for_is_refused(make: Make, secure: FakeService) -> None:
    with pytest.raises(
        Unreachable, match=rf"the certificate of {secure.url} is not trusted: self.signed.*ca=.*SSL_CERT_FILE"
    ):
        make(secure.url, retries=0).lookup("m", "f", [1])


def test_a_certificate_of_another_name_or_time_says_so(make: Make, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*authority.issue("other", "DNS:other.example"))
    with (
        FakeService(context) as service,
        pytest.raises(Unreachable, match=r"IP address mismatch.*; use a name in the url"),
    ):
        make(service.url, ca=authority.ca, retries=0).ready()
    expired = ssl.SSLCertVerificationError(1, "certificate verify failed")
    expired.verify_code, expired.verify_message = 10, "certificate has expired"
    error = not_connected(Address.parse("https://a.example"), expired)
    assert "the certificate of https://a.example is not trusted: certificate has expired; the service needs" in str(
        error
    )


def test_a_url_of_the_other_kind_is_named(make: Make, secure: FakeService, certificate: Path) -> None:
    where = secure.url.removeprefix("https://")
    with pytest.raises(Unreachable, match=f"http://{where} .*does it speak TLS, as https://{where}"):
        make(f"http://{where}", retries=0).ready()
    with FakeService() as plain:
        where = plain.url.removeprefix("http://")
        with pytest.raises(Unreachable, match=f"does not speak TLS there: is it http://{where}"):
            make(f"https://{where}", ca=certificate, retries=0).ready()
