"""One id from the client's call to the service's lines about its look-up and its dense part, and back on the error."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnxruntime", reason="needs the extra `dense`")

import tierstore
from tests.engine.quick_build import in_process
from tests.predict import onnx_models as om
from tests.service.conftest import settings_for
from tests.service.scenes import write_snapshot
from tierstore.engine.store import Store
from tierstore.errors import InferenceError, TierstoreError
from tierstore.predict.session import DenseSession
from tierstore.service.server import ServerThread

WEIGHTS = {"item_id": [1.0, 0.5, 0.25, 0.125]}


def test_a_dense_part_that_fails_and_one_that_is_slow_are_found_by_the_id(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> Any:
        raise InferenceError("the runtime gave up")

    def lines() -> list[dict[str, Any]]:
        name = "tierstore.service.request_log"
        return [record.fields for record in caplog.records if record.name == name]  # type: ignore[attr-defined]

    caplog.set_level(logging.WARNING, "tierstore")
    settings = settings_for(tmp_path, slow_request_ms=1e-6)
    inputs = {"item_id": [5]}
    with in_process(), Store(settings) as store:
        store.load_snapshot(write_snapshot(tmp_path, dense=om.linear(WEIGHTS, 0.5)))
        with ServerThread(store) as server, tierstore.Client(server.url, retries=0) as client:
            assert np.isfinite(client.predict("ctr", inputs, request_id="slow-1")).all()
            slow = next(line for line in lines() if line["path"].endswith("/infer"))
            assert (slow["id"], slow["status"]) == ("slow-1", 200)
            assert slow["dense_ms"] > 0
            for run in ("run", "run_feed"):  # Python's, and that of what a reactor has begun
                monkeypatch.setattr(DenseSession, run, fails)
            with pytest.raises(TierstoreError, match="the runtime gave up") as raised:
                client.predict("ctr", inputs, request_id="lost-1")
            assert raised.value.request_id == "lost-1"
            monkeypatch.undo()
            with pytest.raises(TierstoreError) as unnamed:
                client.predict("nobody", inputs)
    failed = next(line for line in lines() if line["status"] == 503)
    assert (failed["id"], failed["reason"]) == ("lost-1", "the runtime gave up")
    refused = next(line for line in lines() if line["status"] == 404)
    assert refused["id"] == unnamed.value.request_id, "one that the client has made up"
