"""TLS files: the certificate and key of a service, read again when they change, and the names in clients' certificates.

A connection keeps the certificate with which it began. Files that are invalid, or do not fit each other, change
nothing: the earlier ones stay in use, and `problem` says why. `Tls` is replaced on one thread, the event loop's; any
thread may read `current`.
"""

from __future__ import annotations

import logging
import os
import ssl
import time
from dataclasses import dataclass
from pathlib import Path

from tierstore.config import Settings
from tierstore.errors import ConfigError
from tierstore.formats.regular import read_regular
from tierstore.service.openssl import Context

logger = logging.getLogger(__name__)

MAX_FILE_BYTES = 4 << 20  # all authorities of a system take a quarter of a MiB


@dataclass(frozen=True, slots=True)
class Credentials:
    """The certificate files, as read at one time."""

    context: Context
    ends_s: float  # when the certificate expires, on the wall clock


class Tls:
    """The TLS files of the settings."""

    def __init__(self, settings: Settings) -> None:
        """ConfigError for unusable files: a service must not start without its configured TLS."""
        assert settings.tls_cert is not None
        assert settings.tls_key is not None
        self._certificate, self._key, self._client_ca = settings.tls_cert, settings.tls_key, settings.tls_client_ca
        self.problem: str | None = None  # why the files could not be read again; the earlier ones stay in use
        self._python: ssl.SSLContext | None = None
        self._stamp = self._stamp_now()
        self.current = self._read()

    def for_python(self) -> ssl.SSLContext:
        """The files for a server that uses Python's TLS, with only HTTP/1.1. They are read again for it as well."""
        if self._python is None:
            made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            made.minimum_version = ssl.TLSVersion.TLSv1_2
            made.set_alpn_protocols(["http/1.1"])
            if self._client_ca is not None:
                made.verify_mode = ssl.CERT_REQUIRED
            self._load(made)
            self._python = made
        return self._python

    def _load(self, context: ssl.SSLContext) -> None:
        context.load_cert_chain(self._certificate, self._key)
        if self._client_ca is not None:
            context.load_verify_locations(self._client_ca)

    @property
    def ends_s(self) -> float:
        """When the certificate in use expires, on the wall clock."""
        return self.current.ends_s

    def refresh(self, *, anyway: bool = False) -> None:
        """Read the files again if they have changed, or `anyway`."""
        stamp = self._stamp_now()
        if stamp == self._stamp and not anyway:
            return
        try:
            current = self._read()
        except ConfigError as error:
            if str(error) != self.problem:
                logger.error("certificates are not read again, those read before go on: %s", error)
            self.problem = str(error)
        else:
            self.current, self.problem = current, None
            if self._python is not None:
                self._load(self._python)
            logger.info("new connections get the certificate that is in %s now", self._certificate)
        self._stamp = stamp  # from before they were read: a change meanwhile is seen the next time

    def _files(self) -> list[Path]:
        return [file for file in (self._certificate, self._key, self._client_ca) if file is not None]

    def _stamp_now(self) -> list[tuple[int, ...] | None]:
        return [_stamp(file) for file in self._files()]

    def _read(self) -> Credentials:
        for setting, file in (
            ("tls_cert", self._certificate),
            ("tls_key", self._key),
            ("tls_client_ca", self._client_ca),
        ):
            if file is not None:
                _check_readable(setting, file)
        context = Context(self._certificate, self._key, self._client_ca)
        return Credentials(context, context.ends_s())


def tls_of(settings: Settings) -> Tls | None:
    """TLS by the settings; None if they have none. ConfigError for contradicting settings."""
    if (settings.tls_cert is None) != (settings.tls_key is None):
        raise ConfigError("expected tls_cert and tls_key together, got one of them")
    if settings.tls_cert is None:
        if settings.tls_client_ca is not None:
            raise ConfigError("tls_client_ca needs tls_cert and tls_key: without TLS no client shows a certificate")
        return None
    return Tls(settings)


def has_ended(end_s: float | None) -> bool:
    """Whether a client's certificate has expired: a handshake that resumes a session does not check."""
    return end_s is not None and end_s < time.time()


def _check_readable(setting: str, file: Path) -> None:
    try:
        read_regular(file, MAX_FILE_BYTES)
    except OSError as error:
        raise ConfigError(f"{setting}: cannot read {file}: {error.strerror or error}") from error


def _stamp(file: Path) -> tuple[int, ...] | None:
    """Identifies a file's state; None if it cannot be seen."""
    try:
        stat = os.stat(file)
    except OSError:
        return None
    return stat.st_ino, stat.st_mtime_ns, stat.st_size
