"""Connections to the servers of a cluster: opened by redis-py (TLS, users), kept, and handed to one user at a time.

Any thread may acquire and release. A connection on which something failed is closed and never used again.
"""

from __future__ import annotations

import importlib
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore.errors import ConfigError, MissingExtra, RemoteUnavailable, StorageError
from tierstore.tiers.answers import reading
from tierstore.tiers.cluster.options import Endpoints, ServerAddress
from tierstore.tiers.connection_pools import ConnectionPools, Options

_BUFFER_BYTES = 256 << 10
_SLACK = 16  # kernels read whole words
_REFUSED = ("NOAUTH", "WRONGPASS", "Invalid password", "no password is set")  # the last two are Kvrocks's


def driver(module: str = "redis") -> Any:
    """A module of redis-py. Raises MissingExtra."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise MissingExtra("a remote tier needs redis-py: pip install 'tierstore[redis]'") from None


class ServerConnection:
    """One connection, for one user at a time. Kernels receive into `buffer`."""

    def __init__(self, address: ServerAddress, opened: Any, tls: bool) -> None:
        self.address, self.tls = address, tls
        self.driver = opened
        self.used = False  # it has answered before: if it fails now, the server may just have closed it
        self.socket: socket.socket = opened._sock
        self.buffer = np.empty(_BUFFER_BYTES + _SLACK, np.uint8)

    def fit(self, element_bytes: int) -> None:
        """Make room for at least one element of a reply."""
        if self.buffer_bytes < 2 * element_bytes:
            self.buffer = np.empty(2 * element_bytes + _SLACK, np.uint8)

    @property
    def buffer_bytes(self) -> int:
        return len(self.buffer) - _SLACK

    def send(self, request: npt.NDArray[np.uint8], until_s: float) -> bool:
        """Send the whole request, by the socket's own methods. Raises OSError, TimeoutError after `until_s` of `time.monotonic`."""
        self.socket.settimeout(max(0.001, until_s - time.monotonic()))
        self.socket.sendall(request.data)
        return True

    def receive(self, server: Any, until_s: float) -> bool:
        """Receive some more bytes into the buffer; False if the server has closed the connection. Raises as `send`."""
        self.socket.settimeout(max(0.001, until_s - time.monotonic()))
        count = self.socket.recv_into(self.buffer.data[server["received"] : self.buffer_bytes])
        server["received"] += count
        return count > 0

    def close(self) -> None:
        with suppress(OSError, driver().RedisError):
            self.driver.disconnect()


class Connections:
    """Connections to the servers of one cluster, constant after construction; `pools` keeps the idle ones."""

    def __init__(self, endpoints: Endpoints, options: Options) -> None:
        self._endpoints, self._options = endpoints, options
        self.pools: ConnectionPools[ServerAddress, ServerConnection] = ConnectionPools(
            options, f"the remote tier on {endpoints}"
        )

    def acquire(
        self, address: ServerAddress, *, replica: bool = False, timeout_s: float | None = None
    ) -> ServerConnection:
        """An idle connection, or a new one. `replica`: a connection on which a replica answers reads.

        Raises RemoteUnavailable if the server cannot be reached, ConfigError if it refuses user, password or TLS.
        """
        return self.pools.kept(address, replica=replica) or self._open(address, replica, timeout_s)

    def release(self, connection: ServerConnection, *, replica: bool = False) -> None:
        """Keep a connection for the next user. Only if every reply was read."""
        connection.used = True
        self.pools.keep(connection.address, connection, replica=replica)

    @contextmanager
    def borrowed(
        self, address: ServerAddress, *, replica: bool = False, timeout_s: float | None = None
    ) -> Iterator[Any]:
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

    def _open(self, address: ServerAddress, replica: bool, timeout_s: float | None) -> ServerConnection:
        module, redis = driver("redis.connection"), driver()
        limit_s = min(self._options.connect_timeout_s, timeout_s if timeout_s is not None else np.inf)
        kind = module.SSLConnection if self._endpoints.tls else module.Connection
        opened = kind(
            host=address.host, port=address.port, protocol=2, socket_connect_timeout=limit_s, socket_timeout=limit_s,
            socket_keepalive=True, **self._endpoints.credentials,
        )  # fmt: skip
        try:
            with reading(f"what {address} answers"):
                opened.connect()
                if replica:
                    opened.send_command("READONLY")
                    opened.read_response()
        except (redis.RedisError, OSError) as error:
            with suppress(OSError, redis.RedisError):
                opened.disconnect()
            if "wrong number of arguments" in str(error) and "username" in self._endpoints.credentials:
                raise ConfigError(
                    f"{address} knows no users, only a password: leave the user out: redis://:password@host:port"
                ) from error
            raise error if isinstance(error, StorageError) else explain_error(address, error) from error
        return ServerConnection(address, opened, self._endpoints.tls)


def explain_error(address: ServerAddress | Endpoints, error: Exception) -> ConfigError | RemoteUnavailable:
    """Our error for an error of redis-py; it names the server and says what to do."""
    redis = driver()
    text = " ".join(str(error).split())[:200]
    if isinstance(error, (redis.AuthenticationError, redis.exceptions.NoPermissionError)):
        return ConfigError(
            f"{address} refuses the user or the password ({text}): give them in the address "
            "(redis://user:password@host:port) or in TIERSTORE_REMOTE_USER and TIERSTORE_REMOTE_PASSWORD"
        )
    if any(one in text for one in _REFUSED):
        return explain_error(address, redis.AuthenticationError(text))
    if "admin permission" in text.lower():
        return ConfigError(
            f"{address} takes this password, but not for a cluster ({text}): give that of its requirepass"
        )
    if "cluster support disabled" in text or "Cluster mode is not enabled" in text:
        return ConfigError(
            f"{address} is not part of a cluster: expected a server that was started with cluster-enabled yes"
        )
    if "CERTIFICATE" in text or "SSL" in text:
        return ConfigError(f"{address}: TLS failed ({text}): check rediss:// and ?ssl_ca_certs=FILE")
    if isinstance(error, redis.ResponseError):
        return RemoteUnavailable(f"{address} refused a command: {text}")
    if "Connection closed by server" in text or "reset by peer" in text:
        text += "; a server with TLS needs rediss://"
    return RemoteUnavailable(
        f"{address} cannot be reached ({text}): check that the server runs and that its port is open"
    )
