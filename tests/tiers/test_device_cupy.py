"""The cupy_device of CuPy: what it does over a stand-in, and whether the real CuPy has what the stand-in pretends."""

from __future__ import annotations

import inspect
import re
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tests.tiers.cuda_shim.backend import OnGpu, ShimDevice
from tests.tiers.cuda_shim.cupy_stand_in import CUDARuntimeError, CupyStandIn, OutOfMemoryError
from tests.tiers.devices import ReadTable, over_stand_in
from tierstore.errors import InvalidInput
from tierstore.tiers.device import cupy_device
from tierstore.tiers.device.backend import Captured, DeviceError, OutOfDeviceMemory, is_gpu_array
from tierstore.tiers.device.cupy_device import find_devices
from tierstore.tiers.device.workspaces import WORKSPACES, WRITING, DeviceMemory, Workspace
from tierstore.types import KeyType, StorageDtype, TableSpec


class Tensor:
    """An array that speaks DLPack alone, on a device of that kind and number."""

    def __init__(self, number: int, array: np.ndarray, kind: int = 2) -> None:
        self.array, self.number, self.kind = array, number, kind

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.kind, self.number

    def __dlpack__(self, **options: Any) -> Any:
        return self.array


@pytest.fixture
def cupy() -> CupyStandIn:
    return CupyStandIn(ShimDevice(1 << 20))


def test_errors_of_the_driver_are_ours_and_say_which_device(cupy: CupyStandIn) -> None:
    device = over_stand_in(cupy)
    with pytest.raises(OutOfDeviceMemory, match="device 0"):
        device.alloc(1 << 21)
    for error, ours in (
        (CUDARuntimeError(719), DeviceError),
        (OutOfMemoryError(), OutOfDeviceMemory),
        (CUDARuntimeError(906), Captured),
        (CUDARuntimeError(400), InvalidInput),
    ):
        with pytest.raises(ours, match=r"device 0|GPU 0"), device.current():
            raise error
    stream = device.stream()
    cupy.device.broken = True
    with pytest.raises(DeviceError, match="device 0"):
        stream.synchronize()


def test_a_look_up_within_a_capture_is_refused_before_it_can_end_it(cupy: CupyStandIn) -> None:
    device = over_stand_in(cupy)
    assert device.empty((2, 3), np.float16).shape == (2, 3)
    cupy.capturing = True
    with pytest.raises(Captured, match="captured"):
        device.empty((2, 3), np.float32)


def test_an_array_is_taken_from_another_library_on_this_device_only(cupy: CupyStandIn) -> None:
    device = over_stand_in(cupy)
    array = np.arange(5)
    mine = device.adopt(OnGpu(array))
    assert device.address_of(mine) == array.ctypes.data
    with pytest.raises(InvalidInput, match="in the memory of GPU 0, got one on GPU 1"):
        device.adopt(Tensor(1, array))

    class Sparse(Tensor):
        def __dlpack__(self, **options: Any) -> Any:
            raise BufferError("it is sparse")

    with pytest.raises(InvalidInput, match=r"a dense array in the memory of GPU 0: it is sparse"):
        device.adopt(Sparse(0, array))
    cupy.capturing = True
    with pytest.raises(Captured, match="captured"):
        device.adopt(OnGpu(array))


@pytest.mark.parametrize(
    ("values", "on_gpu"),
    [
        (np.arange(3), False), ([1], False), ("a", False), (np.float32(1), False), (pa.array([1]), False),
        (OnGpu(np.arange(3)), True), (Tensor(0, np.arange(3)), True), (Tensor(0, np.arange(3), kind=1), False),
    ],
)  # fmt: skip
def test_what_lies_on_a_gpu_is_told_by_what_it_says_of_itself(values: Any, on_gpu: bool) -> None:
    assert is_gpu_array(values) is on_gpu


def test_while_others_capture_look_ups_and_deltas_go_on(cupy: CupyStandIn) -> None:
    spec = TableSpec("t", KeyType.INT64, 4, StorageDtype.FLOAT32)
    table = ReadTable(spec, 1 << 18, DeviceMemory(over_stand_in(cupy), 1 << 19), default_vector=np.zeros(4))
    keys = np.arange(20, dtype=np.int64)
    assert table.insert(keys, np.ones((20, 16), np.uint8), 0) == 20
    out = np.zeros((20, 4), np.float32)
    cupy.refused = cupy.device.functions.refused = 905
    state = np.zeros(20, np.uint8)
    assert table.lookup(keys, out, state) == 20  # whose kernel says itself that it is done
    assert (out == np.ones(4, np.uint8).view(np.float32)).all()
    table.update(keys, np.zeros((20, 16), np.uint8), np.zeros(20, np.bool_))
    state[:] = 0
    assert table.lookup(keys, out, state) == 20
    assert (out == 0).all()
    assert table.problem is None


