"""The command line: what it starts, prints, refuses and returns, on a data directory and through a service."""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
import typer.main

import tierstore
from tests.formats.test_directories import as_spark
from tests.imports.test_hps import hps
from tierstore.cli import main
from tierstore.cli.app import app
from tierstore.cli.progress import shown_progress
from tierstore.config import ENV_PREFIX
from tierstore.engine.store import Store
from tierstore.predict import runtime
from tierstore.service.server import ServerThread, has_grpc
from tierstore.types import Progress

ROOT = Path(__file__).parents[1]
ROWS, DIM = 300, 8
SMALL = {"host_budget": "4MiB", "load_workers": 1, "disk_threads": 2, "fold_grace_s": 0.0}
COMMANDS = {
    "serve",
    "import",
    "import-hps",
    "compile",
    "load",
    "build",
    "delta",
    "activate",
    "rollback",
    "canary",
    "promote",
    "withdraw",
    "label",
    "drop",
    "lookup",
    "status",
    "verify",
    "demo",
}


def row(stamp: int, key: int) -> list[float]:
    return [stamp + key / 8] * DIM


def write_snapshot(root: Path, version: int) -> Path:
    where = root / f"ctr-{version}"
    keys = np.arange(ROWS)
    with tierstore.SnapshotWriter(where, model="ctr", version=version, delta_seq=10) as snapshot:
        vectors = np.array([row(version, key) for key in keys.tolist()], np.float32)
        snapshot.table("item", dim=DIM).write(keys, vectors)
        snapshot.table("word", dim=2, key="string").write(["a", "b"], np.ones((2, 2), np.float32))
        snapshot.feature("item_id", table="item")
        snapshot.feature("clicked", table="item", combiner="mean")
        snapshot.feature("query", table="word")
    return where


def write_delta(root: Path, seq: int, key: int) -> Path:
    where = root / f"{seq}.arrow"
    with tierstore.DeltaWriter(where, model="ctr", seq=seq, event_time=datetime.now(UTC)) as delta:
        delta.upsert("item", np.array([key]), np.array([row(seq, key)], np.float32))
    return where


@dataclass
class Run:
    code: int
    out: str
    err: str

    @property
    def document(self) -> dict:
        return json.loads(self.out)


Cli = Callable[..., Run]


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Cli:
    """Run a command in this process, in tmp_path, with no setting but small budgets."""
    for name in list(os.environ):
        if name.upper().startswith(ENV_PREFIX):
            monkeypatch.delenv(name)
    for name, value in SMALL.items():
        monkeypatch.setenv(ENV_PREFIX + name.upper(), str(value))
    monkeypatch.chdir(tmp_path)

    def run(*words: object) -> Run:
        monkeypatch.setattr(sys, "argv", ["tierstore", *map(str, words)])
        capfd.readouterr()
        level, handlers = logging.root.level, logging.root.handlers[:]
        with pytest.raises(SystemExit) as ended:
            main()
        logging.root.setLevel(level)  # `serve` sets up a log for its process
        logging.root.handlers[:] = handlers
        out, err = capfd.readouterr()
        return Run(int(ended.value.code or 0), out, err)

    return run


@pytest.fixture(params=["data", "url"])
def place(request: pytest.FixtureRequest, tmp_path: Path, cli: Cli) -> Iterator[list[str]]:
    """The options that say where: a data directory, or a service that holds one open."""
    if request.param == "data":
        yield ["--data", str(tmp_path / "data")]
        return
    with (
        tierstore.open(tmp_path / "data", port=0, source_root=[tmp_path], **SMALL) as store,
        ServerThread(store) as server,
    ):
        yield ["--url", server.url]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """A store with version 1, for what changes nothing; held open, so that it is reached by its service alone."""
    root = tmp_path_factory.mktemp("loaded")
    with tierstore.open(root / "data", port=0, source_root=[root], **SMALL) as store:
        store.load_snapshot(write_snapshot(root, 1))
        yield store


# --- start-up


def python(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, cwd=ROOT, check=False, timeout=60)


