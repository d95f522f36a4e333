"""What programs and commands of the pages come to, in a scene that has what each of them begins with.

`make docs-test` runs this file, and `test_docs_commands.py`, which runs every line of every page. A block of Python is run by
itself; a command line in this process. What a page's reader is to have already (`keys`, `batches`, a directory of Parquet, a
service) is there.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import tierstore
from tests.engine.quick_build import in_process
from tests.predict import onnx_models as om
from tierstore.cli import main
from tierstore.config import ENV_PREFIX
from tierstore.formats.snapshot.reader import open_snapshot
from tierstore.service.server import ServerThread
from tierstore.types import KeyHash

ROOT = Path(__file__).parents[1]
SERVICE = "http://127.0.0.1:8000"
ITEMS = np.arange(5000)
SMALL = {"host_budget": "16MiB", "load_workers": 1, "disk_threads": 2}


def blocks(page: str, *languages: str) -> list[tuple[int, str]]:
    """(line, text) of the fenced blocks of a page."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = re.finditer(r"^( *)```(\w+)\n(.*?)^ *```", text, flags=re.DOTALL | re.MULTILINE)
    return [
        (text.count("\n", 0, match.start()) + 1, re.sub(rf"^{match[1]}", "", match[3], flags=re.MULTILINE))
        for match in found
        if match[2] in languages
    ]


def dense(inputs: str = "user_id item_id clicked hour") -> bytes:
    """score [n] = the sum of all inputs."""
    each = inputs.split()
    nodes = [om.node("ReduceSum", f"{name} axes", f"of_{name}", keepdims=0) for name in each]
    return om.build(
        [*nodes, om.node("Sum", " ".join(f"of_{name}" for name in each), "score")],
        {name: (om.FLOAT, [f"n_{name}", 1 if name == "hour" else 32]) for name in each},
        {"score": (om.FLOAT, ["n"])},
        {"axes": np.array([1])},
    )


def vectors(keys: Any) -> Any:
    return np.repeat(np.asarray(keys, np.float32)[:, None] / 100, 32, axis=1)


def snapshot(where: Path | str, version: int, inputs: str = "user_id item_id clicked hour") -> None:
    with tierstore.SnapshotWriter(where, model="ctr", version=version, delta_seq=41820) as writer:
        for table in ("item", "user"):
            writer.table(table, dim=32, dtype="float16").write(ITEMS, vectors(ITEMS))
        writer.feature("user_id", table="user")
        writer.feature("item_id", table="item")
        writer.feature("clicked", table="item", combiner="mean")
        if inputs:
            writer.dense(dense(inputs))


def delta(where: Path, seq: int) -> None:
    where.parent.mkdir(exist_ok=True)
    with tierstore.DeltaWriter(where, model="ctr", seq=seq) as writer:
        writer.upsert("item", [17], np.full((1, 32), seq % 100, np.float32))


def data(inputs: str = "user_id item_id clicked hour") -> None:
    """What a reader has, in the working directory."""
    frame = pd.DataFrame({"item_id": ITEMS[:50], "embedding": list(vectors(ITEMS[:50]))})
    Path("items").mkdir()
    frame.to_parquet("items/part-0.parquet")
    for i, words in enumerate((["red"], ["shoe"])):
        pd.DataFrame({"word": words, "f0": [0.5], "f1": [float(i)]}).to_parquet(f"words-{i}.parquet")
    for graph in ("model.onnx", "cvr.onnx"):
        Path(graph).write_bytes(dense(inputs or "item_id"))


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in list(os.environ):
        if name.upper().startswith(ENV_PREFIX):
            monkeypatch.delenv(name)
    for name, value in SMALL.items():
        monkeypatch.setenv(ENV_PREFIX + name.upper(), str(value))
    monkeypatch.chdir(tmp_path)
    data()
    return tmp_path


