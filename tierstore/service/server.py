"""A service over a store: its ports and what serves them, from their start to an orderly end.

`serve` blocks the main thread until a stop signal; `ServerThread` runs the same in the background of a program. On
SIGTERM or SIGINT the service reports not ready, goes on serving for `drain_s`, stops accepting, finishes the requests
in progress, and closes the store. A second signal skips the wait. A stop that does not end exits after a bound. On
SIGHUP it reads certificates again and opens the files of its log anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import uvloop

from tierstore import kernels
from tierstore.addresses import host_port
from tierstore.config import Settings
from tierstore.engine.lifecycle import directory_lock
from tierstore.engine.store import Store
from tierstore.errors import ConfigError, TierstoreError
from tierstore.kernels import ahead
from tierstore.service.access import check_access
from tierstore.service.addresses import Ports, url_of
from tierstore.service.admin.application import AdminApplication
from tierstore.service.context import Service
from tierstore.service.http.asgi import UvicornListener
from tierstore.service.http.bounded import ConnectionBounds
from tierstore.service.http.connection_limit import ConnectionLimit, PlainCounts
from tierstore.service.http.handoff import Handoff, RequestDispatch
from tierstore.service.http.listener import TlsListener
from tierstore.service.limits.slow_clients import BACKLOG, FINISH_S
from tierstore.service.process import ExitBound, allowed_connections, freeze_heap, raise_file_limit, say, tune_allocator
from tierstore.service.reactor.allowed import Allowed
from tierstore.service.reactor.plan_index import PlanIndex
from tierstore.service.reactor.reactors import Reactors
from tierstore.service.renewal import Files
from tierstore.service.root import Root
from tierstore.service.rpc.calls import Calls
from tierstore.service.sources.start import check_sources, start_sources
from tierstore.service.tls import tls_of
from tierstore.service.traces import check_traces
from tierstore.threads import Thread

logger = logging.getLogger(__name__)

GRPC_PORT = 8001
COMPILED_POLL_S = 0.1
_ENDED = b"\0"  # the number of no signal
ADMIN_CONNECTIONS = 64  # at the same time, if admin requests have a listener of their own


def check_settings(settings: Settings) -> None:
    """Raise for settings that this release cannot serve, before anything is opened."""
    tls_of(settings)
    check_access(settings)
    check_traces(settings)
    check_sources(settings)


def grpc_port_by_default(settings: Settings) -> Settings:
    """`settings` with a gRPC port: the configured one, else the usual one.

    If the HTTP port is 0, a free one, the gRPC port is 0 too.
    """
    if settings.server == "uvicorn":
        if isinstance(settings.grpc_port, int):
            raise ConfigError("grpc_port: gRPC is served by reactors alone; leave it out with server = 'uvicorn'")
        return settings.model_copy(update={"grpc_port": "off"})
    if settings.grpc_port is not None:
        return settings
    port = 0 if settings.port == 0 else GRPC_PORT
    return settings.model_copy(update={"grpc_port": port})


class HttpService:
    """A store served on one port, or on two that answer alike. Made on any thread; `run` blocks; any thread may call
    `stop`.

    `awaits_grpc`: it is not ready before the gRPC port is open, for which all kernels must be compiled.
    """

    def __init__(self, store: Store, settings: Settings, ports: Ports, *, awaits_grpc: bool) -> None:
        self._settings, self._ports = settings, ports
        self.host = settings.host
        self.port: int = ports.http.getsockname()[1]
        scheme = "http" if settings.tls_cert is None else "https"
        self.url = f"{scheme}://{host_port(self.host, self.port)}"
        self.admin_url = self.url if ports.admin is None else url_of(ports.admin, scheme)
        self.service = Service(store, settings)
        self.grpc_port: int | None = None if ports.grpc is None else ports.grpc.getsockname()[1]
        # the address for a gRPC client
        self.grpc_target: str | None = None if self.grpc_port is None else host_port(self.host, self.grpc_port)
        self.service.awaits_grpc = awaits_grpc
        limit = allowed_connections(settings.max_connections)
        self._reactors = reactors = Reactors(settings.threads, settings, store.epochs, limit)
        self._plans = PlanIndex(store, self.service.rates, reactors.words, settings.threads, self.service.absorb)
        reactors.count_in(self._plans.versions.words, self._plans.tables.words)
        self.service.reactors = reactors
        reactors.predict_with(self.service, self._plans.scorings)
        self.service.inflight.share(theirs=reactors.words["inflight"], ours=reactors.words["other_inflight"])
        self.service.connection_limit = self._connection_limit = ConnectionLimit(self.service, limit, reactors)
        self._admin = AdminApplication(self.service)
        allowed = Allowed(reactors.words, store.epochs, self.service.rates)
        self._files = Files(self.service.access, self.service.tls, allowed, store.audit)
        self._root = Root(self.service, self._admin, allowed.add)
        self._handoff = Handoff(reactors, self._root, self._connection_limit, self.service.inflight, settings)
        self.service.calls = self._calls = Calls(self.service, allowed.add)
        self._requests = RequestDispatch(self._handoff, self._calls)
        self._listeners: list[TlsListener] = []
        self._plain_servers: list[UvicornListener] = []
        if ports.admin is not None:
            admins = ConnectionLimit(self.service, ADMIN_CONNECTIONS, PlainCounts(), "admin_connections")
            self.service.admin_connections = admins
            self._plain_servers.append(self._by_uvicorn(ports.admin, admins, admin=True))
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining, self._ends = False, asyncio.Event()
        self._exit_bound: ExitBound | None = None
        self._stop_early: float | None = None  # it should end before it has begun, after so long
        store.epochs.add_collector(self._plans.collect)

    def _by_uvicorn(self, sock: socket.socket, limit: ConnectionLimit, *, admin: bool = False) -> UvicornListener:
        service = self.service
        bounds = ConnectionBounds(self._settings, limit, service.inflight)
        tls = None if sock.family == socket.AF_UNIX else service.tls
        return UvicornListener(sock, self._root, bounds, tls, lambda: service.draining, admin=admin)

    def _listen_with_tls(self, sock: socket.socket) -> None:
        """Accept connections with TLS, which go to reactors after their handshake."""
        assert self.service.tls is not None
        listener = TlsListener(sock, self._connection_limit, self.service.tls, self._reactors.serve_connection)
        listener.start()
        self._listeners.append(listener)

    def run(self, started: Callable[[], None], exit_bound: ExitBound | None = None) -> None:
        """Serve until `stop`; then it ends within `exit_bound`. `started` is called once requests are answered."""
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(self._serve(started, exit_bound))
        finally:
            self._close()

    def _close(self) -> None:
        self._reactors.close()
        for server in self._plain_servers:
            server.close()
        self._ports.close()
        self._plans.collect()
        self.service.store.epochs.remove_collector(self._plans.collect)
        self.service.close()

    def stop(self, drain_s: float | None = None) -> None:
        """Begin to end: not ready from now on, closed after `drain_s` (default: the setting). A second call ends at
        once.
        """
        seconds = self._settings.drain_s if drain_s is None else drain_s
        if self._loop is None:
            self._stop_early = seconds
            return
        with contextlib.suppress(RuntimeError):  # it has ended already
            self._loop.call_soon_threadsafe(self._drain, seconds)

    def renew(self) -> None:
        """Read certificates and tokens again, and open the files of the log anew. Any thread."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._files.renew)

    async def _serve(self, started: Callable[[], None], exit_bound: ExitBound | None) -> None:
        self._loop = asyncio.get_running_loop()
        self._exit_bound = exit_bound
        if self._stop_early is not None:
            self._drain(self._stop_early)
        self.service.sources = start_sources(self.service, self._settings)
        beside: list[asyncio.Future[Any]] = []
        if not self._ends.is_set():
            beside.append(asyncio.ensure_future(self._calls.report_when(lambda: self.service.ready)))
            for server in self._plain_servers:
                await server.start()
            if self._ports.admin is not None:
                logger.info("admin requests at %s", self.admin_url)
            beside += await self._begin()
            beside.append(asyncio.ensure_future(self._files.follow()))
            started()
        await self._ends.wait()
        await asyncio.gather(*(server.stop() for server in self._plain_servers))
        await self._finish()
        for task in beside:
            task.cancel()

    def begin_admin(self) -> None:
        """Make the admin application now, beside look-ups. Otherwise the first admin request makes it, and waits."""
        self._admin.begin()

    async def _begin(self) -> list[asyncio.Future[None]]:
        """Begin to serve: by reactors, now or as soon as their kernels are compiled, and until then by uvicorn.

        Returns the remaining steps.
        """
        by_uvicorn = self._settings.server == "uvicorn"
        compilation = None if by_uvicorn else ahead.start(logger.info)
        if compilation is None and not by_uvicorn:
            self._start_reactors()
            self._start_http2()
            return []
        server = self._by_uvicorn(self._ports.http, self._connection_limit)
        await server.start()
        self._plain_servers.append(server)
        if compilation is None:
            return []
        self.service.reactors_state = "compiling"
        return [asyncio.ensure_future(self._start_compiled_after(compilation, server))]

    def _start_reactors(self) -> None:
        """Serve HTTP/1.1 by reactors; with TLS, its listener accepts for them."""
        listeners = [self._ports.http] if self.service.tls is None else []
        for sock in listeners:
            sock.listen(BACKLOG)
        if not listeners:
            self._listen_with_tls(self._ports.http)
        self._reactors.start(listeners, self._handoff, self._requests, self._calls.streaming)
        self.service.plans = self._plans
        self.service.store.publish_words()
        self.service.reactors_state = "running"

    def _start_http2(self) -> None:
        """Serve HTTP/2 by reactors as well, and gRPC on its port. OSError if another process has taken it."""
        sock, tls = self._ports.grpc, self.service.tls
        if sock is not None and tls is None:
            sock.listen(BACKLOG)
        self._reactors.start_http2([] if sock is None or tls is not None else [sock])
        if sock is not None and tls is not None:
            self._listen_with_tls(sock)
        self.service.http2_state = "running"
        self.service.awaits_grpc = False

    async def _start_compiled_after(self, compilation: ahead.Compilation, server: UvicornListener) -> None:
        """Start reactors once their kernels are compiled, and HTTP/2 once the others are.

        Until then Python answers HTTP/1.1, and nothing answers gRPC; for good if compiling fails.
        """
        start_s = time.monotonic()
        logger.info("requests over HTTP are answered by Python, and none over gRPC, until their kernels are compiled")
        error = await self._compiled(compilation, compilation.http, kernels.HTTP)
        if error is None and not self._ends.is_set():
            server.stop_accepting()
            self._start_reactors()
            server.hand_on(self._reactors.serve_connection)
            logger.info(
                "requests over HTTP/1.1 are answered with compiled kernels, %.1f s after the start",
                time.monotonic() - start_s,
            )
            error = await self._compiled(compilation, compilation.done, kernels.LAST)
        if self._ends.is_set():
            return
        if error is None:
            try:
                self._start_http2()
            except OSError as caught:
                error = f"cannot listen for gRPC: {caught}"
        if error is None:
            logger.info(
                "all requests are answered with compiled kernels, %.1f s after the start", time.monotonic() - start_s
            )
            return
        self.service.awaits_grpc = False  # HTTP is served
        self.service.http2_state = "failed"
        if self._reactors.running:
            logger.warning("%s; gRPC is not served", error)
            return
        self.service.reactors_state = "failed"
        logger.warning("look-ups over HTTP stay with Python: %s; gRPC is not served", error)

    @staticmethod
    async def _compiled(compilation: ahead.Compilation, event: threading.Event, when: int) -> str | None:
        """Wait until kernels up to level `when` are compiled and loaded, so that no request waits for one. Returns
        the error if they cannot be.
        """
        while not event.is_set():
            await asyncio.sleep(COMPILED_POLL_S)
        if compilation.error is None:
            await asyncio.to_thread(kernels.load, when)
        return compilation.error

    async def _finish(self) -> None:
        """Wait until the reactors have answered the requests in progress, or those that were cut off after a time."""
        for seconds in (FINISH_S, 1.0):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    while self._handoff.busy or self._calls.busy or not self._reactors.idle:
                        await asyncio.sleep(0.01)
            self._handoff.cut_off()
            self._calls.cut_off()

    def _drain(self, drain_s: float) -> None:
        if self._draining:
            drain_s = 0.0
        self._draining = True
        self.service.draining = self._handoff.draining = True
        if self._exit_bound is not None:
            self._exit_bound.start(drain_s + 2 * FINISH_S)  # the server's requests, then the reactors'
        self._reactors.drain()
        self._calls.drain()
        if drain_s > 0:
            logger.info("stopping: not ready from now on, closing in %.1f s", drain_s)
            asyncio.get_running_loop().call_later(drain_s, self._end)
        else:
            self._end()

    def _end(self) -> None:
        self._handoff.ending = True
        self._reactors.finish()
        for listener in self._listeners:
            listener.stop()
        for server in self._plain_servers:
            server.finish()
        for sock in self._ports.all:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)  # a client that connects from here on is refused, and does not wait
        self._ends.set()
        self._calls.stop()


