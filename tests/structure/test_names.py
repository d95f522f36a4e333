"""One name, one thing: what is read by its bare name is defined in one module, and few modules share a name."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from tests.structure.trees import tree_of
from tierstore.kernels import PARTS

ROOT = Path(__file__).parents[2]
# whose functions are named as commands are, or by the module before them: numba finds a kernel's helpers as globals
OF_THEIR_OWN = ("tierstore.cli.", *(f"tierstore.{part}" for part in PARTS))
# a Protocol, and what has it: what one room needs of another one's class
NEEDED = {"Histogram", "PlanIndex"}
# one thing for each protocol, transport or tier, which no module has two of
ONE_OF_EACH = {
    "InferMessage", "PredictMessage", "ResponseLayout", "parse_request", "peek", "read_elements",
}  # fmt: skip
# options of look-ups in process, and of those over the network
TWINS = {"LookupOptions"}
ALLOWED = NEEDED | ONE_OF_EACH | TWINS
# Two modules may share a name: they are two sides of one thing (its settings, its compiled part, its twin over another
# protocol). More may where the package before the name says all that differs.
SHARED_MODULES = {
    "application": "an ASGI application: the whole service, the base of the data plane's, the admin interface",
    "calls": "gRPC calls: on the wire, in a reactor, in Python",
    "connections": "connections to, or of, what the package is about",
    "golden": "golden examples, on each floor that has a part in them",
    "layout": "how what the package is about lies in memory",
    "lookup": "look-ups in what the package is: a view, a tier, a cache",
    "memory": "the memory of what the package is about",
    "messages": "messages of the package's transport",
    "model": "a model as the package has it; in `triton` the backend wants this name",
    "parked": "parked messages: their files, what a person does with them, and the same over HTTP",
    "placement": "the protocol, and the one placement of its package",
    "predict": "predictions: a view's, and scanners of requests for them by encoding",
    "reader": "the reader of what the package is about",
    "rows": "rows of an open version: the protocol, and those of a placement; rows as Feast has them",
    "table": "one table of one version, in the package's tier",
    "writer": "the writer of what the package is about",
}


def module_of(path: Path, root: Path) -> str:
    name = ".".join(path.relative_to(root).with_suffix("").parts)
    return name.removesuffix(".__init__")


def paths() -> dict[str, Path]:
    return {module_of(path, ROOT): path for path in sorted((ROOT / "tierstore").rglob("*.py"))}


def trees() -> dict[str, ast.Module]:
    return {module: tree_of(path) for module, path in paths().items()}


@cache
def twice_here() -> dict[str, list[str]]:
    return twice(trees())


def twice(modules: dict[str, ast.Module]) -> dict[str, list[str]]:
    """Names of public classes, and of functions that others import bare, that more than one module defines."""
    bare = {
        (node.module, name.name)
        for tree in modules.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for name in node.names
        if name.asname is None
    }
    found: dict[str, list[str]] = defaultdict(list)
    for module, tree in modules.items():
        for node in tree.body:
            is_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
            if not (is_function or isinstance(node, ast.ClassDef)) or node.name.startswith("_"):
                continue
            if is_function and (module.startswith(OF_THEIR_OWN) or (module, node.name) not in bare):
                continue
            if module not in found[node.name]:  # overloads are one function
                found[node.name].append(module)
    return {name: places for name, places in sorted(found.items()) if len(places) > 1}


def test_no_public_name_has_two_meanings() -> None:
    """Rename one of them by what it is; one that is the same thing once more belongs to a list above."""
    assert {name: places for name, places in twice_here().items() if name not in ALLOWED} == {}


def test_what_is_allowed_is_there() -> None:
    assert ALLOWED - twice_here().keys() == set()


def shared_modules(modules: Iterable[str]) -> dict[str, list[str]]:
    """Last names of modules that three or more modules have. Commands are named as what they are about."""
    found: dict[str, list[str]] = defaultdict(list)
    for module in modules:
        if not module.startswith("tierstore.cli."):
            found[module.rpartition(".")[2]].append(module)
    return {name: places for name, places in sorted(found.items()) if len(places) > 2}


def test_few_modules_share_a_name() -> None:
    """Name the new one for what it is; or say above why its package's name is enough. A name that is shared no more goes."""
    names = [name for name, path in paths().items() if path.name != "__init__.py"]
    assert {name: places for name, places in shared_modules(names).items() if name not in SHARED_MODULES} == {}
    assert SHARED_MODULES.keys() - shared_modules(names).keys() == set()


def test_the_rule_of_module_names() -> None:
    modules = [*(f"tierstore.{room}.sources" for room in "abc"), "tierstore.a.plan", "tierstore.b.plan"]
    assert shared_modules([*modules, "tierstore.cli.plan"]) == {"sources": modules[:3]}


def test_the_rule_of_names() -> None:
    modules = {
        "tierstore.a": ast.parse("class Plan: ...\ndef load(): ...\ndef run(): ...\nclass _Own: ..."),
        "tierstore.b": ast.parse("class Plan: ...\ndef load(): ...\ndef run(): ...\nclass _Own: ..."),
        "tierstore.c": ast.parse("from tierstore.a import load, run\nfrom tierstore.b import load"),
    }
    assert twice(modules) == {"Plan": ["tierstore.a", "tierstore.b"], "load": ["tierstore.a", "tierstore.b"]}
