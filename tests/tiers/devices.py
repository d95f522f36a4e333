"""Devices that the device tier's tests run on: the stand-in on the CPU, and a real GPU where CuPy finds one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.tiers.cuda_shim.backend import ShimDevice
from tierstore.tiers.device import CudaDevice, find_devices

_FOUND, _NO_GPU = find_devices()
ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not _FOUND, reason=_NO_GPU or "")]
either = pytest.mark.parametrize("kind", ["shim", pytest.param("gpu", marks=ON_GPU)])


def open_device(kind: str) -> Any:
    return ShimDevice() if kind == "shim" else CudaDevice(0)


def to_host(array: Any) -> np.ndarray:
    """A NumPy array of an answer, wherever it lies."""
    return array if isinstance(array, np.ndarray) else array.get()
