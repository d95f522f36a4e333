"""Devices that the device tier's tests run on: stand-ins on the CPU, and a real GPU where CuPy finds one."""

from __future__ import annotations

from contextlib import suppress
from typing import Any
from unittest import mock

import numpy as np
import pytest

from tests.tiers.cuda_shim.backend import ShimDevice
from tests.tiers.cuda_shim.cupy_stand_in import CupyStandIn
from tierstore.tiers.device import cupy_device
from tierstore.tiers.device.backend import DeviceError
from tierstore.tiers.device.cupy_device import CudaDevice, find_devices
from tierstore.tiers.device.workspaces import WORKSPACES

_FOUND, _NO_GPU = find_devices()
ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not _FOUND, reason=_NO_GPU or "")]
SELDOM = [pytest.param(kind, marks=pytest.mark.thorough) for kind in ("early", "cupy")]
either = pytest.mark.parametrize("kind", ["late", *SELDOM, pytest.param("gpu", marks=ON_GPU)])


def open_device(kind: str) -> Any:
    """`late` and `early` are stand-ins whose tables do what they are told as late, or as early, as they may.

    `cupy` is the driver's own cupy_device over a stand-in for CuPy, `gpu` the same over a device.
    """
    if kind == "cupy":
        return over_stand_in(CupyStandIn(ShimDevice()))
    if kind == "gpu":
        return CudaDevice(0)
    return ShimDevice(early_from=WORKSPACES) if kind == "early" else ShimDevice()


def to_host(array: Any) -> np.ndarray:
    """A NumPy array of an answer, wherever it lies."""
    return array if isinstance(array, np.ndarray) else array.get()


def over_stand_in(cupy: CupyStandIn) -> CudaDevice:
    with mock.patch.object(cupy_device, "import_module", return_value=cupy):
        device = CudaDevice(0)
    addresses = mock.patch.object(cupy_device, "driver_addresses", return_value=cupy.device.functions.addresses)
    with addresses, suppress(DeviceError):  # of a compiler that is not there: said again where a stream is made
        device.driver()
    return device