@pytest.fixture
def url(scene: Path) -> Iterator[str]:
    """A service that has the snapshot of the day before the pages' and serves it."""
    snapshot(scene / "before", 20261119)
    with tierstore.open(scene / "served", port=0, source_root=[scene], **SMALL) as store, ServerThread(store) as server:
        store.load_snapshot(scene / "before")
        yield server.url


@pytest.fixture
def empty_url(scene: Path) -> Iterator[str]:
    """A service that has nothing yet."""
    with tierstore.open(scene / "empty", port=0, source_root=[scene], **SMALL) as store, ServerThread(store) as server:
        yield server.url


def names() -> dict[str, Any]:
    keys, n = np.array([17, 42, 17]), 3
    return {
        "np": np,
        "tierstore": tierstore,
        "keys": keys,
        "offsets": np.array([0, 2]),
        "users": keys,
        "items": keys,
        "hours": np.full((n, 1), 0.5, np.float32),
        "batches": [(ITEMS[:2500], vectors(ITEMS[:2500])), (ITEMS[2500:], vectors(ITEMS[2500:]))],
        "vectors": vectors(keys),
        "times": np.full(n, 1_795_140_000),
        "changed_keys": keys[:2],
        "changed_vectors": vectors(keys[:2]),
        "retired_keys": [7],
        "popular_keys": ITEMS[:10],
        "now": 1.7e9,
        "newest_event": 1.7e9,
    }


def run(page: str, line: int, program: str, given: dict[str, Any]) -> dict[str, Any]:
    exec(compile("\n" * line + program, str(ROOT / page), "exec"), given)
    return given


# --- every page


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))])
def test_programs_are_python(page: str) -> None:
    for line, program in blocks(page, "python"):
        compile("\n" * line + program, page, "exec", flags=__import__("ast").PyCF_ALLOW_TOP_LEVEL_AWAIT)


# --- README


README = dict(blocks("README.md", "python"))


def with_word(word: str) -> tuple[int, str]:
    ((line, program),) = [(line, program) for line, program in README.items() if word in program]
    return line, program


def test_readme_has_no_program_that_is_not_run() -> None:
    known = ("tierstore.open", "tierstore.Client")
    assert [line for line, program in README.items() if not any(word in program for word in known)] == []


def test_readme_in_process(scene: Path) -> None:
    snapshot(scene / "snapshots/ctr/20261120", 20261120)
    delta(scene / "deltas/41821.arrow", 41821)
    came = run("README.md", *with_word("tierstore.open"), names())
    assert came["rows"][:, 0].tolist() == [21, np.float16(0.42), 21]
    assert came["found"].all()
    assert came["bags"].shape == (2, 32)


def test_readme_client(url: str) -> None:
    line, program = with_word("tierstore.Client")
    came = run("README.md", line, program.replace(SERVICE, url), names())
    assert came["rows"][:, 0].tolist() == [np.float16(0.17), np.float16(47.11)]
    assert came["found"].all()


# --- the other pages


def test_import_page(scene: Path) -> None:
    (line, program), _ = blocks("docs/import.md", "python")
    came = run("docs/import.md", line, program, names())
    assert came["rows"].tolist() == [[0.5, 1.0]]


def test_hps_on_the_import_page(scene: Path, empty_url: str) -> None:
    from tests.imports.test_hps import hps

    hps(scene)
    (import_hps,) = [line for line in lines("docs/import.md") if "import-hps" in line]
    command(f"{import_hps.replace('/mnt/models', '.')} --url {empty_url}")
    _, (line, program) = blocks("docs/import.md", "python")
    came = run("docs/import.md", line, program.replace("127.0.0.1:8000", empty_url.removeprefix("http://")), names())
    assert came["vectors"].tolist() == [12, 13, 14, 1, 1, 1, 0, 0, 0, 0, 0, 0]


def test_tables_of_the_import_page(scene: Path, empty_url: str) -> None:
    ((_, text),) = blocks("docs/import.md", "toml")
    Path("model.onnx").write_bytes(dense("item_id clicked"))
    Path("tables.toml").write_text(text)
    command(f"tierstore import tables.toml --out s --url {empty_url}")
    with tierstore.Client(empty_url) as client:
        assert client.lookup("ctr", "word", ["shoe", "?"]).tolist() == [[0.5, 1.0], [0.5, 0.5]]
        assert client.lookup_bags("ctr", "clicked", [0, 17], [0])[0, 0] == np.float16(0.17), "key 0 is padding"


