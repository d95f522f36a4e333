"""The walk through the code: numbered steps, and every file and function that they name is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WALK = (ROOT / "docs/walk.md").read_text(encoding="utf-8")
NAMED = re.findall(r"`(tierstore/[\w/]+\.py)`,\s+`([\w.]+)`", WALK)


def names_in(path: Path) -> set[str]:
    """Functions, classes and methods (`Class.method`) of a module."""
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {
                f"{node.name}.{one.name}"
                for one in node.body
                if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef))
            }
    return names


@pytest.mark.parametrize(("file", "name"), NAMED)
def test_what_a_step_names_is_there(file: str, name: str) -> None:
    assert name in names_in(ROOT / file)


def test_each_step_of_a_walk_names_a_function() -> None:
    walks = WALK.split("\n## ")[1:]
    assert len(walks) == 3
    for walk in walks:
        steps = re.split(r"\n(?=\d+\. )", walk)[1:]
        assert [int(step.split(".")[0]) for step in steps] == list(range(1, len(steps) + 1))
        assert all(re.search(r"`tierstore/[\w/]+\.py`, `[\w.]+`", step) for step in steps)
