"""Start-up, help and wrong use of the command line."""

from __future__ import annotations

import json
import re
import shlex
import signal
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import typer.main
from rich.console import Console

import tierstore
from tests.cli.conftest import ROOT, SMALL, Cli, python, write_snapshot
from tierstore import config
from tierstore.access.audit import Audit
from tierstore.cli import audit, jobs, show
from tierstore.cli.app import application
from tierstore.engine.store import Store
from tierstore.service.server import ServerThread
from tierstore.service.sources.kafka_rows_status import RowStats
from tierstore.service.sources.kafka_status import KafkaStats

COMMANDS = {
    "serve",
    "import",
    "import-hps",
    "bench",
    "compile",
    "load",
    "build",
    "export",
    "triton-model",
    "log-level",
    "delta",
    "activate",
    "rollback",
    "canary",
    "parked",
    "promote",
    "withdraw",
    "label",
    "drop",
    "lookup",
    "explain",
    "status",
    "verify",
    "demo",
    "token",
    "audit",
    "rollout",
    "jobs",
    "backup",
    "restore",
    "plan",
    "hot",
}


# --- start-up

HEAVY = {"numba", "rocksdict", "pyarrow", "fastapi", "uvloop", "httpx", "pydantic", "rich", "onnxruntime", "grpc"}
COUNT_KERNELS = """
from tierstore.cli import main
try:
    main()
finally:
    from tierstore.kernels import entries
    read = [entry for entry in entries if entry.dispatcher.overloads]
    sys.stderr.write(f"{len(read)} {len(entries)}\\n")
"""


def packages_in(imported: str) -> set[str]:
    """The packages in what `python -X importtime` wrote."""
    found = {line.rpartition("|")[2].strip().split(".")[0] for line in imported.splitlines()}
    assert "typer" in found, "the list of modules is read right"
    return found


@pytest.mark.parametrize("words", [["--help"], ["load", "--help"], ["--version"]])
def test_help_loads_neither_the_store_nor_the_service(words: list[str]) -> None:
    done = python("-X", "importtime", "-m", "tierstore", *words)
    assert done.returncode == 0
    assert packages_in(done.stderr) & {*HEAVY, "numpy"} == set()


@pytest.mark.parametrize("words", [["status", "--json"], ["status", "ctr", "--json"], ["jobs", "--json"]])
def test_a_command_that_asks_a_service_loads_neither_the_store_nor_what_it_prints_no_table_with(
    loaded: Store, words: list[str]
) -> None:
    with ServerThread(loaded) as server:
        done = python("-X", "importtime", "-m", "tierstore", *words, "--url", server.url)
    assert done.returncode == 0, done.stderr
    assert packages_in(done.stderr) & HEAVY == set()


def test_a_command_on_a_directory_reads_the_kernels_that_it_calls(tmp_path: Path) -> None:
    with tierstore.open(tmp_path / "data", **SMALL) as store:
        store.load_snapshot(write_snapshot(tmp_path, 1))
    words = ["tierstore", "status", "--json", "--data", str(tmp_path / "data")]
    done = python("-c", f"import sys; sys.argv = {words}\n{COUNT_KERNELS}")
    assert done.returncode == 0, done.stderr
    read, all_of_them = map(int, done.stderr.splitlines()[-1].split())
    assert json.loads(done.stdout)["models"]["ctr"]["active_version"] == 1
    assert read < all_of_them / 4


def test_values_are_read_as_typer_reads_them() -> None:
    """Also where that is done without pydantic."""
    context = typer.Context(typer.main.get_command(application()))
    seen = 0
    for command in typer.main.get_command(application()).commands.values():
        for parameter in command.get_params(context):
            by_typer = type(parameter).get_runtime_param(parameter)
            is_list = parameter.multiple or parameter.nargs == -1
            values = [None, ["a", "-1"], ("x",), ["\udc80é", ""]] if is_list else [None, "a", "", "-1", "\udc80é"]
            if parameter.type_descriptor.annotation in (str, list[str]):
                seen += 1
            else:
                values = [None]
            for value in values:
                read, expected = (
                    reader.coerce(value, param=parameter, ctx=context)
                    for reader in (parameter.get_runtime_param(), by_typer)
                )
                assert (type(read), read) == (type(expected), expected), (command.name, parameter.name)
    assert seen > 50


