"""Settings of a client: where a service is, and how to talk to it. Immutable values; any thread may use them."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from tierstore import __version__
from tierstore.addresses import why_not_token
from tierstore.errors import InvalidInput

CONNECT_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Address:
    """A service's URL, parsed: `host` without brackets, `prefix` the path before every path of ours, `tls` for https.

    `socket` is the path of a socket in the file system, for `unix:PATH`.
    """

    url: str
    host: str
    port: int
    prefix: str
    tls: bool
    socket: str | None = None

    @staticmethod
    def parse(url: str) -> Address:
        """InvalidInput for a `url` that is not `http://host[:port]`, `https://…` or `unix:PATH`."""
        if url.startswith("unix:"):
            path = url.removeprefix("unix:")
            path = path.removeprefix("//") if path.startswith("///") else path
            if not path or path.startswith("//") or "\0" in path:
                raise InvalidInput(f"expected the path of a socket, such as unix:/run/tierstore.sock, got {url!r}")
            return Address(f"unix:{path}", "localhost", 80, "", False, path)
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise InvalidInput(f"expected a url such as http://127.0.0.1:8000, got {url!r}: {error}") from error
        if parts.username is not None:  # said without them: it may be a password
            raise InvalidInput(
                "expected a url such as http://127.0.0.1:8000, got one with a user or a password: give a token as "
                "token= (TIERSTORE_TOKEN)"
            )
        plain = url.isascii() and url.isprintable() and " " not in url
        if parts.scheme not in ("http", "https") or not host or parts.query or parts.fragment or not plain:
            raise InvalidInput(f"expected a url such as http://127.0.0.1:8000, got {url!r}")
        tls = parts.scheme == "https"
        shown = f"{parts.scheme}://{parts.netloc}{parts.path}".rstrip("/")
        return Address(shown, host, port or (443 if tls else 80), parts.path.rstrip("/"), tls)

    @property
    def authority(self) -> str:
        """The value of the header Host."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"

    def tls_context(self, files: TlsFiles) -> ssl.SSLContext | None:
        """Checks certificates against `files.ca`, or those that the system trusts (or SSL_CERT_FILE). None without TLS.

        InvalidInput for files that cannot be used, or that are named without TLS.
        """
        if not self.tls:
            if files != TlsFiles():
                raise InvalidInput(f"ca, cert and key are for https, got the url {self.url!r}")
            return None
        if files.key is not None and files.cert is None:
            raise InvalidInput("key: expected the certificate that it belongs to as cert, got none")
        try:
            context = ssl.create_default_context(cafile=files.ca)
        except (OSError, ValueError) as error:
            raise InvalidInput(f"ca {files.ca}: expected a file of certificates in PEM: {error}") from error
        if files.cert is not None:
            try:
                context.load_cert_chain(files.cert, files.key)
            except (OSError, ValueError) as error:
                raise InvalidInput(
                    f"cert {files.cert}, key {files.key}: expected a certificate and its key in PEM: {error}"
                ) from error
        return context


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Files in PEM: authorities of services, and the client's own certificate and key; `key` None: it is in `cert`."""

    ca: str | Path | None = None
    cert: str | Path | None = None
    key: str | Path | None = None


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often and when a call is repeated, and how many calls of a request run at once.

    retries: further attempts of a call, at most. backoff_s: the longest wait before the first of them; it doubles with
    each up to `backoff_limit_s`. retry_burst, retry_share: size of the retry budget, and how much each call adds to it.
    """

    retries: int = 3
    backoff_s: float = 0.05
    backoff_limit_s: float = 2.0
    retry_burst: float = 10.0
    retry_share: float = 0.1
    parallel: int = 4


@dataclass(frozen=True, slots=True)
class Node:
    """The address of one service, its TLS, and the `lines_of_headers` that are sent to it with every request."""

    address: Address
    tls: ssl.SSLContext | None
    header_lines: str


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """The arguments of a client, checked. `nodes` is not empty; any of them may answer a request."""

    nodes: tuple[Node, ...]
    timeout_s: float
    hedge_after_s: float | None
    split_keys: int | None
    split_items: int | None
    max_connections: int
    retry: RetryPolicy


def lines_of_headers(address: Address, token: str | None, *, allow_insecure_token: bool) -> str:
    """The header lines of every request, each with its line end.

    InvalidInput for a token that no header can carry, and, unless `allow_insecure_token`, for one that would
    leave this machine unencrypted.
    """
    lines = f"Host: {address.authority}\r\nUser-Agent: tierstore/{__version__}\r\n"
    if token is None:
        return lines
    if not isinstance(token, str) or not (token.isascii() and token.isprintable()):
        raise InvalidInput("token: expected printable ASCII")
    why = why_not_token(address.url, address.host, tls=address.tls, setting="allow_insecure_token")
    if why is not None and not allow_insecure_token:
        raise InvalidInput(f"token: {why}")
    return f"{lines}Authorization: Bearer {token}\r\n"
