"""The model for Triton's Python backend, in this process: what it answers, one by one and joined, and what it does about errors."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from google.protobuf.json_format import MessageToDict
from google.protobuf.text_format import Parse
from tritonclient.grpc.model_config_pb2 import ModelConfig
from typer.testing import CliRunner

import tierstore
from tests.engine.quick_build import in_process as in_process_loads
from tests.tiers.cuda_shim.backend import ShimDevice
from tests.triton import backend
from tests.triton.data import DIM, mean_bags, scores, vectors, write_delta, write_version
from tierstore.cli.app import application
from tierstore.engine.lifecycle import directory_lock
from tierstore.errors import ConfigError, Locked, NotFound, NotReady
from tierstore.service.server import ServerThread
from tierstore.tiers.device import gpu
from tierstore.triton import TritonPythonModel, answerers
from tierstore.triton.answerers import RemoteService

Start = Callable[..., TritonPythonModel]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("triton")
    with in_process_loads(), tierstore.open(root / "data") as store:
        store.load_snapshot(write_version(root / "1"))
    return root


def write_folder(root: Path, name: str, *options: str, data: Path | None = None) -> Path:
    """What the command writes."""
    folder = root / "models" / name
    source = [] if "--url" in options else ["--data", str(data or root / "data")]
    done = CliRunner().invoke(application(), ["triton-model", "ctr", str(folder), *source, *options])
    assert done.exit_code == 0, done.output
    return folder


def config_of(folder: Path) -> ModelConfig:
    """The configuration, as Triton's own schema reads it."""
    return Parse((folder / "config.pbtxt").read_text(encoding="utf-8"), ModelConfig())


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", backend.module())
    made = []

    def started(folder: Path) -> TritonPythonModel:
        model = TritonPythonModel()
        config = MessageToDict(
            config_of(folder), preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        )
        config["max_batch_size"] = int(config["max_batch_size"])
        kind = config["instance_group"][0]["kind"].removeprefix("KIND_")
        model.initialize({"model_config": json.dumps(config), "model_name": folder.name, "model_instance_kind": kind})
        made.append(model)
        return model

    yield started
    for model in made:
        model.finalize()


def answers(model: TritonPythonModel, *requests: backend.Request) -> list[Any]:
    return model.execute(requests)


def keys_of(*keys: int) -> np.ndarray:
    return np.array(keys, np.int64)


ROWS = ["item_id", "item_id.found", "clicked", "clicked.found"]


def test_the_folder_has_a_configuration_for_each_way_to_ask(prepared: Path) -> None:
    plain, batched, scored = (
        config_of(write_folder(prepared, name, *options))
        for name, options in {
            "a": [],
            "b": ["--max-batch-size", "64"],
            "c": ["--scores", "--host-budget", "1GiB"],
        }.items()
    )
    shapes = {port.name: (list(port.dims), port.optional) for port in plain.input}
    assert shapes == {
        "item_id": ([-1], True), "clicked": ([-1], True), "clicked.offsets": ([-1], True), "clicked.weights": ([-1], True),
    }  # fmt: skip
    assert {port.name: list(port.dims) for port in plain.output} == {
        "item_id": [-1, DIM], "item_id.found": [-1], "clicked": [-1, DIM], "clicked.found": [-1],
    }  # fmt: skip
    assert "dynamic_batching" not in str(plain)
    assert (batched.max_batch_size, batched.WhichOneof("scheduling_choice")) == (64, "dynamic_batching")
    assert [port.name for port in batched.input] == ["item_id", "clicked", "clicked.weights"]
    item, clicked, _ = batched.input
    assert (list(item.dims), item.HasField("reshape"), list(clicked.dims)) == ([1], True, [-1])
    assert [port.name for port in scored.output] == ["score"]
    assert {port.name: port.optional for port in scored.input}["item_id"] is False
    assert scored.parameters["host_budget"].string_value == "1GiB"
    assert Path(scored.parameters["data"].string_value) == prepared / "data"


def test_a_folder_is_not_written_over(prepared: Path) -> None:
    folder = write_folder(prepared, "once")
    done = CliRunner().invoke(application(), ["triton-model", "ctr", str(folder), "--data", str(prepared / "data")])
    assert done.exit_code == 1
    assert "not empty" in str(done.output) + str(done.exception)