@pytest.mark.parametrize("words", [["--help"], ["load", "--help"], ["--version"]])
def test_help_loads_neither_the_store_nor_the_service(words: list[str]) -> None:
    done = python("-X", "importtime", "-m", "tierstore", *words)
    assert done.returncode == 0
    loaded = {line.rpartition("|")[2].strip().split(".")[0] for line in done.stderr.splitlines()}
    assert "typer" in loaded, "the check reads the list of modules right"
    assert loaded & {"numpy", "numba", "rocksdict", "pyarrow", "fastapi", "uvicorn", "httpx"} == set()


def test_it_says_its_version() -> None:
    assert python("-m", "tierstore", "--version").stdout == f"tierstore {tierstore.__version__}\n"


def test_help_of_serve_lists_every_setting(cli: Cli) -> None:
    text = cli("serve", "--help").out
    assert [name for name in tierstore.config.Settings.model_fields if f"  {name} " not in text] == []


def test_every_command_is_on_its_page() -> None:
    assert set(typer.main.get_command(app).commands) == COMMANDS
    page = (ROOT / "docs/cli.md").read_text(encoding="utf-8")
    assert [name for name in sorted(COMMANDS) if f"## `tierstore {name}" not in page] == []


def shown_commands() -> list[str]:
    """Command lines in the fenced blocks of the README and the docs."""
    lines = []
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for language, block in re.findall(
            r"^```(\w*)\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE
        ):
            if language in ("", "sh", "bash", "console"):
                lines += re.findall(r"^(?:\$ )?(tierstore .*?)(?:\s+&|\s+#.*|\s+\|.*)?$", block, flags=re.MULTILINE)
    return lines


def test_commands_shown_in_the_docs_exist_with_their_options() -> None:
    lines = shown_commands()
    assert len(lines) > 10
    known = typer.main.get_command(app).commands
    for line in lines:
        _, *words = shlex.split(line)
        if words[0].startswith("--"):
            continue
        assert words[0] in known, line
        options = {option for parameter in known[words[0]].params for option in parameter.opts} | {"--help"}
        assert {word.split("=")[0] for word in words if word.startswith("--") and word != "--"} <= options, line


# --- what goes wrong


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["statsu"], "No such command"),
        (["load"], "SNAPSHOT"),
        (["status", "--data", "d", "--url", "http://x"], "not both"),
        (["delta", "missing.arrow"], "missing.arrow"),
        (["activate", "ctr", "new"], "VERSION"),
        (["demo", "--seconds", "-1"], "--seconds"),
        (["serve", "--port", "99999"], "port"),
        (["serve", "--host-budget", "much"], "host_budget"),
        (["serve", "--config", "missing.toml"], "missing.toml"),
        (["serve", "--host", "0.0.0.0"], "allow_open_network"),
        (["status", "--url", "host:8000"], "http://127.0.0.1:8000"),
    ],
)
def test_wrong_use_says_what_is_wrong_with_it(cli: Cli, words: list[str], says: str) -> None:
    run = cli(*words)
    assert run.code in (1, 2)
    assert says in run.err
    assert "Traceback" not in run.err
    assert run.out == ""


def test_wrong_use_and_bad_settings_exit_with_2(cli: Cli) -> None:
    assert [cli(*words).code for words in (["statsu"], ["load"], ["serve", "--port", "99999"])] == [2, 2, 2]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["status"], "no data directory at data"),
        (["lookup", "ctr", "item_id", "1"], "--url"),
        (["verify"], "no data directory"),
        (["load", "nowhere"], "nowhere"),
        (["status", "--url", "http://127.0.0.1:1"], "no service answers"),
    ],
)
def test_an_error_is_one_line_and_exits_with_1(cli: Cli, words: list[str], says: str) -> None:
    run = cli(*words)
    assert (run.code, run.out) == (1, "")
    errors = [line for line in run.err.splitlines() if line.startswith("tierstore: ")]
    assert len(errors) == 1
    assert says in errors[0]
    assert "Traceback" not in run.err


