"""README's figures: each stands on the page of benchmarks, and no cell holds several."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
NUMBER = re.compile(r"\d(?:[\d.,]*\d)?")


def rows(page: str) -> list[list[str]]:
    """Cells of each row of the tables under a page's heading "Figures"."""
    section = re.split(r"^## .*[Ff]igures$", page, flags=re.MULTILINE)[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|") and not line.startswith("|---")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def test_figures_of_readme_stand_on_the_page_of_benchmarks() -> None:
    readme, page = ((ROOT / path).read_text(encoding="utf-8") for path in ("README.md", "docs/benchmarks.md"))
    known = set(NUMBER.findall(page))
    told = {number for row in rows(readme) for number in NUMBER.findall(" ".join(row))}
    assert told, "expected tables under README's heading Figures"
    assert sorted(told - known) == []


def test_a_cell_of_readmes_figures_has_one_number() -> None:
    cells = [row[-2] for row in rows((ROOT / "README.md").read_text(encoding="utf-8"))]
    assert [cell for cell in cells if len(NUMBER.findall(cell)) > 1] == []
