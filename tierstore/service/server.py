"""The HTTP server: uvicorn on uvloop, run by us, with an orderly end.

`serve` blocks the main thread until a stop signal; `ServerThread` runs the same in the background of a program. On
SIGTERM or SIGINT the service reports not ready, goes on serving for `drain_s`, stops accepting, finishes what it has
begun, and closes the store. A second signal skips the wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import signal
import socket
import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

from tierstore.config import Settings
from tierstore.engine.store import Store
from tierstore.errors import ConfigError, MissingExtra, TierstoreError
from tierstore.kernels import reactor_words as kernel
from tierstore.service.app import make_root
from tierstore.service.context import Service
from tierstore.service.control.watch import Watcher
from tierstore.service.http.door import Door, connection_limit, raise_file_limit
from tierstore.service.http.guard import check_listen_address
from tierstore.service.http.serving import BACKLOG, FINISH_S, make_server
from tierstore.service.reactor.handover import Handover
from tierstore.service.reactor.plans import Plans
from tierstore.service.reactor.reactors import Reactors, check_threads
from tierstore.service.tuning import freeze_heap, tune_allocator

if TYPE_CHECKING:
    from tierstore.service.rpc.server import GrpcServer

logger = logging.getLogger(__name__)

GRPC_PORT = 8001
GRPC_PACKAGES = ("google", "grpc", "grpc_health", "grpc_reflection")
WARM_POLL_S = 0.1


def check_settings(settings: Settings) -> None:
    """Raise for what this release cannot do, before anything is opened."""
    check_threads(settings.threads)
    if isinstance(settings.grpc_port, int) and not has_grpc():
        raise MissingExtra(
            "grpc_port: the extra `grpc` is not installed: pip install 'tierstore[grpc]', or use the HTTP port, which speaks the same protocol"
        )
    check_listen_address(settings)
    if settings.watch is not None and not settings.watch.is_dir():
        raise ConfigError(f"watch: {settings.watch} is not a directory")


def has_grpc() -> bool:
    """Whether the extra `grpc` is installed."""
    return all(importlib.util.find_spec(name) is not None for name in GRPC_PACKAGES)


def grpc_port_by_default(settings: Settings) -> Settings:
    """`settings` with the gRPC port of a service of its own: what is set, else the usual one where the extra is installed.

    Beside an HTTP port that is picked it is picked too.
    """
    if settings.grpc_port is not None:
        return settings
    port = "off" if not has_grpc() else 0 if settings.port == 0 else GRPC_PORT
    return settings.model_copy(update={"grpc_port": port})


class HttpService:
    """A store served on one port, or two. Made on any thread; `run` blocks; `stop` may be called from any thread."""

    def __init__(self, store: Store, settings: Settings, listener: socket.socket) -> None:
        self._settings = settings
        self._socket = listener
        self.host = settings.host
        self.port: int = listener.getsockname()[1]
        self.url = f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"
        self.service = Service(store, settings)
        self._grpc: GrpcServer | None = None
        self.grpc_port: int | None = None
        self.grpc_target: str | None = None  # what a gRPC client is given
        limit = connection_limit(settings.max_connections)
        self._reactors = reactors = Reactors(settings.threads, settings, store.epochs, limit)
        self._plans = Plans(store, reactors.words, settings.threads, self.service.absorb)
        reactors.count_in(self._plans.versions.words, self._plans.tables.words)
        self.service.reactors, self.service.plans = reactors, self._plans
        self.service.inflight.share(reactors.words, theirs=kernel.INFLIGHT, ours=kernel.OTHER_INFLIGHT)
        self.service.door = self._door = Door(self.service, limit, reactors)
        root = make_root(self.service, reactors.allow_host)
        self._server = make_server(root, self._door, settings.idle_timeout_s)
        self._handover = Handover(reactors, root, self, self.service.inflight)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining = False
        store.epochs.add_collector(self._plans.collect)
        if isinstance(settings.grpc_port, int):
            self._add_grpc(settings.grpc_port)

    def _add_grpc(self, port: int) -> None:
        from tierstore.service.rpc.places import address_of, taken
        from tierstore.service.rpc.server import GrpcServer

        try:
            try:
                self.service.grpc = self._grpc = GrpcServer(self.service, address_of(self.host, port))
            except OSError as error:
                raise taken(self.host, port) from error
            self.grpc_port = self._grpc.port
            self.grpc_target = address_of(self.host, self.grpc_port)
        except BaseException:
            self._close()
            raise

    def run(self, started: Callable[[], None], *, signals: bool) -> None:
        """Serve until `stop` or, with `signals` (main thread only), a stop signal; `started` is called when it is up."""
        try:
            with asyncio.Runner(loop_factory=self._server.config.get_loop_factory()) as runner:
                runner.run(self._serve(started, signals))
        finally:
            self._close()

    @property
    def default_headers(self) -> list[tuple[bytes, bytes]]:
        """What every answer has."""
        return self._server.server_state.default_headers

    def adopt(self, sock: socket.socket, data: bytes, *, refused: bool) -> None:
        """Serve a connection that a reactor hands over. Event loop only."""
        self._server.adopt(self._door, sock, data, refused=refused, back=self._reactors.come_back)

    def _close(self) -> None:
        self._reactors.close()
        self._socket.close()
        self._plans.collect()
        self.service.store.epochs.remove_collector(self._plans.collect)
        if self._grpc is not None:
            self._grpc.stop(0.0)  # if it has not begun to end
            self._grpc.close()
        self.service.close()

    def stop(self, drain_s: float | None = None) -> None:
        """Begin to end: not ready now, closed after `drain_s` (default: the setting). A second call ends at once."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # it has ended already
                self._loop.call_soon_threadsafe(self._drain, self._settings.drain_s if drain_s is None else drain_s)

    async def _serve(self, started: Callable[[], None], signals: bool) -> None:
        loop = self._loop = asyncio.get_running_loop()
        if signals:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self._drain, self._settings.drain_s)
        if self._settings.watch is not None:
            self.service.watcher = Watcher(self.service.store, self._settings.watch, max_delta=self._settings.max_delta)
        warming: asyncio.Future[None] | None = None
        serving = asyncio.ensure_future(self._server.serve(sockets=[]))
        while not self._server.started and not serving.done():
            await asyncio.sleep(0.005)
        if not serving.done():
            if self._grpc is not None:
                self._grpc.start()
                warming = asyncio.ensure_future(self._tell_when_warm(self._grpc))
            self._socket.listen(BACKLOG)
            self._reactors.start(self._socket, self._handover)
            self.service.store.publish_words()
            started()
        await serving
        await self._finish()
        if warming is not None:
            warming.cancel()

    async def _tell_when_warm(self, grpc: GrpcServer) -> None:
        """gRPC's health is told to those who watch it, so it has to change as soon as the service is ready."""
        serving = True
        while not self.service.ready:
            if serving:
                grpc.tell_health(serving=False)
                serving = False
            await asyncio.sleep(WARM_POLL_S)
        if not serving:
            grpc.tell_health(serving=True)

    async def _finish(self) -> None:
        """Wait until the reactors have answered what had begun."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FINISH_S):
                while self._handover.busy or not self._reactors.idle:
                    await asyncio.sleep(0.01)

    def _drain(self, drain_s: float) -> None:
        if self._draining:
            drain_s = 0.0
        self._draining = True
        self.service.draining = True
        if self._grpc is not None:
            self._grpc.drain()
        if drain_s > 0:
            logger.info("stopping: not ready from now on, closing in %.1f s", drain_s)
            asyncio.get_running_loop().call_later(drain_s, self._end)
        else:
            self._end()

    def _end(self) -> None:
        self._handover.ending = True
        self._reactors.finish()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # who connects from here on is refused, not left waiting
        self._server.should_exit = True
        if self._grpc is not None:
            self._grpc.stop(FINISH_S)


def _listen(settings: Settings) -> socket.socket:
    """A bound socket, not listening yet: until the service is up, connections are refused instead of left hanging."""
    listener = socket.socket(socket.AF_INET6 if ":" in settings.host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((settings.host, settings.port))
        return listener
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {settings.host} port {settings.port}: {error}; choose another host or port"
        ) from error


def _say(url: str, grpc_target: str | None) -> None:
    also = "" if grpc_target is None else f"gRPC at {grpc_target}\n"
    sys.stdout.write(f"tierstore serves at {url}\n{also}")
    sys.stdout.flush()


def serve(settings: Settings, *, announce: Callable[[str, str | None], None] = _say) -> None:
    """Open the store, serve it until a stop signal, close it. Blocks the main thread.

    `announce` is called once with the URL and the gRPC target (None where gRPC is not served), when requests are answered;
    by default it prints a line. Raises ConfigError and MissingExtra for what cannot be served, Locked where another
    process has the data directory open.
    """
    settings = grpc_port_by_default(settings)
    check_settings(settings)
    tune_allocator()
    raise_file_limit()
    with _listen(settings) as listener, Store(settings) as store:
        service = HttpService(store, settings, listener)
        freeze_heap()
        service.run(lambda: announce(service.url, service.grpc_target), signals=True)


class ServerThread:
    """The service in the background of this process, over a store that the caller keeps open: `with ServerThread(store) as server:`.

    `url` and `port` are known once it is entered; `grpc_target` and `grpc_port` too where the settings ask for gRPC, else
    they are None. Leaving it, or `close`, ends the service without draining.
    """

    def __init__(self, store: Store, settings: Settings | None = None) -> None:
        settings = settings or store.settings
        check_settings(settings)
        self._http = HttpService(store, settings, _listen(settings))
        self._up = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="tierstore-http", daemon=True)

    @property
    def url(self) -> str:
        return self._http.url

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
        """Return when requests are answered."""
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
            self._http.run(self._up.set, signals=False)
        except BaseException as error:  # noqa: BLE001 - raised where it is started
            self._error = error
        finally:
            self._up.set()

    def __enter__(self) -> ServerThread:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
