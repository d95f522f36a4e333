"""Backups of a store that works: each is restored elsewhere and compared with what the store held at its moment.

`python -m tools.backup_check --backups 200 --seed 1`, from the root of the repository.

A thread does the random stream of work of the crash test (`tools/crash_work.py`: deltas, loads, switches, rollbacks, undone deltas,
canaries, drops, and folds between them) and notes each step in a journal. Meanwhile backups are made, one after the other in the same
place, the older ones with `keep`. Each is restored into a new directory, and a store that opens it must hold what the journal says for
some moment between the beginning and the end of the backup: every row of every table, its seq, what is undone, the dense part
(`tools/crash_check.py`). The restored store takes the next delta. Exit code 1 if not.

With `--copies N` the data directory is copied by `cp -a` instead, which tears it at times: a store that opens the copy must hold what the
journal says for some such moment as well, or refuse the model with what to do.
"""

from __future__ import annotations

import argparse
import copy
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import tierstore
from tierstore.engine.operations.restore import restore
from tierstore.errors import Conflict, SnapshotError
from tierstore.types import BackupReport
from tools.crash_check import Acknowledged, Routing, Wrong, check
from tools.crash_work import MODEL, SETTINGS, Journal, step

BACKUPS_A_LIFE = 8  # before the store is closed and opened again


class BackupCheck:
    """A store under `root` and backups of it. `life` makes some and checks them."""

    settings: ClassVar[dict[str, Any]] = {**SETTINGS, "log_retention_s": 0.0}  # the log is pruned meanwhile

    whole = True  # whether canary, labels and the kept versions are of the moment of the rows

    def __init__(self, root: Path, seed: int, keep: int = 2) -> None:
        self.root, self.seed, self.keep = root, seed, keep
        self._rng = random.Random(seed)
        self._known = Acknowledged(seed)
        self._journal = root / "journal"
        self._journal.touch()
        self._read = 0  # lines of the journal
        self._moments: dict[int, tuple[Acknowledged, list[str], BackupReport]] = {}  # by number of the backup
        self.done: Counter[str] = Counter()  # steps of the work
        self.backups = self.bytes = self.new_bytes = 0

    def life(self, backups: int) -> None:
        """Open the store, make so many backups while it works, and close it. Raises Wrong."""
        rng, stop, failed = self._rng, threading.Event(), list[BaseException]()
        grace_s, base = rng.choice([0.0, 0.0, 0.02, 60.0]), rng.choice(["sealed", "sealed", "rocksdb"])
        with tierstore.open(self.root / "data", fold_grace_s=grace_s, base=base, **self.settings) as store:
            worker = threading.Thread(target=self._work, args=(store, rng.randrange(1 << 30), stop, failed))
            worker.start()
            try:
                for _ in range(backups):
                    self._wait_for_work(worker)
                    self._backup(store)
                    self._check(rng.choice([max(self._moments), max(self._moments), min(self._moments)]))
            finally:
                stop.set()
                worker.join()
        if failed:
            raise failed[0]

    def _work(self, store: tierstore.Store, seed: int, stop: threading.Event, failed: list[BaseException]) -> None:
        rng, journal = random.Random(seed), Journal(self._journal)
        try:
            while not stop.is_set():
                try:
                    step(store, self.root, self.seed, rng, journal, rng.random())
                except (Conflict, SnapshotError) as error:
                    # a rollback to a delta of a version that keeps no base; a load from before what was pruned meanwhile
                    if not any(why in str(error) for why in ("which does not keep rows as loaded", "log begins after")):
                        raise
        except BaseException as error:  # noqa: BLE001 - raised where the thread is waited for
            failed.append(error)

    def _lines(self) -> list[str]:
        """What is new in the journal."""
        lines = self._journal.read_text().splitlines()
        new, self._read = lines[self._read :], len(lines)
        self.done.update(line.split()[1] for line in new if line.startswith("done"))
        return new

    def _wait_for_work(self, worker: threading.Thread) -> None:
        """Wait until the model serves, and for a random time."""
        until = time.monotonic() + 60
        while "done load" not in self._journal.read_text():
            if not worker.is_alive() or time.monotonic() > until:
                raise Wrong("the store does not work")
            time.sleep(0.002)
        time.sleep(self._rng.random() ** 2 * 0.3)

    def _backup(self, store: tierstore.Store) -> None:
        self._known.read(self._lines())
        before = copy.deepcopy(self._known)
        report = store.backup(MODEL, self.root / "backups", keep=self.keep)
        during = self._lines()
        self._known.read(during)
        self.backups += 1
        self._moments[self.backups] = before, during, report
        self._moments = dict(list(self._moments.items())[-self.keep :])
        self.bytes, self.new_bytes = self.bytes + report.bytes, self.new_bytes + report.new_bytes

    def _check(self, number: int) -> None:
        """Restore a backup, and compare it with each moment that it may be of."""
        known, during, report = self._moments[number]
        where = self.root / "restored"
        (restored,) = restore(self.root / "backups", where, number=number)
        if (restored.version, restored.seq) != (report.version, report.seq):
            raise Wrong(f"backup {number} is {report}, and was restored as {restored}")
        with tierstore.open(where, fold_grace_s=self._rng.choice([0.0, 60.0]), **SETTINGS) as store:
            if (store.model(MODEL).log.last or 0) != report.seq:
                raise Wrong(f"backup {number} is of seq {report.seq}, and restored of {store.model(MODEL).log.last}")
            self._compare(number, store, known, during)
        shutil.rmtree(where)

    def _compare(self, number: int, store: tierstore.Store, known: Acknowledged, during: list[str]) -> None:
        reasons = []
        for end in range(len(during) + 1):
            moment = copy.deepcopy(known)
            moment.read(during[:end])
            if not self.whole:
                status = store.status()["models"][MODEL]
                moment.routing = Routing.of(status)
                moment.versions = {entry["version"]: entry["delta_seq"] for entry in status["versions"]}
                moment.before = [back for back in [status["rollback_to"]] if back is not None]
            try:
                return check(moment, store)
            except Wrong as error:
                reasons.append(f"after {moment.unfinished or during[end - 1 : end]}: {error}")
        raise Wrong(f"backup {number} is of no moment while it was made:\n" + "\n".join(reasons))


