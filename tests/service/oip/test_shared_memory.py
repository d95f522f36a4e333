"""System shared memory: keys and rows through regions of an unchanged client, and whatever a client may do wrong with them."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.http as triton
import tritonclient.utils.shared_memory as shm
from tritonclient.utils import InferenceServerException

from tests.extras import has_grpc
from tests.service.conftest import GRPC, eventually, settings_for
from tests.service.fake_store import DEFAULT, ITEMS, USERS
from tests.service.scenes import rows, write_snapshot
from tierstore.access.roles import LOCAL, Principal, Role
from tierstore.addresses import is_loopback
from tierstore.engine.store import Store
from tierstore.errors import InvalidInput, NotFound, Overloaded
from tierstore.service.addresses import is_on_host
from tierstore.service.protocols.oip.shared_memory import DIRECTORY, MAX_REGIONS, MOST_EACH, Regions, Span
from tierstore.service.reactor import reply
from tierstore.service.server import ServerThread

KEYS = np.array([5, 0, 99, 100, -1, 5], np.int64)
ROWS = rows("item", [ITEMS.get(int(key), DEFAULT) for key in KEYS])
NAME = f"test-{os.getpid()}"
SIZE = 4096


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerThread]:
    root = tmp_path_factory.mktemp("shared")
    with Store(settings_for(root, allow_client_shm=True, grpc_port=GRPC)) as store:
        store.load_snapshot(write_snapshot(root))
        with ServerThread(store) as server:
            yield server


@pytest.fixture
def client(server: ServerThread) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(server.url.removeprefix("http://")) as client:
        yield client
        client.unregister_system_shared_memory()


@pytest.fixture
def make() -> Iterator[Callable[..., Any]]:
    """Makes regions with tritonclient's own tool, and removes them."""
    handles = []

    def create(name: str, size: int = SIZE) -> Any:
        handles.append(shm.create_shared_memory_region(name, f"/{NAME}-{name}", size))
        return handles[-1]

    yield create
    for handle in handles:
        shm.destroy_shared_memory_region(handle)


def key_of(name: str) -> str:
    return f"/{NAME}-{name}"


def given(region: str, nbytes: int = KEYS.nbytes, offset: int = 0, shape: tuple[int, ...] = KEYS.shape) -> Any:
    tensor = triton.InferInput("item_id", list(shape), "INT64")
    tensor.set_shared_memory(region, nbytes, offset)
    return tensor


def wanted(region: str, nbytes: int = ROWS.nbytes, offset: int = 0, name: str = "item_id") -> Any:
    output = triton.InferRequestedOutput(name)
    output.set_shared_memory(region, nbytes, offset)
    return output


def descriptors() -> list[str]:
    """What this process, and so the server in it, has open of the tests' objects; one the client has mapped counts too."""
    links = []
    for entry in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{entry}"))
        except OSError:
            continue
    return [link for link in links if NAME in link]


@pytest.mark.parametrize("offset", [0, 24, 100, 101])
def test_keys_and_rows_through_shared_memory(client: triton.InferenceServerClient, make: Any, offset: int) -> None:
    keys, answer = make("in"), make("out")
    shm.set_shared_memory_region(keys, [KEYS], offset)
    for name in ("in", "out"):
        client.register_system_shared_memory(name, key_of(name), SIZE)
    result = client.infer("ctr", [given("in", offset=offset)], outputs=[wanted("out", offset=offset)])
    assert result.get_output("item_id") == {"name": "item_id", "datatype": "FP32", "shape": [len(KEYS), 4]}
    np.testing.assert_array_equal(shm.get_contents_as_numpy(answer, np.float32, ROWS.shape, offset), ROWS)
    other = KEYS[::-1].copy()
    shm.set_shared_memory_region(keys, [other], offset)
    client.infer("ctr", [given("in", offset=offset)], outputs=[wanted("out", offset=offset)])
    np.testing.assert_array_equal(shm.get_contents_as_numpy(answer, np.float32, ROWS.shape, offset), ROWS[::-1])


