"""Unchanged clients of the protocol get the rows of a real store: tritonclient, over HTTP and over gRPC."""

from __future__ import annotations

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from tests.service.fake_store import USERS, VERSION
from tests.service.scenes import KEYS, items, rows
from tests.service.wires import Wire


@pytest.mark.parametrize("binary_out", [True, False])
@pytest.mark.parametrize("binary_in", [True, False])
def test_rows_in_the_order_of_the_keys(wire: Wire, binary_in: bool, binary_out: bool) -> None:
    answer = wire.client.infer(
        "ctr",
        [wire.tensor("item_id", KEYS, "INT64", binary=binary_in)],
        outputs=[wire.wanted("item_id", binary=binary_out)],
    )
    assert answer.as_numpy("item_id").dtype == np.float32
    np.testing.assert_array_equal(answer.as_numpy("item_id"), items(KEYS))
    assert wire.answered(answer) == (str(VERSION), "", ["item_id"])


def test_without_outputs_every_given_feature_is_answered(wire: Wire) -> None:
    users = np.array([b"u1", b"nobody"], object)
    answer = wire.client.infer(
        "ctr", [wire.tensor("item_id", KEYS, "INT64"), wire.tensor("user", users, "BYTES")], request_id="r-7"
    )
    assert wire.answered(answer) == (str(VERSION), "r-7", ["item_id", "user"])
    np.testing.assert_array_equal(answer.as_numpy("item_id"), items(KEYS))
    np.testing.assert_array_equal(answer.as_numpy("user"), rows("user", [USERS["u1"], 0.0]))


@pytest.mark.parametrize("binary", [True, False])
def test_string_keys(wire: Wire, binary: bool) -> None:
    keys = ["u3", "", "λ", "u3", "missing", "u49"]
    array = np.array([key.encode() for key in keys], object)
    answer = wire.client.infer(
        "ctr",
        [wire.tensor("user", array, "BYTES", binary=binary)],
        outputs=[wire.wanted("user"), wire.wanted("user.found")],
    )
    np.testing.assert_array_equal(answer.as_numpy("user"), rows("user", [USERS.get(key, 0.0) for key in keys]))
    assert answer.as_numpy("user.found").tolist() == [key in USERS for key in keys]


@pytest.mark.parametrize("binary", [True, False])
def test_unsigned_keys(wire: Wire, binary: bool) -> None:
    keys = np.array([1 << 63, 5, (1 << 64) - 1], np.uint64)
    answer = wire.client.infer("ctr", [wire.tensor("big", keys, "UINT64", binary=binary)])
    np.testing.assert_array_equal(answer.as_numpy("big"), rows("big", [9.0, 5.0, 0.0]))


def test_found_has_the_shape_of_the_keys_and_may_stand_anywhere(wire: Wire) -> None:
    keys = KEYS[:3].reshape(1, 3)  # three bytes of `found` leave what follows them unaligned
    outputs = [
        wire.wanted("item_id.found"),
        wire.wanted("item_id"),
        wire.wanted("clicked", dtype="FP16"),
        wire.wanted("clicked.found", binary=False),
    ]
    answer = wire.client.infer(
        "ctr", [wire.tensor("item_id", keys, "INT64"), wire.tensor("clicked", keys, "INT64")], outputs=outputs
    )
    assert answer.as_numpy("item_id.found").tolist() == [[True, True, True]]
    np.testing.assert_array_equal(answer.as_numpy("item_id"), items(keys))
    assert answer.as_numpy("clicked").dtype == np.float16
    np.testing.assert_allclose(answer.as_numpy("clicked"), items(keys).mean(1), rtol=1e-3)
    assert answer.as_numpy("clicked.found").tolist() == [[True, True, True]]


def test_found_alone_distinguishes_rows_from_defaults(wire: Wire) -> None:
    answer = wire.client.infer(
        "ctr", [wire.tensor("clicked", KEYS.reshape(2, 4), "INT64")], outputs=[wire.wanted("clicked.found")]
    )
    assert answer.as_numpy("clicked.found").tolist() == [[True, True, True, False], [True, True, False, True]]


