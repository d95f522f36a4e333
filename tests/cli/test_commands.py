"""What the commands do, on a data directory and through a service."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tierstore
from tests.cli.conftest import DIM, ROWS, Cli, row, write_delta, write_snapshot
from tests.engine.operations import test_dense_notes
from tests.formats.test_directories import as_spark
from tests.imports.make_corpus import CORPUS
from tests.imports.test_hps import hps
from tierstore.cli import show
from tierstore.engine.store import Store
from tierstore.predict import runtime
from tierstore.service.server import ServerThread


def test_versions_and_deltas_from_load_to_drop(cli: Cli, tmp_path: Path, place: list[str]) -> None:
    def looked_up(key: int) -> list[float]:
        return cli("lookup", "ctr", "item_id", key, *place, "--json").document["rows"][0]["row"]

    loaded = cli("load", write_snapshot(tmp_path, 1), *place)
    assert loaded.code == 0, loaded.err
    assert loaded.out.startswith("version 1 is loaded and active")
    assert loaded.err.startswith("load: "), "progress is reported without a terminal, too"
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

    bad = write_delta(tmp_path, 13, 12)
    assert cli("delta", bad, *place).code == 0
    assert cli("rollback", "ctr", "--to-seq", 12, *place).out == "ctr serves version 2 as of delta 12\n"
    assert cli("rollback", "ctr", "--to-seq", 12, *place, "--json").document == {
        "model": "ctr",
        "active_version": 2,
        "to_seq": 12,
    }
    assert looked_up(12) == row(12, 12), "the bad delta is undone"
    again = "ctr delta 13 was undone by a rollback, and stays so; to have it applied, send it as delta 14\n"
    assert cli("delta", bad, *place).out == again
    assert cli("delta", bad, *place, "--json").document == [
        {"model": "ctr", "seq": 13, "applied": False, "send_as": 14}
    ]

    active = cli("drop", "ctr", 2, *place)
    assert active.code == 1
    assert "active" in active.err
    assert cli("rollback", "ctr", *place, "--expected-active", 2, "--json").document == {
        "model": "ctr",
        "active_version": 1,
    }
    assert looked_up(7) == row(1, 7)
    assert cli("drop", "ctr", 2, *place).code == 0

    document = cli("status", *place, "--json").document
    assert list(document["models"]) == ["ctr"]
    model = cli("status", "ctr", *place, "--json").document["models"]["ctr"]
    assert (model["active_version"], model["watermark"]) == (1, 13)
    assert [(v["version"], v["state"]) for v in model["versions"]] == [(1, "active")]
    assert model["tables"]["item"]["rows"] == ROWS
    assert {"lookup_keys", "tier_bytes", "tier_budget_bytes"} <= model["tables"]["item"].keys()


def test_a_directory_of_parquet_is_served_by_one_command(cli: Cli, tmp_path: Path, place: list[str]) -> None:
    as_spark(tmp_path / "items")
    where = ["items", "--model", "ctr", "--table", "item", "--key", "item_id", "--vector", "embedding"]
    done = cli("import", *where, "--feature", "clicked", "--combiner", "mean", *place)
    assert re.fullmatch(r"ctr version \d{14} is active: 100 rows of item, dim 4 \(.*\)\n", done.out), done.err
    rows = cli("lookup", "ctr", "clicked", 7, 8, *place, "--json").document["rows"]
    assert rows == [
        {"key": 7, "found": True, "row": [0.5, 0.625, 0.75, 0.875]},
        {"key": 8, "found": False, "row": [0, 0, 0, 0]},
    ]
    wrong = cli("import", "items", "--model", "ctr", "--table", "item", *place)
    assert wrong.code == 1
    assert "expected one column 'key' for keys; there are item_id (int64)" in wrong.err
    assert sorted(path.name for path in tmp_path.iterdir()) in (["data", "items"], ["items"]), "nothing is left of it"


def test_rows_with_nulls_and_keys_that_come_again_are_left_out_and_counted(cli: Cli, tmp_path: Path) -> None:
    columns = {"key": [1, None, 2, 1, 3], "vector": [[1.0], [2.0], None, [3.0], [4.0]]}
    pq.write_table(pa.table(columns), tmp_path / "items.parquet")
    words = ["import", "items.parquet", "--model", "ctr", "--table", "item", "--out", "s"]
    assert "expected a key in column 'key', got null; --on-null skip" in cli(*words).err
    done = cli(*words, "--on-null", "skip", "--on-duplicate", "last")
    assert done.code == 0, done.err
    assert "2 rows of item, dim 1 (left out: 2 with a null, 1 whose key comes again)" in done.out
    assert "expected fail, last, got 'first'" in cli(*words, "--on-duplicate", "first").err


def test_an_import_says_what_the_rounding_costs(cli: Cli, tmp_path: Path) -> None:
    columns = {"key": [1, 2], "vector": [[0.0, 0.25, 15.0], [1.0, 1.0, 1.0]]}
    pq.write_table(pa.table(columns), tmp_path / "items.parquet")
    words = ["import", "items.parquet", "--model", "ctr", "--table", "item", "--dtype", "int4"]
    done = cli(*words, "--out", "s")
    assert done.code == 0, done.err
    assert "2 rows of item, dim 3 as int4, which is off by 0.25 at most and 0.0417 on average (" in done.out
    document = cli(*words, "--out", "t", "--json").document
    assert document["rounding"] == {"item": {"largest": 0.25, "mean": pytest.approx(0.25 / 6)}}
    assert document["dtypes"] == {"item": "int4"}


def test_an_import_of_a_lake_table_takes_the_version_that_is_named(cli: Cli) -> None:
    deltalake = pytest.importorskip("deltalake", reason="deltalake is not installed: make trainers")
    for key in (1, 2):
        rows = pa.table({"key": pa.array([key]), "vector": pa.array([[0.5]], pa.list_(pa.float32()))})
        deltalake.write_deltalake("items", rows, mode="append")
    words = ["import", "items", "--model", "ctr", "--table", "item"]
    assert cli(*words, "--out", "newest", "--json").document["rows"] == {"item": 2}
    assert cli(*words, "--out", "first", "--as-of", "0", "--json").document["rows"] == {"item": 1}
    refused = cli(*words, "--out", "none", "--as-of", "7")
    assert refused.code == 1
    assert "expected a version up to 1" in refused.err


def test_the_working_directory_is_imported_though_the_data_directory_is_in_it(
    cli: Cli, tmp_path: Path, place: list[str]
) -> None:
    as_spark(tmp_path / "items")
    words = ["import", ".", "--model", "ctr", "--table", "item", "--key", "item_id", "--vector", "embedding"]
    for version in (1, 2):
        done = cli(*words, "--version", version, *place, "--json")
        assert done.code == 0, done.err
        assert (done.document["rows"], done.document["dims"]) == ({"item": 100}, {"item": 4})


def test_sizes_of_raw_files_are_said_and_compared_with_a_dim(cli: Cli) -> None:
    words = ["import", CORPUS / "pairs/tfra_int32_keys", "--model", "ctr", "--table", "item", "--out", "s"]
    done = cli(*words, "--dim", 3)
    assert done.code == 1
    assert "right for keys of 32 bits: write int64 keys" in done.err
    done = cli(*words)
    assert (done.code, "item_mht_1of1-keys: does not say the types" in done.err) == (1, True)
    assert cli(*words[:1], CORPUS / "pairs/tfra", *words[2:], "--dim", 3).code == 0
    assert "--dim" in cli("import", "--help").out


def test_an_import_goes_to_where_the_service_reads_or_is_sent(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_spark(tmp_path / "items")
    (tmp_path / "models").mkdir()
    words = ["import", "items", "--table", "item", "--key", "item_id", "--vector", "embedding"]
    with tierstore.open(tmp_path / "data") as store:
        for model, roots in (("seen", [tmp_path / "models"]), ("sent", ["s3://models"])):
            settings = store.settings.model_copy(update={"source_root": roots, "port": 0, "grpc_port": "off"})
            with ServerThread(store, settings) as server:
                done = cli(*words, "--model", model, "--url", server.url)
                assert "is active: 100 rows" in done.out, done.err
                assert ("import: send" in done.err) == (roots == ["s3://models"])
                assert list((tmp_path / "models").iterdir()) == []
    assert {path.name for path in tmp_path.iterdir()} == {"items", "models", "data"}, "nothing is left of it"


def test_a_snapshot_that_the_service_cannot_read_is_sent(cli: Cli, tmp_path: Path) -> None:
    write_snapshot(tmp_path, 1)
    (tmp_path / "models").mkdir()
    with tierstore.open(tmp_path / "data") as store:
        settings = store.settings.model_copy(
            update={"source_root": [tmp_path / "models"], "port": 0, "grpc_port": "off"}
        )
        with ServerThread(store, settings) as server:
            done = cli("load", write_snapshot(tmp_path, 2), "--url", server.url)
            assert "version 2 is loaded and active" in done.out, done.err
            assert "load: send" in done.err
            assert not any((tmp_path / "data/uploads").iterdir())


def test_numbers_of_a_row_are_on_one_line_of_json(cli: Cli, tmp_path: Path) -> None:
    cli("load", write_snapshot(tmp_path, 1))
    out = cli("lookup", "ctr", "item_id", "8", "--json").out
    assert f'"row": [{", ".join(["2.0"] * DIM)}]' in out


def test_a_snapshot_that_is_not_there_is_said_before_all_else(cli: Cli, tmp_path: Path) -> None:
    for words in (["load", "nowhere"], ["build", "nowhere", "out"]):
        assert "no such directory: nowhere" in cli(*words).err
    assert list(tmp_path.iterdir()) == []


def test_an_import_is_written_beside_the_data_directory_of_the_settings(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_spark(tmp_path / "items")
    monkeypatch.setenv("TIERSTORE_DATA", str(tmp_path / "disk/data"))
    (tmp_path / "disk").mkdir()
    seen: list[Path] = []
    monkeypatch.setattr("tierstore.cli.imports._load", lambda write, *_: seen.append(write()) or {})
    words = ["items", "--model", "ctr", "--table", "item", "--key", "item_id", "--vector", "embedding"]
    assert cli("import", *words).code == 0
    assert [path.parents[1] for path in seen] == [tmp_path / "disk"]


@pytest.mark.parametrize("error", [tierstore.errors.Unauthorized, tierstore.errors.Forbidden])
def test_an_import_asks_before_the_work_whether_the_token_is_known(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    """A token that may not see all models is known; whether it may load this one is said by the load."""

    def refuse(*_: object) -> None:
        raise error("no")

    as_spark(tmp_path / "items")
    monkeypatch.setattr(tierstore.Client, "status", refuse)
    seen: list[Path] = []
    monkeypatch.setattr("tierstore.cli.imports._load", lambda write, *_: seen.append(write()) or {})
    words = ["items", "--model", "ctr", "--table", "item", "--key", "item_id", "--vector", "embedding"]
    assert cli("import", *words, "--url", "http://127.0.0.1:9").code == (
        1 if error is tierstore.errors.Unauthorized else 0
    )
    assert bool(seen) == (error is tierstore.errors.Forbidden)


@pytest.mark.parametrize("keys", [[1, 2, 3, 2], ["a", "ü", "c", "ü"]])
def test_a_key_that_is_there_twice_is_shown_where_the_user_has_it(
    cli: Cli, tmp_path: Path, place: list[str], keys: list[int] | list[str]
) -> None:
    (tmp_path / "items").mkdir()
    for part in (0, 1):
        columns = {"item_id": keys[2 * part :][:2], "embedding": [[1.0], [float(part)]]}
        pq.write_table(pa.table(columns), tmp_path / f"items/part-{part}.parquet")
    where = ["items", "--model", "ctr", "--table", "item", "--key", "item_id", "--vector", "embedding"]
    done = cli("import", *where, *place)
    assert done.code == 1
    assert (
        f"items/part-1.parquet, row 1: duplicate key {keys[1]!r}: it is also in items/part-0.parquet, row 1" in done.err
    )


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


@pytest.mark.parametrize("ttl", ["30d", "2592000"])
def test_rows_that_are_too_old_are_not_served(cli: Cli, tmp_path: Path, place: list[str], ttl: str) -> None:
    now = pd.Timestamp.now("UTC")
    seen = [now, now - pd.Timedelta(days=29), now - pd.Timedelta(days=31)]
    pd.DataFrame({"key": [1, 2, 3], "vector": [[1.0]] * 3, "seen": seen}).to_parquet(tmp_path / "users.parquet")
    done = cli(
        "import",
        tmp_path / "users.parquet",
        "--model",
        "old",
        "--table",
        "user",
        "--ttl",
        ttl,
        "--time-column",
        "seen",
        *place,
    )
    assert done.code == 0, done.err
    assert "2 rows of user, dim 1 (left out: 1 older than their ttl)" in done.out
    rows = cli("lookup", "old", "user", 1, 2, 3, *place, "--json").document["rows"]
    assert [row["found"] for row in rows] == [True, True, False]
    table = cli("status", "old", *place, "--json").document["models"]["old"]["tables"]["user"]
    assert (table["rows"], table["ttl"]["ttl_s"], table["ttl"]["expired_at_load"]) == (2, 2_592_000, 1)
    assert "2, 1 expired" in cli("status", "old", *place).out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["import", "items", "--model", "ctr"], "--table"),
        (["import", "items", "--table", "item"], "--model"),
        (["import", "nowhere", "--model", "ctr", "--table", "item"], "nowhere"),
        (["import", "tables.toml", "--table", "item"], "names the tables"),
        (["import-hps", "ps.json", "--model", "nobody"], "expected a model 'nobody'"),
    ],
)
def test_an_import_that_is_not_all_said(cli: Cli, tmp_path: Path, words: list[str], says: str) -> None:
    as_spark(tmp_path / "items")
    hps(tmp_path)
    (tmp_path / "tables.toml").write_text('[tables.item]\npath = "items"\n')
    run = cli(*words)
    assert run.code == 2
    assert says in run.err


def test_a_dense_part_that_is_not_served_is_reported(
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
    assert (
        "version 1: the dense part is kept, not served: install tierstore[dense] (no onnx)" in cli("status", *place).out
    )


def test_features_that_no_dense_part_takes_are_reported(cli: Cli, tmp_path: Path, place: list[str]) -> None:
    done = cli("load", test_dense_notes.write(tmp_path, 1, own=test_dense_notes.takes("item_id")), *place)
    said = "version 1: no input of the dense part takes the features clicked, bought"
    assert (done.code, f"tierstore: ctr {said}" in done.err) == (0, True), done.err
    assert said in " ".join(cli("status", *place).out.split())


def test_a_load_whose_golden_examples_differ_ends_with_the_difference(
    cli: Cli, tmp_path: Path, place: list[str]
) -> None:
    def write(version: int, off: float) -> Path:
        where = tmp_path / str(version)
        with tierstore.SnapshotWriter(where, model="ctr", version=version) as writer:
            writer.table("item", dim=2).write([1, 2], [[1.0, 2.0], [3.0, 4.0]])
            writer.golden({"item": [1, 2]}, {"item": [[1.0, 2.0], [3.0 + off, 4.0]]})
        return where

    assert cli("load", write(1, 0.0), *place).code == 0
    assert "version 1: golden examples: 1 held, largest difference 0" in cli("status", *place).out
    refused = cli("load", write(2, 0.5), *place)
    said = " ".join(refused.err.split())
    assert refused.code != 0
    assert "golden example 0: the rows of feature 'item': 1 of 4 differ: expected 3.5, got 3 at [1, 0]" in said
    assert cli("lookup", "ctr", "item", 1, *place).code == 0
    assert json.loads(cli("status", "--json", *place).out)["models"]["ctr"]["active_version"] == 1


@pytest.mark.thorough
def test_a_canary_from_its_first_share_to_its_promotion(cli: Cli, tmp_path: Path, place: list[str]) -> None:
    for version in (1, 2):
        activate = [] if version == 1 else ["--no-activate"]
        assert cli("load", write_snapshot(tmp_path, version), *activate, *place).code == 0
    started = cli("canary", "ctr", 2, "--share", "12.5%", *place)
    says = (
        r"ctr serves version 2 as canary, to 12.5% of the requests; it has (.+) of memory for rows, the active version "
    )
    assert re.fullmatch(rf"{says}\1\n", started.out), (started.out, started.err)  # there is room for all rows of both
    shared = cli("canary", "ctr", 2, "--share", "1", *place, "--json").document
    assert shared == {"model": "ctr", "canary": {"version": 2, "share": 1.0}}
    assert cli("lookup", "ctr", "item_id", 7, *place, "--json").document["rows"][0]["row"] == row(2, 7)
    for version, of in (("1", 1), ("stable", 1), ("2", 2), ("canary", 2)):
        answer = cli("lookup", "ctr", "item_id", 7, "--version", version, *place, "--json").document
        assert answer["rows"][0]["row"] == row(of, 7)
    assert "has no version 3" in cli("lookup", "ctr", "item_id", 7, "--version", "3", *place).err
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
    assert "to 5% of the requests; it has " in cli("canary", "ctr", 2, *place).out
    assert cli("activate", "ctr", 1, *place).out == "ctr serves version 1\n", "it does, so the canary goes on"
    assert cli("promote", "ctr", *place).out == "ctr serves version 2\n"
    assert cli("label", "ctr", "holdout", 2, *place).code == 0
    assert cli("label", "ctr", "holdout", "--remove", *place).out == "ctr label holdout is removed\n"
    model = cli("status", "ctr", *place, "--json").document["models"]["ctr"]
    assert (model["active_version"], model["canary"], model["labels"]) == (2, None, {"stable": 2})
    again = cli("promote", "ctr", *place)
    assert again.code == 1
    assert "has no canary" in again.err


def test_memory_that_has_room_for_every_row_does_not_look_full(cli: Cli, loaded: Store) -> None:
    with ServerThread(loaded) as server:
        lines = cli("status", "--url", server.url).out.splitlines()
    (held,) = (line.split("host ")[1] for line in lines if line.strip().startswith("item "))
    assert " of " not in held
    assert "KiB, room for every row · disk" in held
    table = loaded.status()["models"]["ctr"]["tables"]["item"]
    table["host"]["capacity_rows"] = 100
    assert show._room(table, "host") == ", room for 100 rows"


def test_a_switch_that_ends_a_canary_says_so(cli: Cli, tmp_path: Path, place: list[str]) -> None:
    def load(version: int, *options: str) -> None:
        assert cli("load", write_snapshot(tmp_path, version), *options, *place).code == 0

    load(1)
    load(2)
    load(3, "--no-activate")
    assert cli("canary", "ctr", 3, *place).code == 0
    assert cli("activate", "ctr", 2, *place, "--json").document == {"model": "ctr", "active_version": 2}
    assert cli("rollback", "ctr", *place).out == "ctr serves version 1; the canary, version 3, is withdrawn\n"
    load(4, "--no-activate")
    assert cli("canary", "ctr", 4, *place).code == 0
    assert cli("activate", "ctr", 2, *place, "--json").document == {"model": "ctr", "active_version": 2, "withdrawn": 4}
    load(5, "--no-activate")
    assert cli("canary", "ctr", 5, *place).code == 0
    assert cli("activate", "ctr", 5, *place).out == "ctr serves version 5\n", "the canary is what serves"
    assert cli("canary", "ctr", 2, *place).code == 0
    assert cli("delta", write_delta(tmp_path, 11, 1), *place).code == 0
    undone = cli("rollback", "ctr", "--to-seq", 10, *place).out
    assert undone == "ctr serves version 5 as of delta 10; the canary, version 2, is withdrawn\n"


@pytest.mark.parametrize("share", ["105%", "-1", "half", "%", "nan"])
def test_a_share_that_is_none_is_used_wrongly(cli: Cli, share: str) -> None:
    assert cli("canary", "ctr", 2, f"--share={share}").code == 2


def test_rows_and_status_for_a_person(cli: Cli, tmp_path: Path, place: list[str]) -> None:
    assert cli("load", write_snapshot(tmp_path, 1), *place).code == 0
    lines = cli("lookup", "ctr", "item_id", "3", "0x10", "999", *place).out.splitlines()
    assert lines[0].split() == ["key", "found", "row", f"({DIM}", "numbers)"]
    assert [line.split()[:2] for line in lines[1:]] == [["3", "yes"], ["16", "yes"], ["999", "no"]]
    assert all(line.rstrip().endswith("…") for line in lines[1:]), "long rows are cut"
    negative = cli("lookup", "ctr", "item_id", *place, "--json", "-1").document
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
        (["lookup", "ctr", "item_id", "x"], 2, "expected numbers, got 'x'"),
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


def test_a_bad_snapshot_is_refused_and_changes_nothing(cli: Cli, tmp_path: Path, place: list[str]) -> None:
    cli("load", write_snapshot(tmp_path, 1), *place)
    bad = write_snapshot(tmp_path, 2)
    shard = next((bad / "item").iterdir())
    shard.write_bytes(shard.read_bytes()[:-100])
    run = cli("load", bad, *place)
    assert run.code == 1
    assert shard.name in run.err
    assert cli("status", *place, "--json").document["models"]["ctr"]["active_version"] == 1


def test_what_build_makes_is_loaded_as_a_snapshot_is(cli: Cli, tmp_path: Path, place: list[str]) -> None:
    done = cli("build", write_snapshot(tmp_path, 1), tmp_path / "built")
    assert done.code == 0, done.err
    assert done.out.startswith(f"version 1 is built in {tmp_path / 'built'}")
    again = cli("build", tmp_path / "ctr-1", tmp_path / "built")
    assert (again.code, "built version already" in again.err) == (1, True)
    assert cli("load", tmp_path / "built", *place).code == 0
    assert cli("lookup", "ctr", "item_id", 7, *place, "--json").document["rows"][0]["row"] == row(1, 7)


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
    largest = max((tmp_path / "data").rglob("*.sealed"), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 4] ^= 1
    largest.write_bytes(content)
    run = cli("verify", "--json")
    assert run.code == 1
    assert not run.document["ok"]
    assert run.document["problems"]


def test_an_export_is_loaded_elsewhere(cli: Cli, tmp_path: Path, place: list[str]) -> None:
    where = tmp_path / "ids-1"
    with tierstore.SnapshotWriter(where, model="ids", version=1) as snapshot:
        snapshot.table("id", dim=2).write(np.arange(50), np.ones((50, 2), np.float32))
    assert cli("load", where, *place).code == 0
    out = tmp_path / "exports" / "ids"
    written = cli("export", "ids", out, "--as-version", 2, *place)
    assert written.code == 0, written.err
    assert written.out == f"ids version 2 at seq 0 is exported to {out}: 50 rows\n"
    assert cli("export", "ids", out, *place).code == 1, "it exists"
    report = cli("export", "ids", f"{out}-2", "--version", "1", *place, "--json").document
    assert report == {"model": "ids", "version": 1, "seq": 0, "rows": 50, "directory": f"{out}-2"}
    assert cli("load", out, *place, "--json").document["version"] == 2

    assert cli("load", write_snapshot(tmp_path, 1), *place).code == 0
    words = cli("export", "ctr", tmp_path / "exports/words", *place)
    assert words.code == 0, words.err
    assert "302 rows" in words.out, "string keys too"


def test_a_backup_is_made_while_it_serves_and_restored_elsewhere(cli: Cli, tmp_path: Path, place: list[str]) -> None:
    assert cli("load", write_snapshot(tmp_path, 1), *place).code == 0
    out = tmp_path / "exports" / "nightly"
    made = cli("backup", "ctr", out, *place)
    assert made.code == 0, made.err
    assert f"ctr is backed up at seq 10 in {out}: " in made.out
    document = cli("backup", "--all", out, "--keep", "2", *place, "--json").document
    assert [each["model"] for each in document["models"]] == ["ctr"]
    relative = cli("backup", "ctr", "weekly", *place).out
    assert ("in weekly, below the service's export_root" in relative) is (place[0] == "--url")
    assert document["models"][0]["new_bytes"] < document["models"][0]["bytes"]
    assert cli("backup", out, *place).code == 2
    assert cli("backup", "--all", "ctr", out, *place).code == 2

    other = tmp_path / "other"
    restored = cli("restore", out, "--data", other)
    assert restored.code == 0, restored.err
    assert f"ctr is restored at seq 10 in {other}: " in restored.out
    assert cli("verify", "--data", other).code == 0
    again = cli("restore", out, "ctr", "--data", other)
    assert again.code == 1
    assert "a restore overwrites nothing" in again.err


def test_explain_says_who_answers_and_who_wrote_it(cli: Cli, tmp_path: Path, place: list[str]) -> None:
    assert cli("load", write_snapshot(tmp_path, 1), *place).code == 0
    assert cli("delta", write_delta(tmp_path, 11, 3), *place).code == 0
    document = cli("explain", "ctr", "item_id", "3", "0x10", 999, *place, "--json").document
    written, old, never = document["keys"]
    assert (written["key"], written["row"], written["written"]["seq"]) == (3, row(11, 3), 11)
    assert (old["key"], old["row"], old["state"]) == (16, row(1, 16), "present")
    assert (never["state"], never["default"], never["row"]) == ("never_there", True, [0.0] * DIM)
    lines = cli("explain", "ctr", "item_id", 3, 999, *place).out.splitlines()
    assert lines[0].startswith("ctr  table item, version 1, seq 11")
    assert any("present: delta 11 wrote it" in line for line in lines)
    assert any("999  not found: the default is answered" in line for line in lines)
    assert any(line.split()[:2] == ["base", "row"] for line in lines)
    word = cli("explain", "ctr", "query", "a", "--version", "1", *place, "--json").document
    assert (word["keys"][0]["key"], word["keys"][0]["row"]) == ("a", [1.0, 1.0])
    refused = cli("explain", "ctr", "item_id", "x", *place)
    assert refused.code == 2
    assert cli("explain", "ctr", "item_id", 1, "--version", "canary", *place).code == 1
