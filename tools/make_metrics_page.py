"""Write docs/metrics.md, the reference of all metrics.

python -m tools.make_metrics_page
"""

from __future__ import annotations

import logging
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prometheus_client.core import Metric

import tierstore
from tierstore.service.admin import metrics
from tierstore.service.server import ServerThread
from tierstore.service.sources import kafka_rows_status, kafka_status

PAGE = Path(__file__).parents[1] / "docs/metrics.md"
HEAD = """# Metrics

Every metric of a service. `GET /metrics` has them in Prometheus' text format; parts that a
service does not have (a GPU, an SSD cache, Kafka) have no metrics there. Beside these are those of the process and of Python
(`process_…`, `python_…`). [How to read them](http-api.md#metrics-get-metrics), [alerts](runbook.md). This page is made by
`python -m tools.make_metrics_page` from what a service registers.

| name | type | labels | |
|---|---|---|---|
"""
ANY = defaultdict(int, present=True, problem=None)  # of a status


def page() -> str:
    return HEAD + "".join(_row(family) for _, family in sorted(_families().items()))


def _row(family: Metric) -> str:
    name = family.name + {"counter": "_total", "info": "_info"}.get(family.type, "")
    labels = {*getattr(family, "_labelnames", ()), *(label for sample in family.samples for label in sample.labels)} - {
        "le"
    }
    return f"| `{name}` | {family.type} | {', '.join(f'`{label}`' for label in sorted(labels))} | {family.documentation} |\n"


def _families() -> dict[str, Metric]:
    """By name, of the service and of all parts that it can have."""
    with a_service() as server:
        found = list(metrics.Everything(server.service).collect())
    found += metrics.device_families(ANY)
    found += metrics.ssd_cache_families(ANY, {})
    found += kafka_status.families(kafka_status.KafkaStats("").status(parked=0))
    rows = kafka_rows_status.RowStats("")
    found += kafka_rows_status.row_families([(rows, rows.status(parked=0))])
    return {family.name: family for family in found}


@contextmanager
def a_service() -> Iterator[ServerThread]:
    """A service of an empty store that watches a directory and a location, listens for admins, and has a peer, which is away."""
    logging.getLogger("tierstore").addHandler(
        logging.NullHandler()
    )  # what it has to say of its peers is of no interest
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        for folder in ("deltas", "snapshots"):
            (root / folder).mkdir()
        settings = {
            "watch": root / "deltas", "watch_snapshots": [root / "snapshots"], "source_root": [root], "peer": ["http://127.0.0.1:9"],
            "admin_listen": f"unix:{root}/admin.sock",
        }  # fmt: skip
        with (
            tierstore.open(root / "data", port=0, host_budget="16MiB", **settings) as store,
            ServerThread(store) as server,
        ):
            yield server


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
