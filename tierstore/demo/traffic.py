"""The demo's load generator: ranking requests from a process of its own, each checked and timed.

A request ranks the candidates of one user: one `user_id`, `candidates` `item_id`s and one bag of
recently `clicked` items, by Zipf's law over users and items, beside the canaries (`canary.py`).
Requests are due at fixed times, whatever became of the earlier ones, and a latency runs from the time
at which its request was due: a service that stalls cannot hide it by slowing the generator down.

`Traffic` is used by the demo's main thread. The process, `python -m tierstore.demo.traffic SPEC`, ends
when its standard input closes and then writes all its samples to one file.
"""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore.client import Client
from tierstore.demo.canary import item_canaries, read_numbers, user_canaries
from tierstore.demo.clicklog import zipf_ranks
from tierstore.demo.export import CLICKED, ITEM, MODEL, USER
from tierstore.demo.process import Child
from tierstore.types import Keys

READY = "answered"


@dataclass(frozen=True, slots=True)
class TrafficSpec:
    """What to send: `keys` is an `.npz` of `user` and `item` keys, the most popular first."""

    url: str
    keys: str
    out: str
    per_second: float = 100.0
    threads: int = 3
    candidates: int = 200
    seed: int = 1


@dataclass(frozen=True, slots=True)
class Samples:
    """Every request, ordered by when it was due. Arrays [n] of one length.

    due: float64, seconds of the monotonic clock; latency_s: float64; version, seq: int64, as the
    canaries told them; failed, mixed: bool. `mixed` is an answer from more than one version or seq.
    """

    due: npt.NDArray[np.float64]
    latency_s: npt.NDArray[np.float64]
    version: npt.NDArray[np.int64]
    seq: npt.NDArray[np.int64]
    failed: npt.NDArray[np.bool_]
    mixed: npt.NDArray[np.bool_]
    first_error: str = ""

    def between(self, start: float, end: float) -> Samples:
        """Those due from `start` to `end`."""
        chosen = (self.due >= start) & (self.due < end)
        arrays = {name: getattr(self, name)[chosen] for name in _ARRAYS}
        return Samples(**arrays, first_error=self.first_error)

    def stale(self, acknowledged: npt.ArrayLike) -> int:
        """Answers without a delta that had been acknowledged when the request was due.

        acknowledged: when delta 1, 2, … was, seconds of the monotonic clock, ascending.
        """
        owed = np.searchsorted(np.asarray(acknowledged), self.due, side="left")
        return int((self.seq < owed)[~self.failed].sum())


_ARRAYS = ("due", "latency_s", "version", "seq", "failed", "mixed")


class Traffic:
    """The generator's process. A context manager; `finish` ends it and returns what it saw."""

    def __init__(self, directory: Path, url: str, users: Keys, items: Keys, **spec: int | float) -> None:
        keys, self._out, spec_file = (
            directory / "traffic-keys.npz",
            directory / "traffic.npz",
            directory / "traffic.json",
        )
        np.savez(keys, user=users, item=items)
        spec_file.write_text(json.dumps(asdict(TrafficSpec(url, str(keys), str(self._out), **spec))))  # type: ignore[arg-type]
        self._child = Child("traffic", ["tierstore.demo.traffic", str(spec_file)], directory)

    def wait_ready(self, timeout_s: float = 60.0) -> None:
        """Return once the first request was answered. Raises NotReady with the process's output if none is."""
        self._child.wait_for(re.compile(READY), timeout_s)

    def finish(self) -> Samples:
        """Stop sending, and read the samples. Raises RuntimeError with the process's output if it failed."""
        if self._child.close_input():
            raise RuntimeError(f"the load generator failed; its output:\n{self._child.output()[-4000:]}")
        with np.load(self._out) as saved:
            return Samples(**{name: saved[name] for name in _ARRAYS}, first_error=str(saved["first_error"]))

    def __enter__(self) -> Traffic:
        return self

    def __exit__(self, *_: object) -> None:
        self._child.stop()


class _Sender:
    """One thread's part: its own connection, its own random numbers, its own samples."""

    def __init__(self, number: int, spec: TrafficSpec, users: Keys, items: Keys) -> None:
        self.number, self.spec, self.users, self.items = number, spec, users, items
        self.draw = np.random.default_rng([spec.seed, number])
        self.samples: list[tuple[float, float, int, int, bool, bool]] = []
        self.first_error = ""

    def run(self, stop: threading.Event) -> None:
        period = self.spec.threads / self.spec.per_second
        with Client(self.spec.url) as client:
            due = time.monotonic() + period * self.number / self.spec.threads
            while not stop.wait(max(0.0, due - time.monotonic())):
                self._one(client, due)
                due += period

    def _one(self, client: Client, due: float) -> None:
        draw, spec = self.draw, self.spec
        user = self.users[zipf_ranks(draw, 1, len(self.users), 0.9)]
        candidates = self.items[zipf_ranks(draw, spec.candidates, len(self.items), 1.05)]
        clicked = self.items[zipf_ranks(draw, int(draw.integers(1, 9)), len(self.items), 1.05)]
        version, seq, failed, mixed = -1, -1, False, False
        try:
            model = client.model(MODEL)
            answer = model.lookup_many(
                {
                    USER: np.concatenate([user_canaries(), user]),
                    ITEM: np.concatenate([item_canaries(), candidates]),
                    CLICKED: (clicked, np.zeros(1, np.int64)),
                }
            )
            bag = answer[CLICKED]
            numbers = read_numbers(np.concatenate([answer[USER][:2], answer[ITEM][:2]]))
            version, seq = int(numbers[0]), int(numbers[1])
            mixed = bool(version != numbers[2] or seq != numbers[3])
            if len(answer[ITEM]) != 2 + spec.candidates or len(bag) != 1:
                raise ValueError("the answer lacks rows")
        except Exception as error:  # noqa: BLE001  a failed request is a sample, whatever failed
            failed = True
            if not self.first_error:
                self.first_error = f"{type(error).__name__}: {error}"
                print(self.first_error, flush=True)
        latency = time.monotonic() - due
        if not self.samples and not failed:
            print(READY, flush=True)
        self.samples.append((due, latency, version, seq, failed, mixed))


def main(spec_file: str) -> None:
    spec = TrafficSpec(**json.loads(Path(spec_file).read_text()))
    with np.load(spec.keys) as keys:
        users, items = keys["user"], keys["item"]
    senders = [_Sender(number, spec, users, items) for number in range(spec.threads)]
    stop = threading.Event()
    threads = [threading.Thread(target=sender.run, args=(stop,), daemon=True) for sender in senders]
    for thread in threads:
        thread.start()
    sys.stdin.buffer.read()  # until the demo closes it, or is gone
    stop.set()
    for thread in threads:
        thread.join(30.0)
    samples = sorted(sample for sender in senders for sample in list(sender.samples))
    columns = zip(*samples, strict=True)
    types = (np.float64, np.float64, np.int64, np.int64, np.bool_, np.bool_)
    arrays: dict[str, Any] = {
        name: np.array(values, kind) for name, values, kind in zip(_ARRAYS, columns, types, strict=True)
    }
    first_error = next((sender.first_error for sender in senders if sender.first_error), "")
    np.savez(spec.out, first_error=np.array(first_error), **arrays)


if __name__ == "__main__":
    main(sys.argv[1])