def test_process_1_can_be_ended_before_its_command_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    handlers: list[object] = []
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr("tierstore.cli.os.getpid", lambda: 1)

    def application(*_: str) -> Callable[..., None]:
        return lambda prog_name: handlers.append(signal.getsignal(signal.SIGTERM))

    monkeypatch.setattr("tierstore.cli.app.application", application)
    try:
        with pytest.raises(SystemExit):
            tierstore.cli.main()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert handlers == [tierstore.cli.end_at_once]


ASKS = """
import sys
from tierstore.cli.app import application
from tierstore.client import Client
application("status")
with Client(sys.argv[1]) as client:
    client.status()
print(sorted({"numpy", "pyarrow", "pydantic", "numba", "asyncio", "tierstore.engine"} & sys.modules.keys()))
"""


def test_a_command_that_asks_a_service_imports_nothing_of_a_store() -> None:
    """Each of these takes as long as all else that such a command does."""

    class Empty(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = b'{"models": [], "problems": []}'
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    with HTTPServer(("127.0.0.1", 0), Empty) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        done = python("-c", ASKS, f"http://127.0.0.1:{server.server_port}")
        server.shutdown()
    assert done.stdout == "[]\n", done.stderr


def test_it_says_its_version() -> None:
    assert python("-m", "tierstore", "--version").stdout == f"tierstore {tierstore.__version__}\n"


def test_without_a_package_of_the_command_line_it_says_which() -> None:
    """As on a machine that only asks."""
    done = python("-c", "import sys; sys.modules['typer'] = None; from tierstore.cli import main; main()")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("tierstore: the command line needs the package typer, which is not installed")


def test_help_of_serve_lists_every_setting(cli: Cli) -> None:
    text = cli("serve", "--help").out
    assert [name for name in tierstore.config.Settings.model_fields if f"  {name} " not in text] == []


def test_help_fits_a_terminal_and_begins_with_what_comes_first(monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    commands = cli("--help").out.partition("Commands:")[2]
    assert "..." not in commands, "no summary of a command is cut"
    listed = re.findall(r"^  ([a-z-]+)  +[A-Z]", commands, flags=re.MULTILINE)
    assert set(listed) == COMMANDS
    assert listed[:4] == ["demo", "import", "import-hps", "serve"]


def test_a_command_is_read_without_the_others() -> None:
    for name, command in typer.main.get_command(application()).commands.items():
        ((same, alone),) = typer.main.get_command(application(name)).commands.items()
        assert (same, alone.get_help(typer.Context(alone))) == (name, command.get_help(typer.Context(command)))
    assert set(typer.main.get_command(application("unknown")).commands) == COMMANDS


def test_every_command_is_on_its_page() -> None:
    assert set(typer.main.get_command(application()).commands) == COMMANDS
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
    commands = typer.main.get_command(application()).commands
    for line in lines:
        _, *words = shlex.split(line)
        if words[0].startswith("--"):
            continue
        assert words[0] in commands, line
        command = commands[words[0]]
        if words[0] in ("parked", "token"):
            command = command.commands[words[1]]
        options = {option for parameter in command.params for option in parameter.opts} | {"--help"}
        assert {word.split("=")[0] for word in words if word.startswith("--") and word != "--"} <= options, line


# --- what goes wrong


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["statsu"], "No such command"),
        (["load"], "SNAPSHOT"),
        (["status", "--data", "d", "--url", "http://x"], "got both"),
        (["delta", "missing.arrow"], "missing.arrow"),
        (["activate", "ctr", "new"], "VERSION"),
        (["demo", "--seconds", "-1"], "--seconds"),
        (["serve", "--port", "99999"], "port"),
        (["serve", "--host-budget", "much"], "host_budget"),
        (["serve", "--config", "missing.toml"], "missing.toml"),
        (["serve", "--host", "0.0.0.0"], "allow_open_network"),
        (["status", "--url", "host:8000"], "http://127.0.0.1:8000"),
        (["serve", "--log-format", "json"], "TIERSTORE_LOG_FORMAT in the environment, log_format in tierstore.toml"),
        (["audit", "--url", "http://x"], "--data or --directory"),
        (["verify", "--url", "http://x"], "--url goes with --against"),
        (["compile", "--url", "http://x"], "for this machine"),
        (["rollout", "s", "--url", "host:1", "--url", "host:2"], "http://127.0.0.1:8000"),
        (["load", "."], "`tierstore import` takes files of rows as they are, Parquet and others"),
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


def test_an_unknown_variable_is_a_warning_or_an_error(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(config, "_warned", set())
    monkeypatch.setenv("TIERSTORE_HOST_BUDGTE", "1GiB")
    assert cli("verify").code == 1, "there is no data directory, and that is all"
    assert "TIERSTORE_HOST_BUDGTE (did you mean TIERSTORE_HOST_BUDGET?) sets nothing" in caplog.text
    monkeypatch.setenv("TIERSTORE_STRICT_ENVIRONMENT", "1")
    run = cli("verify")
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


ENTRY = {
    "job": "3f2a90c41d7be856", "kind": "load", "model": "ads_click_ranker", "source": "/snapshots/ctr/20261123022651",
    "directory": None, "activate": True, "state": "failed", "phase": "read", "done": 5, "total": 9, "rate": None,
    "waits_for": None, "eta_s": None, "error": "item/part-0.npy: row 17: " + "a long reason, " * 9,
    "error_type": "SnapshotError", "version": 20261123022651, "seq": None, "report": None, "acknowledged": True,
    "created_at": 1795400000.0, "finished_at": 1795400012.0,
}  # fmt: skip


@pytest.mark.parametrize("wide", [False, True], ids=["terminal", "pipe"])
def test_jobs_and_the_audit_fit_100_columns_of_a_terminal_and_are_a_line_each_in_a_pipe(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, wide: bool
) -> None:
    width = 250 if wide else 100
    monkeypatch.setattr(show, "console", lambda: Console(width=width, soft_wrap=wide))
    running = ENTRY | {
        "job": "a" * 16, "state": "running", "error": None, "version": None, "finished_at": None, "eta_s": 240.0,
        "created_at": time.time(), "waits_for": "a storage", "acknowledged": False,
    }  # fmt: skip
    jobs._show([ENTRY, running])
    lines = capsys.readouterr().out.splitlines()
    for words in (
        "3f2a90c41d7be856  load  ads_click_ranker  20261123022651  failed", "2026-11-23 02:13 UTC  12 s",
        "/snapshots/ctr/20261123022651", "row 17", "(acknowledged)", "read 5 of 9, 240 s to go, waits: a storage",
    ):  # fmt: skip
        assert any(words in line for line in lines), words
    assert len(lines) == 2 if wide else max(map(len, lines)) <= 100
    who = "token 3f2a90c4 at 10.0.0.7:51312 (id abcdefabcdefabcd)"
    Audit(tmp_path).change(
        "load", who, "done", flush=False, model="ads_click_ranker", before={"active": 20261122022651},
        after={"active": 20261123022651}, version=20261123022651, source="/snapshots/ctr/20261123022651",
    )  # fmt: skip
    audit.audit(directory=tmp_path)
    lines = capsys.readouterr().out.splitlines()
    assert "load  ads_click_ranker  done" in lines[0]
    text = " ".join(" ".join(lines).split())
    for words in (f"by {who}", "active 20261122022651 → 20261123022651", "source /snapshots/ctr/20261123022651"):
        assert words in text
    assert len(lines) == 1 if wide else max(map(len, lines)) <= 100


def test_a_load_of_a_folder_that_is_not_there_says_so(cli: Cli, loaded: Store) -> None:
    with ServerThread(loaded) as server:
        for where in (["--url", server.url], ["--data", "new"]):
            run = cli("load", "nosuch", *where)
            assert (run.code, "nosuch" in run.err, "snapshot.json" in run.err) == (1, True, False), run.err
            assert "no folder nosuch here" in run.err or "no such directory: nosuch" in run.err


def test_a_status_says_how_old_the_newest_delta_is_and_who_sent_it(capsys: pytest.CaptureFixture[str]) -> None:
    model = {
        "active_version": 1, "watermark": 7, "versions": [], "tables": {}, "overlays": 2, "overlay_bytes": 4096,
        "last_event_time": "2026-11-23T02:26:52+00:00", "last_received_time": "2026-11-23T02:27:01+00:00",
        "last_received_from": "token trainer at 10.0.0.7:51312", "delta_age_s": 3 * 3600 + 61.0,
    }  # fmt: skip
    show.status({"models": {"ctr": model | {"freshness_max_s": 0}, "cvr": model | {"freshness_max_s": 900}}})
    unbounded, bounded = (line for line in capsys.readouterr().out.splitlines() if "newest event" in line)
    for words in (
        "2026-11-23T02:26:52+00:00, 3 h ago", "received 2026-11-23 02:27 UTC from token trainer at 10.0.0.7:51312",
        "2 overlays of 4.0 KiB",
    ):  # fmt: skip
        assert words in unbounded
        assert words in bounded
    assert "no limit is set (freshness_max_s)" in unbounded
    assert "no limit" not in bounded


def test_a_status_in_80_columns_cuts_nothing_and_shows_what_a_store_works_with(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(show, "console", lambda: Console(width=80))
    version = {"version": 20261123022651, "state": "active", "labels": ["stable"], "watermark": 41821}
    model = {"active_version": 20261123022651, "watermark": 41821, "tables": {}}
    kafka = KafkaStats("embeddings")
    kafka.connected()
    kafka.place({0: 7}, {0: 1234})
    document = {
        "models": {"ctr": model | {"versions": [version | {"created_at": "2026-11-23T02:26:52Z"}]}},
        "remote": {
            "cluster": "h1:6379",
            "reachable": False,
            "engines": ["kvrocks 2.10.1"],
            "warnings": ["rocksdb.write_options.sync is no (h1:6379)"],
        },
        "service": {
            "kafka": kafka.status(parked=0),
            "kafka_rows": {"topics": {"vectors": RowStats("vectors").status(parked=0)}},
            "watch": {"directory": "/deltas", "applied": 3},
            "watch_snapshots": {"locations": [{"location": "s3://models", "state": "followed", "snapshots": 2}]},
        },
        "throttle": {"work": ["load"], "share": 0.25},
        "disk": {"free": 60 << 30, "reserve": 256 << 20, "problem": None},
    }
    show.status(document)
    shown = capsys.readouterr().out
    assert "…" not in shown
    for words in (
        "20261123022651    active    stable    41821        2026-11-23 02:26 UTC",
        "cluster h1:6379: unreachable, kvrocks 2.10.1",
        "cluster: rocksdb.write_options.sync is no (h1:6379)",
        "kafka topic embeddings: reading, 0 deltas applied, 1,234 messages behind",
        "rows of kafka topic vectors: starting, 0 rows applied",
        "deltas in /deltas: 3 applied",
        "snapshots in s3://models: followed, 2 found",
        "background work: load, 25% of the time",
        "disk: 60.0 GiB free, of which 256.0 MiB are kept (disk_reserve)",
    ):
        assert words in shown, shown
