"""What reactors have answered, handed to Python and hold, as Prometheus families."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from prometheus_client.core import Metric

from tierstore.kernels import reactor_words as kernel
from tierstore.service.families import counters, gauge, gauges


def families(lines: npt.NDArray[np.int64], *, unfinished: int, unsent_bytes: int) -> Iterator[Metric]:
    """`lines` has a line of each reactor; `unfinished` requests have begun to arrive, `unsent_bytes` wait to be taken by clients."""
    of = [(str(number), line.tolist()) for number, line in enumerate(lines)]
    text = "Requests that a reactor answered or refused without the interpreter."
    yield counters("tierstore_reactor_answers", text, "reactor", {number: line[kernel.ANSWERS] for number, line in of})
    handed = [
        ((number, name), line[kernel.REASONS_FROM + reason])
        for number, line in of
        for reason, name in enumerate(kernel.REASONS)
    ]
    text = "Requests and connections that it handed to Python, by the reason."
    yield counters("tierstore_reactor_handed_on", text, "reactor reason", handed)
    loads = {number: line[kernel.LOAD] for number, line in of}
    yield gauges("tierstore_reactor_connections", "Connections that it serves.", "reactor", loads)
    yield gauge("tierstore_unfinished_requests", "Requests that have begun to arrive.", unfinished)
    yield gauge("tierstore_unsent_bytes", "Bytes of answers that clients have not taken yet.", unsent_bytes)
