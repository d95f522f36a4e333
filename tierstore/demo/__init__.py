"""An example that runs wherever tierstore is installed: a click model, trained on the spot and served under load.

No part of the store. `tierstore demo` calls `run`; docs/demo.md says what it does. To read it: `clicklog` makes the
events, `trainer` learns them, `shop` writes snapshots and deltas, `traffic` sends look-ups, `story` tells it in order.
"""

from __future__ import annotations

from tierstore.demo.report import DemoReport
from tierstore.demo.story import run

__all__ = ["DemoReport", "run"]
