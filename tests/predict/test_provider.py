"""What dense parts run on: options of the provider, and what is said at start where it cannot be had."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tierstore.config import load_settings
from tierstore.errors import MissingExtra
from tierstore.predict.provider import CUDA_PROVIDER, ON_CPU, check_installed, check_made, provider_of
from tierstore.predict.runtime import Runtime

onnxruntime = pytest.importorskip("onnxruntime", reason="needs the extra `dense`")
GPU_BUILD = CUDA_PROVIDER in onnxruntime.get_available_providers()


def settings(**options: Any) -> Any:
    return load_settings(None, dense_provider="cuda", **options)


def test_the_processor_is_what_is_not_said_otherwise(load: Callable[..., Any]) -> None:
    assert provider_of(load_settings(None)) is ON_CPU
    assert ON_CPU.providers == ["CPUExecutionProvider"]


def test_the_providers_options_are_the_settings() -> None:
    provider = provider_of(
        settings(dense_options={"cuda.gpu_mem_limit": 3 << 30, "cuda.tunable_op_enable": True})
    )  # fmt: skip
    assert (provider.memory, provider.device) == ("cuda", "gpu:0")
    (name, options), last = provider.providers
    assert (name, last) == (CUDA_PROVIDER, "CPUExecutionProvider")
    assert options == {
        "device_id": "0", "gpu_mem_limit": str(3 << 30), "arena_extend_strategy": "kSameAsRequested", "use_tf32": "0",
        "tunable_op_enable": "1",
    }  # fmt: skip


@pytest.mark.skipif(GPU_BUILD, reason="this ONNX Runtime has a CUDA provider")
def test_an_onnx_runtime_without_the_provider_is_refused_at_start() -> None:
    with pytest.raises(MissingExtra, match=r"no CUDAExecutionProvider, only .*pip install 'tierstore\[dense-gpu\]'"):
        Runtime(settings())


@pytest.mark.skipif(not GPU_BUILD, reason="this ONNX Runtime has no CUDA provider")
def test_a_provider_that_cannot_start_is_refused_and_not_replaced_by_the_processor() -> None:
    with pytest.raises(MissingExtra, match="cannot start CUDAExecutionProvider"):
        Runtime(settings(dense_options={"cuda.device_id": "99"}))


def test_a_session_that_goes_without_its_provider_is_refused() -> None:
    provider = provider_of(settings())
    check_made(SimpleNamespace(get_providers=lambda: [CUDA_PROVIDER, "CPUExecutionProvider"]), provider)
    with pytest.raises(MissingExtra, match=r"onnxruntime-gpu\[cuda,cudnn\]"):
        check_made(SimpleNamespace(get_providers=lambda: ["CPUExecutionProvider"]), provider)


def test_libraries_of_nvidias_packages_are_found_where_onnx_runtime_can_look_for_them() -> None:
    loaded: list[bool] = []
    module = SimpleNamespace(
        get_available_providers=lambda: [CUDA_PROVIDER], preload_dlls=lambda: loaded.append(True), __version__="1"
    )
    check_installed(module, provider_of(settings()))
    assert loaded == [True]