def test_formats_page(scene: Path) -> None:
    (scene / "deltas").mkdir()
    Path("model.onnx").write_bytes(dense("item_id clicked"))
    for line, program in blocks("docs/formats.md", "python"):
        run("docs/formats.md", line, program, names())
    with tierstore.open("data/", **SMALL) as store:
        store.load_snapshot("snapshots/20261120")


@pytest.mark.thorough
def test_pytorch_programs(scene: Path) -> None:
    for needed in ("torch", "onnxscript", "onnxruntime"):
        pytest.importorskip(needed, reason=f"{needed} is not installed: make trainers")
    import torch

    from tests.torch.test_export import Net, inputs
    from tierstore.torch import write_snapshot

    (scene / "deltas").mkdir()
    (line, program), hashed, swap, torchrec = blocks("docs/pytorch.md", "python")
    given = {"inputs": inputs(), "train": lambda net, *_: net(**inputs()), "minutes": [[1], [2]]}
    run("docs/pytorch.md", line, program, {**given, "net": Net()})
    assert (scene / "deltas/1.arrow").exists()
    made = run("docs/pytorch.md", *hashed, {})["Net"]()
    write_snapshot("hashed", made, {"item_id": torch.tensor([5, -5])}, model="hashed", version=1, dense=False)
    assert open_snapshot("hashed").manifest.feature_specs()["item_id"].hash == KeyHash(1_000_000, 7)
    with tierstore.open(scene / "swapped") as store:
        store.load_snapshot(scene / "snapshots/20261120")
        run("docs/pytorch.md", *swap, {"net": Net(), "store": store, "batch": inputs()})
    pytest.importorskip("torchrec", reason="TorchRec is not installed: make trainers")
    from tests.torch.test_torchrec import dlrm
    from tests.torch.test_torchrec import inputs as bags

    given = {"dense": bags()["dense_features"], "kjt": bags()["sparse_features"]}
    run("docs/pytorch.md", *torchrec, {**given, "dlrm": dlrm(), "write_snapshot": write_snapshot})
    assert (scene / "snapshots/1/snapshot.json").exists()


def trained(trainer: str, x: Any, clicked: Any) -> dict[str, Any]:
    """What a reader of the page has trained, by its name there."""
    if trainer == "LightGBM":
        lgb = pytest.importorskip("lightgbm", reason="LightGBM is not installed: make trainers")
        pytest.importorskip("onnxmltools", reason="onnxmltools is not installed: make trainers")
        return {"booster": lgb.train({"verbose": -1, "num_threads": 1}, lgb.Dataset(x, x[:, 0] + x[:, 33]), 5)}
    if trainer == "XGBoost":
        xgb = pytest.importorskip("xgboost", reason="XGBoost is not installed: make trainers")
        pytest.importorskip("onnxmltools", reason="onnxmltools is not installed: make trainers")
        return {"model": xgb.XGBClassifier(n_estimators=5, n_jobs=1).fit(x, clicked)}
    if trainer == "CatBoost":
        cat = pytest.importorskip("catboost", reason="CatBoost is not installed: make trainers")
        model = cat.CatBoostRegressor(iterations=5, thread_count=1, allow_writing_files=False)
        return {"model": model.fit(x, x[:, 0] + x[:, 33], verbose=False)}
    if trainer == "scikit-learn":
        pytest.importorskip("skl2onnx", reason="skl2onnx is not installed: make trainers")
        ensemble = pytest.importorskip("sklearn.ensemble", reason="scikit-learn is not installed: make trainers")
        return {"model": ensemble.RandomForestRegressor(5, random_state=0).fit(x, x[:, 0] + x[:, 33])}
    keras = pytest.importorskip("keras", reason="Keras is not installed: make trainers")
    pytest.importorskip("onnxscript", reason="onnxscript is not installed: make trainers")
    item = keras.Input((), dtype="int64", name="item_id")
    embedding, hidden = keras.layers.Embedding(len(x), 32), keras.layers.Dense(8, activation="relu")
    score = keras.layers.Dense(1, activation="sigmoid")
    net = keras.Model(item, score(hidden(embedding(item))))
    net.compile("adagrad", "binary_crossentropy")
    net.fit(np.arange(len(x)), clicked.astype("float32"), epochs=2, verbose=0)
    return {"net": net, "hidden": hidden, "score": score, "item_vectors": np.asarray(embedding.get_weights()[0])}


