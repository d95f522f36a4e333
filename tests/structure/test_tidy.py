"""The house is tidy: files that say what they are, short functions, no stray prints or markers, and pages whose commands exist."""

from __future__ import annotations

import ast
import io
import os
import re
import shutil
import subprocess
import sys
import tokenize
import tomllib
from pathlib import Path

import pytest

from tests.structure.trees import tree_of
from tierstore import kernels
from tools.make_client import made

ROOT = Path(__file__).parents[2]
FOLDERS = ("tierstore", "tests", "benchmarks", "tools", "examples")
LONGEST_FUNCTION = 60  # lines; of the package, but for kernels
MOST_PARAMETERS = 7  # of a function of the package, but for kernels, which take scalars; more are a record
# what users call, each parameter an option by its name, and what passes such options on
OPTIONS = {
    "cli/delta.delta", "cli/export.export", "cli/fleet.rollout", "cli/imports._imported", "cli/imports.import_",
    "cli/imports.import_hps", "cli/plan.plan", "cli/serve.serve", "cli/tokens.create", "cli/triton.triton_model",
    "client/base.__init__", "client/inference.exchange", "client/rollout.__init__", "client/rollout.rollout",
    "engine/reads/view.begin_on_device", "engine/reads/view.lookup_bags", "formats/snapshot/writer.table",
    "imports/columns.choose_columns", "imports/deltas.rows_delta", "imports/tables.import_table",
    "imports/tables.import_tables", "ingest/partitioned.write", "torch/export.write_snapshot",
    "torch/golden.write_golden", "torch/runs._add", "torch/touched.write_delta",
}  # fmt: skip
# made in one place or two of parts that have nothing else in common
OF_PARTS = {
    "engine/placements/cluster/model.__init__", "engine/placements/following/rows.__init__", "tiers/cluster/write.__init__",
}  # fmt: skip
MAY_PRINT = ("tierstore/cli", "tierstore/demo", "tools", "benchmarks")
MARKERS = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")

