"""TLS of connections, by descriptor and serial: sessions, and the names of clients' certificates.

A row is written while its connection belongs to Python. Any thread may call `close`.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore.kernels.codec import address_of
from tierstore.service.access import caller_key
from tierstore.service.openssl import TlsSession, functions


class TlsRows:
    """TLS fields in the rows of the connections `conns`. `limits` gets the addresses of OpenSSL's functions."""

    def __init__(self, conns: npt.NDArray[Any], limits: npt.NDArray[Any], *, with_tls: bool) -> None:
        self._conns = conns
        limits["openssl"] = address_of(functions()) if with_tls else 0
        # by descriptor: a connection's serial, the names of its client's certificate, and the reactors' key for them
        self._named: dict[int, tuple[int, tuple[str, ...], npt.NDArray[np.uint8]]] = {}

    def put(self, fd: int, session: TlsSession | None) -> bool:
        """Write the TLS fields of a connection that goes to a reactor, which then owns the session.

        False: there is no row, and the connection is closed.
        """
        if fd >= len(self._conns):
            if session is not None:
                session.close(abort=True)
            os.close(fd)
            return False
        names = () if session is None else session.names
        row, name = self._conns[fd], np.frombuffer(caller_key(names), np.uint8)
        row["tls"] = 0 if session is None else session.detach()
        row["caller_at"], row["caller_bytes"] = address_of(name), len(name)
        if names:
            self._named[fd] = int(row["serial"]), names, name
        else:
            self._named.pop(fd, None)
        return True

    def names_of(self, fd: int, serial: int) -> tuple[str, ...]:
        of, names, _ = self._named.get(fd, (-1, (), None))
        return names if of == serial else ()

    def close(self, fd: int) -> None:
        """Close a connection whose reactor has ended."""
        if at := self._detach(fd):
            TlsSession(at).close()
        os.close(fd)

    def _detach(self, fd: int) -> int:
        if fd >= len(self._conns):  # one that was refused
            return 0
        row = self._conns[fd]
        at, row["tls"] = int(row["tls"]), 0
        return at