def test_an_unknown_variable_is_an_error(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERSTORE_HOST_BUDGTE", "1GiB")
    run = cli("load", "x")
    assert run.code == 2
    assert "TIERSTORE_HOST_BUDGTE" in run.err


def test_the_service_may_be_named_by_a_variable(cli: Cli, loaded: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    with ServerThread(loaded) as server:
        monkeypatch.setenv("TIERSTORE_URL", server.url)
        assert cli("status", "--json").document["models"]["ctr"]["active_version"] == 1
        here = cli("status", "--data", "nowhere")
        assert (here.code, "no data directory at nowhere" in here.err) == (1, True), "a flag wins over it"


def test_a_directory_that_is_held_open_names_url(cli: Cli, loaded: Store) -> None:
    for words in (["status"], ["load", loaded.root.root.parent / "ctr-1"], ["verify"]):
        run = cli(*words, "--data", loaded.root.root)
        assert run.code == 1
        assert "--url" in run.err
        assert len(run.err.splitlines()) == 1


# --- the whole story, at both places


def test_versions_and_deltas_from_load_to_drop(cli: Cli, tmp_path: Path, place: list[str]) -> None:
    def looked_up(key: int) -> list[float]:
        return cli("lookup", "ctr", "item_id", key, *place, "--json").document["rows"][0]["row"]

    loaded = cli("load", write_snapshot(tmp_path, 1), *place)
    assert loaded.code == 0, loaded.err
    assert loaded.out.startswith("version 1 is loaded and active")
    assert loaded.err.startswith("load: "), "progress is told where there is no terminal, too"
    assert looked_up(7) == row(1, 7)

    files = [write_delta(tmp_path, seq, seq) for seq in (11, 12)]
    assert cli("delta", *files, *place).out.splitlines() == ["ctr delta 11 is applied", "ctr delta 12 is applied"]
    assert cli("delta", files[1], *place, "--json").document == [{"model": "ctr", "seq": 12, "applied": False}]
    assert looked_up(12) == row(12, 12)

    gap = cli("delta", write_delta(tmp_path, 14, 14), *place, "--json")
    assert (gap.code, gap.document) == (1, [])
    assert "13" in gap.err

    second = cli("load", write_snapshot(tmp_path, 2), "--no-activate", *place, "--json").document
    assert (second["version"], second["active"]) == (2, False)
    assert looked_up(7) == row(1, 7)
    assert cli("activate", "ctr", 2, *place).out == "ctr serves version 2\n"
    assert looked_up(7) == row(2, 7)
    assert looked_up(12) == row(12, 12), "caught up with the deltas"

    active = cli("drop", "ctr", 2, *place)
    assert active.code == 1
    assert "active" in active.err
    assert cli("rollback", "ctr", *place, "--json").document == {"model": "ctr", "active_version": 1}
    assert looked_up(7) == row(1, 7)
    assert cli("drop", "ctr", 2, *place).code == 0

    document = cli("status", *place, "--json").document
    assert list(document["models"]) == ["ctr"]
    model = cli("status", "ctr", *place, "--json").document["models"]["ctr"]
    assert (model["active_version"], model["watermark"]) == (1, 12)
    assert [(v["version"], v["state"]) for v in model["versions"]] == [(1, "active")]
    assert model["tables"]["item"]["rows"] == ROWS
    assert {"lookup_keys", "tier_bytes", "tier_budget_bytes"} <= model["tables"]["item"].keys()


def test_a_directory_of_parquet_is_served_by_one_command(cli: Cli, tmp_path: Path, place: list[str]) -> None:
    as_spark(tmp_path / "items")
    where = ["items", "--model", "ctr", "--table", "item", "--key", "item_id", "--vector", "embedding"]
    done = cli("import", *where, "--feature", "clicked", "--combiner", "mean", *place)
    assert re.fullmatch(r"ctr version \d{14} is active: 100 rows of item \(.*\)\n", done.out), done.err
    rows = cli("lookup", "ctr", "clicked", 7, 8, *place, "--json").document["rows"]
    assert rows == [
        {"key": 7, "found": True, "row": [0.5, 0.625, 0.75, 0.875]},
        {"key": 8, "found": False, "row": [0, 0, 0, 0]},
    ]
    wrong = cli("import", "items", "--model", "ctr", "--table", "item", *place)
    assert wrong.code == 1
    assert "there is no one column 'key' for keys; there are item_id (int64)" in wrong.err
    assert sorted(path.name for path in tmp_path.iterdir()) in (["data", "items"], ["items"]), "nothing is left of it"


def test_tables_named_in_a_file_and_a_snapshot_for_later(cli: Cli, tmp_path: Path, place: list[str]) -> None:
    as_spark(tmp_path / "items")
    tables = '[tables.item]\npath = "items"\nkey = "item_id"\nvector = "embedding"\n'
    (tmp_path / "tables.toml").write_text(f'model = "ctr"\nversion = 5\n{tables}')
    done = cli("import", "tables.toml", "--out", "s", "--json").document
    assert (done["version"], done["rows"], done["active"], done["snapshot"]) == (5, {"item": 100}, False, "s")
    assert cli("load", "s", *place).code == 0
    assert cli("lookup", "ctr", "item", 7, *place, "--json").document["rows"][0]["row"] == [0.5, 0.625, 0.75, 0.875]


def test_a_configuration_of_hps_is_served_by_one_command(cli: Cli, tmp_path: Path, place: list[str]) -> None:
    done = cli("import-hps", hps(tmp_path), *place, "--json")
    assert done.code == 0, done.err
    assert done.document["rows"] == {"sparse_embedding1": 5, "sparse_embedding2": 5}
    rows = cli("lookup", "wdl", "sparse_embedding1", 4, 99, *place, "--json").document["rows"]
    assert [row["row"] for row in rows] == [[12, 13, 14], [1, 1, 1]], "its defaults are the tables'"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["import", "items", "--model", "ctr"], "--table"),
        (["import", "items", "--table", "item"], "--model"),
        (["import", "nowhere", "--model", "ctr", "--table", "item"], "nowhere"),
        (["import", "tables.toml", "--table", "item"], "names the tables"),
        (["import-hps", "ps.json", "--model", "nobody"], "names no model 'nobody'"),
    ],
)
def test_an_import_that_is_not_all_said(cli: Cli, tmp_path: Path, words: list[str], says: str) -> None:
    as_spark(tmp_path / "items")
    hps(tmp_path)
    (tmp_path / "tables.toml").write_text('[tables.item]\npath = "items"\n')
    run = cli(*words)
    assert run.code == 2
    assert says in run.err


