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
from tierstore.tiers.device.lookup import OtherTiers, look_up_into
from tierstore.tiers.device.table import DeviceTable
from tierstore.tiers.device.workspaces import WORKSPACES
from tierstore.types import Keys, States, Tier, Vectors

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
    array = getattr(array, "array", array)  # of a `GpuArray`
    return array if isinstance(array, np.ndarray) else array.get()


class ReadTable(DeviceTable):
    """A table that is asked as `HostTable` is."""

    def lookup(self, keys: Keys, out: Vectors, state: States) -> int:
        """Answer, in CPU memory, the PENDING keys that the table has; others stay PENDING. Returns how many got a row."""

        def below(keys: Keys, dtype: Any) -> tuple[Vectors, States]:
            return np.full((len(keys), self.spec.dim), np.nan, dtype), np.zeros(len(keys), np.uint8)

        at = np.flatnonzero(state == Tier.PENDING)
        found = np.zeros(len(at), np.uint8)
        look_up = look_up_into(out.dtype, self, keys[at], found, OtherTiers(below))
        if look_up is None or not look_up.finish():
            return 0
        hit = np.flatnonzero(found)
        out[at[hit]], state[at] = to_host(look_up.out)[hit], found
        return int(np.count_nonzero(found == Tier.DEVICE))


def over_stand_in(cupy: CupyStandIn) -> CudaDevice:
    with mock.patch.object(cupy_device, "import_module", return_value=cupy):
        device = CudaDevice(0)
    addresses = mock.patch.object(cupy_device, "driver_addresses", return_value=cupy.device.functions.addresses)
    with addresses, suppress(DeviceError):  # of a compiler that is not there: said again where a stream is made
        device.driver()
    return device
