"""The execution provider that runs dense parts: ONNX Runtime's, its options, and the memory that rows may be in.

Immutable values and functions; any thread may use them. Names and values of options are ONNX Runtime's:
https://onnxruntime.ai/docs/execution-providers/CUDA-ExecutionProvider.html
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tierstore.config import Settings
from tierstore.errors import MissingExtra

CUDA = "cuda."  # before the names of the provider's options, in the setting dense_options
CUDA_PROVIDER, CPU_PROVIDER = "CUDAExecutionProvider", "CPUExecutionProvider"
INSTALL_CUDA = "pip uninstall onnxruntime, then pip install 'tierstore[dense-gpu]'"


@dataclass(frozen=True, slots=True)
class DenseProvider:
    """A provider, and the memory that it reads and writes.

    `memory` names the kind of device as IO bindings do; it is the first of that kind. `device` is its name in this
    store (`gpu:0`): rows that the device tier holds there are read there. None: rows come in CPU memory.
    """

    name: str
    memory: str
    device: str | None = None
    options: Mapping[str, str] = field(default_factory=dict)

    @property
    def providers(self) -> list[Any]:
        """Execution providers for `InferenceSession`; operators that the first has no kernels for run on the CPU."""
        if self.name == CPU_PROVIDER:
            return [CPU_PROVIDER]
        return [(self.name, dict(self.options)), CPU_PROVIDER]


ON_CPU = DenseProvider(CPU_PROVIDER, "cpu")


def provider_of(settings: Settings) -> DenseProvider:
    """The provider that the settings name."""
    if settings.dense_provider == "cpu":
        return ON_CPU
    options = {
        "device_id": "0",  # of those that CUDA_VISIBLE_DEVICES shows, as the device tier's
        "gpu_mem_limit": str(2 << 30),  # bytes that a session may keep for its tensors
        "arena_extend_strategy": "kSameAsRequested",  # the default strategy doubles it, past the limit
        "use_tf32": "0",  # on by default, it keeps 10 of the 23 bits of float32 numbers in products of matrices
    }
    given = {name.removeprefix(CUDA): value for name, value in settings.dense_options.items() if name.startswith(CUDA)}
    return DenseProvider(CUDA_PROVIDER, "cuda", "gpu:0", options | given)


def check_installed(onnxruntime: Any, provider: DenseProvider) -> None:
    """Raise MissingExtra where the installed ONNX Runtime has no such provider."""
    if provider.name not in (there := onnxruntime.get_available_providers()):
        raise MissingExtra(
            f"dense_provider is cuda, and the ONNX Runtime {onnxruntime.__version__} that is installed has no "
            f"{provider.name}, only {', '.join(there)}: {INSTALL_CUDA}"
        )
    if hasattr(onnxruntime, "preload_dlls"):
        onnxruntime.preload_dlls()  # from NVIDIA's packages, where they are installed


def check_made(session: Any, provider: DenseProvider) -> None:
    """Raise MissingExtra where a session lacks its provider: ONNX Runtime drops one that
    cannot start, and only logs it.
    """
    if provider.name not in session.get_providers():
        raise MissingExtra(
            f"dense_provider is cuda, and ONNX Runtime cannot start {provider.name}: there is no such device, or "
            "its driver, CUDA or cuDNN is missing or of another release than ONNX Runtime's (its log says which): "
            "pip install 'onnxruntime-gpu[cuda,cudnn]' brings the libraries"
        )