def _up_and_down(ws: Workspace) -> None:
    ws.staging(0, 8)[:] = 1
    ws.stream.upload(ws.at(0), ws.staging(0, 8))
    ws.stream.download(ws.staging(0, 8), ws.at(0))
    ws.stream.synchronize()


def test_a_workspace_whose_work_could_not_be_waited_for_is_waited_for_by_the_next(cupy: CupyStandIn) -> None:
    memory = DeviceMemory(over_stand_in(cupy), 1 << 19)
    for _ in range(2 * WORKSPACES):
        cupy.refused = 905
        with pytest.raises(Captured), memory.workspace() as ws:
            _up_and_down(ws)
        others = [memory.workspace() for _ in range(WRITING - 1)]  # taken in turn
        with pytest.raises(Captured), memory.workspace():
            pass
        cupy.refused = 0
        for other in others:
            with other:
                pass
        with memory.workspace() as ws:
            ws.staging(0, 8)[:] = 2  # what is still to come down would write over it
            ws.stream.synchronize()
            assert (ws.staging(0, 8) == 2).all()
    assert memory.held == 0


def test_memory_that_is_given_back_is_the_drivers_again(cupy: CupyStandIn) -> None:
    memory = DeviceMemory(over_stand_in(cupy), 1 << 19)
    assert cupy.device.used > 0
    memory.close()
    assert cupy.device.used == 0


def test_a_table_gets_the_memory_that_is_kept_for_answers(cupy: CupyStandIn) -> None:
    device = over_stand_in(cupy)
    cupy.pool.append(cupy.device.alloc(900 << 10))
    buffer = device.alloc(500 << 10)
    assert cupy.device.used == buffer.nbytes


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ModuleNotFoundError("No module named 'cupy'", name="cupy"), cupy_device.NOT_INSTALLED),
        (ImportError("CuPy is not correctly installed.\n\nlibcuda", name="cupy.cuda"), "CuPy cannot be imported: CuPy is not correctly installed. libcuda"),
    ],
)  # fmt: skip
def test_a_cupy_that_is_broken_is_told_from_none(
    error: ImportError, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> Any:
        raise error

    monkeypatch.setattr(cupy_device, "import_module", missing)
    assert find_devices() == (0, said)


def _parameters(of: Any) -> list[str] | None:
    """Names of parameters, of what Python or Cython has made; None where it does not say."""
    if isinstance(of, type):
        of = of.__init__
    try:
        return [name for name in inspect.signature(of).parameters if name not in ("self", "cls")]
    except (TypeError, ValueError):
        said = re.match(r"[\w.]+\((.*?)\)", of.__doc__ or "")
    if said is None:
        return None
    names = [part.split("=")[0].split(":")[0].split()[-1] for part in said[1].split(",") if part.strip()]
    return [name for name in names if name not in ("self", "cls")]


OWN = ("array", "refused", "options", "null")  # of the stand-in alone, or made when there is a device


def _pairs(ours: Any, theirs: Any, path: str) -> list[tuple[str, Any, Any]]:
    """(name, what the stand-in has, what CuPy has), of everything that is public below them."""
    pairs = []
    for name in dir(ours):
        if name.startswith("_") or name in OWN:
            continue
        mine, where = getattr(ours, name), f"{path}.{name}"
        assert hasattr(theirs, name), f"CuPy has no {where}"
        pairs.append((where, mine, getattr(theirs, name)))
        if not callable(mine) or (isinstance(mine, type) and not issubclass(mine, BaseException)):
            pairs += _pairs(mine, getattr(theirs, name), where) if not isinstance(mine, int) else []
    return pairs


def test_cupy_has_all_that_is_used_of_it_under_these_names_and_with_these_parameters() -> None:
    real = pytest.importorskip("cupy", reason="CuPy is not installed")
    for name in ("empty", "asarray", "ascontiguousarray", "from_dlpack"):
        assert callable(getattr(real, name))
    assert hasattr(real.ndarray, "device")
    assert hasattr(real.cuda.Stream, "__cuda_stream__")
    assert callable(real.get_default_memory_pool().free_all_blocks)
    compared = []
    for where, mine, theirs in _pairs(CupyStandIn(ShimDevice()).cuda, real.cuda, "cupy.cuda"):
        if isinstance(mine, type) and issubclass(mine, BaseException):
            assert issubclass(theirs, BaseException), where
        elif callable(mine) and not where.endswith("PinnedMemoryPointer"):
            expected, came = _parameters(mine), _parameters(theirs)
            if came and "args" not in came:  # which is what Cython says of a constructor
                compared.append(where)
                assert came[: len(expected or [])] == expected, where
    assert "cupy.cuda.runtime.memcpyAsync" in compared
