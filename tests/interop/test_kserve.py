"""KServe: the manifests are of its types, and the transformer stands between a real predictor and a real service."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

import tierstore
from benchmarks.triton_peer import free_port
from tests.engine.quick_build import in_process as in_process_loads
from tests.triton.data import WEIGHTS, mean_bags, scores, vectors, write_version
from tierstore.service.server import ServerThread

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
VENV = ROOT / ".clients/kserve"
FOLDER = ROOT / "deploy/kserve"
START_S = 120.0

pytestmark = pytest.mark.skipif(
    not (VENV / ".installed").exists(), reason="no environment .clients/kserve: make client-venvs"
)


def python(*words: str | Path) -> list[str]:
    return [str(word) for word in (VENV / "bin/python", *words)]


def problems_of(*files: Path) -> list[str]:
    done = subprocess.run(python(HERE / "run_kserve_manifests.py", *files), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.thorough
def test_the_manifests_are_of_kserves_types(tmp_path: Path) -> None:
    spoiled = tmp_path / "spoiled.yaml"
    text = (FOLDER / "predictor.yaml").read_text().replace("minReplicas: 2", "minReplicas: two")
    spoiled.write_text(text.replace("readinessProbe:", "readyProbe:"))
    found = problems_of(*sorted(FOLDER.glob("*.yaml")), spoiled)
    assert [line.partition(": ")[2] for line in found] == [
        "rows.spec.predictor.minReplicas: expected int, got 'two'",
        "rows.spec.predictor.containers[0]: V1Container has no 'readyProbe'",
    ]


@contextmanager
def running(log: Path, *words: str | Path, grpc: int | None = None) -> Iterator[str]:
    """A model server of KServe; yields its address once it is ready."""
    port = free_port()
    options = ["--http_port", str(port), "--model_name", "ranking", "--enable_grpc", str(grpc is not None)]
    options += [] if grpc is None else ["--grpc_port", str(grpc)]
    with log.open("wb") as said:
        environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
        process = subprocess.Popen(python(*words, *options), stdout=said, stderr=said, env=environment)
    try:
        until = time.monotonic() + START_S
        while not is_ready(port):
            if process.poll() is not None or time.monotonic() > until:
                pytest.fail(f"{log.name}: {log.read_text()[-3000:]}")
            time.sleep(0.1)
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


def is_ready(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/v2/models/ranking/ready", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


@pytest.fixture(scope="module")
def transformers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The addresses of two, by the protocol in which they ask the predictor."""
    root = tmp_path_factory.mktemp("kserve")
    with ExitStack() as stack:
        stack.enter_context(in_process_loads())
        store = stack.enter_context(tierstore.open(root / "data", port=0, grpc_port="off"))
        store.load_snapshot(write_version(root / "1"))
        service, grpc = stack.enter_context(ServerThread(store)), free_port()
        weights = "--weights=" + ",".join(map(str, WEIGHTS))
        program = HERE / "run_kserve_predictor.py"
        predictor = stack.enter_context(running(root / "predictor.log", program, weights, grpc=grpc))
        made = {}
        for protocol, host in {"v2": predictor, "grpc-v2": f"127.0.0.1:{grpc}"}.items():
            words = ["--predictor_host", host, "--predictor_protocol", protocol]
            words += ["--tierstore_url", service.url, "--tierstore_model", "ctr"]
            log = root / f"transformer-{protocol}.log"
            made[protocol] = stack.enter_context(running(log, FOLDER / "transformer.py", *words))
        yield made


def tensor(name: str, datatype: str, values: Any) -> dict[str, Any]:
    return {"name": name, "shape": [len(values)], "datatype": datatype, "data": values}


def ask(address: str, *inputs: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"http://{address}/v2/models/ranking/infer", json={"inputs": list(inputs)}, timeout=60)


KEYS, BAGS, OFFSETS, ENDS = [7, 499, -1], [1, 2, 3, 4], [0, 2, 2], [2, 2, 4]
IDS = (
    tensor("item_id", "INT64", KEYS),
    tensor("clicked", "INT64", BAGS),
    tensor("clicked.offsets", "INT64", OFFSETS),
)


@pytest.mark.thorough
@pytest.mark.parametrize("protocol", ["v2", "grpc-v2"])
def test_the_transformer_gives_the_predictor_rows(transformers: dict[str, str], protocol: str) -> None:
    transformer = transformers[protocol]
    answer = ask(transformer, *IDS)
    assert answer.status_code == 200, answer.text
    (output,) = answer.json()["outputs"]
    expected = scores(vectors(KEYS), mean_bags(BAGS, ENDS))[:, 0]
    np.testing.assert_allclose(output["data"], expected, rtol=1e-5)
    shifted = ask(transformer, *IDS, tensor("bias", "FP64", [0.5]))
    (output,) = shifted.json()["outputs"]
    np.testing.assert_allclose(output["data"], 1 / (1 + np.exp(-(np.log(expected / (1 - expected)) + 0.5))), rtol=1e-5)


@pytest.mark.thorough
def test_a_request_that_tierstore_refuses_is_a_bad_request(transformers: dict[str, str]) -> None:
    answer = ask(transformers["v2"], IDS[0], IDS[1], tensor("clicked.offsets", "INT64", [1]))
    assert answer.status_code == 400
    assert "0 first, never descending" in answer.text
