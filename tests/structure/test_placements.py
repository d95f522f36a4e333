"""No branch outside `engine/placements/` asks where rows are, and what a placement does not do is in its one table."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Literal, get_args

import pytest

from tests.structure.trees import tree_of
from tierstore.engine.placement import Act, ModelVerbs, Refusals
from tierstore.engine.placements import refusals
from tierstore.errors import InvalidInput

PACKAGE = Path(__file__).parents[2] / "tierstore"
PLACEMENTS = PACKAGE / "engine/placements"

# The kinds of what reads rows: to ask which one an object is, is to ask where rows are.
KINDS = {"DiskTier", "SealedTier", "LocalRows", "RemoteRows", "LocalPlacement", "ClusterPlacement", "UpstreamPlacement"}
# Names of questions that there were, and of what they were answered by.
QUESTIONS = {"is_remote", "is_copy", "is_local", "open_remote", "fleet", "front"}


def asked(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, what) of each question where rows are."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id="isinstance"), args=[_, kinds]):
                named = {one.id for one in ast.walk(kinds) if isinstance(one, ast.Name)} & KINDS
                yield from ((node.lineno, f"isinstance {name}") for name in sorted(named))
            case ast.Attribute(attr=name) if name in QUESTIONS:
                yield node.lineno, name
            case ast.Compare(left=left, comparators=others):
                sides = [left, *others]
                if any(
                    isinstance(side, ast.Constant) and side.value in ("remote", "cluster", "upstream") for side in sides
                ):
                    yield node.lineno, "a comparison with the name of a placement"
                attributes = {side.attr for side in sides if isinstance(side, ast.Attribute)}
                if attributes & {"disk", "remote", "upstream"} and any(
                    isinstance(side, ast.Constant) and side.value is None for side in sides
                ):
                    yield node.lineno, f"{', '.join(sorted(attributes))} is None"
            case ast.ImportFrom(module=str(module)) if module.startswith("tierstore.engine.placements"):
                yield node.lineno, f"import of {module}"


# What is no branch: by file, why.
ALLOWED = {
    "engine/store.py": ["import of tierstore.engine.placements.choose"],
    "engine/versions/version.py": ["disk is None"],  # an assertion, for all that need files
    # settings that contradict each other, before there is a store
    "config/store.py": ["remote is None", "upstream is None"],
    "service/sources/kafka_routes.py": ["remote is None"],
    "service/sources/start.py": ["upstream is None"],
}


def test_nothing_outside_placements_asks_where_rows_are() -> None:
    found: dict[str, list[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        if (
            path.is_relative_to(PLACEMENTS)
            or path.is_relative_to(PACKAGE / "cli")
            or path.is_relative_to(PACKAGE / "client")
        ):
            continue  # the command line shows a document
        if whats := {what for _, what in asked(tree_of(path))}:
            found[path.relative_to(PACKAGE).as_posix()] = sorted(whats)
    assert found == ALLOWED


@pytest.mark.parametrize(
    ("source", "whats"),
    [
        ("if isinstance(version.disk, (DiskTier, int)): pass", ["isinstance DiskTier"]),
        ("if info.is_remote: pass", ["is_remote"]),
        ("x = store.fleet.ready", ["fleet"]),
        ("y = info.base == 'remote'", ["a comparison with the name of a placement"]),
        ("y = 1 if settings.remote is None else 2", ["remote is None"]),
        (
            "from tierstore.engine.placements.local.rows import LocalRows",
            ["import of tierstore.engine.placements.local.rows"],
        ),
        ("if placement.refusals.allow('catch_up'): pass", []),
        ("if x is None or isinstance(x, int): pass", []),
    ],
)
def test_the_rule_of_questions(source: str, whats: list[str]) -> None:
    assert [what for _, what in asked(ast.parse(source))] == whats


@cache
def said_of_acts() -> set[str]:
    """Acts that some code asks the table about."""
    texts = [path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")]
    calls = (node for text in texts if "refusals" in text for node in ast.walk(ast.parse(text)))
    return {
        str(call.args[0].value)
        for call in calls
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in ("allow", "check")
        and call.args and isinstance(call.args[0], ast.Constant)
    }  # fmt: skip


def test_every_act_of_the_table_is_asked_about() -> None:
    table, verbs = refusals.TABLE, {of.name for of in fields(ModelVerbs)}
    assert set(table) == set(get_args(Act))
    tasks = {"drop_surplus", "catch_up", "check_files"}  # of `lifecycle/tasks.py`, by name
    assert set(table) - verbs - tasks <= said_of_acts()
    assert said_of_acts() & set(get_args(Act)) <= set(table)


@pytest.mark.parametrize("name", get_args(refusals.Name))
def test_every_refusal_has_a_text_for_a_person(name: Literal["cluster", "upstream"]) -> None:
    column = Refusals(refusals.refusals_of(name), nodes="http://a:1")
    for act, refusal in refusals.refusals_of(name).items():
        with pytest.raises(refusal.error, match=r"^[^{}]{10,}$"):
            column.check(act, model="ctr", number=3)
        assert not column.allow(act)


def test_a_front_has_no_verb_and_this_machine_has_all() -> None:
    front = Refusals(refusals.refusals_of("upstream"), nodes="http://a:1").verbs("ctr")
    assert set(front) == {of.name for of in fields(ModelVerbs)} - {"leads"}
    with pytest.raises(InvalidInput, match=r"a switch is for the nodes .*rollout SNAPSHOT --nodes http://a:1"):
        front["activate"](3, force=False)
    assert set(Refusals(refusals.refusals_of("cluster")).verbs("ctr")) == {"label", "unlabel"}