def test_a_dense_part_that_is_not_served_is_told(
    cli: Cli, tmp_path: Path, place: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "missing_extra", lambda: "install tierstore[dense] (no onnx)")
    where = write_snapshot(tmp_path, 1)
    document = json.loads((where / "snapshot.json").read_text())
    (where / "model.onnx").write_bytes(b"onnx")
    (where / "snapshot.json").write_text(json.dumps({**document, "dense": {"path": "model.onnx"}}))
    done = cli("load", where, *place)
    assert (done.code, "is loaded and active" in done.out) == (0, True)
    assert "ctr version 1: the dense part is kept, not served: install tierstore[dense]" in done.err


def test_a_canary_from_its_first_share_to_its_promotion(cli: Cli, tmp_path: Path, place: list[str]) -> None:
    for version in (1, 2):
        activate = [] if version == 1 else ["--no-activate"]
        assert cli("load", write_snapshot(tmp_path, version), *activate, *place).code == 0
    begun = cli("canary", "ctr", 2, "--share", "12.5%", *place)
    assert begun.out == "ctr serves version 2 as canary, to 12.5% of the requests\n", begun.err
    shared = cli("canary", "ctr", 2, "--share", "1", *place, "--json").document
    assert shared == {"model": "ctr", "canary": {"version": 2, "share": 1.0}}
    assert cli("lookup", "ctr", "item_id", 7, *place, "--json").document["rows"][0]["row"] == row(2, 7)
    assert cli("label", "ctr", "trial", 2, *place).out == "ctr label trial stands for version 2\n"
    text = cli("status", "ctr", *place).out
    assert "canary 2 gets 100% of the requests" in text
    assert "canary, trial" in text
    served = cli("drop", "ctr", 2, *place)
    assert served.code == 1
    assert "is the canary" in served.err
    assert cli("withdraw", "ctr", *place, "--json").document == {"model": "ctr", "withdrawn": 2}
    refused = cli("label", "ctr", "trial", 2, *place)
    assert refused.code == 1
    assert "may only point to what is served" in refused.err
    assert cli("canary", "ctr", 2, *place).out.endswith("to 5% of the requests\n")
    assert cli("promote", "ctr", *place).out == "ctr serves version 2\n"
    assert cli("label", "ctr", "holdout", 2, *place).code == 0
    assert cli("label", "ctr", "holdout", "--remove", *place).out == "ctr label holdout is removed\n"
    model = cli("status", "ctr", *place, "--json").document["models"]["ctr"]
    assert (model["active_version"], model["canary"], model["labels"]) == (2, None, {"stable": 2})
    again = cli("promote", "ctr", *place)
    assert again.code == 1
    assert "has no canary" in again.err


