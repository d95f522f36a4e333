"""The demo's load generator: ranking requests from a process of its own, each checked and timed.

A request ranks the candidates of one user: one `user_id`, `CANDIDATES` `item_id`s and one bag of recently `clicked`
items, by Zipf's law over users and items, together with the marker rows (see `shop`). Requests are due at fixed times,
whatever becomes of the earlier ones, and a latency counts from the time at which its request was due. So a service that
stalls cannot hide it by slowing the generator down.

The demo's main thread uses `Traffic`. The process ends when the demo does, even after a `kill -9`: its pipe closes.
"""

from __future__ import annotations

import multiprocessing
import signal
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore.client import Client
from tierstore.demo.clicklog import item_keys, user_keys, zipf_ranks
from tierstore.demo.graph import CLICKED, ITEM, USER
from tierstore.demo.shop import MARKER_ROWS, MODEL, read_markers
from tierstore.errors import NotReady
from tierstore.types import Keys

PER_SECOND = 100.0
THREADS = 3
CANDIDATES = 200

# One row per request, ordered by when it was due. `due`: seconds of the monotonic clock. `version`, `seq`: by the
# marker rows. `mixed`: answered from more than one version or seq.
SAMPLE = np.dtype(
    [("due", "f8"), ("latency_s", "f8"), ("version", "i8"), ("seq", "i8"), ("failed", "?"), ("mixed", "?")]
)
Samples = npt.NDArray[np.void]


def stale(samples: Samples, acknowledged: npt.ArrayLike) -> int:
    """Answers without a delta that had been acknowledged when the request was due.

    acknowledged: when delta 1, 2, … was, seconds of the monotonic clock, ascending.
    """
    expected = np.searchsorted(np.asarray(acknowledged), samples["due"], side="left")
    return int((samples["seq"] < expected)[~samples["failed"]].sum())


class Traffic:
    """The generator's process. A context manager; `finish` ends it and returns what it saw."""

    def __init__(self, url: str, users: Keys, items: Keys, seed: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_generate, args=(theirs, url, users, items, seed), daemon=True)
        self._process.start()
        theirs.close()

    def wait_ready(self, timeout_s: float = 60.0) -> None:
        """Return once the first request was answered. Raises NotReady if none is."""
        if not self._pipe.poll(timeout_s):
            raise NotReady(f"expected an answer to the load generator within {timeout_s:.0f} s, got none")
        if error := self._receive():
            raise NotReady(f"the first request of the load generator failed: {error}")

    def finish(self) -> tuple[Samples, str]:
        """Stop sending. Returns the samples and the first error. Raises NotReady if the process has failed."""
        self._pipe.send("stop")
        samples, first_error = self._receive()
        return samples, first_error

    def _receive(self) -> Any:
        try:
            return self._pipe.recv()
        except EOFError as error:
            raise NotReady("the load generator has failed; its error is above, on standard error") from error

    def __enter__(self) -> Traffic:
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()
        self._process.terminate()
        self._process.join()


def _generate(pipe: Connection, url: str, users: Keys, items: Keys, seed: int) -> None:
    """The process: reports the first answer, sends until `pipe` says stop or closes, then reports the samples."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the demo, which ends this process
    stop, answered = threading.Event(), threading.Event()
    senders = [_Sender(number, users, items, seed, answered) for number in range(THREADS)]
    threads = [threading.Thread(target=sender.run, args=(url, stop), daemon=True) for sender in senders]
    for thread in threads:
        thread.start()
    try:
        answered.wait()
        pipe.send(next((sender.first_error for sender in senders if sender.first_error), ""))
        pipe.recv()
    except (EOFError, OSError):
        return  # the demo is gone
    stop.set()
    for thread in threads:
        thread.join(30.0)
    samples = sorted(sample for sender in senders for sample in list(sender.samples))
    pipe.send((np.array(samples, SAMPLE), next((sender.first_error for sender in senders if sender.first_error), "")))


class _Sender:
    """One thread's part: its own connection, its own random numbers, its own samples."""

    def __init__(self, number: int, users: Keys, items: Keys, seed: int, answered: threading.Event) -> None:
        self._number, self._users, self._items, self._answered = number, users, items, answered
        self._draw = np.random.default_rng([seed, number])
        self.samples: list[tuple[float, float, int, int, bool, bool]] = []
        self.first_error = ""

    def run(self, url: str, stop: threading.Event) -> None:
        with Client(url) as client:
            due = time.monotonic() + self._number / PER_SECOND
            while not stop.wait(max(0.0, due - time.monotonic())):
                self._send(client, due)
                due += THREADS / PER_SECOND

    def _send(self, client: Client, due: float) -> None:
        draw, users, items = self._draw, self._users, self._items
        user = users[zipf_ranks(draw, 1, len(users), 0.9)]
        candidates = items[zipf_ranks(draw, CANDIDATES, len(items), 1.05)]
        clicked = items[zipf_ranks(draw, int(draw.integers(1, 9)), len(items), 1.05)]
        keys = {
            USER: np.concatenate([user_keys(MARKER_ROWS), user]),
            ITEM: np.concatenate([item_keys(MARKER_ROWS), candidates]),
            CLICKED: (clicked, np.zeros(1, np.int64)),
        }
        version, seq, failed, mixed = -1, -1, False, False
        try:
            rows = client.lookup_many(MODEL, keys)
            version, seq, *others = read_markers(np.concatenate([rows[USER][:2], rows[ITEM][:2]])).tolist()
            mixed = [version, seq] != others
            if len(rows[ITEM]) != 2 + CANDIDATES or len(rows[CLICKED]) != 1:
                raise ValueError("the answer lacks rows")
        except Exception as error:  # noqa: BLE001  a failed request is a sample, whatever failed
            failed = True
            self.first_error = self.first_error or f"{type(error).__name__}: {error}"
        self.samples.append((due, time.monotonic() - due, version, seq, failed, mixed))
        self._answered.set()