KERNELS = kernels.sources()
SOURCES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def shown(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def prints(source: str) -> list[int]:
    """Lines that call `print`."""
    if "print" not in source:
        return []
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    return [call.lineno for call in calls if isinstance(call.func, ast.Name) and call.func.id == "print"]


def markers(source: str) -> list[int]:
    """Lines whose comment carries a marker of unfinished work."""
    if not MARKERS.search(source):  # tokens take a hundred times as long
        return []
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return [token.start[0] for token in tokens if token.type == tokenize.COMMENT and MARKERS.search(token.string)]


def test_no_function_is_long() -> None:
    long = []
    for path in SOURCES:
        if not shown(path).startswith("tierstore/") or path in KERNELS:
            continue
        for node in ast.walk(tree_of(path)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                long += [f"{shown(path)}: {node.name}"] if lines > LONGEST_FUNCTION else []
    assert long == []


def is_compiled(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    names = {name for of in node.decorator_list for name in re.findall(r"\w+", ast.unparse(of))}
    return bool(names & {"njit", "compiled", "compiled_c", "emits"})


def parameters(tree: ast.Module) -> dict[str, int]:
    """How many parameters functions have that are no kernels, where they are many."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not is_compiled(node):
            every = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
            count = len([each for each in every if each.arg not in ("self", "cls")])
            if count > MOST_PARAMETERS:
                found[node.name] = count
    return found


def test_functions_with_many_parameters_are_those_that_have_a_reason() -> None:
    package = ROOT / "tierstore"
    many = {
        f"{path.relative_to(package).with_suffix('').as_posix()}.{name}"
        for path in sorted(package.rglob("*.py"))
        for name in parameters(tree_of(path))
    }
    assert many == OPTIONS | OF_PARTS


def test_the_rule_of_parameters() -> None:
    seven, eight = (", ".join("abcdefgh"[:count]) for count in (7, 8))
    sources = [
        f"def f({seven}): ...", f"def f(self, *, {seven}): ...", f"@nb.njit(nogil=True)\ndef f({eight}): ...",
        f"def f({eight}): ...", f"class C:\n async def g(self, *, {eight}): ...",
    ]  # fmt: skip
    assert [parameters(ast.parse(source)) for source in sources] == [{}, {}, {}, {"f": 8}, {"g": 8}]


def says_what_it_is(source: str) -> bool:
    """Whether a module begins with a docstring, by its first tokens."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    first = next(token for token in tokens if token.type not in (tokenize.COMMENT, tokenize.NL))
    return first.type == tokenize.STRING and bool(str(ast.literal_eval(first.string)).strip())


def test_every_module_says_what_it_is() -> None:
    texts = {shown(path): path.read_text(encoding="utf-8") for path in SOURCES}
    assert [name for name, text in texts.items() if text and not says_what_it_is(text)] == []


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ('# Of whom.\n\n"""What."""\n', True),
        ('import os\n"""What."""\n', False),
        ('""" """\n', False),
        ("# What.\n", False),
    ],
)
def test_the_rule_of_first_words(source: str, says: bool) -> None:
    assert says_what_it_is(source) is says


def riddles(tree: ast.Module) -> list[str]:
    """First words of docstrings that only somebody understands who has read what is around them."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = [ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, documented)]
    found = [docstring for docstring in docstrings if re.match(r"(Those|That|Of|Both in one|Its|Their)\b", docstring)]
    module = ast.get_docstring(tree) or ""  # a question is what its reader comes with
    return found + ([module] if re.match(r"(What|How|Whether|Which|Where|When|Why|Who)\b", module) else [])


def test_a_docstring_begins_with_what_the_thing_is() -> None:
    # a word changed in a kernel's file has every kernel compiled again
    library = [path for path in SOURCES if shown(path).startswith("tierstore/") and path not in KERNELS]
    assert {shown(path): found for path in library if (found := riddles(tree_of(path)))} == {}


@pytest.mark.parametrize(
    ("first", "found"), [("Those of one model.", True), ("Of a node.", True), ("The loads.", False)]
)
def test_the_rule_of_docstrings(first: str, found: bool) -> None:
    assert bool(riddles(ast.parse(f'def f():\n    """{first}"""\n'))) is found


def test_the_rule_of_first_lines_of_modules() -> None:
    assert riddles(ast.parse('"""What begins anew in a forked child."""'))
    assert not riddles(ast.parse('"""Resets objects in a forked child."""\ndef f():\n    """Whether it is one."""'))


def test_only_those_who_speak_to_a_person_print() -> None:
    library = [
        path for path in SOURCES if shown(path).startswith("tierstore/") and not shown(path).startswith(MAY_PRINT)
    ]
    assert {shown(path): lines for path in library if (lines := prints(path.read_text(encoding="utf-8")))} == {}


def test_nothing_is_left_for_later_in_a_comment() -> None:
    assert {shown(path): lines for path in SOURCES if (lines := markers(path.read_text(encoding="utf-8")))} == {}


def test_what_the_pages_tell_to_make_can_be_made() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, flags=re.MULTILINE))
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    asked = {
        page: set(re.findall(r"(?:^|`)make ([a-z-]+)\b(?=`|$| )", page.read_text(encoding="utf-8"), flags=re.MULTILINE))
        for page in pages
    }
    assert {shown(page): sorted(names - targets) for page, names in asked.items() if names - targets} == {}
    assert {"demo", "test", "check", "bench"} <= targets
    assert "test" in asked[ROOT / "README.md"], "the README says how to run the tests"


def test_the_blocking_client_is_made_of_the_awaited_one() -> None:
    for path, text in made().items():
        assert path.read_text(encoding="utf-8") == text, "python tools/make_client.py"


def test_kernels_that_copy_have_one_name_each_and_name_the_target_first() -> None:
    """Arguments the other way round write over the source, and no type tells two addresses apart."""
    copies: dict[str, list[list[str]]] = {}
    for path in KERNELS:
        for node in tree_of(path).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith(("copy_", "move_")):
                copies.setdefault(node.name, []).append([arg.arg for arg in node.args.args])
    assert {"copy_bytes", "move_bytes"} <= copies.keys()
    assert [name for name, made in copies.items() if len(made) > 1] == []
    for name, (args,) in copies.items():
        if "source" in args:
            assert set(args[: args.index("source")]) & {"target", "dest"}, f"{name}({', '.join(args)})"


def test_ci_runs_what_a_person_runs() -> None:
    script = ROOT / ".ci/run"
    assert script.stat().st_mode & 0o111, ".ci/run is executable"
    lines = script.read_text(encoding="utf-8").splitlines()
    assert "set -euo pipefail" in lines
    check = next(
        line.split()[1:]
        for line in (ROOT / "Makefile").read_text(encoding="utf-8").splitlines()
        if line.startswith("check:")
    )
    run = {word for line in lines if line.startswith("make --no-print-directory ") for word in line.split()[2:]}
    assert set(check) <= {word.removesuffix("-all") for word in run}


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_the_demo_installs_what_it_needs_and_the_tests_add_the_rest(tmp_path: Path) -> None:
    """As `make` says what it would do."""
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)

    def extras(target: str) -> list[str]:
        done = subprocess.run(["make", "-n", target], cwd=tmp_path, capture_output=True, text=True, check=True)
        return re.findall(r"-e '\.\[(\w+)\]'", done.stdout)

    assert (extras("demo"), extras("test")) == (["dense"], ["dev"])
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv/.installed-demo").touch()
    assert (extras("demo"), extras("test")) == ([], ["dev"])
    (tmp_path / ".venv/.installed").touch()
    assert (extras("demo"), extras("test")) == ([], [])
    os.utime(tmp_path / ".venv/.installed", (0, 0))
    assert extras("demo") == ["dev"], "what is there is brought up to date, and not made less"


def test_kernels_are_compiled_with_numba_alone() -> None:
    """The demo compiles them while pip installs the other packages."""
    program = (
        "import importlib, sys, tierstore.kernels.ahead as ahead\n"
        "for module in ahead.kernels.modules(): importlib.import_module(module)\n"
        "print(*{name.partition('.')[0] for name, module in sys.modules.items() if '/site-packages/' in (getattr(module, '__file__', '') or '')})"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    every = [*project["dependencies"], *(one for extra in project["optional-dependencies"].values() for one in extra)]
    ours = {re.match(r"[\w-]+", one)[0].replace("-", "_") for one in every}
    assert set(done.stdout.split()) & ours == {"numba", "numpy"}  # numba itself imports others where they are there


@pytest.mark.parametrize(
    ("source", "lines"), [("print(1)", [1]), ("x.print(1)", []), ("def f():\n    print()", [2]), ("'print(1)'", [])]
)
def test_the_rule_of_prints(source: str, lines: list[int]) -> None:
    assert prints(source) == lines


@pytest.mark.parametrize(("word", "found"), [("TO" + "DO", True), ("FIX" + "ME", True), ("method", False)])
def test_the_rule_of_markers(word: str, found: bool) -> None:
    assert bool(markers(f"x = 1  # {word}: later\n")) is found
    assert not markers(f"x = '# {word}'\n")
