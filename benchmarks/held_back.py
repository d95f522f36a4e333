"""Deltas that hold small changes back: their bytes, and the AUC of what is served, on the click log of the demo.

    python -m benchmarks.held_back [--scale 1.0] [--tiny] [--json FILE]

The demo's trainer learns a day, whose rows are what a snapshot holds, and then minute by minute. After each minute every
contender writes its delta with `tierstore.torch.write_delta`; the delta is read back and applied to a copy of the rows, by
which the events after the last minute are scored, with the newest dense part. Bytes are those of the deltas' rows: a dense
part would be the same for all. Needs PyTorch: `make trainers`.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import report
from benchmarks.footprint import load
from benchmarks.machine import describe
from tierstore.demo.clicklog import ClickLog, Events, WorldSize, item_keys, user_keys
from tierstore.demo.scoring import auc
from tierstore.demo.trainer import Dense, Trainer
from tierstore.formats.delta.reader import read_delta

SEED = 7
NORMS = (0.0, 0.01, 0.03, 0.1, 0.2, 0.3, 0.5)


class Contender:
    """One way to choose rows: its deltas, and the rows that a service would have by them."""

    def __init__(self, name: str, net: Any, keys: dict[str, Any], hold_back: float | None) -> None:
        from tierstore.torch import TouchedRows

        self.name, self.hold_back, self._keys = name, hold_back, keys
        self._touched = TouchedRows(net, keys=keys, hold_back=hold_back)
        self._order = {table: np.argsort(values) for table, values in keys.items()}
        self.served = {table: net[table].weight.detach().numpy().copy() for table in keys}
        self.rows = self.bytes = self.seq = 0
        self.seconds = 0.0

    def write(self, folder: Path) -> None:
        from tierstore.torch import write_delta

        path, self.seq = folder / "delta.arrow", self.seq + 1
        began = time.perf_counter()
        self.rows += write_delta(path, self._touched, model="shop", seq=self.seq)
        self.seconds += time.perf_counter() - began
        self.bytes += path.stat().st_size
        for table, change in read_delta(path).tables.items():
            order = self._order[table]
            at = order[np.searchsorted(self._keys[table], change.keys, sorter=order)]
            self.served[table][at] = change.vectors

    def furthest(self, net: Any) -> float:
        """The largest distance (L2) of a served row from the trainer's."""
        return max(
            float(np.linalg.norm(net[table].weight.detach().numpy() - rows, axis=1).max())
            for table, rows in self.served.items()
        )


def scored(tables: dict[str, Any], dense: Dense, events: Events) -> float:
    """AUC of the events by rows and a dense part."""
    total = np.cumsum(tables["item"][events.history], axis=0, dtype=np.float64)
    total = np.vstack([np.zeros((1, total.shape[1])), total])
    counts = np.maximum(np.diff(events.starts), 1)[:, None]
    bags = ((total[events.starts[1:]] - total[events.starts[:-1]]) / counts).astype(np.float32)
    rows = tables["user"][events.users], tables["item"][events.items]
    return auc(dense.score(*rows, bags, events.context), events.clicked)


def measured(size: WorldSize) -> dict[str, Any]:
    import torch

    log, trainer = ClickLog(size, SEED), Trainer(size.users, size.all_items, SEED)
    for _ in range(size.day_slots):
        trainer.train(log.next_slot())
    trainer.pop_touched()
    net = torch.nn.ModuleDict(
        {  # over the trainer's own memory
            "user": torch.nn.Embedding.from_pretrained(torch.from_numpy(trainer.user)),
            "item": torch.nn.Embedding.from_pretrained(torch.from_numpy(trainer.item)),
        }
    )
    keys = {"user": user_keys(np.arange(size.users)), "item": item_keys(np.arange(size.all_items))}
    contenders = [Contender("touched rows", net, keys, None)]
    contenders += [Contender(f"hold_back={norm:g}", net, keys, norm) for norm in NORMS]
    daily = {table: net[table].weight.detach().numpy().copy() for table in keys}
    spread = {f"mean_norm_{table}": float(np.linalg.norm(rows, axis=1).mean()) for table, rows in daily.items()}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(size.minutes):
            trainer.remove(log.removed(log.slot))
            trainer.train(log.next_slot())
            for table, rows in zip(keys, trainer.pop_touched(), strict=True):
                net[table](torch.from_numpy(rows))  # a look-up, by which `TouchedRows` marks them
            for contender in contenders:
                contender.write(Path(folder))
    newest, dense = log.next_slot(), trainer.dense
    every = contenders[0].bytes
    results = [{"contender": "the day's rows alone", "rows": 0, "bytes": 0, "share_of_bytes": 0.0, "auc": scored(daily, dense, newest)}]  # fmt: skip
    for contender in contenders:
        furthest = contender.furthest(net)
        assert contender.hold_back is None or furthest <= contender.hold_back * (1 + 1e-5), "the promise is broken"
        results.append(
            {
                "contender": contender.name,
                "rows": contender.rows,
                "bytes": contender.bytes,
                "share_of_bytes": contender.bytes / every,
                "auc": scored(contender.served, dense, newest),
                "largest_held_back": None if contender.hold_back is None else furthest,
                "ms_a_delta": contender.seconds / size.minutes * 1e3,
            }
        )
    return {"users": size.users, "items": size.all_items, "deltas": size.minutes, **spread, "results": results}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=1.0, help="of tables and traffic; 1.0 is about a million rows")
    parser.add_argument("--minutes", type=int, default=30)
    parser.add_argument("--tiny", action="store_true", help="a few seconds, to see that it runs")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.tiny:
        args.scale, args.minutes = 0.01, 4
    document: dict[str, Any] = {"benchmark": "held_back", "machine": describe(), "load_before": load()}
    try:
        document |= measured(WorldSize.scaled(args.scale, args.minutes))
    except ImportError as error:
        document["skipped"] = [f"all of it: {error}; make trainers"]
    document["load_after"] = load()
    print(report.markdown(document))
    if args.json:
        report.write(args.json, document)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
