"""What it costs the service to learn a structure of requests: `python -m benchmarks.plan_learning [--tiny] [--json FILE]`.

The first request of a structure is planned by Python, and its plan is then written where reactors look (docs/decisions/reactor.md). Here
that writing is timed, in processor time of its thread, for structures that all are new: as many features as told, each of a table of its
own, rows as bytes over HTTP. From the 4,096th on, each takes the place of another.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import tierstore
from benchmarks.machine import describe
from benchmarks.options import parser_of
from benchmarks.report import headline, markdown, write
from tierstore.config import load_settings
from tierstore.engine.store import Store
from tierstore.kernels import reactor_words
from tierstore.kernels.plan_records import SETS, WAYS
from tierstore.service.dataplane.planner import make_plan
from tierstore.service.limits.rates import RateLimits
from tierstore.service.oip.json_request import parse_request
from tierstore.service.oip.json_response import ResponseLayout
from tierstore.service.reactor.lessons import HttpLesson
from tierstore.service.reactor.plan_index import LEARNED_A_SECOND, MOST_LEARNED, PlanIndex

FEATURES = (1, 4, 12, 26)
MARKED = 4  # features of the structure that the mark is for


def snapshot(where: Path) -> Path:
    with tierstore.SnapshotWriter(where, model="m", version=1) as writer:
        for i in range(max(FEATURES)):
            writer.table(f"t{i}", dim=16).write(np.arange(100), np.zeros((100, 16), np.float32))
            writer.feature(f"f{i}", table=f"t{i}")
    return where


def request(features: int) -> bytes:
    """The JSON of a request for three rows of each feature."""
    size = {"binary_data_size": 24}
    inputs = [{"name": f"f{i}", "datatype": "INT64", "shape": [3], "parameters": size} for i in range(features)]
    return json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()


class Learner:
    """An index of plans, and a clock by which it may always learn."""

    def __init__(self, store: Store) -> None:
        self._now_s = 0.0
        rates = RateLimits(store.settings)
        self._shared = reactor_words.SHARED.new()
        self.index = PlanIndex(store, rates, self._shared, 1, lambda *_: None, lambda: self._now_s)
        self._store = store

    def took_us(self, features: int, structures: int) -> np.ndarray[Any, Any]:
        """Microseconds of processor time for each of so many new structures."""
        text, took = request(features), np.zeros(structures)
        publisher = self._store.model("m").publisher
        publisher.publish_words()  # as for compiled readers
        view = publisher.served.active
        parsed = parse_request(memoryview(text), 24 * features)
        plan = make_plan(view, parsed.request)
        layout = ResponseLayout(parsed, "m", plan)
        for i in range(structures):
            self._now_s += MOST_LEARNED / LEARNED_A_SECOND
            lesson = HttpLesson("m", None, memoryview(text), parsed, layout)
            lesson.path += b"/%d/%d" % (features, i)  # what makes it another one
            began = time.thread_time_ns()
            self.index.learn("m", view, None, plan, lesson)
            took[i] = (time.thread_time_ns() - began) / 1e3
        return took


def main() -> None:
    args = parser_of(__file__, __doc__, "tiny", structures=6000).parse_args()
    structures = 50 if args.tiny else args.structures
    results = []
    with tempfile.TemporaryDirectory(prefix="plan-learning-") as where:
        settings = load_settings(None, data=Path(where) / "data")
        with Store(settings) as store:
            store.load_snapshot(snapshot(Path(where) / "m-1"))
            for features in FEATURES:
                learner = Learner(store)
                took = learner.took_us(features, structures)
                if len(learner.index) < 0.9 * min(structures, SETS * WAYS):
                    raise RuntimeError(f"of {structures} structures {len(learner.index)} were learned")
                middle, late = np.quantile(took, [0.5, 0.99])
                results.append({"features": features, "p50_us": middle, "p99_us": late, "structures": structures})
    at = next(row["p50_us"] for row in results if row["features"] == MARKED)
    document = {
        "benchmark": "plan_learning",
        "machine": describe(),
        "headlines": [headline(f"a new structure of {MARKED} features learned", "", at, at_most=100, unit="µs")],
        "results": results,
    }
    print(markdown(document))
    write(args.json, document)


if __name__ == "__main__":
    main()
