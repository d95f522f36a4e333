"""Access to a running service: its tokens, and the host names under which it may be called.

Without tokens every caller is an admin; the check of names keeps web pages out (a page can have its own name resolve
to this machine, and then `Host` is that name). `Access` may be used by any thread.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from prometheus_client.core import Metric

from tierstore.access.roles import LOCAL, NOBODY, Action, Principal
from tierstore.access.tokens import Tokens, lock_of
from tierstore.addresses import is_loopback
from tierstore.config import Settings
from tierstore.config.values import is_address
from tierstore.errors import ConfigError, Forbidden, Unauthorized
from tierstore.formats import files
from tierstore.formats.names import DataDirectory
from tierstore.service.addresses import host_name, parse_listen
from tierstore.service.families import counters

logger = logging.getLogger(__name__)
ANY_NAME = "*"
_PASSED, _LONGEST_HOST = 256, 300  # values that are kept, and bytes of one: whoever reaches the port can send others


class Allow(Protocol):
    """Is told of a Host and an `Authorization` with which a caller may look up, for reactors; None: no caller needs
    one.
    """

    def __call__(self, host: bytes, authorization: bytes | None, principal: Principal) -> None: ...


class Access:
    """The access check. Constant except for its tokens, which are read again when their file changes, and accepted
    names.
    """

    def __init__(self, settings: Settings) -> None:
        """Corruption or StorageError for a file of tokens that cannot be read, ConfigError for a missing one that is
        required.
        """
        path = settings.tokens or DataDirectory(settings.data).tokens
        self.tokens = Tokens(path)
        if not self.tokens.required:
            _check_meant_open(path, named=settings.tokens is not None)
        self._beyond = bool(_beyond(settings))  # whether it listens beyond this machine
        self.admin_apart = settings.admin_listen is not None  # whether admin requests have a listener of their own
        own = (socket.gethostname(), socket.getfqdn()) if self._beyond else ()
        self._names = frozenset(name.lower() for name in (*own, *settings.allowed_host))  # besides those of loopback
        self._passed: set[bytes] = set()  # values of Host; bounded
        self._counting = threading.Lock()
        self._refused = {"no_token": 0, "forbidden": 0}  # guarded by _counting

    @property
    def required(self) -> bool:
        """Whether callers need a token."""
        return self.tokens.required

    def count(self, error: Forbidden) -> None:
        """Count a refused request."""
        with self._counting:
            self._refused["no_token" if isinstance(error, Unauthorized) else "forbidden"] += 1

    def families(self) -> Iterator[Metric]:
        """Counts of refused requests, as metrics."""
        text = "Requests that were refused: without a valid token, without the right, or under a foreign host name."
        yield counters("tierstore_access_refused", text, "why", self._refused)

    def principal(self, authorization: str | bytes | None, names: Sequence[str] = ()) -> Principal:
        """The caller that a header, or metadata, identifies, or without one its certificate of these `names`.

        Unauthorized if it needs a token, or a certificate with a role, and has no valid one.
        """
        if not self.tokens.required:
            return LOCAL
        if authorization is None and names:
            return self.tokens.of_certificate(names)
        return self.tokens.principal(authorization)

    def of_call(
        self, action: Action, authority: bytes, authorizations: Sequence[bytes], names: Sequence[str]
    ) -> Principal:
        """The caller of a gRPC call that does `action`; Forbidden if it may not, whichever model is concerned.

        `authorizations` are the values of that entry of its metadata, `names` those of its certificate.
        """
        try:
            if authority or action is not Action.OPEN:  # health needs no host name, as over HTTP
                self.check_host(authority)
            if action is Action.OPEN:
                return NOBODY
            if action is Action.ADMIN:
                self.check_listener(admin=False)
            if len(authorizations) > 1:
                raise Unauthorized("expected one entry of authorization")
            principal = self.principal(authorizations[0] if authorizations else None, names)
            principal.check_role(action)
        except Forbidden as error:
            self.count(error)
            raise
        return principal

    def check_listener(self, admin: bool) -> None:
        """Forbidden for an admin request that did not come through the admin listener, if there is one."""
        if self.admin_apart and not admin:
            raise Forbidden("admin requests are served on the address of admin_listen alone")

    def check_host(self, host: bytes) -> None:
        """Forbidden for a `Host` or an `:authority` under which the service may not be called.

        If it listens beyond this machine, any IP address is accepted: nobody can make one point here.
        """
        if host in self._passed:
            return
        name = (host_name(host.decode("latin-1")) or "").lower()
        if not (is_loopback(name) or name in self._names or (name and ANY_NAME in self._names)) and not (
            self._beyond and is_address(name)
        ):
            raise Forbidden(
                f"Host {name[:80]!r} is not a name of this service; add it to allowed_host (--allowed-host)"
            )
        if len(self._passed) < _PASSED and len(host) <= _LONGEST_HOST:
            self._passed.add(host)


def caller_key(names: Sequence[str]) -> bytes:
    """The key by which a reactor recognizes the caller of a certificate: an Authorization value that no client can
    send.

    Empty without names.
    """
    return "".join(f"\n{name}" for name in names).encode()


def _beyond(settings: Settings) -> list[str]:
    """The non-loopback hosts that it listens on."""
    hosts = [settings.host]
    if settings.admin_listen is not None and isinstance(address := parse_listen(settings.admin_listen), tuple):
        hosts.append(address[0])
    return [host for host in hosts if not is_loopback(host)]


def _check_meant_open(path: Path, *, named: bool) -> None:
    """Raise ConfigError if a file of tokens is missing that was named, or existed before: a lost file must let
    nobody in.
    """
    if named:
        raise ConfigError(
            f"tokens: expected a file at {path}, and there is none. Make one with "
            f"`tierstore token create --role admin --tokens {path}`, or correct the setting, or leave it out"
        )
    lock = lock_of(path)
    if files.exists(lock):
        raise ConfigError(
            f"{path} is gone: there were tokens, as {lock.name} beside it says. Restore it, or make new tokens with "
            "`tierstore token create`, or remove that file too if everybody who reaches the port may do everything"
        )


def check_access(settings: Settings) -> None:
    """Raise ConfigError for an address beyond loopback, unless there are tokens or a setting allows it.

    Also for a required file of tokens that is missing. Logs a warning if the service is open beyond loopback, and if
    there are tokens but no TLS to hide them.
    """
    required, hosts = Access(settings).required, _beyond(settings)
    if not hosts:
        return
    if required:
        if settings.tls_cert is None:
            logger.warning(
                "%s is not a loopback address, and there is no TLS: tokens cross the network in clear. "
                "Set tls_cert and tls_key, or have a proxy or a mesh in front that encrypts",
                hosts[0],
            )
    elif not settings.allow_open_network:
        raise ConfigError(
            f"host {hosts[0]!r} is not a loopback address, and there are no tokens: whoever reaches the port could "
            "change models. Make one with `tierstore token create --role admin`, or listen on 127.0.0.1, or set "
            "allow_open_network if the network is trusted"
        )
    else:
        logger.warning(
            "%s is not a loopback address, and there are no tokens: whoever reaches the port may do everything",
            hosts[0],
        )
