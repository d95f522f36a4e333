"""The reports of upstream nodes, each read by a thread of its own, so that a node that hangs delays nothing else.

Any thread may read. A node's last report counts until the node has been silent for SILENT_S.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from urllib.parse import urlencode

from tierstore.engine.placements.upstream.choice import ModelsDocument, ReportedModel
from tierstore.errors import Overloaded, TierstoreError
from tierstore.threads import Thread
from tierstore.tiers.upstream.connections import UpstreamNode
from tierstore.tiers.upstream.wire import PREFIX

log = logging.getLogger(__name__)

EVERY_S = 0.05
LONGEST_S = 1.0  # between two requests to a node that does not answer
SILENT_S = 3.0
LOOK_S = 1.0  # the wait for one look


class Watch:
    """Watches one node, for the front `name`. `serves`: by model, the version that the front serves and its seq.

    `changed` is notified of news.
    """

    def __init__(
        self,
        node: UpstreamNode,
        name: str,
        serves: Callable[[], Mapping[str, tuple[int, int]]],
        changed: Callable[[], None],
    ) -> None:
        # constant after construction
        self.node, self._name, self._serves, self._changed = node, name, serves, changed
        self._thread = Thread(target=self._run, name=f"tierstore-upstream-{node}", daemon=True)
        self._wake, self._stopping = threading.Event(), threading.Event()
        self._ended = threading.Condition()
        self._looked_s = -math.inf  # when the last look that ended began; guarded by _ended
        self.first = threading.Event()  # set once it has answered, or failed to
        # written by the thread, each in one step
        self._models: dict[str, ReportedModel] = {}
        self._reported_s = -SILENT_S
        self.problem: str | None = None
        self.heard = False  # whether it has ever answered
        self._document: bytes | memoryview = b""

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._stopping.set()
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join()

    def wake(self) -> None:
        """Ask the node at once."""
        self._wake.set()

    def await_look(self, asked_s: float) -> None:
        """Wait until the node was asked after this time, and has answered, or failed to; at most `LOOK_S`."""
        self.wake()
        with self._ended:
            self._ended.wait_for(lambda: self._looked_s >= asked_s or self._stopping.is_set(), LOOK_S)

    @property
    def answers(self) -> bool:
        return self.problem is None and time.monotonic() - self._reported_s < SILENT_S

    def state(self, model: str) -> ReportedModel | None:
        """The report of a model; None if the node does not answer, or has no such model."""
        return self._models.get(model) if self.answers else None

    def models(self) -> list[str]:
        return list(self._models) if self.answers else []

    def _run(self) -> None:
        pause_s = EVERY_S
        while not self._stopping.is_set():
            began_s = time.monotonic()
            try:
                self._look()
                problem, pause_s = None, EVERY_S
            except Overloaded:  # it does answer, only not this request
                problem, pause_s = self.problem, 2 * EVERY_S
            except Exception as error:
                problem, pause_s = str(error), min(LONGEST_S, pause_s * 2)
                if self.problem is None:
                    log.error("%s", problem, exc_info=not isinstance(error, TierstoreError))
            if problem != self.problem:
                self.problem = problem
                self._changed()
            self.first.set()
            with self._ended:
                self._looked_s = began_s
                self._ended.notify_all()
            self._wake.wait(pause_s)
            self._wake.clear()

    def _look(self) -> None:
        serves = urlencode({"front": self._name, "serves": json.dumps(dict(self._serves()))})
        target = f"{PREFIX}/models?{serves}"
        document = self.node.get(target, timeout_s=self.node.pools.options.connect_timeout_s)
        if document != self._document:
            models = self.node.parse(ModelsDocument, document, target).models
            self._models = {name: ReportedModel.of(model) for name, model in models.items()}
            self._document = document
            self._reported_s = time.monotonic()
            self._changed()
        self._reported_s = time.monotonic()
        self.heard = True
