"""`Client`: the verbs of a store, over HTTP, for threads.

Any thread may use one `Client`, and many should share one: it keeps its connections open. All requests of one call are
carried by the thread that calls, side by side on several connections; the client has no threads of its own. It holds no
state of the service's, so nothing is lost with it; a verb that was acknowledged is as durable as the service made it.
"""

from __future__ import annotations

import select
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from tierstore.client.face import Face
from tierstore.client.flights import Attempt, Call, Group
from tierstore.client.links import Link, Links
from tierstore.client.replies import Reply
from tierstore.client.signatures import BlockingVerbs
from tierstore.client.steps import Pause, Steps
from tierstore.errors import TierstoreError

POOL_S = 0.002  # until a call that has connections under way asks for another one again


class Client(BlockingVerbs):
    __doc__ = f"{Face.__doc__}\n\n    Every verb blocks until it is done."

    def _open(self) -> None:
        self._links = Links(self._address, self._settings.max_connections)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections; requests under way on other threads still end. May be called twice."""
        self._run(self._shared.close())
        self._links.close()

    def _connections(self) -> dict[str, int]:
        return self._links.figures()

    def _run(self, steps: Steps) -> Any:
        """Carry out what the verb asks for, step by step."""
        answer: Any = None
        error: TierstoreError | None = None
        try:
            while True:
                step = steps.send(answer) if error is None else steps.throw(error)
                answer, error = None, None
                try:
                    if isinstance(step, Pause):
                        time.sleep(step.seconds)
                    else:
                        answer = self._exchange(step)
                except TierstoreError as failed:
                    error = failed
        except StopIteration as done:
            return done.value
        finally:
            steps.close()

    def _exchange(self, calls: Sequence[Call]) -> list[Reply]:
        """All calls side by side, with what has to be repeated."""
        group = Group(calls, self._settings.policy, self._budget, time.monotonic())
        busy: list[Link] = []
        try:
            while not group.ended():
                now = time.monotonic()
                group.expire(now)
                group.resume(now)
                self._drop_unwanted(busy)
                while (attempt := group.next(now)) is not None:
                    link = self._begin(group, attempt, wait=not busy)
                    if link is None:
                        break
                    busy.append(link)
                if not group.ended():
                    self._wait(group, busy)
            return group.replies()
        finally:
            group.abandon()
            self._drop_unwanted(busy)

    def _begin(self, group: Group, attempt: Attempt, *, wait: bool) -> Link | None:
        """A connection that carries the attempt; None if there is none."""
        left = max(0.0, attempt.flight.deadline - time.monotonic())
        try:
            link = self._links.take(fresh=attempt.fresh, wait_s=left if wait else 0.0, timeout_s=left)
        except TierstoreError as error:
            group.failed(attempt, error, time.monotonic())
            return None
        if link is None:
            group.put_back(attempt)
            return None
        try:
            link.begin(attempt, attempt.head(self._address, self._fields))
        except TierstoreError as error:
            group.failed(attempt, error, time.monotonic(), stale=link.stale)
            self._links.drop(link)
            return None
        return link

    def _wait(self, group: Group, busy: list[Link]) -> None:
        """Until something came, or is due."""
        wait_s = group.wake_at() - time.monotonic()
        if group.starved:
            wait_s = min(wait_s, POOL_S)
        if not busy:
            if wait_s > 0:
                time.sleep(wait_s)
            return
        for link in _ready(busy, max(0.0, wait_s)):
            attempt = link.attempt
            assert attempt is not None
            if attempt.dropped:
                continue
            try:
                if not link.pump():
                    continue
            except TierstoreError as error:
                busy.remove(link)
                group.failed(attempt, error, time.monotonic(), stale=link.stale)
                self._links.drop(link)
            else:
                busy.remove(link)
                group.answered(attempt, time.monotonic())
                self._links.give_back(link)

    def _drop_unwanted(self, busy: list[Link]) -> None:
        for link in [link for link in busy if link.attempt is None or link.attempt.dropped]:
            busy.remove(link)
            self._links.drop(link)


def _ready(links: list[Link], timeout_s: float) -> list[Link]:
    if len(links) == 1:
        return links[:] if links[0].wait(timeout_s) else []
    poll = select.poll()
    for link in links:
        poll.register(link, link.wants)
    ready = {descriptor for descriptor, _ in poll.poll(timeout_s * 1e3)}
    return [link for link in links if link.fileno() in ready]
