"""The words of the code: names contain none that the glossary has put aside."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GLOSSARY = ROOT / "docs/glossary.md"
_PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
# Names that users rely on, or that a library asks for.
GIVEN_BY_OTHERS = {"figures", "tell"}


def put_aside() -> set[str]:
    """The words of the glossary's last table."""
    lines = GLOSSARY.read_text(encoding="utf-8").split("## Words that are not used")[1].splitlines()
    rows = [line.split("|")[1] for line in lines if line.startswith("|")]
    return {word.strip() for row in rows[2:] for word in row.split(",")}


def names_of(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """(name, line) of everything that a module defines or assigns."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name, node.lineno
            case ast.arg():
                yield node.arg, node.lineno
            case ast.Name(ctx=ast.Store()):
                yield node.id, node.lineno
            case ast.Attribute(ctx=ast.Store()):
                yield node.attr, node.lineno
            case ast.alias(asname=str(name)):
                yield name, node.lineno


def words_of(name: str) -> set[str]:
    return {part.lower() for part in _PART.findall(name)}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("rest_of", {"rest", "of"}),
        ("_RESTS_A_WORK", {"rests", "a", "work"}),
        ("RestingVersion", {"resting", "version"}),
        ("HTTPDoor", {"http", "door"}),
        ("restart", {"restart"}),
        ("interface", {"interface"}),
    ],
)
def test_a_name_is_taken_apart_into_words(name: str, words: set[str]) -> None:
    assert words_of(name) == words


def test_names_have_no_word_that_was_put_aside() -> None:
    words = put_aside()
    assert {"rest", "settle", "face"} <= words
    found = []
    for path in sorted((ROOT / "tierstore").rglob("*.py")):
        where = path.relative_to(ROOT)
        names = [(part, 0) for part in where.with_suffix("").parts[1:]]
        names += names_of(ast.parse(path.read_text(encoding="utf-8")))
        found += [
            f"{where}:{line}: {name}" for name, line in names if words_of(name) & words and name not in GIVEN_BY_OTHERS
        ]
    assert sorted(set(found)) == []
