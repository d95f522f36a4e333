"""A stop ends, whatever a graph, or a part of the service, does."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.engine import scenes
from tests.predict import onnx_models as om
from tests.service.conftest import settings_for
from tests.service.fake_store import FakeStore
from tierstore.engine.store import Store
from tierstore.service import root
from tierstore.service import server as server_module
from tierstore.service.error_status import CUT_OFF
from tierstore.service.exchange import Exchange
from tierstore.service.http.handoff import Answer, Handoff
from tierstore.service.process import EXIT_CODE
from tierstore.service.server import ServerThread

SERVES = """
import os, sys, time
from tierstore.config import load_settings
from tierstore.service import process, server
from tierstore.service.context import Service
process.CLOSE_S, process.LAST_S, server.FINISH_S = 1.0, 0.5, 1.0
def say(*_):
    print("serves", flush=True)
    if sys.argv[2] == "the event loop":
        os.mkfifo("pipe")
        open("pipe")  # for ever, on the event loop
Service.close = lambda self: time.sleep(3600)
settings = load_settings(None, data=sys.argv[1], port=0, grpc_port="off", drain_s=0, threads=1, host_budget="4MiB")
server.serve(settings, announce=say)
"""


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("endless", "code", "said"), [("a part", EXIT_CODE, "has not ended"), ("the event loop", -signal.SIGALRM, "")]
)
def test_a_stop_that_does_not_end_exits(tmp_path: Path, endless: str, code: int, said: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SERVES, str(tmp_path / "data"), endless],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )
    try:
        assert process.stdout is not None
        assert "serves" in process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == code
    assert said in log


_SIGNALS_ITSELF = """
import signal, sys, threading
from tierstore.config import load_settings
from tierstore.service.server import serve

def announce(*_):
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

serve(load_settings(data=sys.argv[1], port=0, grpc_port="off", drain_s=0), announce=announce)
"""


def test_a_signal_that_another_thread_gets_stops_the_service(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _SIGNALS_ITSELF, str(tmp_path)]
    assert subprocess.run(command, timeout=60, check=False).returncode == 0


def test_a_stop_ends_a_graph_that_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "FINISH_S", 0.5)
    began_s = 0.0
    with Store(settings_for(tmp_path, dense_timeout_s=3600)) as store:
        store.load_snapshot(scenes.write_snapshot(tmp_path, dense=om.looping(always=False)))
        store.apply_delta(scenes.delta(1, {"user": ([1], np.full((1, 4), 99, np.float32))}))
        body = {"inputs": [{"name": "user_id", "datatype": "INT64", "shape": [1], "data": [1]}]}
        statuses: list[int] = []

        def predict() -> None:
            try:
                statuses.append(httpx.post(f"{server.url}/v2/models/ctr/infer", json=body, timeout=90).status_code)
            except httpx.HTTPError:
                statuses.append(0)  # its connection was closed

        with ServerThread(store) as server:
            thread = threading.Thread(target=predict)
            thread.start()
            scenes.eventually(lambda: store.shared.dense.limits._running, "the run")
            began_s = time.monotonic()
        thread.join(90)
    assert time.monotonic() - began_s < 80
    assert statuses in ([503], [504], [0])


def test_a_request_that_a_stop_cuts_off_is_503_and_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server_module, "FINISH_S", 0.2)
    came, answers = threading.Event(), []

    async def never(*_: object) -> None:
        came.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(root.Root, "_call_admin", never)
    with ServerThread(FakeStore(settings_for(tmp_path))) as server:  # type: ignore[arg-type]
        asking = threading.Thread(target=lambda: answers.append(httpx.get(f"{server.url}/admin/models", timeout=60)))
        asking.start()
        assert came.wait(60)
    asking.join(60)
    assert [answer.status_code for answer in answers] == [503]
    assert answers[0].json()["detail"] == CUT_OFF
    assert not [record for record in caplog.records if record.exc_info]
    assert len([record for record in caplog.records if CUT_OFF in record.getMessage()]) == 1


def test_a_prediction_that_a_stop_cuts_off_is_503_and_what_its_thread_answers_later_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server_module, "FINISH_S", 0.2)
    came, goes_on, answers, told = threading.Event(), threading.Event(), [], []
    work, answered = Exchange.answer, Handoff._answered
    send = Answer.send

    def held_up(call: Exchange[Any]) -> object:
        came.set()
        assert goes_on.wait(60)
        return work(call)

    def telling(*of: Any) -> None:
        told.append("a thread has it")
        answered(*of)

    def sending(answer: Answer, response: Any) -> None:
        told.append(response.status)
        send(answer, response)

    monkeypatch.setattr(Exchange, "answer", held_up)
    monkeypatch.setattr(Handoff, "_answered", telling)
    monkeypatch.setattr(Answer, "send", sending)
    with Store(settings_for(tmp_path)) as store:
        store.load_snapshot(scenes.write_snapshot(tmp_path, dense=scenes.some_dense()))
        body = {"inputs": [{"name": "user_id", "datatype": "INT64", "shape": [1], "data": [1]}]}
        with ServerThread(store) as server:
            ask = threading.Thread(
                target=lambda: answers.append(httpx.post(f"{server.url}/v2/models/ctr/infer", json=body, timeout=60))
            )
            ask.start()
            assert came.wait(60)
            end = threading.Thread(target=server.close)
            end.start()
            ask.join(60)
            goes_on.set()
            end.join(60)
    assert [answer.status_code for answer in answers] == [503]
    assert answers[0].json()["error"] == CUT_OFF
    assert told == [503, "a thread has it"]
    assert len([record for record in caplog.records if CUT_OFF in record.getMessage()]) == 1


def test_a_run_that_takes_too_long_is_504(tmp_path: Path) -> None:
    with Store(settings_for(tmp_path, dense_timeout_s=0.3)) as store:
        store.load_snapshot(scenes.write_snapshot(tmp_path, dense=om.looping(always=False)))
        store.apply_delta(scenes.delta(1, {"user": ([1], np.full((1, 4), 99, np.float32))}))
        body = {"inputs": [{"name": "user_id", "datatype": "INT64", "shape": [1], "data": [1]}]}
        with ServerThread(store) as server:
            answer = httpx.post(f"{server.url}/v2/models/ctr/infer", json=body, timeout=60)
            assert answer.status_code == 504, answer.text
            assert "dense_timeout_s" in answer.json()["error"]
            body["inputs"][0]["data"] = [2]
            assert httpx.post(f"{server.url}/v2/models/ctr/infer", json=body, timeout=60).status_code == 200