RECIPES = {
    re.search(r"\w[\w-]+", program)[0]: (line, program)  # type: ignore[index]
    for line, program in blocks("docs/dense.md", "python")
    if program.startswith("# ")
}


def test_the_page_has_a_recipe_for_each_trainer() -> None:
    assert set(RECIPES) == {"LightGBM", "XGBoost", "CatBoost", "scikit-learn", "Keras"}


@pytest.mark.thorough
@pytest.mark.parametrize("trainer", RECIPES)
def test_golden_examples_of_each_trainer(scene: Path, monkeypatch: pytest.MonkeyPatch, trainer: str) -> None:
    """As printed: they hold what is served to what the trainer says, and notice rows of another day."""
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, 34)).astype(np.float32)
    names = {"item_keys": np.arange(400), "item_vectors": x[:, :32], "own": x[:64, 32:]}
    names |= trained(trainer, x, (x[:, 0] + x[:, 33] > 0).astype(int))
    for version, rows in ((1, names["item_vectors"]), (2, names["item_vectors"][::-1])):
        with tierstore.SnapshotWriter(f"s-{version}", model="ctr", version=version) as snapshot:
            snapshot.table("item", dim=32).write(names["item_keys"], rows)
            snapshot.feature("item_id", table="item")
            line, program = RECIPES[trainer]
            run("docs/dense.md", line, program, {"np": np, "tierstore": tierstore, "snapshot": snapshot, **names})
    with in_process(), tierstore.open("data/", **SMALL) as store:
        store.load_snapshot("s-1")
        assert store.status()["models"]["ctr"]["versions"][0]["golden"]["held"] == 1
        with pytest.raises(tierstore.SnapshotError, match=r"golden example 0: (output|the rows of feature)"):
            store.load_snapshot("s-2")


def alone(program: str) -> None:
    """Run a program in a new process, in the working directory."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, f"{program}\n{done.stderr}"


# --- commands


def command(line: str) -> None:
    """Run a command line of a page here, and see that it ends well."""
    words = shlex.split(line, comments=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as ended:
            main()
    assert not ended.value.code, line


def lines(page: str) -> list[str]:
    text = "".join(block for _, block in blocks(page, "sh"))
    return [line for line in text.replace("\\\n", " ").splitlines() if line.startswith("tierstore ")]


def test_readme_from_data_to_served(empty_url: str) -> None:
    ran = [line for line in lines("README.md") if not line.startswith("tierstore serve")]
    assert ran[0].startswith("tierstore import")
    command(f"{ran[0]} --url {empty_url}")
    command(ran[1].replace(SERVICE, empty_url))
    with tierstore.Client(empty_url) as client:
        assert client.lookup("ctr", "item_id", [17])[0, 0] == np.float32(0.17)


def test_each_program_of_the_tutorial_runs_by_itself(scene: Path, empty_url: str) -> None:
    """In a process of its own, as a reader has it who has closed the one before."""
    first, *others = (program for _, program in blocks("docs/tutorial.md", "python"))
    alone(first)
    command(f"{next(line for line in lines('docs/tutorial.md') if ' import ' in line)} --url {empty_url}")
    for program in others:
        alone(program.replace(SERVICE, empty_url))
    assert Path("deltas/1.arrow").exists()
