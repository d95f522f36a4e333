"""Metrics of reactors, as Prometheus families: what they have answered, handed to Python, and hold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy.typing as npt
from prometheus_client.core import Metric

from tierstore.reactor import layout as kernel
from tierstore.service.families import counters, gauge, gauges


def families(lines: npt.NDArray[Any], *, unfinished: int, unsent_bytes: int) -> Iterator[Metric]:
    """`lines` has a line of each reactor; `unfinished` requests have begun to arrive, `unsent_bytes` wait for
    clients to read them.
    """
    text = "Requests that a reactor answered or refused without the interpreter."
    answers = {str(number): int(line["answers"]) for number, line in enumerate(lines)}
    yield counters("tierstore_reactor_answers", text, "reactor", answers)
    handed = [
        ((str(number), name), count)
        for number, line in enumerate(lines)
        for name, count in zip(kernel.REASONS, line["reasons"].tolist(), strict=True)
    ]
    text = "Requests and connections that a reactor handed to Python, by the reason."
    yield counters("tierstore_reactor_handed_on", text, "reactor reason", handed)
    loads = {str(number): int(line["load"]) for number, line in enumerate(lines)}
    yield gauges("tierstore_reactor_connections", "Connections that a reactor serves.", "reactor", loads)
    yield gauge("tierstore_unfinished_requests", "Requests that have begun to arrive.", unfinished)
    yield gauge("tierstore_unsent_bytes", "Bytes of answers that clients have not read yet.", unsent_bytes)