def test_keys_and_rows_through_shared_memory_over_grpc(server: ServerThread, make: Any) -> None:
    triton_grpc = pytest.importorskip("tritonclient.grpc", reason="tritonclient[grpc] is not installed")
    region = make("grpc")
    shm.set_shared_memory_region(region, [KEYS])
    item_id, user = (
        triton_grpc.InferInput("item_id", [len(KEYS)], "INT64"),
        triton_grpc.InferInput("user", [1], "BYTES"),
    )
    item_id.set_shared_memory("grpc", KEYS.nbytes)
    user.set_data_from_numpy(np.array([b"u1"], object))
    outputs = [triton_grpc.InferRequestedOutput(name) for name in ("item_id", "item_id.found", "user")]
    outputs[0].set_shared_memory("grpc", ROWS.nbytes, 1024)
    with triton_grpc.InferenceServerClient(server.grpc_target) as client:
        client.register_system_shared_memory("grpc", key_of("grpc"), SIZE)
        (status,) = client.get_system_shared_memory_status().regions.values()
        assert (status.name, status.key, status.byte_size) == ("grpc", key_of("grpc"), SIZE)
        result = client.infer("ctr", [item_id, user], outputs=outputs)
        np.testing.assert_array_equal(shm.get_contents_as_numpy(region, np.float32, ROWS.shape, 1024), ROWS)
        assert [len(raw) for raw in result.get_response().raw_output_contents] == [0, len(KEYS), 32]
        np.testing.assert_array_equal(result.as_numpy("item_id.found"), [int(key) in ITEMS for key in KEYS])
        np.testing.assert_array_equal(result.as_numpy("user"), rows("user", [USERS["u1"]]))
        outputs[0].set_shared_memory("grpc", ROWS.nbytes - 1, 1024)
        with pytest.raises(InferenceServerException, match="shared_memory_byte_size is"):
            client.infer("ctr", [item_id, user], outputs=outputs)
        client.unregister_system_shared_memory("grpc")
        assert not client.get_system_shared_memory_status().regions


def test_one_request_may_mix_all_ways(client: triton.InferenceServerClient, make: Any) -> None:
    region = make("both")
    shm.set_shared_memory_region(region, [KEYS])
    client.register_system_shared_memory("both", key_of("both"), SIZE)
    user = triton.InferInput("user", [2], "BYTES")
    user.set_data_from_numpy(np.array([b"u1", b"\xce\xbb"], object), binary_data=True)
    outputs = [
        triton.InferRequestedOutput("item_id", binary_data=True),
        wanted("both", 8 * 4 * 2, 1024, "user"),
        triton.InferRequestedOutput("item_id.found", binary_data=False),
    ]
    result = client.infer("ctr", [given("both"), user], outputs=outputs)
    np.testing.assert_array_equal(result.as_numpy("item_id"), ROWS)
    np.testing.assert_array_equal(result.as_numpy("item_id.found"), [int(key) in ITEMS for key in KEYS])
    got = shm.get_contents_as_numpy(region, np.float32, (2, 8), 1024)
    np.testing.assert_array_equal(got, rows("user", [USERS["u1"], USERS["λ"]]))
    assert "data" not in result.get_output("user")


def test_string_keys_lie_in_a_region_as_they_travel(client: triton.InferenceServerClient, make: Any) -> None:
    region = make("names")
    text = np.array([b"\x02\x00\x00\x00u3\x00\x00\x00\x00"], object)
    shm.set_shared_memory_region(region, [text])
    client.register_system_shared_memory("names", key_of("names"), SIZE)
    user = triton.InferInput("user", [2], "BYTES")
    user.set_shared_memory("names", 10)
    np.testing.assert_array_equal(client.infer("ctr", [user]).as_numpy("user"), rows("user", [USERS["u3"], USERS[""]]))


def test_large_answers_go_through_the_pool(
    client: triton.InferenceServerClient, make: Any, server: ServerThread
) -> None:
    n = 50_000
    keys, answer = make("manykeys", n * 8), make("manyrows", n * 16)
    shm.set_shared_memory_region(keys, [np.arange(n) % 100])
    client.register_system_shared_memory("manykeys", key_of("manykeys"), n * 8)
    client.register_system_shared_memory("manyrows", key_of("manyrows"), n * 16)
    client.infer("ctr", [given("manykeys", n * 8, shape=(n,))], outputs=[wanted("manyrows", n * 16)])
    got = shm.get_contents_as_numpy(answer, np.float32, (n, 4))
    np.testing.assert_array_equal(got, rows("item", (np.arange(n) % 100).tolist()))


def test_regions_are_listed_and_forgotten(client: triton.InferenceServerClient, make: Any) -> None:
    make("a")
    make("b")
    mapped = len(descriptors())
    client.register_system_shared_memory("a", key_of("a"), 64, offset=8)
    client.register_system_shared_memory("b", key_of("b"), 64)
    assert len(descriptors()) == mapped + 2
    entry = {"name": "a", "key": key_of("a"), "offset": 8, "byte_size": 64}
    assert client.get_system_shared_memory_status("a") == [entry]
    assert [each["name"] for each in client.get_system_shared_memory_status()] == ["a", "b"]
    client.unregister_system_shared_memory("a")
    client.unregister_system_shared_memory("a")  # gone is gone
    assert len(descriptors()) == mapped + 1
    with pytest.raises(InferenceServerException, match="'a' is registered"):
        client.get_system_shared_memory_status("a")
    client.unregister_system_shared_memory()
    assert client.get_system_shared_memory_status() == []
    assert len(descriptors()) == mapped
    assert "system_shared_memory" in client.get_server_metadata()["extensions"]


