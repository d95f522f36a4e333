"""Connections to the servers of a cluster: opened by redis-py (TLS, users), kept, and handed to one user at a time.

Any thread may acquire and release. A connection on which something failed is closed and never used again.
"""

from __future__ import annotations

import importlib
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore.errors import Closed, ClusterUnavailable, ConfigError, MissingExtra
from tierstore.tiers.remote.options import Address, Endpoints, Options

_BUFFER_BYTES = 256 << 10
_SLACK = 16  # kernels read whole words


def driver(module: str = "redis") -> Any:
    """A module of redis-py. Raises MissingExtra."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise MissingExtra("a remote tier needs redis-py: pip install 'tierstore[redis]'") from None


class Connection:
    """One connection, for one user at a time. `buffer` is where kernels receive into."""

    def __init__(self, address: Address, opened: Any, tls: bool) -> None:
        self.address, self.tls = address, tls
        self.driver = opened
        self.used = False  # it has answered before: where it fails now, the server may just have closed it
        self.socket: socket.socket = opened._sock
        self.buffer = np.empty(_BUFFER_BYTES + _SLACK, np.uint8)

    def fit(self, element_bytes: int) -> None:
        """Have room for at least one element of a reply."""
        if self.buffer_bytes < 2 * element_bytes:
            self.buffer = np.empty(2 * element_bytes + _SLACK, np.uint8)

    @property
    def buffer_bytes(self) -> int:
        return len(self.buffer) - _SLACK

    def send(self, request: npt.NDArray[np.uint8], until_s: float) -> bool:
        """All of it, by the socket's own methods. Raises OSError, TimeoutError after `until_s` of `time.monotonic`."""
        self.socket.settimeout(max(0.001, until_s - time.monotonic()))
        self.socket.sendall(request.data)
        return True

    def receive(self, server: Any, until_s: float) -> bool:
        """Some bytes more into the buffer; False if the server has closed the connection. Raises as `send`."""
        self.socket.settimeout(max(0.001, until_s - time.monotonic()))
        count = self.socket.recv_into(self.buffer.data[server["received"] : self.buffer_bytes])
        server["received"] += count
        return count > 0

    def close(self) -> None:
        with suppress(OSError, driver().RedisError):
            self.driver.disconnect()


class Connections:
    """Idle connections by server and role. `close` ends them; those in use end when they are released."""

    def __init__(self, endpoints: Endpoints, options: Options) -> None:
        # constant after construction
        self._endpoints, self._options = endpoints, options
        # guarded by _lock
        self._lock = threading.Lock()
        self._idle: dict[tuple[Address, bool], list[Connection]] = defaultdict(list)
        self._closed = False
        self.opened = 0

    def acquire(self, address: Address, *, replica: bool = False, timeout_s: float | None = None) -> Connection:
        """An idle connection, or a new one. `replica`: one on which a replica answers reads.

        Raises ClusterUnavailable where the server cannot be reached, ConfigError where it refuses user, password or TLS.
        """
        with self._lock:
            self._check_open()
            if idle := self._idle[address, replica]:
                return idle.pop()
            self.opened += 1
        return self._open(address, replica, timeout_s)

    def release(self, connection: Connection, *, replica: bool = False) -> None:
        """Keep it for the next user. Only where every reply was read."""
        connection.used = True
        with self._lock:
            idle = self._idle[connection.address, replica]
            if not self._closed and len(idle) < self._options.connections:
                idle.append(connection)
                return
        connection.close()

    def forget(self, address: Address) -> None:
        """Close the idle ones of a server that failed."""
        with self._lock:
            stale = [one for replica in (False, True) for one in self._idle.pop((address, replica), [])]
        for one in stale:
            one.close()

    @contextmanager
    def borrowed(self, address: Address, *, replica: bool = False, timeout_s: float | None = None) -> Iterator[Any]:
        """redis-py's connection, to send commands and read replies. Errors of the server itself leave it usable."""
        connection = self.acquire(address, replica=replica, timeout_s=timeout_s)
        redis = driver()
        try:
            connection.socket.settimeout(min(self._options.timeout_s, timeout_s or np.inf))
            yield connection.driver
        except redis.ResponseError:
            self.release(connection, replica=replica)
            raise
        except BaseException:
            connection.close()
            raise
        self.release(connection, replica=replica)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            idle = [one for kept in self._idle.values() for one in kept]
            self._idle.clear()
        for one in idle:
            one.close()

    def _check_open(self) -> None:
        if self._closed:
            raise Closed(f"the remote tier on {self._endpoints} was closed")

    def _open(self, address: Address, replica: bool, timeout_s: float | None) -> Connection:
        module, redis = driver("redis.connection"), driver()
        limit_s = min(self._options.connect_timeout_s, timeout_s if timeout_s is not None else np.inf)
        kind = module.SSLConnection if self._endpoints.tls else module.Connection
        opened = kind(
            host=address.host, port=address.port, protocol=2, socket_connect_timeout=limit_s, socket_timeout=limit_s,
            socket_keepalive=True, **self._endpoints.credentials,
        )  # fmt: skip
        try:
            opened.connect()
            if replica:
                opened.send_command("READONLY")
                opened.read_response()
        except (redis.RedisError, OSError) as error:
            with suppress(OSError, redis.RedisError):
                opened.disconnect()
            raise explain(address, error) from error
        return Connection(address, opened, self._endpoints.tls)


def explain(address: Address | Endpoints, error: Exception) -> ConfigError | ClusterUnavailable:
    """An error of redis-py as one of ours that names the server and what to do."""
    redis = driver()
    text = " ".join(str(error).split())[:200]
    if isinstance(error, (redis.AuthenticationError, redis.exceptions.NoPermissionError)):
        return ConfigError(
            f"{address} refuses the user or the password ({text}): give them in the address "
            "(redis://user:password@host:port) or in TIERSTORE_REMOTE_USER and TIERSTORE_REMOTE_PASSWORD"
        )
    if "NOAUTH" in text or "WRONGPASS" in text:
        return explain(address, redis.AuthenticationError(text))
    if "cluster support disabled" in text or "Cluster mode is not enabled" in text:
        return ConfigError(
            f"{address} is not part of a cluster: expected a server that was started with cluster-enabled yes"
        )
    if "CERTIFICATE" in text or "SSL" in text:
        return ConfigError(f"{address}: TLS failed ({text}): check rediss:// and ?ssl_ca_certs=FILE")
    if isinstance(error, redis.ResponseError):
        return ClusterUnavailable(f"{address} refused a command: {text}")
    if "Connection closed by server" in text or "reset by peer" in text:
        text += "; a server with TLS needs rediss://"
    return ClusterUnavailable(
        f"{address} cannot be reached ({text}): check that the server runs and that its port is open"
    )
