"""Services with a device: reactors answer rows, and begin predictions, whose graph or whose rows may be there; as Python does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.service.conftest import eventually
from tests.service.reactor.prediction_scenes import Drawn, OverGrpc, OverHttp, ask, two_services, warm
from tests.service.reactor.test_predictions import compare_counts, predict_alike
from tests.tiers.cuda_shim.backend import ShimDevice
from tierstore.predict import runtime
from tierstore.predict.provider import CPU_PROVIDER, DenseProvider
from tierstore.predict.session import Slot
from tierstore.tiers.device import gpu


@pytest.mark.parametrize("budget", [0, "4MiB"])
@pytest.mark.parametrize("graph", ["gpu:0", None])
def test_reactors_begin_predictions_of_rows_and_graphs_on_a_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, budget: Any, graph: str | None
) -> None:
    """Without a tier there the reactors look up; else the thread that runs the graph does, on rows that stay there."""
    monkeypatch.setattr(gpu, "find_backend", lambda: (ShimDevice(), None))
    if graph is not None:
        monkeypatch.setattr(runtime, "provider_of", lambda settings: DenseProvider(CPU_PROVIDER, "cpu", graph))
    with two_services(tmp_path, device_budget=budget) as both:
        predict_alike(both, 150)
        compare_counts(both)
        bound = Slot.bind
        on_device: list[str] = []
        monkeypatch.setattr(Slot, "bind", lambda slot, name, *more: (on_device.append(name), bound(slot, name, *more)))
        before = both[0].by_reactors
        inputs = {"many": np.arange(3 * 4).reshape(4, 3)}
        answers = [ask(served, OverHttp, Drawn(inputs, ["score"], "flat")) for served in both]
        assert answers[0].said == answers[1].said
        assert both[0].by_reactors == before + 1
        assert on_device == (["many"] * 2 if budget and graph else [])
        eventually(lambda: both[0].server.service.inflight.used_bytes == 0, "nothing is held")


@pytest.mark.parametrize("wire", [OverHttp, OverGrpc])
def test_reactors_answer_rows_and_bags_of_tables_with_a_device_tier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wire: Any
) -> None:
    monkeypatch.setattr(gpu, "find_backend", lambda: (ShimDevice(), None))
    with two_services(tmp_path, device_budget="4MiB") as both:
        for inputs in {"one": np.arange(20)}, {"bag": np.arange(20).reshape(5, 4)}:
            asked = Drawn(inputs, list(inputs))
            warm(both[0], wire, asked)
            before = both[0].by_reactors
            answers = [ask(served, wire, asked) for served in both]
            assert answers[0].said == answers[1].said
            assert both[0].by_reactors == before + 1
