"""How often the service's threads give way to each other.

For the process that serves, once at its start: a library that is embedded leaves this to its host.
"""

from __future__ import annotations

import sys

SWITCH_S = 0.0002


def share_interpreter() -> None:
    """Have a thread that computes in Python give way after 0.2 ms instead of CPython's 5 ms.

    A prediction leaves the interpreter for every look-up and for ONNX Runtime, and must come back after each: twenty
    times in a row it would wait its 5 ms while a version is opened or a delta read. See docs/decisions/dense-predictor.md.
    """
    sys.setswitchinterval(SWITCH_S)
