"""The middle of the story: minute deltas at their pace, while a second snapshot is loaded and switched to.

`stream` runs in the main thread and sends the deltas; the second snapshot goes through a thread of its
own. Both end early when `over` is set. A delta that was sent and not acknowledged is sent again only
when the service said that it is full.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from tierstore.client import Client
from tierstore.demo.export import MODEL
from tierstore.demo.shop import MinuteDelta, Shop
from tierstore.errors import Overloaded, TierstoreError
from tierstore.types import Progress, ProgressFn


@dataclass(slots=True)
class Streamed:
    """What was seen. `windows`: (name, start) by the monotonic clock; each lasts to the next."""

    acknowledged: list[float] = field(default_factory=list)  # when delta 1, 2, … was, by the monotonic clock
    freshness_s: list[float] = field(default_factory=list)  # from event time to acknowledged
    rows: int = 0
    windows: list[tuple[str, float]] = field(default_factory=list)  # appended to by one thread at a time
    beside_rows_per_s: float = 0.0

    def window(self, name: str) -> None:
        """From now on, requests count under `name`."""
        self.windows.append((name, time.monotonic()))


@dataclass(frozen=True, slots=True)
class Plan:
    """How to stream. `after_delta` is called in the main thread, `note` with a line for the person, in either."""

    pace_s: float  # between deltas
    hold_s: float  # between switches
    second_version: int
    after_delta: Callable[[int], None]
    note: Callable[[str], None]


def stream(shop: Shop, client: Client, directory: Path, over: threading.Event, plan: Plan, streamed: Streamed) -> None:
    """Send every minute's delta; a quarter of the way in, write, load and switch to a second snapshot beside it.

    It is switched to, back from and to again, all while deltas go on. Raises what failed first.
    """
    second: Future[None] | None = None
    with ThreadPoolExecutor(1, "second-snapshot") as executor:
        try:
            streamed.window("deltas")
            due = time.monotonic()
            for minute in range(shop.size.minutes):
                if minute == shop.size.minutes // 4:
                    second = executor.submit(_second_snapshot, shop, client, directory, over, plan, streamed)
                if (second is not None and second.done() and second.exception()) or over.wait(due - time.monotonic()):
                    break
                _send(client, shop.next_delta(), streamed, over)
                plan.after_delta(minute + 1)
                due = max(due + plan.pace_s, time.monotonic())
            if second is not None:
                second.result()
        except BaseException:
            over.set()
            raise


def load(client: Client, source: Path, *, activate: bool, progress: ProgressFn | None = None) -> float:
    """Have the service load a snapshot. Returns the seconds it took. Raises SnapshotError when it is refused."""
    started = time.monotonic()
    client.load_snapshot(source, model=MODEL, activate=activate, progress=progress)
    return time.monotonic() - started


def _send(client: Client, delta: MinuteDelta, streamed: Streamed, over: threading.Event) -> None:
    while True:
        try:
            result = client.apply_delta(delta.payload, model=MODEL)
            break
        except Overloaded as full:  # its deltas have a budget of memory: come back when it says
            if over.wait(full.retry_after_s):
                return
    if not result.applied:
        raise TierstoreError(f"delta {delta.seq} was sent once and is said to have been held already")
    streamed.acknowledged.append(time.monotonic())
    streamed.freshness_s.append((datetime.now(UTC) - delta.event_time).total_seconds())
    streamed.rows += delta.rows


def _second_snapshot(
    shop: Shop, client: Client, directory: Path, over: threading.Event, plan: Plan, streamed: Streamed
) -> None:
    new = plan.second_version
    source = directory / "snapshots" / str(new)
    rows, seq = shop.write_snapshot(source, new)
    streamed.window("deltas, a snapshot loading")
    took_s = load(client, source, activate=False, progress=_checked(over))
    streamed.beside_rows_per_s = rows / took_s
    plan.note(f"snapshot {new}, the state after delta {seq}, loaded beside in {took_s:.1f} s")
    streamed.window("deltas, switching versions")
    switches: list[Callable[[], object]] = [
        lambda: client.activate(MODEL, new),
        lambda: client.rollback(MODEL),
        lambda: client.activate(MODEL, new),
    ]
    for step in switches:
        began = time.monotonic()
        step()
        now = client.status(MODEL)["models"][MODEL]["active_version"]
        plan.note(f"switched to {now} in {(time.monotonic() - began) * 1e3:.0f} ms")
        if over.wait(plan.hold_s):
            return
    streamed.window("deltas, second snapshot")


def _checked(over: threading.Event) -> ProgressFn:
    def check(_: Progress) -> None:
        if over.is_set():
            raise TierstoreError("the demo was ended while a snapshot was loading")

    return check