def serve(settings: Settings, *, announce: Callable[[str, str | None], None] = say) -> None:
    """Open the store, serve it until a stop signal, close it. Blocks the main thread.

    `announce` is called once, when requests are answered, with the URL and the gRPC target (None if gRPC is not
    served); by default it prints a line. Raises ConfigError and MissingExtra for settings that cannot be served, and
    Locked if another process has the data directory open.
    """
    is_named = isinstance(settings.grpc_port, int)
    settings = grpc_port_by_default(settings)
    check_settings(settings)
    tune_allocator()
    raise_file_limit()
    with ExitBound() as bound, Ports(settings) as ports, Store(settings) as store:
        service = HttpService(store, settings, ports, awaits_grpc=is_named)
        kernels.load(kernels.FIRST)
        freeze_heap()

        def started() -> None:
            directory_lock.announce(store.root.lock, service.url)
            announce(service.url, service.grpc_target)
            service.begin_admin()

        _run_until_signalled(service, started, bound, settings.drain_s)


def _run_until_signalled(service: HttpService, started: Callable[[], None], bound: ExitBound, drain_s: float) -> None:
    """Run a service on a thread of its own, so that the main thread handles signals whatever holds up the event loop.

    The main thread waits for a byte: a signal that another thread gets wakes it too, which no lock would.
    """
    errors: list[BaseException] = []
    ears, mouth = socket.socketpair()
    mouth.setblocking(False)

    def run() -> None:
        try:
            service.run(started, bound)
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)
        finally:
            mouth.send(_ENDED)

    def stop(*_: object) -> None:
        bound.signalled(drain_s + 2 * FINISH_S)
        service.stop()

    handlers = {signal.SIGTERM: stop, signal.SIGINT: stop, signal.SIGHUP: lambda *_: service.renew()}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    waker = signal.set_wakeup_fd(mouth.fileno(), warn_on_full_buffer=False)  # gets the number of each signal
    thread = Thread(target=run, name="tierstore-http")
    try:
        thread.start()
        while _ENDED not in ears.recv(64):
            pass
        thread.join()
    finally:
        signal.set_wakeup_fd(waker)
        for number, handler in before.items():
            signal.signal(number, handler)
        for end in (ears, mouth):
            end.close()
    for error in errors:
        raise error


