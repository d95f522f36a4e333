"""The index of decisions has each page once, with its day and its status."""

from __future__ import annotations

import re
from pathlib import Path

DECISIONS = Path(__file__).parents[2] / "docs/decisions"
LINE = re.compile(r"^\| \[([a-z0-9-]+)\]\(\1\.md\) \| [^|]+ \| \d{4}-\d\d-\d\d \| ([^|]+) \|$", re.MULTILINE)


def test_each_decision_is_in_the_index_with_its_day_and_status() -> None:
    listed = LINE.findall((DECISIONS / "README.md").read_text(encoding="utf-8"))
    assert sorted(name for name, _ in listed) == sorted(
        path.stem for path in DECISIONS.glob("*.md") if path.stem != "README"
    )
    for name, status in listed:
        assert "standing" in status or re.search(r"superseded by \[[a-z0-9-]+\]", status), name
