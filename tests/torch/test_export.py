"""PyTorch: what a module holds is what is served, and what training touched is what a delta brings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="PyTorch is not installed: make trainers")
pytest.importorskip("onnxscript", reason="onnxscript is not installed: make trainers")
pytest.importorskip("onnxruntime", reason="needs the extra `dense`")

import torch
from torch import nn

import tierstore
from tierstore.errors import InvalidInput, SnapshotError
from tierstore.formats.delta.reader import read_delta
from tierstore.formats.snapshot.reader import open_snapshot
from tierstore.torch import TouchedRows, export_dense, write_delta, write_snapshot

USERS, ITEMS = 50, 80


class Net(nn.Module):
    """Two tables, one of them read twice and pooled, and an input of its own."""

    def __init__(self, *, sparse: bool = False, dtype: Any = torch.float32) -> None:
        super().__init__()
        self.user = nn.ModuleDict({"rows": nn.Embedding(USERS, 4, sparse=sparse, dtype=dtype)})
        self.item = nn.Embedding(ITEMS, 8, sparse=sparse, padding_idx=0, dtype=dtype)
        self.clicked = nn.EmbeddingBag(ITEMS, 8, mode="mean", sparse=sparse, dtype=dtype)
        self.top = nn.Sequential(nn.Linear(4 + 8 + 8 + 2, 16), nn.Dropout(0.5), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, user_id: Any, item_id: Any, clicked: Any, clicked_at: Any, hour: Any) -> Any:
        rows = [self.user["rows"](user_id), self.item(item_id), self.clicked(clicked, clicked_at)]
        return torch.sigmoid(self.top(torch.cat([*(row.float() for row in rows), hour], 1))).squeeze(1)


def inputs(n: int = 4, seed: int = 0) -> dict[str, Any]:
    rng = torch.Generator().manual_seed(seed)
    return {
        "user_id": torch.randint(0, USERS, (n,), generator=rng),
        "item_id": torch.randint(1, ITEMS, (n,), generator=rng),
        "clicked": torch.randint(1, ITEMS, (3 * n,), generator=rng),
        "clicked_at": torch.arange(n) * 3,
        "hour": torch.rand(n, 2, generator=rng),
    }


def scored(net: Any, values: dict[str, Any]) -> Any:
    net.eval()
    with torch.no_grad():
        scores = net(**values).numpy()
    net.train()
    return scores


def request(values: dict[str, Any]) -> dict[str, Any]:
    arrays = {name: value.numpy() for name, value in values.items()}
    arrays["clicked"] = (arrays["clicked"], arrays.pop("clicked_at"))
    return arrays


def train(net: Any, optimizer: Any, values: dict[str, Any]) -> None:
    optimizer.zero_grad()
    (net(**values) - 0.25).square().sum().backward()
    optimizer.step()


OPTIMIZERS = {"dense gradients": (False, torch.optim.Adagrad), "sparse gradients": (True, torch.optim.SGD)}


@pytest.mark.thorough
@pytest.mark.parametrize(("sparse", "optimizer"), OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_scores_are_the_modules_after_a_snapshot_and_after_each_delta(
    tmp_path: Path, sparse: bool, optimizer: Any
) -> None:
    torch.manual_seed(0)
    net = Net(sparse=sparse)
    touched = TouchedRows(net)
    by = optimizer(net.parameters(), lr=0.5)
    train(net, by, inputs(seed=1))
    write_snapshot(tmp_path / "s", net, inputs(), model="ctr", version=1)
    touched.clear()
    manifest = open_snapshot(tmp_path / "s").manifest
    assert {f.name: (f.table, f.combiner, f.padding_key) for f in manifest.features} == {
        "user_id": ("user_rows", None, None),
        "item_id": ("item", None, 0),
        "clicked": ("clicked", "mean", None),
    }
    assert [(t.name, t.dim, t.rows) for t in manifest.tables] == [("user_rows", 4, USERS), ("item", 8, ITEMS), ("clicked", 8, ITEMS)]  # fmt: skip
    requested = inputs(7, seed=9)
    with tierstore.open(tmp_path / "data", host_budget="4MiB", load_workers=1) as store:
        store.load_snapshot(tmp_path / "s")
        ctr = store.model("ctr")
        np.testing.assert_allclose(ctr.predict(request(requested)), scored(net, requested), atol=1e-5)
        for seq in (1, 2):
            train(net, by, inputs(seed=10 + seq))
            path = tmp_path / f"{seq}.arrow"
            rows = write_delta(path, touched, model="ctr", seq=seq, event_time=1e9, dense=export_dense(net, inputs()))
            used = inputs(seed=10 + seq)
            assert rows == sum(len(set(used[name].tolist())) for name in ("user_id", "item_id", "clicked"))
            store.apply_delta(path)
            np.testing.assert_allclose(ctr.predict(request(requested)), scored(net, requested), atol=1e-5)
        every = ctr.lookup("user_id", np.arange(USERS))
        assert np.array_equal(every, net.user["rows"].weight.detach().numpy()), "no row was left behind"


def test_rows_count_that_are_looked_up_while_it_trains(tmp_path: Path) -> None:
    net = Net()
    touched = TouchedRows(net)
    scored(net, inputs())
    assert len(touched.rows("item")) == 0, "to score is not to train"
    net(**inputs())
    assert touched.rows("item").tolist() == sorted(set(inputs()["item_id"].tolist()))
    assert write_delta(tmp_path / "1.arrow", touched, model="ctr", seq=1) > 0
    assert write_delta(tmp_path / "2.arrow", touched, model="ctr", seq=2) == 0
    assert read_delta(tmp_path / "2.arrow").tables == {}
    net(**inputs())
    with pytest.raises(OSError, match="nowhere"):
        write_delta(tmp_path / "nowhere" / "3.arrow", touched, model="ctr", seq=3)
    assert len(touched.rows("item")), "what was not written is not forgotten"
    touched.clear()
    touched.close()
    net(**inputs())
    assert len(touched.rows("item")) == 0


def test_keys_of_the_users_own(tmp_path: Path) -> None:
    net = Net(dtype=torch.bfloat16)
    keys = {"item": [f"item-{i}" for i in range(ITEMS)], "user_rows": torch.arange(USERS) * 100}
    touched = TouchedRows(net, keys=keys)
    write_snapshot(tmp_path / "s", net, inputs(), model="ctr", version=1, keys=keys, dtype="bfloat16", dense=False)
    tables = {t.name: t for t in open_snapshot(tmp_path / "s").manifest.tables}
    assert (tables["item"].key, tables["user_rows"].key, tables["item"].dtype) == ("string", "int64", "bfloat16")
    net(**inputs())
    write_delta(tmp_path / "1.arrow", touched, model="ctr", seq=1)
    with tierstore.open(tmp_path / "data", host_budget="4MiB", load_workers=1) as store:
        store.load_snapshot(tmp_path / "s")
        store.apply_delta(tmp_path / "1.arrow")
        ctr = store.model("ctr")
        rows, found = ctr.lookup("item_id", ["item-5", "item-0", "item-80"], return_found=True)
        assert found.tolist() == [True, False, False], "the padding key, and one that there is not"
        assert np.array_equal(rows[0], net.item.weight[5].detach().float().numpy())
        assert np.array_equal(ctr.lookup("user_id", [4900])[0], net.user["rows"].weight[49].detach().float().numpy())


def test_what_rounding_costs_is_returned_by_table(tmp_path: Path) -> None:
    net = Net()
    off = write_snapshot(tmp_path / "s", net, inputs(), model="ctr", version=1, dtype="int4", dense=False)
    assert off.keys() == {table.name for table in open_snapshot(tmp_path / "s").manifest.tables}
    with tierstore.open(tmp_path / "data", host_budget="4MiB", load_workers=1) as store:
        store.load_snapshot(tmp_path / "s")
        rows = store.model("ctr").lookup("user_id", np.arange(USERS))
    error = np.abs(rows - net.user["rows"].weight.detach().numpy())
    assert off["user_rows"].largest == pytest.approx(error.max(), rel=1e-5)
    assert off["user_rows"].mean == pytest.approx(error.mean(), rel=1e-5)


def test_a_module_stays_as_it_was(tmp_path: Path) -> None:
    net = Net()
    before, names = scored(net, inputs()), [name for name, _ in net.named_modules()]
    export_dense(net, inputs(), tmp_path / "dense.onnx")
    assert net.training
    assert [name for name, _ in net.named_modules()] == names
    assert np.array_equal(scored(net, inputs()), before)
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in net.modules())


class Hashed(Net):
    def forward(self, user_id: Any, item_id: Any, clicked: Any, clicked_at: Any, hour: Any) -> Any:
        return super().forward(user_id % USERS, item_id, clicked, clicked_at, hour)


class ByTheIds(Net):
    """Its scores hang on what is no row: the exported part cannot know it."""

    def forward(self, user_id: Any, item_id: Any, clicked: Any, clicked_at: Any, hour: Any) -> Any:
        return super().forward(user_id, item_id, clicked, clicked_at, hour) + user_id.float().sum()


@pytest.mark.parametrize(
    ("module", "error", "reason"),
    [
        (nn.Linear(2, 1), InvalidInput, "Linear has no nn.Embedding and no nn.EmbeddingBag"),
        (Hashed(), InvalidInput, "table 'user_rows' is looked up with a value that is no argument of forward"),
        (ByTheIds(), SnapshotError, "expected the module's scores .*output 0 differs by"),
    ],
)
def test_what_cannot_be_served_is_refused_before_anything_is_written(
    tmp_path: Path, module: Any, error: Any, reason: str
) -> None:
    with pytest.raises(error, match=reason):
        write_snapshot(tmp_path / "s", module, inputs(), model="ctr", version=1)
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("keys", "reason"),
    [({"items": [1]}, "expected tables among user_rows, item, clicked, got 'items'"), ({"item": [1]}, "expected one per row, 80")],
)  # fmt: skip
def test_keys_that_do_not_fit(keys: Any, reason: str) -> None:
    with pytest.raises(InvalidInput, match=reason):
        TouchedRows(Net(), keys=keys)


def test_tables_of_a_module_may_expire(tmp_path: Path) -> None:
    write_snapshot(tmp_path / "s", Net(), inputs(), model="ctr", version=1, ttl_s={"item": "30d"}, dense=False)
    manifest = open_snapshot(tmp_path / "s").manifest
    assert {table.name: table.ttl_s for table in manifest.tables}["item"] == 2_592_000
    assert {table.ttl_s for table in manifest.tables if table.name != "item"} == {None}
    with pytest.raises(InvalidInput, match="ttl_s: 'items' is no table of the module"):
        write_snapshot(tmp_path / "t", Net(), inputs(), model="ctr", version=1, ttl_s={"items": "30d"}, dense=False)


class TwoScores(Net):
    def forward(self, user_id: Any, item_id: Any, clicked: Any, clicked_at: Any, hour: Any) -> Any:
        score = super().forward(user_id, item_id, clicked, clicked_at, hour)
        return score, score * score


def test_outputs_have_the_names_that_are_given(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    net = TwoScores()
    write_snapshot(tmp_path / "1", net, inputs(), model="ctr", version=1, output_names=("ctr", "cvr"))
    assert (capfd.readouterr(), [*recwarn]) == (("", ""), []), "an export says nothing of itself"
    with tierstore.open(tmp_path / "data") as store:
        store.load_snapshot(tmp_path / "1")
        scores = store.model("ctr").predict(request(inputs()))
    assert list(scores) == ["ctr", "cvr"]
    np.testing.assert_allclose(scores["cvr"], scores["ctr"] ** 2, rtol=1e-5)
    for names in (("ctr",), ("ctr", "ctr"), ("ctr", "a b")):
        with pytest.raises(InvalidInput, match=r"output_names|output name"):
            export_dense(net, inputs(), output_names=names)