def test_scores_of_a_model_without_a_dense_part_are_refused(tmp_path: Path) -> None:
    with in_process_loads(), tierstore.open(tmp_path / "data") as store:
        store.load_snapshot(write_version(tmp_path / "1", words=True))
    done = CliRunner().invoke(
        application(), ["triton-model", "ctr", str(tmp_path / "m"), "--data", str(tmp_path / "data"), "--scores"]
    )
    assert isinstance(done.exception, NotReady) or "gives no scores" in done.output
    assert not (tmp_path / "m").exists()


def test_a_request_gets_what_its_inputs_allow_or_what_it_names(prepared: Path, start: Start) -> None:
    model = start(write_folder(prepared, "rows"))
    keys = keys_of(7, 499, -1, 7)
    every, one, bags = answers(
        model,
        backend.Request({"item_id": keys}, ROWS),
        backend.Request({"item_id": keys}, ["item_id.found"]),
        backend.Request(
            {"clicked": keys, "clicked.offsets": keys_of(0, 0, 3)}, ["clicked", "clicked.found"]
        ),
    )  # fmt: skip
    assert set(every.arrays) == {"item_id", "item_id.found"}
    np.testing.assert_array_equal(every.arrays["item_id"], vectors(keys))
    assert one.arrays["item_id.found"].tolist() == [True, True, False, True]
    assert set(one.arrays) == {"item_id.found"}
    np.testing.assert_allclose(bags.arrays["clicked"], mean_bags(keys, [0, 3, 4]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("batch", [0, 64])
def test_an_instance_on_a_gpu_answers_with_the_memory_in_which_rows_were_left(
    prepared: Path, start: Start, monkeypatch: pytest.MonkeyPatch, batch: int
) -> None:
    """A part of it where Triton has joined requests."""
    device, made = ShimDevice(), []

    def empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        made.append(ShimDevice.empty(device, shape, dtype))
        return made[-1]

    monkeypatch.setattr(device, "empty", empty)
    monkeypatch.setattr(gpu, "find_backend", lambda: (device, None))
    options = ["--device-budget", "4MiB", "--max-batch-size", str(batch)]
    folder = write_folder(prepared, f"on-gpu-{batch}", *options)
    (instances,) = config_of(folder).instance_group
    assert (instances.kind, list(instances.gpus)) == (instances.KIND_GPU, [0])
    model = start(folder)
    keys, bags = keys_of(7, 499, -1, 7), np.arange(12).reshape(4, 3)
    given = {"item_id": keys, "clicked": bags}
    for _ in range(3):  # from disk, from memory, from the device
        for answer in answers(model, *[backend.Request(given, ROWS)] * 2):
            assert answer.error is None
            np.testing.assert_array_equal(answer.arrays["item_id"], vectors(keys))
            np.testing.assert_array_equal(answer.arrays["item_id.found"].reshape(-1), keys >= 0)
            np.testing.assert_allclose(answer.arrays["clicked"], vectors(bags).mean(1), rtol=1e-6)
            for name in ("item_id", "clicked"):
                at = answer.addresses[name]
                assert any(array.ctypes.data <= at < array.ctypes.data + array.nbytes for array in made)
        model._answerer._answerer._store.shared.devices.promoter.drain()


def test_a_bad_request_fails_alone_with_its_reason(prepared: Path, start: Start) -> None:
    model = start(write_folder(prepared, "errors"))
    good = backend.Request({"item_id": keys_of(3)}, ["item_id"])
    wrong = {
        "offsets": backend.Request({"clicked": keys_of(1), "clicked.offsets": keys_of(1)}, ["clicked"]),
        "no keys": backend.Request({"item_id": keys_of(1)}, ["clicked"]),
        "late": backend.Request({"item_id": keys_of(1)}, ["item_id"], timeout_us=1),
    }
    first, *bad, last = answers(model, good, *wrong.values(), good)
    for response in (first, last):
        np.testing.assert_array_equal(response.arrays["item_id"], vectors([3]))
    assert [one.error.code for one in bad] == ["INVALID_ARG", "INVALID_ARG", "UNAVAILABLE"]
    assert "0 first" in bad[0].error.text
    assert "needs an input 'clicked'" in bad[1].error.text
    assert all(one.arrays == {} for one in bad)


def test_requests_of_one_form_are_one_look_up_and_get_their_own_rows(
    prepared: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = start(write_folder(prepared, "joined", "--max-batch-size", "64"))
    counted: list[int] = []
    answerer: Any = model._answerer
    answer = answerer.answer
    monkeypatch.setattr(
        answerer, "answer", lambda *given, **how: counted.append(len(given[1])) or answer(*given, **how)
    )
    sizes = (1, 3, 0, 5)
    asked = [np.arange(size, dtype=np.int64) + 10 * size for size in sizes]
    bags = np.arange(12, dtype=np.int64).reshape(4, 3)
    *rows, pooled, wide = answers(
        model,
        *(backend.Request({"item_id": keys}, ["item_id", "item_id.found"]) for keys in asked),
        backend.Request({"clicked": bags}, ["clicked", "clicked.found"]),
        backend.Request({"clicked": bags[:, :2].copy()}, ["clicked"]),
    )
    for keys, response in zip(asked, rows, strict=True):
        np.testing.assert_array_equal(response.arrays["item_id"], vectors(keys))
        assert response.arrays["item_id.found"].shape == keys.shape
    np.testing.assert_allclose(
        pooled.arrays["clicked"], mean_bags(bags.reshape(-1), [3, 6, 9, 12]), rtol=1e-5, atol=1e-6
    )
    assert wide.arrays["clicked"].shape == (4, DIM)
    assert len(counted) == 3, "one for the rows, and one for each width of bags"


def test_one_bad_request_does_not_fail_those_that_it_is_joined_with(prepared: Path, start: Start) -> None:
    model = start(write_folder(prepared, "joined-bad", "--max-batch-size", "64"))

    def request(weight: float) -> backend.Request:
        weights = np.full((1, 2), weight, np.float32)
        return backend.Request({"clicked": np.array([[1, 2]]), "clicked.weights": weights}, ["clicked"])

    good, bad, other = answers(model, request(1), request(np.nan), request(2))
    assert "NaN" in bad.error.text
    for response in (good, other):
        np.testing.assert_allclose(response.arrays["clicked"], mean_bags([1, 2], [2]), rtol=1e-5)


def test_scores_come_of_the_dense_part(prepared: Path, start: Start) -> None:
    model = start(write_folder(prepared, "scores", "--scores"))
    keys, bags, offsets = keys_of(1, 2), keys_of(3, 4, 5), keys_of(0, 1)
    (response,) = answers(
        model, backend.Request({"item_id": keys, "clicked": bags, "clicked.offsets": offsets}, ["score"])
    )
    assert response.error is None, response.error.text
    np.testing.assert_allclose(response.arrays["score"], scores(vectors(keys), mean_bags(bags, [1, 3])), rtol=1e-5)


def test_instances_share_one_store_and_the_next_takes_over_where_it_ends(
    prepared: Path, start: Start, tmp_path: Path
) -> None:
    folder = write_folder(prepared, "shared")
    first, second = start(folder), start(folder)
    assert isinstance(second._answerer._answerer, RemoteService)  # type: ignore[union-attr]
    with pytest.raises(Locked) as locked:
        tierstore.open(prepared / "data")
    assert locked.value.url is not None
    with tierstore.Client(locked.value.url) as client:
        client.apply_delta(write_delta(tmp_path / "1.arrow", 1, [7], 9.0))
        assert 'protocol="triton"' not in client.metrics()
        request = backend.Request({"item_id": keys_of(7)}, ["item_id"])
        for model in (first, second):
            (response,) = answers(model, request)
            assert response.arrays["item_id"].tolist() == [[9.0] * DIM]
        assert 'protocol="triton"' in client.metrics()
    first.finalize()
    (response,) = answers(second, request)
    assert response.arrays["item_id"].tolist() == [[9.0] * DIM], "the delta is kept"
    assert not isinstance(second._answerer._answerer, RemoteService)  # type: ignore[union-attr]
    first._answerer = None


def test_an_instance_waits_for_one_that_opens_or_closes_the_directory(
    prepared: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, held, waits = write_folder(prepared, "waits"), directory_lock.lock(prepared / "data/LOCK"), []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 1:  # it says that it serves, and nothing answers there yet
            directory_lock.announce(prepared / "data/LOCK", "http://127.0.0.1:9")
        if len(waits) == 2:
            directory_lock.unlock(held)

    monkeypatch.setattr(answerers, "time", SimpleNamespace(monotonic=time.monotonic, sleep=wait))
    (response,) = answers(start(folder), backend.Request({"item_id": keys_of(3)}, ["item_id"]))
    assert response.arrays["item_id"].shape == (1, DIM)
    assert len(waits) == 2


def test_a_service_is_asked_where_one_has_the_directory(tmp_path: Path, start: Start) -> None:
    settings = {"port": 0, "grpc_port": "off"}
    with in_process_loads(), tierstore.open(tmp_path / "data", **settings) as store, ServerThread(store) as server:
        store.load_snapshot(write_version(tmp_path / "1", words=True))
        directory_lock.announce(store.root.lock, server.url)
        by_url = start(write_folder(tmp_path, "url", "--url", server.url))
        # the folder of a directory that is open elsewhere: the same, but for where answers come from
        config = (tmp_path / "models/url/config.pbtxt").read_text()
        (tmp_path / "models/data").mkdir()
        place = config.replace('key: "url"', 'key: "data"').replace(server.url, str(tmp_path / "data"))
        (tmp_path / "models/data/config.pbtxt").write_text(place)
        by_directory = start(tmp_path / "models/data")
        words = np.array(["\u00e9".encode(), b"none", b"a"], object)
        for model in (by_url, by_directory):
            (response,) = answers(
                model, backend.Request({"word": words, "item_id": keys_of(4)}, ["word", "word.found", "item_id"])
            )
            assert response.error is None, response.error.text
            assert response.arrays["word.found"].tolist() == [True, False, True]
            np.testing.assert_array_equal(response.arrays["word"], vectors([3, -1, 1]))
            np.testing.assert_array_equal(response.arrays["item_id"], vectors([4]))
            model.finalize()
            model._answerer = None


def test_strings_are_refused_where_the_backend_would_lose_them(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    with in_process_loads(), tierstore.open(tmp_path / "data") as store:
        store.load_snapshot(write_version(tmp_path / "1", words=True))
    folder = write_folder(tmp_path, "words")
    monkeypatch.setattr(backend.Tensor, "loses_elements", True)
    with pytest.raises(ConfigError, match=r"Triton 24\.11"):
        start(folder)
    monkeypatch.setattr(backend.Tensor, "loses_elements", False)
    (response,) = answers(start(folder), backend.Request({"word": np.array([b"bb"], object)}, ["word"]))
    np.testing.assert_array_equal(response.arrays["word"], vectors([2]))


def test_a_model_that_is_not_there_is_not_loaded(prepared: Path, start: Start) -> None:
    folder = write_folder(prepared, "missing")
    text = (folder / "config.pbtxt").read_text()
    (folder / "config.pbtxt").write_text(text.replace('string_value: "ctr"', 'string_value: "cvr"'))
    with pytest.raises(NotFound, match="ctr"):
        start(folder)
    with tierstore.open(prepared / "data"):
        pass  # and the directory is free again


def test_parameters_name_one_source(prepared: Path, start: Start) -> None:
    folder = write_folder(prepared, "neither")
    text = (folder / "config.pbtxt").read_text()
    (folder / "config.pbtxt").write_text("\n".join(line for line in text.splitlines() if 'key: "data"' not in line))
    with pytest.raises(ConfigError, match="`data`, a directory, or `url`"):
        start(folder)


@pytest.mark.parametrize("batch", [0, 1024])
def test_a_model_of_hps_comes_with_its_folder_and_is_asked_as_before(tmp_path: Path, start: Start, batch: int) -> None:
    for table, dim in (("wide", 1), ("deep", 3)):
        (tmp_path / table).mkdir()
        np.arange(100, dtype=np.int64).tofile(tmp_path / table / "key")
        np.arange(100 * dim, dtype=np.float32).tofile(tmp_path / table / "emb_vector")
    model = {
        "model": "wdl", "sparse_files": ["wide", "deep"], "embedding_table_names": ["wide", "deep"],
        "embedding_vecsize_per_table": [1, 3], "default_value_for_each_table": [0.0, 1.0],
    }  # fmt: skip
    (tmp_path / "ps.json").write_text(json.dumps({"models": [model]}))
    words = ["--data", str(tmp_path / "data"), "--triton", str(tmp_path / "models"), "--max-batch-size", str(batch)]
    with in_process_loads():
        done = CliRunner().invoke(application(), ["import-hps", str(tmp_path / "ps.json"), *words])
    assert done.exit_code == 0, done.output
    served = start(tmp_path / "models/wdl")
    keys, numbers = np.array([[7, 99, 2, 100]], np.int64), np.array([[2, 2]], np.int32)
    (response,) = answers(served, backend.Request({"KEYS": keys, "NUMKEYS": numbers}, ["OUTPUT0"]))
    assert response.error is None, response.error.text
    rows = response.arrays["OUTPUT0"]
    assert rows.shape == ((1, 8) if batch else (8,))
    assert rows.reshape(-1).tolist() == [7, 99, 6, 7, 8, 1, 1, 1]
