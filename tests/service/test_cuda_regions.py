"""CUDA shared memory: refused clearly without a GPU, and with one (a stand-in here) like any other region."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from tierstore.access.roles import LOCAL
from tierstore.engine.store import Store
from tierstore.errors import InvalidInput
from tierstore.service.oip.shared_memory import Regions, Span
from tierstore.service.server import ServerThread
from tierstore.tiers.device.backend import DeviceError
from tierstore.tiers.device.cupy_device import find_devices

from .conftest import GRPC, settings_for
from .fake_store import DEFAULT, ITEMS
from .scenes import rows, write_snapshot

KEYS = np.array([5, 0, 99, 100, -1, 5], np.int64)
ROWS = rows("item", [ITEMS.get(int(key), DEFAULT) for key in KEYS])
HANDLE = bytes(range(64))
RAW = base64.b64encode(HANDLE)
SIZE = 4096


class DeviceMemory:
    """Of another process, as the driver would open it."""

    def __init__(self, handle: bytes, device: int, nbytes: int) -> None:
        assert handle == HANDLE
        if device > 0:
            raise DeviceError("device 1: cudaErrorInvalidDevice")
        self.data, self.closed = np.zeros(nbytes, np.uint8), 0

    def read(self, at: int, data: np.ndarray) -> None:
        data[:] = self.data[at : at + len(data)]

    def write(self, at: int, data: np.ndarray) -> None:
        self.data[at : at + len(data)] = data

    def close(self) -> None:
        self.closed += 1


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerThread]:
    root = tmp_path_factory.mktemp("cuda")
    with Store(settings_for(root, allow_client_shm=True, grpc_port=GRPC)) as store:
        store.load_snapshot(write_snapshot(root))
        with ServerThread(store) as server:
            yield server


@pytest.fixture
def client(server: ServerThread) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(server.url.removeprefix("http://")) as client:
        yield client
        client.unregister_cuda_shared_memory()


@pytest.fixture
def opened(server: ServerThread, monkeypatch: pytest.MonkeyPatch) -> list[DeviceMemory]:
    memories: list[DeviceMemory] = []

    def open_cuda(*where: Any) -> DeviceMemory:
        memories.append(DeviceMemory(*where))
        return memories[-1]

    monkeypatch.setattr(Regions, "_open_cuda", staticmethod(open_cuda), raising=False)
    for regions in (server.service.regions, server.service.regions.of(LOCAL)):
        monkeypatch.delattr(regions, "_open_cuda", raising=False)
    return memories


def infer(client: Any, module: Any = triton) -> Any:
    keys, answer = module.InferInput("item_id", list(KEYS.shape), "INT64"), module.InferRequestedOutput("item_id")
    keys.set_shared_memory("gpu", KEYS.nbytes, 8)
    answer.set_shared_memory("gpu", ROWS.nbytes, 1024)
    return client.infer("ctr", [keys], outputs=[answer])


def test_keys_and_rows_through_device_memory(client: triton.InferenceServerClient, opened: list[DeviceMemory]) -> None:
    client.register_cuda_shared_memory("gpu", RAW, 0, SIZE)
    assert client.get_cuda_shared_memory_status() == [{"name": "gpu", "device_id": 0, "byte_size": SIZE}]
    assert client.get_system_shared_memory_status() == []
    memory = opened[0]
    memory.write(8, KEYS.view(np.uint8))
    result = infer(client)
    assert result.get_output("item_id") == {"name": "item_id", "datatype": "FP32", "shape": [len(KEYS), 4]}
    np.testing.assert_array_equal(memory.data[1024 : 1024 + ROWS.nbytes].view(np.float32).reshape(ROWS.shape), ROWS)
    client.unregister_system_shared_memory()  # which is another kind
    infer(client)
    client.unregister_cuda_shared_memory("gpu")
    assert memory.closed == 1
    with pytest.raises(InferenceServerException, match="no shared memory region 'gpu'"):
        infer(client)


def test_keys_and_rows_through_device_memory_over_grpc(server: ServerThread, opened: list[DeviceMemory]) -> None:
    triton_grpc = pytest.importorskip("tritonclient.grpc", reason="tritonclient[grpc] is not installed")
    with triton_grpc.InferenceServerClient(server.grpc_target) as client:
        client.register_cuda_shared_memory("gpu", RAW, 0, SIZE)
        assert client.get_cuda_shared_memory_status().regions["gpu"].byte_size == SIZE
        opened[0].write(8, KEYS.view(np.uint8))
        infer(client, triton_grpc)
        answered = opened[0].data[1024 : 1024 + ROWS.nbytes].view(np.float32).reshape(ROWS.shape)
        np.testing.assert_array_equal(answered, ROWS)
        client.unregister_cuda_shared_memory()
        assert opened[0].closed == 1


@pytest.mark.parametrize(
    ("handle", "device", "size", "message"),
    [
        (RAW, 1, SIZE, "cudaErrorInvalidDevice"),
        (RAW, 0, 0, "byte_size of at least 1"),
        (RAW, -1, SIZE, "device_id is -1"),
        (base64.b64encode(b"short"), 0, SIZE, "64 bytes"),
    ],
)
def test_what_cannot_be_registered_is_refused(
    client: triton.InferenceServerClient,
    opened: list[DeviceMemory],
    handle: bytes,
    device: int,
    size: int,
    message: str,
) -> None:
    with pytest.raises(InferenceServerException, match=message):
        client.register_cuda_shared_memory("gpu", handle, device, size)
    assert client.get_cuda_shared_memory_status() == []
    assert client.is_server_live()


@pytest.mark.parametrize("raw", [None, 5, "handle", {"b64": 7}, {"b64": "not base64!"}, {}])
def test_a_handle_that_is_none_is_refused(server: ServerThread, raw: Any) -> None:
    request = {"raw_handle": raw, "device_id": 0, "byte_size": 8}
    answer = httpx.post(f"{server.url}/v2/cudasharedmemory/region/gpu/register", json=request)
    assert answer.status_code == 400
    assert "raw_handle" in answer.json()["error"]


@pytest.mark.skipif(find_devices()[0] > 0, reason="there is a GPU")
def test_without_a_gpu_it_is_refused_and_not_offered(client: triton.InferenceServerClient) -> None:
    with pytest.raises(InferenceServerException, match="there is no CUDA device 0"):
        client.register_cuda_shared_memory("gpu", RAW, 0, SIZE)
    extensions = client.get_server_metadata()["extensions"]
    assert "system_shared_memory" in extensions
    assert "cuda_shared_memory" not in extensions


def test_a_name_is_of_one_kind_and_a_device_that_fails_is_an_error(tmp_path: Path) -> None:
    memories: list[DeviceMemory] = []

    def open_cuda(*where: Any) -> DeviceMemory:
        memories.append(DeviceMemory(*where))
        return memories[-1]

    regions = Regions(enabled=True, max_read=SIZE, open_cuda=open_cuda)
    regions.register_cuda("r", HANDLE, 0, 64, on_host=True)
    with pytest.raises(InvalidInput, match="registered already"):
        regions.register_cuda("r", HANDLE, 0, 64, on_host=True)

    def fail(at: int, data: np.ndarray) -> None:
        raise DeviceError("device 0: cudaErrorIllegalAddress")

    memories[0].read = fail  # type: ignore[method-assign]
    with pytest.raises(InvalidInput, match="cudaErrorIllegalAddress"):
        regions.read(Span("r", 0, 64), "input 'x'")
    regions.close()
    assert [memory.closed for memory in memories] == [1]
