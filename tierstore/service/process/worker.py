"""A worker process: answers look-ups on the service's port, out of the owner's memory.

Started by `fleet.py` as `python -m tierstore.service.process.worker <descriptor of the control socket>`. It keeps nothing
that counts: killed at any moment, it loses the requests it is at and what it has counted in the last second. It ends
when the owner says so, or has gone. Threads: the event loop, look-ups, one that listens to the owner, one that takes
over what the owner publishes.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import threading
from typing import TYPE_CHECKING, Any

from tierstore.config import Settings
from tierstore.engine.mirror import MirrorStore
from tierstore.engine.sharing import Changes
from tierstore.errors import InvalidInput
from tierstore.logs import configure
from tierstore.service.context import Service
from tierstore.service.http.door import Door
from tierstore.service.http.face import BEGUN, HttpFace
from tierstore.service.http.guard import Guard
from tierstore.service.http.messages import Receive, Response, Scope, Send
from tierstore.service.http.oip import OipHttp
from tierstore.service.http.serving import FINISH_S, make_server
from tierstore.service.http.tfs import TfsHttp
from tierstore.service.oip.parameters import version_of
from tierstore.service.plane.plan import Elsewhere
from tierstore.service.process.forward import Forward, Replay
from tierstore.service.process.link import Link
from tierstore.service.process.tuning import freeze_heap, tune_allocator

if TYPE_CHECKING:
    from tierstore.service.rpc.server import GrpcServer

REPORT_S = 1.0
_EXIT_ORPHAN = 3
_ELSEWHERE = "tierstore.elsewhere"  # in a scope: the owner is to answer it


class _Root:
    """Look-ups that this process can answer stay here; everything else goes to the owner. Event loop only."""

    def __init__(self, service: Service, link: Link) -> None:
        self._service, self._store = service, service.store
        self._oip, self._tfs = OipHttp(service), TfsHttp(service)
        self._forward = Forward(lambda: service.control.run(link.connect))

    def at_once(self, scope: Scope, body: bytes) -> Response | None:
        protocol, parts = self._data_plane(scope["path"])
        if protocol is None or not self._store.fresh or not self._answers(parts):
            return None
        try:
            return protocol.at_once(scope, body)
        except Elsewhere:
            scope[_ELSEWHERE] = True
            return None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        protocol, parts = self._data_plane(scope["path"])
        if protocol is not None and _ELSEWHERE not in scope and await self._takes(scope, parts):
            replay = Replay(receive)
            try:
                await protocol(scope, replay, send)
                return
            except Elsewhere:  # it needs the dense part; nothing has been sent yet
                receive = replay.again
        await self._forward(scope, receive, send)

    def _data_plane(self, path: str) -> tuple[HttpFace | None, list[str]]:
        """(who answers a look-up, the parts of its path that say of what); None for anything else."""
        if path.endswith("/infer") and path.startswith("/v2/models/"):
            return self._oip, path.split("/")[3:-1]
        if path.endswith(":predict") and path.startswith("/v1/models/"):
            return self._tfs, path.removesuffix(":predict").split("/")[3:]
        return None, []

    async def _takes(self, scope: Scope, parts: list[str]) -> bool:
        """Whether a look-up is answered here, as far as its path says."""
        if BEGUN in scope:
            return True
        if not self._store.fresh:
            await self._service.control.run(self._store.refresh)
        return self._answers(parts)

    def _answers(self, parts: list[str]) -> bool:
        """Whether `{model}` or `{model}/versions/{number or label}` is served, or `{model}/labels/{label}`.

        If not, the owner says what is wrong.
        """
        if not parts:
            return False
        served = self._store.served(parts[0])
        if served.active is None or len(parts) == 1:
            return served.active is not None
        if len(parts) != 3 or parts[1] not in ("versions", "labels"):
            return False
        try:
            asked = version_of(parts[2])
        except InvalidInput:
            return False
        return asked in served.versions if isinstance(asked, int) else asked in served.all_labels()


class Worker:
    """`hello` is what the owner sent first. Made and run by the main thread."""

    def __init__(self, control: socket.socket, lines: Any, hello: dict[str, Any]) -> None:
        settings = Settings(**hello["settings"])
        self._lines, self._wake = lines, hello["wake"]
        calls = [socket.socket(fileno=fd) for fd in hello["calls"]]
        self._link = Link(control, calls)
        self._store = MirrorStore(self._link, Changes(hello["changes"]))
        self._service = Service(self._store, settings)
        self._listener = socket.socket(fileno=hello["listener"])
        self._service.door = door = Door(self._service)
        self._server = make_server(Guard(_Root(self._service, self._link), settings), door)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._grpc: GrpcServer | None = None
        grpc = hello["grpc"]
        if grpc is not None:
            from tierstore.service.rpc.server import GrpcServer

            self._service.hands_on = True
            self._service.grpc = self._grpc = GrpcServer(self._service, grpc["address"], owner=grpc["owner"])

    def run(self) -> None:
        """Serve until the owner says stop."""
        self._store.refresh()
        with asyncio.Runner(loop_factory=self._server.config.get_loop_factory()) as runner:
            self._loop = runner.get_loop()
            for work in (self._listen, self._follow):
                threading.Thread(target=work, name=f"tierstore{work.__name__}", daemon=True).start()
            runner.run(self._serve())
            if self._grpc is not None:
                self._grpc.close()
            runner.run(self._last_report())
        self._service.close()

    async def _serve(self) -> None:
        serving = asyncio.ensure_future(self._server.serve(sockets=[self._listener]))
        while not self._server.started and not serving.done():
            await asyncio.sleep(0.005)
        if not serving.done():
            if self._grpc is not None:
                self._grpc.start()
            self._link.tell({"up": os.getpid()})
            self._report_often()
        await serving

    async def _last_report(self) -> None:
        self._report(None)

    def _report_often(self) -> None:
        self._report(None)
        asyncio.get_running_loop().call_later(REPORT_S, self._report_often)

    def _report(self, asked: int | None) -> None:
        """Tell the owner what was counted since the last time. Event loop, which is what counts."""
        service = self._service
        self._link.tell(
            {
                "report": asked,
                "lookups": self._store.take_counts(),
                "requests": service.request_times.take(),
                "infer": service.infer_stats.take(),
                "shed": service.shed.take(),
                "gauges": {
                    "lookup_threads_busy": service.lookups.busy,
                    "lookup_queue_depth": service.lookups.waiting,
                    "lookup_rejected": service.lookups.rejected,
                    "inflight_bytes": service.inflight.used_bytes,
                    "inflight_rejected": service.inflight.rejected,
                    "connections": len(self._server.server_state.connections),
                    **({} if self._grpc is None else self._grpc.gauges()),
                },
            }
        )

    def _listen(self) -> None:
        """What the owner says, on a thread of its own. An owner that has gone ends this process at once."""
        assert self._loop is not None
        for line in self._lines:
            message = json.loads(line)
            if "report" in message:
                self._loop.call_soon_threadsafe(self._report, message["report"])
            elif "stop" in message:
                self._loop.call_soon_threadsafe(self._stop)
        os._exit(_EXIT_ORPHAN)

    def _follow(self) -> None:
        """Take over what the owner publishes without being asked by a request: the owner waits for what is held here."""
        while True:
            os.eventfd_read(self._wake)
            self._store.refresh()

    def _stop(self) -> None:
        self._server.should_exit = True
        if self._grpc is not None:
            self._grpc.stop(FINISH_S)


def main() -> None:
    """Entry of the process."""
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to the whole group; the owner says when to end
        signal.signal(number, signal.SIG_IGN)
    tune_allocator()
    control = socket.socket(fileno=int(sys.argv[1]))
    lines = control.makefile("rb")
    first = lines.readline()
    if first:
        hello = json.loads(first)
        configure(hello["settings"]["log_format"], hello["settings"]["log_level"])
        worker = Worker(control, lines, hello)
        freeze_heap()
        worker.run()


if __name__ == "__main__":
    main()