@pytest.mark.parametrize("share", ["105%", "-1", "half", "%", "nan"])
def test_a_share_that_is_none_is_used_wrongly(cli: Cli, share: str) -> None:
    assert cli("canary", "ctr", 2, f"--share={share}").code == 2


def test_rows_and_status_for_a_person(cli: Cli, tmp_path: Path, place: list[str]) -> None:
    assert cli("load", write_snapshot(tmp_path, 1), *place).code == 0
    lines = cli("lookup", "ctr", "item_id", "3", "0x10", "999", *place).out.splitlines()
    assert lines[0].split() == ["key", "found", "row", f"({DIM}", "numbers)"]
    assert [line.split()[:2] for line in lines[1:]] == [["3", "yes"], ["16", "yes"], ["999", "no"]]
    assert all(line.rstrip().endswith("…") for line in lines[1:]), "long rows are cut"
    negative = cli("lookup", "ctr", "item_id", *place, "--json", "--", "-1").document
    assert negative["rows"] == [{"key": -1, "found": False, "row": [0.0] * DIM}]
    words = cli("lookup", "ctr", "query", "a", "zz", *place, "--json").document["rows"]
    assert words == [{"key": "a", "found": True, "row": [1.0, 1.0]}, {"key": "zz", "found": False, "row": [0.0, 0.0]}]
    text = cli("status", *place).out
    for part in ("ctr", "version 1", "watermark 10", "active", "item", f"{ROWS:,}", "host"):
        assert part in text


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["lookup", "ctr", "nothing", "1"], 1, "clicked, item_id, query"),
        (["lookup", "nobody", "item_id", "1"], 1, "nobody"),
        (["lookup", "ctr", "item_id", "x"], 2, "expected numbers, came 'x'"),
        (["activate", "ctr", "9"], 1, "no version 9"),
        (["rollback", "ctr"], 1, "roll back"),
        (["status", "nobody"], 1, "nobody"),
    ],
)
def test_what_is_not_there_is_named(cli: Cli, loaded: Store, words: list[str], code: int, says: str) -> None:
    with ServerThread(loaded) as server:
        run = cli(*words, "--url", server.url)
    assert run.code == code
    assert says in run.err


def test_what_is_not_there_is_named_in_a_directory_too(cli: Cli, tmp_path: Path) -> None:
    cli("load", write_snapshot(tmp_path, 1))
    assert "clicked, item_id, query" in cli("lookup", "ctr", "nothing", "1").err
    assert "nobody" in cli("lookup", "nobody", "item_id", "1").err
    assert "no version 9" in cli("activate", "ctr", "9").err


def test_a_bad_snapshot_is_refused_and_leaves_what_serves(cli: Cli, tmp_path: Path, place: list[str]) -> None:
    cli("load", write_snapshot(tmp_path, 1), *place)
    bad = write_snapshot(tmp_path, 2)
    shard = next((bad / "item").iterdir())
    shard.write_bytes(shard.read_bytes()[:-100])
    run = cli("load", bad, *place)
    assert run.code == 1
    assert shard.name in run.err
    assert cli("status", *place, "--json").document["models"]["ctr"]["active_version"] == 1


