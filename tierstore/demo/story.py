"""The demo's story: a click model served from snapshots and minute deltas by a real service under load.

`run` is called from the main thread. All files lie in one directory, which is removed at the end unless it was given.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
from rich.console import Console

from tierstore.client import Client, RemoteModel
from tierstore.demo.clicklog import WorldSize, item_keys, user_keys
from tierstore.demo.graph import can_predict
from tierstore.demo.report import DemoReport, LatencyWindow, Quality, TierCounter, show
from tierstore.demo.scoring import auc, compare_with_trainer, predicted, scores
from tierstore.demo.service import ServiceProcess
from tierstore.demo.shop import MODEL, ROW_BYTES, MinuteDelta, Shop
from tierstore.demo.traffic import Samples, Traffic, stale
from tierstore.errors import Overloaded, TierstoreError
from tierstore.status import ModelStatus
from tierstore.types import Progress

SEED = 20261120
DAILY, SECOND = 20261120, 20261121  # the versions
SECONDS = 15.0  # of deltas
PACE_S = 0.5  # between deltas: what a minute of the log is compressed to
HOST_BUDGET_MIB = 20
CHECKED_ROWS = 50_000  # of each table, at the end

# who answers, before and after the loops are compiled, which a first run does not wait for
SERVERS = "Python, while the loops for it are compiled", "compiled loops"

Say = Callable[[str], None]


def run(
    keep: bool = False,
    seconds: float | None = None,
    port: int = 0,
    seed: int = SEED,
    workdir: Path | None = None,
    console: Console | None = None,
    scale: float = 1.0,
) -> DemoReport:
    """Tell the whole story and return its results.

    keep: leave the service up at the end, until Ctrl-C. seconds: how long deltas stream (default 15; the other steps
    are about 15 more). port: of the service, 0 for a free one. workdir: where files go and stay, which must hold no
    earlier run; by default a temporary directory that is removed. console: where it is told; by default standard
    output. scale: of tables and traffic; 1.0 is about a million rows. Raises ValueError for a scale or time that is not
    positive, TierstoreError when a step fails.
    """
    seconds = SECONDS if seconds is None else seconds
    if scale <= 0 or seconds <= 0:
        raise ValueError(f"scale and seconds must be above 0; got scale={scale}, seconds={seconds}")
    with ExitStack() as stack:
        _stop_in_order(stack)
        if workdir is None:
            directory = Path(tempfile.mkdtemp(prefix="tierstore-demo-"))
            stack.callback(shutil.rmtree, directory, ignore_errors=True)
        else:
            directory = workdir.resolve()
            directory.mkdir(parents=True, exist_ok=True)
        story = Story(stack, directory, console or Console(), seconds=seconds, port=port, seed=seed, scale=scale)
        report = story.play()
        show(report, story.console)
        if keep:
            story.console.print(f"\nThe service is still up: [bold]{report.url}[/] (see / and /docs). Ctrl-C stops it.")
            with contextlib.suppress(KeyboardInterrupt):
                story.service.process.wait()
    return report


def _stop_in_order(stack: ExitStack) -> None:
    """SIGTERM raises SystemExit until `stack` is closed, so that the service and the load generator are stopped too."""

    def end(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is threading.main_thread():  # no signal arrives in any other
        stack.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, end))


class Story:
    """The steps, in order. `stack` gets what must be stopped, whatever happens."""

    def __init__(
        self, stack: ExitStack, directory: Path, console: Console, *, seconds: float, port: int, seed: int, scale: float
    ) -> None:
        self.stack, self.directory, self.console = stack, directory, console
        self.size = WorldSize.scaled(scale, minutes=max(4, round(seconds / PACE_S)))
        self.pace_s, self.hold_s = seconds / self.size.minutes, min(2.0, seconds / 10)
        self.report = DemoReport(seed=seed, scale=scale, host_budget=f"{max(2, round(HOST_BUDGET_MIB * scale))}MiB")
        self.over = threading.Event()  # set when a step has failed: what runs at the same time ends early
        self.windows: list[tuple[str, float]] = []  # (name, start by the monotonic clock); each lasts to the next
        self.servers: list[tuple[str, float]] = []  # likewise, by what the status says of who answers
        self.acknowledged: list[float] = []  # when delta 1, 2, … was, by the monotonic clock
        self.freshness_s: list[float] = []  # from event time to acknowledged
        # The service starts while the trainer learns; on a first run both compile their kernels meanwhile.
        self.service = stack.enter_context(ServiceProcess(directory, port=port, host_budget=self.report.host_budget))
        self.shop = Shop(self.size, seed)
        self.client: Client
        self.model: RemoteModel
        self.tiers: TierCounter

    def play(self) -> DemoReport:
        """All steps. Returns the report."""
        began = time.monotonic()
        self._prepare()
        with self._step("score the newest events") as say:
            daily = self._score()
            by_service = "by the service: rows and dense part of one moment in each request"
            say(
                by_service
                if self.report.served_scores
                else "here, on rows looked up: with tierstore[dense] the service would"
            )
        self._under_load()
        with self._step("score the newest events again"):
            self.report.quality = self._quality(daily, self._score())
        with self._step("read rows back") as say:
            report = self.report
            report.rows_checked, report.mismatches = compare_with_trainer(
                self.model, self.shop, CHECKED_ROWS, report.seed
            )
            say(f"{report.mismatches} mismatches of {report.rows_checked:,}")
        report.total_s = round(time.monotonic() - began, 2)
        return report

    def _prepare(self) -> None:
        """Make the log, train, and start a service with the daily snapshot."""
        report, shop = self.report, self.shop
        with self._step("learn a day of clicks") as say:
            events = shop.learn_day()
            say(f"{events:,} events; {self.size.users:,} users, {self.size.items:,} items")
        with self._step("write the daily snapshot") as say:
            source = self.directory / "snapshots" / str(DAILY)
            report.rows, _ = shop.write_snapshot(source, DAILY)
            report.table_bytes = report.rows * (8 + ROW_BYTES)
            say(f"{report.rows:,} rows, {report.table_bytes / 2**20:.0f} MiB with their keys")
        with self._step("start the service") as say:
            report.url = self.service.url()
            self.client = self.stack.enter_context(Client(report.url))
            self.model = self.client.model(MODEL)
            say(f"{report.url}, {report.host_budget} of memory for rows")
        with self._step("load the snapshot through it") as say:
            start = began = time.monotonic()
            compiling = False  # on a first run

            def follow(progress: Progress) -> None:
                nonlocal began, compiling
                if compiling:
                    began = time.monotonic()
                compiling = progress.phase == "compile kernels"

            self.client.load_snapshot(source, model=MODEL, progress=follow)
            report.load_rows_per_s = report.rows / (time.monotonic() - began)
            compiled = f"; kernels were compiled first, {began - start:.1f} s" if began > start else ""
            say(f"{report.load_rows_per_s:,.0f} rows a second, checked, caught up and active{compiled}")

    def _under_load(self) -> None:
        """Look-ups all the time; meanwhile deltas, a second snapshot, and switches between the two."""
        report, log = self.report, self.shop.log
        users, items = user_keys(log.users_by_activity()), item_keys(log.items_by_popularity())
        traffic = self.stack.enter_context(Traffic(report.url, users, items, report.seed))
        with self._step("answer look-ups") as say:
            traffic.wait_ready()
            self.tiers = TierCounter(self._status())
            self._answers()
            self._window("daily snapshot alone")
            time.sleep(2 * self.hold_s)
            shares = self._answers()
            say(f"by {self.servers[-1][0]}; {shares}")
        with self._step("stream deltas, load and switch") as say:
            self._stream()
            say(f"{len(self.acknowledged)} deltas, {report.delta_rows:,} rows")
        with self._step("answer on") as say:
            self._window("afterwards")
            time.sleep(2 * self.hold_s)
            self._window("")
            report.tiers = self.tiers.add(self._status())
            self._judge(*traffic.finish())
            say(f"{report.requests:,} requests in all, {report.failed_requests} failed")

    def _stream(self) -> None:
        """Send every minute's delta at its pace; from a quarter of the way on, the
        second snapshot in another thread.
        """
        second: Future[None] | None = None
        with ThreadPoolExecutor(1, "second-snapshot") as executor:
            try:
                self._window("deltas")
                due = time.monotonic()
                for minute in range(self.size.minutes):
                    if minute == self.size.minutes // 4:
                        second = executor.submit(self._second_snapshot)
                    if second is not None and second.done():
                        second.result()  # raises what it failed with
                    time.sleep(max(0.0, due - time.monotonic()))
                    self._send(self.shop.next_delta())
                    self._after_delta(minute + 1)
                    due = max(due + self.pace_s, time.monotonic())
                if second is not None:
                    second.result()
            except BaseException:
                self.over.set()
                raise

    def _send(self, delta: MinuteDelta) -> None:
        while True:
            try:
                result = self.client.apply_delta(delta.payload, model=MODEL)
                break
            except Overloaded as full:  # deltas have a budget of memory: try again when the service says so
                time.sleep(full.retry_after_s)
        if not result.applied:
            raise TierstoreError(f"delta {delta.seq} was sent once, expected it to be new to the service")
        self.acknowledged.append(time.monotonic())
        self.freshness_s.append((datetime.now(UTC) - delta.event_time).total_seconds())
        self.report.delta_rows += delta.rows

    def _second_snapshot(self) -> None:
        """Write and load the state of now next to the first; switch to it, back, and to it again."""
        client, source = self.client, self.directory / "snapshots" / str(SECOND)
        rows, seq = self.shop.write_snapshot(source, SECOND)
        self._window("deltas, a snapshot loading")
        began = time.monotonic()
        client.load_snapshot(source, model=MODEL, activate=False, progress=self._check_over)
        took_s = time.monotonic() - began
        self.report.beside_rows_per_s = rows / took_s
        self._note(f"snapshot {SECOND}, the state after delta {seq}, loaded next to the first in {took_s:.1f} s")
        self._window("deltas, switching versions")
        for version in (SECOND, DAILY, SECOND):
            began = time.monotonic()
            if version == DAILY:
                client.rollback(MODEL)
            else:
                client.activate(MODEL, version)
            self._note(f"switched to {self._status()['active_version']} in {(time.monotonic() - began) * 1e3:.0f} ms")
            if self.over.wait(self.hold_s):
                return
        self._window("deltas, second snapshot")

    def _score(self) -> npt.NDArray[np.float32]:
        """Logits of the newest events: by the service where it can predict, and then compared with those made here."""
        report, newest = self.report, self.shop.newest
        here = scores(self.model, newest, self.shop.trainer.dense)
        report.served_scores = can_predict()
        if not report.served_scores:
            return here
        served = predicted(self.model, newest)
        report.scores_checked += len(served)
        report.score_mismatches += int((~np.isclose(served, here, rtol=1e-3, atol=1e-3)).sum())
        return served

    def _quality(self, daily: npt.NDArray[np.float32], deltas: npt.NDArray[np.float32]) -> Quality:
        """AUC of both scores, over all of the newest events and over those of items in the daily snapshot."""
        events = self.shop.newest
        old, clicked = events.items < self.size.items, events.clicked
        every = (auc(daily, clicked), auc(deltas, clicked))
        of_old = (auc(daily[old], clicked[old]), auc(deltas[old], clicked[old]))
        return Quality(len(events), float(1 - old.mean()), *every, *of_old)

    def _judge(self, samples: Samples, first_error: str) -> None:
        """What the load generator saw, window by window and in all."""
        report, failed = self.report, samples["failed"]
        report.windows = _measured(self.windows, samples)
        report.servers = _measured([*self.servers, self.windows[-1]], samples)
        report.requests, report.failed_requests, report.first_error = len(samples), int(failed.sum()), first_error
        report.mixed_answers, report.stale_answers = int(samples["mixed"].sum()), stale(samples, self.acknowledged)
        report.versions_seen = np.unique(samples["version"][~failed]).tolist()
        report.deltas = len(self.acknowledged)
        freshness = np.percentile(self.freshness_s, [50, 99, 100]).tolist()
        report.freshness_median_s, report.freshness_p99_s, report.freshness_max_s = freshness

    # --- what the console shows meanwhile

    def _status(self) -> ModelStatus:
        return self.client.status(MODEL)["models"][MODEL]

    def _answers(self) -> str:
        """Where keys were answered since the last time. Notes by whom; for the main thread."""
        document = self.client.status()
        server = SERVERS[document["service"]["reactors"] == "running"]
        if not self.servers or server != self.servers[-1][0]:
            if self.servers:
                self._note(f"from now on {server} answer")
            self.servers.append((server, time.monotonic()))
        return _shares(self.tiers.add(document["models"][MODEL]))

    def _window(self, name: str) -> None:
        """Begin a window: from now on, requests count under `name`."""
        self.windows.append((name, time.monotonic()))

    def _after_delta(self, minute: int) -> None:
        shares = self._answers()
        if minute % max(1, self.size.minutes // 6) == 0:
            ms = self.freshness_s[-1] * 1e3
            self._note(f"minute {minute} of {self.size.minutes}: visible {ms:.0f} ms after its newest event; {shares}")

    def _note(self, text: str) -> None:
        self.console.print(f"    {text}", style="dim", highlight=False, soft_wrap=True)

    @contextmanager
    def _step(self, name: str) -> Iterator[Say]:
        """A step of the story: timed, and told in a line when it is done."""
        said: list[str] = []
        began = time.monotonic()
        with self.console.status(name) if self.console.is_terminal else contextlib.nullcontext():
            yield said.append
        took_s = time.monotonic() - began
        self.report.steps_s[name] = round(took_s, 2)
        self.console.print(f"[green]✓[/] {name:<30}{took_s:6.1f} s", highlight=False, end="   ")
        self.console.print(f"[dim]{'; '.join(said)}[/]", highlight=False, soft_wrap=True)

    def _check_over(self, _: Progress) -> None:
        if self.over.is_set():
            raise TierstoreError("the demo was ended while a snapshot was loading")


def _measured(parts: list[tuple[str, float]], samples: Samples) -> list[LatencyWindow]:
    """What was seen in each part, but for those without a request. `parts`: (name, start), the last being the end."""
    windows = [LatencyWindow.of(name, samples, start, end) for (name, start), (_, end) in pairwise(parts)]
    return [window for window in windows if window.requests]


def _shares(shares: dict[str, float]) -> str:
    return ", ".join(f"{tier} {share:.0%}" for tier, share in shares.items()) or "nothing answered yet"