def test_a_region_may_begin_within_its_object(client: triton.InferenceServerClient, make: Any) -> None:
    region = make("part")
    shm.set_shared_memory_region(region, [KEYS], 512)
    client.register_system_shared_memory("part", key_of("part"), 1024, offset=512)
    np.testing.assert_array_equal(client.infer("ctr", [given("part")]).as_numpy("item_id"), ROWS)
    client.infer("ctr", [given("part")], outputs=[wanted("part", offset=100)])
    np.testing.assert_array_equal(shm.get_contents_as_numpy(region, np.float32, ROWS.shape, 612), ROWS)


@pytest.mark.parametrize(
    ("tensors", "outputs", "words"),
    [
        ([given("nothing")], None, "no shared memory region 'nothing'"),
        ([given("in")], [wanted("nothing")], "no shared memory region 'nothing'"),
        ([given("in", offset=SIZE - 40)], None, "beyond the 4096 bytes"),
        ([given("in", offset=1 << 62)], None, "beyond the 4096 bytes"),
        ([given("in", 40)], None, "takes 48 bytes, got 40"),
        ([given("in")], [wanted("in", ROWS.nbytes - 1)], "takes 96 bytes, shared_memory_byte_size is 95"),
        ([given("in")], [wanted("in", offset=SIZE)], "beyond the 4096 bytes"),
        ([given("in", offset=-8)], None, "expected a number of bytes"),
        ([given("in", "48")], None, "expected a number of bytes"),  # type: ignore[arg-type]
        ([given(7)], None, "expected a name"),  # type: ignore[arg-type]
    ],
)
def test_tensors_that_do_not_fit_their_region(
    client: triton.InferenceServerClient, make: Any, tensors: list[Any], outputs: list[Any] | None, words: str
) -> None:
    shm.set_shared_memory_region(make("in"), [KEYS])
    client.register_system_shared_memory("in", key_of("in"), SIZE)
    with pytest.raises(InferenceServerException, match=words) as caught:
        client.infer("ctr", tensors, outputs=outputs)
    assert caught.value.status() in ("400", "404")


@pytest.mark.parametrize(
    ("key", "size", "offset", "words"),
    [
        ("", 64, 0, "plain name"),
        ("/", 64, 0, "plain name"),
        ("..", 64, 0, "plain name"),
        ("/../etc/passwd", 64, 0, "plain name"),
        (f"a/{NAME}-there", 64, 0, "plain name"),
        ("x\0y", 64, 0, "plain name"),
        ("x" * 300, 64, 0, "plain name"),
        ("/tierstore-anything", 64, 0, "server's own"),
        (f"{NAME}-missing", 64, 0, "No such file"),
        (f"{NAME}-link", 64, 0, "cannot be opened"),
        (f"{NAME}-pipe", 64, 0, "not a shared memory object"),
        (f"{NAME}-folder", 64, 0, "directory"),
        (f"{NAME}-there", 0, 0, "at least one"),
        (f"{NAME}-there", SIZE + 1, 0, "4096 bytes"),
        (f"{NAME}-there", 64, SIZE - 63, "4096 bytes"),
        (f"{NAME}-there", 1 << 62, 0, "4096 bytes"),
        (f"{NAME}-there", -1, 0, "number of bytes"),
        (f"{NAME}-there", 64, -1, "number of bytes"),
        (7, 64, 0, "expected the name"),
    ],
    ids=lambda value: str(value).replace(NAME, "name"),  # the same in every process
)
def test_objects_that_are_refused(
    client: triton.InferenceServerClient, make: Any, tmp_path: Path, key: Any, size: int, offset: int, words: str
) -> None:
    make("there")
    target = tmp_path / "outside"
    target.write_bytes(bytes(SIZE))
    link, pipe, folder = (DIRECTORY / f"{NAME}-{name}" for name in ("link", "pipe", "folder"))
    link.symlink_to(target)
    os.mkfifo(pipe)
    folder.mkdir()
    assert client.is_server_live()  # connected
    before = len(os.listdir("/proc/self/fd"))
    try:
        with pytest.raises(InferenceServerException, match=words) as caught:
            client.register_system_shared_memory("region", key, size, offset)
        assert caught.value.status() == "400"
    finally:
        link.unlink()
        pipe.unlink()
        folder.rmdir()
    eventually(lambda: len(os.listdir("/proc/self/fd")) <= before, "nothing is left open")
    assert client.get_system_shared_memory_status() == []