class ServerThread:
    """The service in the background of this process, over a store that the caller keeps open: `with ServerThread(store)
    as server:`.

    Inside the block `url` and `port` are set, and `grpc_target` and `grpc_port` if the settings name a gRPC port (else
    None). Leaving the block, or `close`, ends the service without draining.
    """

    def __init__(self, store: Store, settings: Settings | None = None) -> None:
        settings = settings or store.settings
        check_settings(settings)
        self._http = HttpService(store, settings, Ports(settings), awaits_grpc=isinstance(settings.grpc_port, int))
        self._up = threading.Event()
        self._error: BaseException | None = None
        self._thread = Thread(target=self._run, name="tierstore-http", daemon=True)

    @property
    def url(self) -> str:
        return self._http.url

    @property
    def admin_url(self) -> str:
        """The URL of admin requests: `url`, unless they have a listener of their own."""
        return self._http.admin_url

    @property
    def port(self) -> int:
        return self._http.port

    @property
    def grpc_port(self) -> int | None:
        return self._http.grpc_port

    @property
    def grpc_target(self) -> str | None:
        return self._http.grpc_target

    @property
    def service(self) -> Service:
        """The running parts, for tests and dashboards in the same process."""
        return self._http.service

    def start(self) -> ServerThread:
        """Start. Returns when requests are answered."""
        self._thread.start()
        self._up.wait()
        if self._error is not None:
            raise TierstoreError(f"the service did not start: {self._error}") from self._error
        return self

    def stop(self, drain_s: float = 0.0) -> None:
        """Begin to end; `close` waits for it."""
        self._http.stop(drain_s)

    def close(self) -> None:
        """End the service and wait until it has."""
        self._http.stop(0.0)
        self._thread.join()

    def _run(self) -> None:
        try:
            self._http.run(self._up.set)
        except BaseException as error:  # noqa: BLE001 - raised where it is started
            self._error = error
        finally:
            self._up.set()

    def __enter__(self) -> ServerThread:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()
