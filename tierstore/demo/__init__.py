"""The whole story in a minute: a click model trained on the spot, served by a real service under load.

`run` is what `tierstore demo` calls; see `docs/demo.md` for what it does and how the data come about.
"""

from __future__ import annotations

from tierstore.demo.report import DemoReport
from tierstore.demo.story import run

__all__ = ["DemoReport", "run"]