def test_a_name_is_registered_once(client: triton.InferenceServerClient, make: Any) -> None:
    make("in")
    client.register_system_shared_memory("in", key_of("in"), SIZE)
    with pytest.raises(InferenceServerException, match="registered already"):
        client.register_system_shared_memory("in", key_of("in"), SIZE)


def test_a_region_that_shrinks_is_an_error_and_no_crash(client: triton.InferenceServerClient, make: Any) -> None:
    shm.set_shared_memory_region(make("in"), [KEYS])
    client.register_system_shared_memory("in", key_of("in"), SIZE)
    os.truncate(DIRECTORY / key_of("in").lstrip("/"), 16)
    with pytest.raises(InferenceServerException, match="has shrunk"):
        client.infer("ctr", [given("in")])
    tensor = triton.InferInput("item_id", list(KEYS.shape), "INT64")
    tensor.set_data_from_numpy(KEYS)
    with pytest.raises(InferenceServerException, match="has shrunk"):
        client.infer("ctr", [tensor], outputs=[wanted("in")])
    assert (DIRECTORY / key_of("in").lstrip("/")).stat().st_size == 16
    assert client.is_server_live()


def test_a_region_is_there_for_its_caller_and_for_admins_alone(make: Any) -> None:
    make("in")
    regions = Regions(enabled=True, max_read=SIZE)
    one, two = Principal("token 1", Role.READER), Principal("token 2", Role.ADMIN, frozenset({"ctr"}))
    span = Span("r", 0, 64)
    regions.of(one).register("r", key_of("in"), 0, SIZE, on_host=True)
    for stranger in (two, Principal("token 3", Role.READER)):
        theirs = regions.of(stranger)
        assert theirs.status() == []
        for use in (
            lambda theirs=theirs: theirs.status("r"),
            lambda theirs=theirs: theirs.check(span, "x"),
            lambda theirs=theirs: theirs.read(span, "x"),
            lambda theirs=theirs: theirs.write(span, np.zeros(64, np.uint8)),
        ):
            with pytest.raises(NotFound):
                use()
        with pytest.raises(InvalidInput, match="choose another name"):
            theirs.register("r", key_of("in"), 0, SIZE, on_host=True)
        theirs.unregister("r")
        theirs.unregister()
    assert len(regions.of(one).status()) == 1
    admin = regions.of(Principal("token 4", Role.ADMIN))
    assert len(admin.read(span, "x")) == 64
    admin.unregister("r")
    assert len(regions) == 0


def test_an_object_is_registered_by_one_caller_alone_whatever_its_name(make: Any) -> None:
    make("in")
    regions = Regions(enabled=True, max_read=SIZE)
    owner, stranger, admin = (
        regions.of(Principal(f"token {role}", role)) for role in (Role.READER, Role.WRITER, Role.ADMIN)
    )
    for name in ("one", "two"):
        owner.register(name, key_of("in"), 0, SIZE, on_host=True)
    linked = DIRECTORY / f"{NAME}-linked"
    linked.hardlink_to(DIRECTORY / f"{NAME}-in")
    try:
        for key in (key_of("in"), f"/{linked.name}"):
            with pytest.raises(InvalidInput, match="is registered by another caller"):
                stranger.register("theirs", key, 0, SIZE, on_host=True)
    finally:
        linked.unlink()
    admin.register("three", key_of("in"), 0, SIZE, on_host=True)
    admin.unregister()
    stranger.register("theirs", key_of("in"), 0, SIZE, on_host=True)
    regions.close()


def test_one_caller_cannot_use_up_all_regions(make: Any) -> None:
    make("in")
    make("other")
    regions = Regions(enabled=True, max_read=SIZE)
    greedy, other = (regions.of(Principal(name, Role.READER)) for name in ("token 1", "token 2"))
    for i in range(MOST_EACH):
        greedy.register(f"r{i}", key_of("in"), 0, SIZE, on_host=True)
    with pytest.raises(Overloaded, match=f"token 1 has registered {MOST_EACH} regions"):
        greedy.register("one more", key_of("in"), 0, SIZE, on_host=True)
    other.register("one more", key_of("other"), 0, SIZE, on_host=True)
    regions.close()


