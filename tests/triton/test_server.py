"""The model in a real Triton server: look-ups, bags, an ensemble, BLS, loads and unloads, errors, deltas, and `perf_analyzer`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException
from typer.testing import CliRunner

import tierstore
from benchmarks.triton_peer import Analyzer, Packages, Peer, Unavailable, serving
from tests.engine.quick_build import in_process as in_process_loads
from tests.triton.data import DIM, dense_part, mean_bags, scores, vectors, write_delta, write_version
from tests.triton.models import write_bls, write_dense, write_ensemble
from tierstore.cli.app import application
from tierstore.service.server import ServerThread

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parents[2]
VENV = ROOT / ".clients/triton"
TIERSTORE = [sys.executable, "-m", "tierstore"]


@pytest.fixture(scope="module")
def packages() -> Packages:
    if not (VENV / ".installed").exists():
        pytest.skip("no environment .clients/triton: make client-venvs")
    return Packages.at(VENV)


def command(*words: str) -> None:
    done = CliRunner().invoke(application(), words)
    assert done.exit_code == 0, (done.output, done.exception)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("triton-server")
    with in_process_loads(), tierstore.open(where / "data") as store:
        store.load_snapshot(write_version(where / "1"))
    models = where / "models"
    for name, options in {"ctr": [], "batched": ["--max-batch-size", "64"], "scored": ["--scores"]}.items():
        command("triton-model", "ctr", str(models / name), "--data", str(where / "data"), *options)
    (where / "dense.onnx").write_bytes(dense_part())
    write_dense(models / "dense", where / "dense.onnx", ("item_id", "clicked"), DIM)
    write_ensemble(models / "ranking", "ctr", "dense", ("item_id", "clicked", "clicked.offsets"))
    write_bls(models / "caller", "ctr")
    return where


@pytest.fixture(scope="module")
def peer(packages: Packages, root: Path) -> Iterator[Peer]:
    arguments = ["--model-control-mode", "explicit", "--load-model", "*", "--exit-timeout-secs", "10"]
    try:
        variables = {"TIERSTORE_SOURCE_ROOT": str(root)}
        with serving(packages, root / "models", root, arguments=arguments, variables=variables) as running:
            yield running
    except Unavailable as error:
        said = (root / "triton.log").read_text(encoding="utf-8", errors="replace")
        pytest.fail(f"{error}: {said[-3000:]}")


@pytest.fixture
def client(peer: Peer) -> Iterator[Any]:
    with triton.InferenceServerClient(f"127.0.0.1:{peer.http}", network_timeout=60) as made:
        yield made


def tensors(**arrays: Any) -> list[Any]:
    made = []
    for name, array in arrays.items():
        name = name.replace("__", ".")
        datatype = (
            "BYTES"
            if array.dtype.hasobject
            else {"int64": "INT64", "float32": "FP32", "int32": "INT32"}[str(array.dtype)]
        )
        made.append(triton.InferInput(name, array.shape, datatype))
        made[-1].set_data_from_numpy(array)
    return made


def infer(client: Any, model: str, outputs: list[str] | None = None, **arrays: Any) -> Any:
    wanted = None if outputs is None else [triton.InferRequestedOutput(name) for name in outputs]
    return client.infer(model, tensors(**arrays), outputs=wanted)


KEYS = np.array([7, 499, -1, 12], np.int64)
BAGS, OFFSETS, ENDS = np.array([1, 2, 3, 4, 500, 6], np.int64), np.array([0, 2, 2, 5], np.int64), [2, 2, 5, 6]
RANKING = {"item_id": KEYS, "clicked": BAGS, "clicked__offsets": OFFSETS}


def test_look_ups_and_bags_are_those_of_the_table(client: Any) -> None:
    answer = infer(client, "ctr", item_id=KEYS)
    np.testing.assert_array_equal(answer.as_numpy("item_id"), vectors(KEYS))
    assert answer.as_numpy("item_id.found").tolist() == [True, True, False, True]
    weights = np.linspace(0.5, 2, 6, dtype=np.float32)
    weighted = infer(client, "ctr", ["clicked"], clicked=BAGS, clicked__offsets=OFFSETS, clicked__weights=weights)
    rows = vectors(BAGS) * weights[:, None]
    expected = [
        rows[:2].sum(0) / weights[:2].sum(),
        [0] * DIM,
        rows[2:5].sum(0) / weights[2:5].sum(),
        rows[5] / weights[5],
    ]
    np.testing.assert_allclose(weighted.as_numpy("clicked"), expected, rtol=1e-5, atol=1e-6)


def test_over_grpc_and_batched_it_is_the_same(peer: Peer, client: Any) -> None:
    answer = infer(client, "batched", item_id=KEYS.reshape(-1, 1), clicked=np.stack([KEYS, KEYS], 1))
    np.testing.assert_array_equal(answer.as_numpy("item_id"), vectors(KEYS))
    np.testing.assert_allclose(answer.as_numpy("clicked"), vectors(KEYS), rtol=1e-6)
    assert answer.as_numpy("item_id.found").tolist() == [[True], [True], [False], [True]]
    with triton_grpc.InferenceServerClient(f"127.0.0.1:{peer.grpc}") as rpc:
        keys = triton_grpc.InferInput("item_id", KEYS.shape, "INT64")
        keys.set_data_from_numpy(KEYS)
        np.testing.assert_array_equal(rpc.infer("ctr", [keys]).as_numpy("item_id"), vectors(KEYS))


def test_requests_at_once_get_their_own_rows(peer: Peer) -> None:
    with triton.InferenceServerClient(f"127.0.0.1:{peer.http}", concurrency=8, network_timeout=60) as many:
        asked = [np.arange(n, n + 1 + n % 5, dtype=np.int64).reshape(-1, 1) for n in range(40)]
        pending = [many.async_infer("batched", tensors(item_id=keys)) for keys in asked]
        for keys, one in zip(asked, pending, strict=True):
            np.testing.assert_array_equal(one.get_result().as_numpy("item_id"), vectors(keys[:, 0]))


def test_an_ensemble_scores_as_its_parts_do(client: Any) -> None:
    answer = infer(client, "ranking", **RANKING)
    expected = scores(vectors(KEYS), mean_bags(BAGS, ENDS))
    np.testing.assert_allclose(answer.as_numpy("score"), expected, rtol=1e-5)
    np.testing.assert_allclose(infer(client, "scored", **RANKING).as_numpy("score"), expected, rtol=1e-5)


def test_another_python_model_asks_for_rows(client: Any) -> None:
    np.testing.assert_allclose(
        infer(client, "caller", ids=KEYS).as_numpy("sums")[:, 0], vectors(KEYS).sum(1), rtol=1e-5
    )


def test_errors_say_what_is_wrong_and_the_model_goes_on(client: Any) -> None:
    with pytest.raises(InferenceServerException, match="0 first, never descending"):
        infer(client, "ctr", clicked=BAGS, clicked__offsets=np.array([1, 2], np.int64))
    with pytest.raises(InferenceServerException, match="needs an input 'clicked'"):
        infer(client, "ctr", ["clicked"], item_id=KEYS)
    np.testing.assert_array_equal(infer(client, "ctr", item_id=KEYS).as_numpy("item_id"), vectors(KEYS))


def test_deltas_and_versions_come_by_the_service_beside(client: Any, root: Path) -> None:
    done = subprocess.run(
        [*TIERSTORE, "delta", str(write_delta(root / "1.arrow", 1, [7], 9.0)), "--data", str(root / "data")],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode != 0
    found = re.search(r"--url (http://127\.0\.0\.1:\d+)", done.stderr)
    assert found, done.stderr
    command("delta", str(root / "1.arrow"), "--url", found[1])
    for model in ("ctr", "batched"):
        keys = KEYS if model == "ctr" else KEYS.reshape(-1, 1)
        assert infer(client, model, ["item_id"], item_id=keys).as_numpy("item_id")[0].tolist() == [9.0] * DIM
    with tierstore.Client(found[1]) as service:
        assert 'protocol="triton"' in service.metrics()
    command("load", str(write_version(root / "2", 2, shift=1.0)), "--url", found[1])
    rows = infer(client, "ctr", ["item_id"], item_id=KEYS).as_numpy("item_id")
    np.testing.assert_array_equal(rows[1], vectors([499], 1.0)[0])
    command("rollback", "ctr", "--url", found[1])


def test_models_are_unloaded_and_loaded_while_others_go_on(client: Any) -> None:
    first = infer(client, "ctr", ["item_id"], item_id=KEYS).as_numpy("item_id")

    def answers(model: str) -> None:
        keys = KEYS if model == "ctr" else KEYS.reshape(-1, 1)
        np.testing.assert_array_equal(infer(client, model, ["item_id"], item_id=keys).as_numpy("item_id"), first)

    for name in ("batched", "scored"):  # then it is the model that is left which has the directory open
        client.unload_model(name)
        assert not client.is_model_ready(name)
        answers("ctr")
    client.load_model("batched")
    answers("batched")
    client.unload_model("ctr")
    answers("batched")
    for _ in range(2):  # the second time anew, while it serves
        client.load_model("ctr")
        answers("ctr")
    client.load_model("scored")


def test_tritons_figures_count_its_requests(client: Any, peer: Peer) -> None:
    infer(client, "ctr", item_id=KEYS)
    (stats,) = client.get_inference_statistics("ctr")["model_stats"]
    assert stats["inference_stats"]["success"]["count"] > 0
    with urllib.request.urlopen(f"http://127.0.0.1:{peer.metrics}/metrics", timeout=30) as answer:
        assert re.search(r'nv_inference_request_success\{model="ctr",version="1"\} [1-9]', answer.read().decode())


def test_perf_analyzer_asks_it(packages: Packages, peer: Peer, tmp_path: Path) -> None:
    try:
        analyzer = Analyzer(packages)
    except Unavailable as error:
        pytest.skip(str(error))
    data = tmp_path / "keys.json"
    entries = [{"item_id": {"content": list(range(n, n + 64)), "shape": [64]}} for n in range(8)]
    data.write_text(json.dumps({"data": entries}), encoding="utf-8")
    turn = analyzer.turn(replace(peer, model="ctr", pids=peer.pids[:1]), data, 2, 0.5, grpc=False)
    assert turn.requests_per_s > 0


def test_string_keys_with_numpy_1(packages: Packages, tmp_path: Path) -> None:
    """This release of Triton reads strings with NumPy 1 alone: its Python has that, and the client's packages, not the store's."""
    settings = {"port": 0, "grpc_port": "off"}
    with in_process_loads(), tierstore.open(tmp_path / "data", **settings) as store, ServerThread(store) as server:
        store.load_snapshot(write_version(tmp_path / "1", words=True))
        command("triton-model", "ctr", str(tmp_path / "models/words"), "--url", server.url)
        python, variables = VENV / "bin/python", {"PYTHONPATH": str(ROOT)}
        with (
            serving(packages, tmp_path / "models", tmp_path, python=python, variables=variables) as peer,
            triton.InferenceServerClient(f"127.0.0.1:{peer.http}", network_timeout=60) as client,
        ):
            words = np.array(["\u00e9".encode(), b"none", b"a"], object)
            answer = infer(client, "words", word=words, item_id=KEYS)
            np.testing.assert_array_equal(answer.as_numpy("word"), vectors([3, -1, 1]))
            assert answer.as_numpy("word.found").tolist() == [True, False, True]
            np.testing.assert_array_equal(answer.as_numpy("item_id"), vectors(KEYS))