# --- verify


def test_verify_reads_everything_back(cli: Cli, tmp_path: Path) -> None:
    cli("load", write_snapshot(tmp_path, 1))
    cli("delta", write_delta(tmp_path, 11, 3))
    run = cli("verify")
    assert run.code == 0, run.err
    assert run.out.endswith("all is well\n")
    document = cli("verify", "--json").document
    assert document["ok"]
    assert document["rows"] >= ROWS


def test_verify_finds_a_flipped_bit_and_exits_with_1(cli: Cli, tmp_path: Path) -> None:
    cli("load", write_snapshot(tmp_path, 1))
    largest = max((tmp_path / "data").rglob("*.sst"), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 4] ^= 1
    largest.write_bytes(content)
    run = cli("verify", "--json")
    assert run.code == 1
    assert not run.document["ok"]
    assert run.document["problems"]


# --- progress


def test_progress_in_lines_says_each_phase_once_in_a_while(capfd: pytest.CaptureFixture[str]) -> None:
    with shown_progress("load") as report:
        for done in range(100):
            report(Progress("read", done, 100))
        report(Progress("warm"))
    assert capfd.readouterr().err.splitlines() == ["load: read 0 of 100", "load: warm"]


def test_progress_on_a_terminal_is_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = os.openpty()
    shown = bytearray()

    def read() -> None:
        while True:
            try:
                part = os.read(ours, 4096)
            except OSError:  # how a terminal says that its other end was closed
                return
            if not part:
                return
            shown.extend(part)

    reader = threading.Thread(target=read)
    reader.start()
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        monkeypatch.setenv("TERM", "xterm-256color")
        with shown_progress("load") as report:
            report(Progress("read", 50, 100))
    reader.join(10)
    os.close(ours)
    assert b"load: read" in shown
    assert b"50/100" in shown


# --- serve


def test_serve_says_where_it_listens_and_ends_in_order(tmp_path: Path) -> None:
    snapshot = write_snapshot(tmp_path, 1)
    (tmp_path / "tierstore.toml").write_text('host_budget = "4MiB"\nload_workers = 1\nport = 1\n')
    environment = {name: value for name, value in os.environ.items() if not name.upper().startswith(ENV_PREFIX)}
    environment |= {"TIERSTORE_PORT": "2", "TIERSTORE_DRAIN_S": "0", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tierstore", "serve", "--port", "0", "--data", "d"]
    with (tmp_path / "err").open("w") as err:
        service = subprocess.Popen(
            command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=err, text=True
        )
    try:
        assert service.stdout is not None
        line = service.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:\d+", line)
        assert found, (line, (tmp_path / "err").read_text())
        if has_grpc():
            assert re.fullmatch(r"gRPC at 127\.0\.0\.1:\d+\n", service.stdout.readline())
        with tierstore.Client(found.group()) as client:
            assert client.ready()
            assert client.load_snapshot(snapshot) == 1
            np.testing.assert_array_equal(client.lookup("ctr", "item_id", [5]), np.array([row(1, 5)], np.float32))
        held = python("-m", "tierstore", "status", "--data", str(tmp_path / "d"))
        assert held.returncode == 1
        assert "--url" in held.stderr
        service.send_signal(signal.SIGTERM)
        assert service.wait(60) == 0
    finally:
        service.kill()
        service.wait()
    assert "Traceback" not in (tmp_path / "err").read_text()


def test_what_build_makes_is_loaded_as_a_snapshot_is(cli: Cli, tmp_path: Path, place: list[str]) -> None:
    done = cli("build", write_snapshot(tmp_path, 1), tmp_path / "built")
    assert done.code == 0, done.err
    assert done.out.startswith(f"version 1 is built in {tmp_path / 'built'}")
    again = cli("build", tmp_path / "ctr-1", tmp_path / "built")
    assert (again.code, "built version already" in again.err) == (1, True)
    assert cli("load", tmp_path / "built", *place).code == 0
    assert cli("lookup", "ctr", "item_id", 7, *place, "--json").document["rows"][0]["row"] == row(1, 7)
