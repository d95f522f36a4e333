"""Opening a connection within a time, whatever resolvers, addresses and handshakes do. For threads.

Names are resolved in threads of their own, as `getaddrinfo` knows no deadline. Where a name has several addresses the
next one is tried while the last is still silent (RFC 8305, "Happy Eyeballs"), and the first that answers is used.
"""

from __future__ import annotations

import _thread
import errno
import os
import select
import socket
import ssl
import threading
import time
from typing import Any

from tierstore.client.forks import renew_in_child
from tierstore.client.settings import Address

STAGGER_S = 0.25  # between the tries of two addresses
_RESOLVING_S = 60.0  # after which a name that is still not resolved is asked for again

Found = list[tuple[Any, ...]]  # as of `socket.getaddrinfo`


def open_socket(address: Address, tls: ssl.SSLContext | None, until: float) -> socket.socket:
    """A connected socket that does not block, the handshake of TLS done. OSError; TimeoutError at `until`."""
    sock = _first_connected(_addresses(address, until), until)
    try:
        if address.socket is None:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock if tls is None else _secured(sock, tls, address.host, until)
    except BaseException:
        sock.close()
        raise


def _addresses(address: Address, until: float) -> Found:
    if address.socket is not None:
        return [(socket.AF_UNIX, socket.SOCK_STREAM, 0, "", address.socket)]
    try:
        return socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except socket.gaierror:
        return _resolver.addresses(address.host, address.port, until)


def _first_connected(addresses: Found, until: float) -> socket.socket:
    """The first connection that is made, to any of the addresses."""
    poll, trying = select.poll(), dict[int, socket.socket]()
    ready: list[tuple[int, int | None]]
    error, next_at = OSError("its name has no address"), 0.0
    addresses = addresses[::-1]
    try:
        while addresses or trying:
            now = time.monotonic()
            if now >= until:
                raise TimeoutError("timed out")
            if addresses and (now >= next_at or not trying):
                family, kind, protocol, _, where = addresses.pop()
                try:
                    sock = socket.socket(family, kind, protocol)
                except OSError as failure:
                    error = failure
                    continue
                trying[sock.fileno()] = sock
                sock.setblocking(False)
                poll.register(sock, select.POLLOUT)
                number = sock.connect_ex(where)
                ready = [] if number == errno.EINPROGRESS else [(sock.fileno(), number)]
                next_at = now + STAGGER_S
            else:
                waits_until = min(until, next_at) if addresses else until
                ready = [(descriptor, None) for descriptor, _ in poll.poll(max(0.0, waits_until - now) * 1e3)]
            for descriptor, status in ready:
                sock = trying.pop(descriptor)
                poll.unregister(descriptor)
                number = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) if status is None else status
                if not number:
                    return sock
                sock.close()
                error, next_at = OSError(number, os.strerror(number)), 0.0
        raise error
    finally:
        for sock in trying.values():
            sock.close()


def _secured(sock: socket.socket, tls: ssl.SSLContext, host: str, until: float) -> ssl.SSLSocket:
    secured = tls.wrap_socket(sock, server_hostname=host, do_handshake_on_connect=False)
    try:
        poll = select.poll()
        while True:
            try:
                secured.do_handshake()
                return secured
            except ssl.SSLWantReadError:
                poll.register(secured, select.POLLIN)
            except ssl.SSLWantWriteError:
                poll.register(secured, select.POLLOUT)
            if not poll.poll(max(0.0, until - time.monotonic()) * 1e3):
                raise TimeoutError("the handshake of TLS timed out")
    except BaseException:
        secured.close()
        raise


class _Resolution:
    """One name that is being resolved."""

    def __init__(self) -> None:
        self.began_at = time.monotonic()
        self.done = threading.Event()
        # set before `done`
        self.found: Found = []
        self.error: Exception | None = None

    def run(self, host: str, port: int) -> None:
        try:
            self.found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            self.error = error
        finally:
            self.done.set()


class _Resolver:
    """Resolves names, each in one thread at a time; any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way: dict[tuple[str, int], _Resolution] = {}  # guarded by _lock
        renew_in_child(self)

    def renew(self) -> None:
        self._lock, self._under_way = threading.Lock(), {}

    def addresses(self, host: str, port: int, until: float) -> Found:
        """The addresses of a name. OSError; TimeoutError at `until`, the name is then still being resolved."""
        with self._lock:
            one = self._under_way.get((host, port))
            if one is None or one.done.is_set() or time.monotonic() - one.began_at > _RESOLVING_S:
                one = _Resolution()
                try:
                    # not `threading.Thread`, whose start waits for a thread that may die before it begins
                    _thread.start_new_thread(one.run, (host, port))
                except RuntimeError as error:
                    raise OSError(f"its name cannot be resolved: {error}") from error
                self._under_way[host, port] = one
        if not one.done.wait(max(0.0, until - time.monotonic())):
            raise TimeoutError("its name is not resolved: timed out")
        with self._lock:
            if self._under_way.get((host, port)) is one:
                del self._under_way[host, port]
        if one.error is not None:
            raise OSError(str(one.error)) from one.error
        return one.found


_resolver = _Resolver()
