"""What reactors have answered, handed to Python and hold, as Prometheus families."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy.typing as npt
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from tierstore.kernels import reactor_words as kernel


def families(lines: npt.NDArray[Any], *, unfinished: int, unsent_bytes: int) -> Iterator[Metric]:
    """`lines` has a line of each reactor; `unfinished` requests have begun to arrive, `unsent_bytes` wait to be taken by clients."""
    answers = CounterMetricFamily(
        "tierstore_reactor_answers",
        "Requests that a reactor answered or refused without the interpreter.",
        labels=["reactor"],
    )
    handed = CounterMetricFamily(
        "tierstore_reactor_handed_on",
        "Requests and connections that it handed to Python, by the reason.",
        labels=["reactor", "reason"],
    )
    served = GaugeMetricFamily("tierstore_reactor_connections", "Connections that it serves.", labels=["reactor"])
    for number, line in enumerate(lines):
        answers.add_metric([str(number)], int(line["answers"]))
        for reason, name in enumerate(kernel.REASONS):
            handed.add_metric([str(number), name], int(line["reasons"][reason]))
        served.add_metric([str(number)], int(line["load"]))
    yield from (answers, handed, served)
    yield GaugeMetricFamily("tierstore_unfinished_requests", "Requests that have begun to arrive.", value=unfinished)
    yield GaugeMetricFamily(
        "tierstore_unsent_bytes",
        "Bytes of answers that clients have not taken yet.",
        value=unsent_bytes,
    )
