"""The demo's story: a click model served from snapshots and minute deltas by a real service under load.

`run` is called once, from the main thread (it turns SIGTERM into an orderly end while it runs, so that
the service is stopped too). All files live in one directory, removed at the end unless it was given;
nothing survives a crash.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.status import Status

from tierstore.client import Client, RemoteModel
from tierstore.demo import scoring
from tierstore.demo.clicklog import WorldSize, item_keys, user_keys
from tierstore.demo.export import MODEL, ROW_BYTES
from tierstore.demo.graph import can_predict
from tierstore.demo.process import Child, service_url, start_service
from tierstore.demo.report import DemoReport, TierCounter, Window, show
from tierstore.demo.shop import Shop
from tierstore.demo.streaming import Plan, Streamed, load, stream
from tierstore.demo.traffic import Samples, Traffic
from tierstore.types import Progress

SEED = 20261120
DAILY, COMPACTED = 20261120, 20261121  # the versions
SECONDS = 24.0  # of deltas
PACE_S = 0.8  # a minute of the log takes
HOST_BUDGET_MIB = 20
_SCORED_BY = {
    True: "the service: rows and dense part of one moment in each request",
    False: "the demo itself, on rows looked up: with tierstore[dense] the service would",
}
CHECKED_ROWS = 50_000  # of each table, at the end

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
    """Tell the whole story and return its figures.

    keep: leave the service up at the end, until Ctrl-C. seconds: how long deltas stream (default 24; the
    rest takes about 25 more). port: of the service, 0 for a free one. workdir: where files go and stay,
    which must hold no earlier run; by default a temporary directory that is removed. console: where it
    is told; by default standard output. scale: of tables and traffic; 1.0 is about a million rows.
    Raises ValueError for a scale or time that is not positive, TierstoreError when a step fails.
    """
    seconds = SECONDS if seconds is None else seconds
    if scale <= 0 or seconds <= 0:
        raise ValueError(f"scale and seconds must be above 0; got scale={scale}, seconds={seconds}")
    console = console or Console()
    with _signals() as ignore, ExitStack() as stack:
        if workdir is None:
            directory = Path(tempfile.mkdtemp(prefix="tierstore-demo-"))
            stack.callback(shutil.rmtree, directory, ignore_errors=True)
        else:
            directory = workdir.resolve()
            directory.mkdir(parents=True, exist_ok=True)
        try:
            story = Story(stack, directory, console, seconds=seconds, port=port, seed=seed, scale=scale)
            report = story.tell()
            show(report, console)
            if keep:
                story.stay()
        finally:
            ignore()  # stopping what runs takes a moment, which a second Ctrl-C must not cut short
    return report


class Story:
    """The steps, in order. `stack` gets what must be stopped, whatever happens."""

    def __init__(
        self, stack: ExitStack, directory: Path, console: Console, *, seconds: float, port: int, seed: int, scale: float
    ) -> None:
        self.stack, self.directory, self.console, self.port = stack, directory, console, port
        self.size = WorldSize.scaled(scale, minutes=max(4, round(seconds / PACE_S)))
        self.pace_s, self.hold_s = seconds / self.size.minutes, min(2.0, seconds / 10)
        self.report = DemoReport(seed=seed, scale=scale, host_budget=f"{max(2, round(HOST_BUDGET_MIB * scale))}MiB")
        self.tiers = TierCounter()
        self.streamed = Streamed()
        self.over = threading.Event()
        self.line: Status | None = None  # of the step under way, on a terminal
        self.service: Child
        self.client: Client

    def tell(self) -> DemoReport:
        """All steps. Returns the report."""
        report, streamed = self.report, self.streamed
        began = time.monotonic()
        # The service starts while the trainer learns; on a first run both compile their kernels meanwhile.
        self.service = self.stack.enter_context(
            start_service(self.directory, port=self.port, host_budget=report.host_budget)
        )
        with self._step("learn a day of clicks") as say:
            shop = Shop(self.size, report.seed)
            events = shop.learn_day()
            say(f"{events:,} events; {self.size.users:,} users, {self.size.items:,} items")
        with self._step("write the daily snapshot") as say:
            source = self.directory / "snapshots" / str(DAILY)
            rows, _ = shop.write_snapshot(source, DAILY)
            report.rows, report.table_bytes = rows, rows * (8 + ROW_BYTES)
            say(f"{rows:,} rows, {report.table_bytes / 2**20:.0f} MiB with their keys")
        with self._step("start the service") as say:
            report.url = service_url(self.service)
            self.client = self.stack.enter_context(Client(report.url))
            say(f"{report.url}, {report.host_budget} of memory for rows")
        with self._step("load the snapshot through it") as say:
            report.load_rows_per_s = rows / load(self.client, source, activate=True, progress=self._progress)
            say(f"{report.load_rows_per_s:,.0f} rows a second, checked, caught up and active")
        model = self.client.model(MODEL)
        with self._step("score the newest events") as say:
            daily = self._score(model, shop)
            say(f"by {_SCORED_BY[report.served_scores]}")
        traffic = self.stack.enter_context(self._traffic(shop))
        with self._step("answer look-ups") as say:
            traffic.wait_ready()
            self.tiers.start(self._status())
            streamed.window("daily snapshot alone")
            self.over.wait(2 * self.hold_s)
            say(_shares(self.tiers.add(self._status())))
        with self._step("stream deltas, load and switch") as say:
            plan = Plan(self.pace_s, self.hold_s, COMPACTED, self._after_delta, self._note)
            stream(shop, self.client, self.directory, self.over, plan, streamed)
            say(f"{len(streamed.acknowledged)} deltas, {streamed.rows:,} rows")
        with self._step("answer on") as say:
            streamed.window("afterwards")
            self.over.wait(2 * self.hold_s)
            streamed.window("")
            report.tiers = self.tiers.add(self._status())
            self._judge(traffic.finish())
            say(f"{report.requests:,} requests in all, {report.failed_requests} failed")
        with self._step("score the newest events again"):
            deltas = self._score(model, shop)
            report.quality = scoring.quality(self.size, shop.newest, daily, deltas)
        with self._step("read rows back") as say:
            checked = scoring.compare_rows(model, shop.trainer, shop.item_exists, CHECKED_ROWS, report.seed)
            report.rows_checked, report.mismatches = checked
            say(f"{report.mismatches} mismatches of {report.rows_checked:,}")
        report.total_s = round(time.monotonic() - began, 2)
        return report

    def stay(self) -> None:
        """Leave the service up until Ctrl-C, or until it ends by itself."""
        self.console.print(f"\nThe service is still up: [bold]{self.report.url}[/] (see / and /docs). Ctrl-C stops it.")
        with contextlib.suppress(KeyboardInterrupt):
            self.service.process.wait()

    def _score(self, model: RemoteModel, shop: Shop) -> npt.NDArray[np.float32]:
        """Logits of the newest events: the service's own where it can predict, and then compared with the other way."""
        report = self.report
        here = scoring.scores(model, shop.newest, shop.trainer.dense)
        report.served_scores = can_predict()
        if not report.served_scores:
            return here
        served = scoring.predicted(model, shop.newest)
        report.scores_checked += len(served)
        report.score_mismatches += int((~np.isclose(served, here, rtol=1e-3, atol=1e-3)).sum())
        return served

    def _traffic(self, shop: Shop) -> Traffic:
        users = user_keys(shop.log.users_by_activity())
        items = item_keys(shop.log.items_by_popularity())
        return Traffic(self.directory, self.report.url, users, items, seed=self.report.seed)

    def _judge(self, samples: Samples) -> None:
        """What the load generator saw, window by window and in all."""
        report, streamed = self.report, self.streamed
        windows = zip(streamed.windows, streamed.windows[1:], strict=False)
        measured = [Window.of(name, samples, start, end) for (name, start), (_, end) in windows]
        report.windows = [window for window in measured if window.requests]
        report.requests, report.failed_requests = len(samples.due), int(samples.failed.sum())
        report.first_error = samples.first_error
        report.mixed_answers = int(samples.mixed.sum())
        report.stale_answers = samples.stale(streamed.acknowledged)
        report.versions_seen = np.unique(samples.version[~samples.failed]).tolist()
        report.deltas, report.delta_rows = len(streamed.acknowledged), streamed.rows
        report.beside_rows_per_s = streamed.beside_rows_per_s
        report.freshness_median_s, report.freshness_p99_s, report.freshness_max_s = np.percentile(
            streamed.freshness_s, [50, 99, 100]
        ).tolist()

    def _status(self) -> dict[str, Any]:
        model: dict[str, Any] = self.client.status(MODEL)["models"][MODEL]
        return model

    def _after_delta(self, minute: int) -> None:
        shares = self.tiers.add(self._status())
        ms = self.streamed.freshness_s[-1] * 1e3
        text = f"minute {minute} of {self.size.minutes}: visible {ms:.0f} ms after its newest event; {_shares(shares)}"
        if minute % max(1, self.size.minutes // 6) == 0:
            self._note(text)
        elif self.line is not None:
            self.line.update(text)

    def _note(self, text: str) -> None:
        self.console.print(f"    {text}", style="dim", highlight=False, soft_wrap=True)

    @contextmanager
    def _step(self, name: str) -> Iterator[Say]:
        """A step of the story: timed, and told in a line when it is done."""
        said: list[str] = []
        began = time.monotonic()
        with self.console.status(name) if self.console.is_terminal else contextlib.nullcontext() as self.line:
            yield said.append
        took_s = time.monotonic() - began
        self.report.steps_s[name] = round(took_s, 2)
        self.console.print(f"[green]✓[/] {name:<30}{took_s:6.1f} s", highlight=False, end="   ")
        self.console.print(f"[dim]{'; '.join(said)}[/]", highlight=False, soft_wrap=True)

    def _progress(self, at: Progress) -> None:
        if self.line is not None:
            self.line.update(f"{at.phase} {at.done:,} of {at.total:,}" if at.total else at.phase)


def _shares(shares: dict[str, float]) -> str:
    return ", ".join(f"{tier} {share:.0%}" for tier, share in shares.items()) or "nothing answered yet"


@contextmanager
def _signals() -> Iterator[Callable[[], None]]:
    """SIGTERM raises SystemExit meanwhile, so that what was started is stopped. Yields what turns both signals off.

    Outside of the main thread, where no signal arrives, it does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return

    def end(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    def ignore() -> None:
        for number in before:
            signal.signal(number, signal.SIG_IGN)

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGTERM, end)
    try:
        yield ignore
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
