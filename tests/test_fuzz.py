"""Inputs that were found to matter, and a few new ones, for everything that reads what others wrote (`tools/fuzz.py`)."""

from __future__ import annotations

import importlib.util
import os

import pytest

pytest.importorskip("onnx", reason="needs the extra `dense`")
pytest.importorskip("onnxruntime", reason="needs the extra `dense`")

from tools.fuzz import fuzz
from tools.fuzz_targets import TARGETS

COUNT = int(os.environ.get("FUZZ_INPUTS", 250))  # a target


@pytest.mark.thorough
@pytest.mark.parametrize("name", TARGETS)
def test_whatever_is_read_is_answered_or_refused_by_name(name: str) -> None:
    if name == "grpc" and not all(importlib.util.find_spec(module) for module in ("grpc", "tritonclient")):
        pytest.skip("needs the extra `grpc` and tritonclient")
    if name == "redis":
        pytest.importorskip("redis", reason="needs the extra `redis`")
    if name == "registry":
        pytest.importorskip("fastavro", reason="needs the extra `kafka`")
    run = fuzz(name, COUNT, seed=20)
    assert run.faults == {}
    assert run.inputs >= COUNT
    assert len(run.outcomes) > 5, "it is about something"