def test_a_client_of_another_machine_registers_nothing(
    server: ServerThread, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    make("in")
    monkeypatch.setattr(reply, "is_on_host", lambda _: False)
    with (
        triton.InferenceServerClient(server.url.removeprefix("http://")) as client,
        pytest.raises(InferenceServerException, match="clients on this machine"),
    ):
        client.register_system_shared_memory("r", key_of("in"), SIZE)
    if has_grpc():
        import tritonclient.grpc as triton_grpc

        from tierstore.service.rpc import caller

        monkeypatch.setattr(caller, "is_on_host", lambda _: False)
        with (
            triton_grpc.InferenceServerClient(server.grpc_target) as client,
            pytest.raises(InferenceServerException, match=r"PERMISSION_DENIED.*clients on this machine"),
        ):
            client.register_system_shared_memory("r", key_of("in"), SIZE)


def test_who_is_on_this_machine_is_seen_by_the_connection() -> None:
    near, other = socket.socketpair()
    with near, other, socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as lost:
        assert is_on_host(near)
        with socket.create_connection(listener.getsockname()), listener.accept()[0] as accepted:
            assert is_on_host(accepted)
        assert not is_on_host(lost), "nobody is there any more, so nobody knows"
    for host, expected in (
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("::ffff:192.0.2.7", False),
        ("2001:db8::1", False),
    ):
        assert is_loopback(host) is expected


def test_a_client_at_a_unix_socket_registers_as_one_over_loopback(tmp_path: Path, make: Any) -> None:
    make("in")
    path = f"{tmp_path}/s"
    settings = settings_for(tmp_path, allow_client_shm=True, grpc_port="off", admin_listen=f"unix:{path}")
    transport = httpx.HTTPTransport(uds=path)
    with Store(settings) as store, ServerThread(store), httpx.Client(transport=transport, timeout=60) as http:
        body = {"key": key_of("in"), "offset": 0, "byte_size": SIZE}
        answer = http.post("http://localhost/v2/systemsharedmemory/region/r/register", json=body)
        assert (answer.status_code, answer.text) == (200, "")


def test_regions_have_a_bound(make: Any) -> None:
    make("in")
    before = len(descriptors())
    regions = Regions(enabled=True, max_read=SIZE).of(LOCAL)
    for i in range(MAX_REGIONS):
        regions.register(f"r{i}", key_of("in"), 0, SIZE, on_host=True)
    with pytest.raises(Exception, match="registered already"):
        regions.register("one more", key_of("in"), 0, SIZE, on_host=True)
    assert len(descriptors()) == before + MAX_REGIONS
    regions.close()
    assert len(descriptors()) == before


def test_a_region_in_use_stays_open_until_its_use_ends(make: Any) -> None:
    shm.set_shared_memory_region(make("in"), [KEYS])
    before = len(descriptors())
    regions = Regions(enabled=True, max_read=SIZE)
    regions.register("r", key_of("in"), 0, SIZE, on_host=True)
    span = Span("r", 0, KEYS.nbytes)
    with regions._using(span, "input 'x'") as region:
        regions.unregister("r")
        with pytest.raises(NotFound):
            regions.read(span, "input 'x'")
        data = np.empty(KEYS.nbytes, np.uint8)
        region.file.read(0, data)
        assert data.tobytes() == KEYS.tobytes()
    assert len(descriptors()) == before


def test_reads_have_a_bound(make: Any) -> None:
    make("in")
    regions = Regions(enabled=True, max_read=64)
    regions.register("r", key_of("in"), 0, SIZE, on_host=True)
    assert len(regions.read(Span("r", 0, 64), "input 'x'")) == 64
    with pytest.raises(Exception, match="64 are allowed"):
        regions.read(Span("r", 0, 65), "input 'x'")
    regions.close()


def test_nothing_is_opened_where_it_is_not_enabled(make: Any) -> None:
    make("in")
    regions = Regions(enabled=False, max_read=SIZE)
    with pytest.raises(InvalidInput, match="not enabled"):
        regions.register("r", key_of("in"), 0, SIZE, on_host=True)
    with pytest.raises(InvalidInput, match="not enabled"):
        regions.status()
    regions.unregister()


def test_shutdown_closes_the_regions(tmp_path: Path, make: Any) -> None:
    make("in")
    before = len(descriptors())
    with Store(settings_for(tmp_path, allow_client_shm=True)) as store, ServerThread(store) as own:
        body = {"key": key_of("in"), "offset": 0, "byte_size": SIZE}
        assert httpx.post(f"{own.url}/v2/systemsharedmemory/region/r/register", json=body).status_code == 200
        assert len(descriptors()) == before + 1
    assert len(descriptors()) == before
