"""One set of requests through every client there is: all answers are those computed without the service."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("grpc", reason="grpcio is not installed")
pytest.importorskip("tritonclient.grpc", reason="needs tritonclient, of the extra dev")

from tests.engine.quick_build import in_process as in_process_loads
from tests.interop import cases, exchange, in_process
from tests.service.scenes import write_snapshot
from tierstore.config import load_settings
from tierstore.engine.store import Store
from tierstore.service.server import ServerThread

HERE = Path(__file__).parent
VENVS = HERE.parents[1] / ".clients"
# program → (virtual environment, the clients it asks with)
PROGRAMS = {
    "run_tensorflow.py": ("tfs", ("tensorflow", "tensorflow_values")),
    "run_kserve.py": ("kserve", ("kserve_json", "kserve_binary", "kserve_v1", "kserve_grpc")),
}
PROGRAM_OF = {client: program for program, (_, clients) in PROGRAMS.items() for client in clients}
CLIENTS = [*in_process.CLIENTS, *PROGRAM_OF]
DEADLINE_S = 120
REQUESTS = [*cases.look_ups(), *cases.predictions()]
for asked_for, wanted in REQUESTS:
    asked_for.answers = asked_for.answers or list(wanted if isinstance(wanted, dict) else asked_for.inputs)
ASKED = [
    pytest.param(client, case, expected, id=f"{client}-{case.name}")
    for case, expected in REQUESTS
    for client in CLIENTS
]

Answers = dict[str, exchange.Answer]


class Asked:
    """Asks each client all there is to ask, once. The programs run side by side, from the beginning on."""

    def __init__(self, job: exchange.Job, work: Path) -> None:
        self._job, self._work = job, work
        self._answers: dict[str, Answers] = {}
        self._running: dict[str, subprocess.Popen[str]] = {}
        exchange.write_job(work / "job.json", job)
        for program, (venv, _) in PROGRAMS.items():
            python = VENVS / venv / "bin/python"
            if (VENVS / venv / ".installed").exists():
                self._running[program] = subprocess.Popen(
                    [python, HERE / program, work / "job.json", work / f"{program}.json"],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
                )

    def of(self, client: str) -> Answers:
        """A client's answers by case; skips where the client is not installed."""
        if client not in self._answers:
            if client in in_process.CLIENTS:
                self._answers[client] = in_process.CLIENTS[client](self._job)
            else:
                self._collect(client)
        return self._answers[client]

    def _collect(self, client: str) -> None:
        program = PROGRAM_OF[client]
        running = self._running.get(program)
        if running is None:
            pytest.skip(f"no environment .clients/{PROGRAMS[program][0]}: make client-venvs")
        said, _ = running.communicate(timeout=DEADLINE_S)
        assert running.returncode == 0, said
        self._answers |= exchange.read_answers(self._work / f"{program}.json")

    def close(self) -> None:
        for running in self._running.values():
            running.kill()
            running.communicate()


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asked]:
    root = tmp_path_factory.mktemp("clients")
    settings = load_settings(
        None,
        data=root / "data",
        port=0,
        grpc_port=0,
        drain_s=0.0,
        host_budget="4MiB",
        allow_client_shm=True,
        load_workers=1,
        disk_threads=2,
    )
    with in_process_loads(), Store(settings) as store:
        store.load_snapshot(write_snapshot(root))
        store.load_snapshot(write_snapshot(root, cases.VERSION + 1, shift=cases.SHIFT), activate=False)
        store.canary(cases.MODEL, cases.VERSION + 1, share=0.0)
        store.load_snapshot(write_snapshot(root, model=cases.RANKER, dense=cases.ranker()))
        with ServerThread(store) as server:
            job = exchange.Job(server.url.removeprefix("http://"), server.grpc_target, [case for case, _ in REQUESTS])
            asked = Asked(job, root)
            try:
                yield asked
            finally:
                asked.close()


@pytest.mark.parametrize(("client", "case", "expected"), ASKED)
def test_every_client_gets_the_same(asked: Asked, client: str, case: exchange.Case, expected: cases.Expected) -> None:
    answer = asked.of(client)[case.name]
    if isinstance(expected, str):
        assert isinstance(answer, str), answer
        assert re.search(rf"\b{expected}\b", answer), answer
        return
    assert isinstance(answer, dict), answer
    if answer.keys() == {""}:  # a single output has no name in this client's answers
        answer = dict(zip(expected, answer.values(), strict=True))
    assert answer.keys() == expected.keys()
    for name, array in expected.items():
        got = answer[name]
        if client != "kserve_v1":  # JSON has no types
            assert got.dtype == array.dtype, name
        np.testing.assert_array_equal(got.astype(array.dtype), array, err_msg=name)


def test_tensorflow_reads_status_and_signatures(asked: Asked) -> None:
    asked.of("tensorflow")  # or skip
    about = asked.of("tensorflow_about")
    assert about["status"][str(cases.VERSION)].tolist() == [30]  # AVAILABLE
    dtypes = {name: dtype.tolist()[0] for name, dtype in about["inputs"].items()}
    assert dtypes["user"] == 7
    assert dtypes["big"] == 23
    assert dtypes["item_id"] == dtypes["clicked.offsets"] == 9
    assert dtypes["clicked.weights"] == 1
