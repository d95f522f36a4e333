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
from collections.abc import Callable
from typing import Any

from tierstore.client.settings import Address
from tierstore.forks import renew_in_child

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
    found = without_resolver(address)
    if found is not None:
        return found
    resolution = resolver.start(address.host, address.port)
    if not resolution.done.wait(max(0.0, until - time.monotonic())):
        raise TimeoutError("its name is not resolved: timed out")
    return resolution.found()


def without_resolver(address: Address) -> Found | None:
    """The addresses that are known at once; None for a name."""
    if address.socket is not None:
        return [(socket.AF_UNIX, socket.SOCK_STREAM, 0, "", address.socket)]
    # as bytes: for text Python imports what encodes names
    host = address.host.encode() if address.host.isascii() else address.host
    try:
        return socket.getaddrinfo(host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except socket.gaierror:
        return None


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


class Resolution:
    """One name that is being resolved. Any thread."""

    def __init__(self) -> None:
        self.began_at = time.monotonic()
        self.done = threading.Event()
        self._lock = threading.Lock()
        self._calls: list[Callable[[], object]] = []  # guarded by _lock
        # set before `done`
        self._found: Found = []
        self._error: Exception | None = None

    def run(self, host: str, port: int) -> None:
        try:
            self._found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            self._error = error
        finally:
            with self._lock:
                self.done.set()
                calls, self._calls = self._calls, []
            for call in calls:
                call()

    def when_done(self, call: Callable[[], object]) -> None:
        """Call that once it is done, in the thread that has resolved it, or now."""
        with self._lock:
            if not self.done.is_set():
                self._calls.append(call)
                return
        call()

    def found(self) -> Found:
        """The addresses, once it is done. OSError."""
        if self._error is not None:
            raise OSError(str(self._error)) from self._error
        return self._found


class Resolver:
    """Resolves names, each in one thread at a time; any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way: dict[tuple[str, int], Resolution] = {}  # guarded by _lock
        renew_in_child(self)

    def renew(self) -> None:
        self._lock, self._under_way = threading.Lock(), {}

    def start(self, host: str, port: int) -> Resolution:
        """The resolution of a name that is under way, or a new one. OSError where no thread can be started."""
        with self._lock:
            one = self._under_way.get((host, port))
            if one is not None and time.monotonic() - one.began_at < _RESOLVING_S:
                return one
            one = Resolution()
            try:
                # not `threading.Thread`, whose start waits for a thread that may die before it begins
                _thread.start_new_thread(one.run, (host, port))
            except RuntimeError as error:
                raise OSError(f"its name cannot be resolved: {error}") from error
            self._under_way[host, port] = one
        one.when_done(lambda: self._forget((host, port), one))
        return one

    def _forget(self, name: tuple[str, int], one: Resolution) -> None:
        with self._lock:
            if self._under_way.get(name) is one:
                del self._under_way[name]


resolver = Resolver()
