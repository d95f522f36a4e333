"""Where a service is: its URL taken apart. A value; any thread may use it."""

from __future__ import annotations

import ipaddress
import ssl
from dataclasses import dataclass
from urllib.parse import urlsplit

from tierstore.errors import InvalidInput

CONNECT_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Address:
    """`host` without brackets, `prefix` the path that stands before every path of ours, `tls` for https."""

    url: str
    host: str
    port: int
    prefix: str
    tls: bool

    @staticmethod
    def of(url: str) -> Address:
        """InvalidInput for a `url` that is not `http://host[:port]` or `https://…`."""
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise InvalidInput(f"expected a url such as http://127.0.0.1:8000, came {url!r}: {error}") from error
        plain = url.isascii() and url.isprintable() and " " not in url
        if parts.scheme not in ("http", "https") or not host or parts.query or parts.fragment or not plain:
            raise InvalidInput(f"expected a url such as http://127.0.0.1:8000, came {url!r}")
        tls = parts.scheme == "https"
        shown = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}".rstrip("/")
        return Address(shown, host, port or (443 if tls else 80), parts.path.rstrip("/"), tls)

    @property
    def authority(self) -> str:
        """What goes into the header Host."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"

    @property
    def loopback(self) -> bool:
        """Whether this machine is meant."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def tls_context(self) -> ssl.SSLContext | None:
        """Certificates are checked against those that the system trusts (or SSL_CERT_FILE)."""
        return ssl.create_default_context() if self.tls else None