@pytest.mark.parametrize(("dtype", "numpy"), [("FP16", np.float16), ("FP32", np.float32)])
def test_a_client_chooses_the_datatype(wire: Wire, dtype: str, numpy: type) -> None:
    answer = wire.client.infer(
        "ctr", [wire.tensor("item_id", KEYS, "INT64")], outputs=[wire.wanted("item_id", dtype=dtype)]
    )
    assert answer.as_numpy("item_id").dtype == numpy
    np.testing.assert_array_equal(answer.as_numpy("item_id"), items(KEYS).astype(numpy))


def test_rows_of_a_batch_are_pooled(wire: Wire) -> None:
    keys = np.array([[1, 2, 3], [4, 100, 6]], np.int64)
    answer = wire.client.infer("ctr", [wire.tensor("clicked", keys, "INT64")])
    np.testing.assert_allclose(answer.as_numpy("clicked"), items(keys).mean(1), rtol=1e-6)


def test_ragged_bags_with_weights(wire: Wire) -> None:
    keys, offsets = np.array([1, 2, 3, 4], np.int64), np.array([0, 3, 3], np.int64)
    weights = np.array([1, 2, 1, 5], np.float32)
    answer = wire.client.infer(
        "ctr",
        [
            wire.tensor("clicked.offsets", offsets, "INT64"),
            wire.tensor("clicked.weights", weights, "FP32"),
            wire.tensor("clicked", keys, "INT64"),
        ],
    )
    expected = np.stack([(items(keys[:3]) * weights[:3, None]).sum(0) / 4, np.zeros(4), items(keys[3:])[0]])
    np.testing.assert_allclose(answer.as_numpy("clicked"), expected, rtol=1e-6)


def test_a_request_may_name_the_combiner(wire: Wire) -> None:
    keys = np.array([[1, 2, 3], [4, 100, 6]], np.int64)
    inputs = [wire.tensor("clicked", keys, "INT64"), wire.tensor("item_id", keys, "INT64")]
    answer = wire.client.infer("ctr", inputs, outputs=[wire.wanted("clicked", combiner="sum"), wire.wanted("item_id")])
    np.testing.assert_allclose(answer.as_numpy("clicked"), items(keys).sum(1), rtol=1e-6)
    np.testing.assert_array_equal(answer.as_numpy("item_id"), items(keys))
    answer = wire.client.infer("ctr", inputs, parameters={"combiner": "sqrtn"})
    for name in ("clicked", "item_id"):
        np.testing.assert_allclose(answer.as_numpy(name), items(keys).sum(1) / np.sqrt(3), rtol=1e-6)
    for outputs, words in (
        ([wire.wanted("clicked", combiner="max")], "sum, mean or sqrtn"),
        ([wire.wanted("clicked", combiner=1)], "expected sum, mean or sqrtn"),
        ([wire.wanted("clicked.found", combiner="sum")], "only a feature's vectors"),
    ):
        with pytest.raises(InferenceServerException, match=words):
            wire.client.infer("ctr", inputs, outputs=outputs)


def test_flat_keys_without_offsets_are_bags_of_one(wire: Wire) -> None:
    inputs = [wire.tensor("clicked", KEYS, "INT64")]
    np.testing.assert_array_equal(wire.client.infer("ctr", inputs).as_numpy("clicked"), items(KEYS))
    inputs.append(wire.tensor("clicked.weights", np.array([0, *[3] * 7], np.float32), "FP32"))
    expected = np.concatenate([np.zeros((1, 4)), items(KEYS)[1:]])
    np.testing.assert_allclose(wire.client.infer("ctr", inputs).as_numpy("clicked"), expected, rtol=1e-6)


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0)])
@pytest.mark.parametrize("feature", ["item_id", "clicked"])
def test_empty_requests_have_empty_answers(wire: Wire, feature: str, shape: tuple[int, ...]) -> None:
    answer = wire.client.infer("ctr", [wire.tensor(feature, np.empty(shape, np.int64), "INT64")])
    lead = shape if feature == "item_id" else shape[:1]
    assert answer.as_numpy(feature).shape == (*lead, 4)
    assert not answer.as_numpy(feature).any()


def test_a_large_answer_comes_whole(wire: Wire) -> None:
    keys = np.arange(100_000, dtype=np.int64) % 120
    answer = wire.client.infer("ctr", [wire.tensor("item_id", keys, "INT64")])
    np.testing.assert_array_equal(answer.as_numpy("item_id"), items(keys))