class CopyCheck(BackupCheck):
    """Checks copies that `cp -a` makes while the store works."""

    settings: ClassVar[dict[str, Any]] = SETTINGS
    whole = False

    def __init__(self, root: Path, seed: int) -> None:
        super().__init__(root, seed, keep=1)
        self.found: Counter[str] = Counter()

    def _backup(self, store: tierstore.Store) -> None:
        self._known.read(self._lines())
        before, command = copy.deepcopy(self._known), ["cp", "-a", str(store.root.root), str(self.root / "copy")]
        subprocess.run(command, stderr=subprocess.DEVNULL, check=False)  # a file is removed before it is read
        during = self._lines()
        self._known.read(during)
        self.backups += 1
        self._moments = {self.backups: (before, during, BackupReport(MODEL, None, 0, 0, 0, 0))}

    def _check(self, number: int) -> None:
        self._without_the_end = False
        self._open(number)
        if self._without_the_end:  # do what the problem says
            (self.root / f"copy/models/{MODEL}/log.end").unlink()
            self._open(number, "refused, then ")
        shutil.rmtree(self.root / "copy")

    def _open(self, number: int, how: str = "") -> None:
        known, during, _ = self._moments[number]
        with tierstore.open(self.root / "copy", fold_grace_s=60.0, **SETTINGS) as store:
            status = store.status(MODEL)["models"][MODEL]
            if (problem := store.model(MODEL).problem) is not None:
                if "was copied while a process had the original open" not in problem:
                    raise Wrong(f"copy {number} is refused without a word of why: {problem}")
                self.found[f"{how}refused"] += 1
                self._without_the_end = "at its end" in problem
            elif (
                status["damaged"]
                or any(version["problem"] for version in status["versions"])
                or self._kept_is_torn(store)
            ):
                self.found[f"{how}right, without a kept version"] += 1
            else:
                self._compare(number, store, known, during)
                self.found[f"{how}right"] += 1

    def _kept_is_torn(self, store: tierstore.Store) -> bool:
        """Whether `verify` finds versions damaged, all of which only are kept: who activates one of them is told."""
        torn = {int(why.split()[2].rstrip(":")) for why in store.verify().problems if " version " in why}
        return bool(torn) and not torn & set(store.model(MODEL).served.versions)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backups", type=int, default=200)
    parser.add_argument("--copies", type=int, help="check so many copies in place of backups")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="tierstore-backups-"))
    print(f"seed {options.seed}, under {root}", flush=True)
    test = BackupCheck(root, options.seed) if options.copies is None else CopyCheck(root, options.seed)
    wanted = options.backups if options.copies is None else options.copies
    while test.backups < wanted:
        test.life(min(BACKUPS_A_LIFE, wanted - test.backups))
        share = f"{test.new_bytes / max(1, test.bytes):.0%} of their bytes new"
        found = dict(test.found) if isinstance(test, CopyCheck) else share
        print(f"{test.backups} backups, {found}; {dict(test.done)}", flush=True)
    shutil.rmtree(root)
    print(
        "each has every row and seq of a moment while it was made"
        + ("" if options.copies is None else ", or is refused")
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
