"""Changes that are held back: none is larger than was agreed, they add up, and nothing is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="PyTorch is not installed: make trainers")

import torch

import tierstore
from tierstore.errors import DeltaError, InvalidInput
from tierstore.formats.delta.reader import read_delta
from tierstore.torch import Behind, TouchedRows, write_delta, write_snapshot

ROWS, DIM = 40, 4


class Tables(torch.nn.Module):  # type: ignore[misc]
    def __init__(self, dtype: Any = torch.float32) -> None:
        super().__init__()
        self.item = torch.nn.Embedding(ROWS, DIM, dtype=dtype)
        self.user = torch.nn.Embedding(ROWS, DIM, dtype=dtype)

    def forward(self, item_id: Any, user_id: Any) -> Any:
        return (self.item(item_id) * self.user(user_id)).sum(1)


def change(table: Any, row: int, norm: float) -> None:
    """Move one row by a vector of that L2 norm."""
    with torch.no_grad():
        table.weight[row] += norm / DIM**0.5


def written(tmp_path: Path, touched: TouchedRows, seq: int, **options: Any) -> dict[str, list[int]]:
    """The keys by table of the next delta."""
    write_delta(tmp_path / f"{seq}.arrow", touched, model="m", seq=seq, **options)
    tables = read_delta(tmp_path / f"{seq}.arrow").tables
    return {name: table.keys.tolist() for name, table in tables.items()}


def test_small_changes_wait_and_add_up(tmp_path: Path) -> None:
    net = Tables()
    touched = TouchedRows(net, hold_back=0.1)
    change(net.item, 3, 0.04)
    change(net.item, 5, 0.5)
    assert written(tmp_path, touched, 1) == {"item": [5]}
    assert touched.behind("item") == Behind(1, pytest.approx(0.04, rel=1e-4))
    change(net.item, 3, 0.04)
    assert written(tmp_path, touched, 2) == {}
    assert touched.behind("item") == Behind(1, pytest.approx(0.08, rel=1e-4))
    change(net.item, 3, 0.04)
    assert written(tmp_path, touched, 3) == {"item": [3]}, "0.12 in all"
    assert touched.behind("item") == touched.behind("user") == Behind(0, 0.0)


def test_to_flush_writes_every_row_that_differs_however_little(tmp_path: Path) -> None:
    net = Tables()
    with torch.no_grad():
        net.item.weight[7] = 0
    touched = TouchedRows(net, hold_back={"item": 1.0, "user": 0})
    with torch.no_grad():
        net.item.weight[7, 1] = 1e-30  # its square is 0 in float32
        net.user.weight[8, 1] += 1e-6
    change(net.item, 2, 0.5)
    assert written(tmp_path, touched, 1) == {"user": [8]}, "0 holds nothing back"
    assert written(tmp_path, touched, 2, flush=True) == {"item": [2, 7]}
    assert touched.behind("item").rows == 0


def test_a_table_by_itself_and_rows_that_an_optimizer_moves_without_a_gradient(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = Tables()
    touched = TouchedRows(net, hold_back={"item": 0})
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, weight_decay=0.1)
    net(torch.tensor([1]), torch.tensor([2])).sum().backward()
    optimizer.step()
    assert written(tmp_path, touched, 1) == {"item": list(range(ROWS)), "user": [2]}
    assert touched.behind("user") == Behind(0, 0.0)


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norm", [0.02, 0.3])
def test_what_is_served_is_never_further_behind_than_was_agreed(tmp_path: Path, norm: float, dtype: Any) -> None:
    torch.manual_seed(1)
    net = Tables(dtype)
    touched = TouchedRows(net, hold_back=norm)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.02)  # it moves rows that were not looked up too
    inputs = {"item_id": torch.arange(4), "user_id": torch.arange(4)}
    write_snapshot(tmp_path / "s", net, inputs, model="m", version=1, dense=False, touched=touched)
    held = sent = 0
    with tierstore.open(tmp_path / "data", host_budget="4MiB", load_workers=1) as store:
        store.load_snapshot(tmp_path / "s")
        for seq in range(1, 9):
            optimizer.zero_grad()
            (net(torch.randint(0, ROWS, (9,)), torch.randint(0, ROWS, (9,))) - 1).square().sum().backward()
            optimizer.step()
            last = seq == 8
            sent += write_delta(tmp_path / f"{seq}.arrow", touched, model="m", seq=seq, flush=last)
            store.apply_delta(tmp_path / f"{seq}.arrow")
            for table, feature in (("item", "item_id"), ("user", "user_id")):
                served = store.model("m").lookup(feature, np.arange(ROWS))
                now = touched.tables[table].weight.detach().float().numpy()
                behind = np.linalg.norm(served - now, axis=1)
                assert behind.max() <= norm * (1 + 1e-5)
                assert touched.behind(table) == (int((served != now).any(axis=1).sum()), pytest.approx(behind.max()))
                held += int((behind > 0).sum())
                assert not last or np.array_equal(served, now)
    assert held
    assert sent < 8 * 2 * ROWS


def test_a_delta_that_fails_leaves_its_rows_to_the_next(tmp_path: Path) -> None:
    net = Tables()
    touched = TouchedRows(net, hold_back=0.1)
    change(net.item, 3, 0.5)
    with pytest.raises(OSError, match="nowhere"):
        write_delta(tmp_path / "nowhere/1.arrow", touched, model="m", seq=1)
    assert written(tmp_path, touched, 1) == {"item": [3]}
    change(net.item, 4, float("nan"))
    with pytest.raises(DeltaError, match="NaN"):
        written(tmp_path, touched, 2)


@pytest.mark.parametrize(
    ("hold_back", "reason"),
    [
        ({"items": 0.1}, "hold_back: expected tables among item, user, got 'items'"),
        (-1, "hold_back of table 'item': expected a finite number, at least 0, got -1"),
        (float("nan"), "expected a finite number, at least 0, got nan"),
        (True, "expected a finite number, at least 0, got True"),
    ],
)
def test_norms_that_mean_nothing(hold_back: Any, reason: str) -> None:
    with pytest.raises(InvalidInput, match=reason):
        TouchedRows(Tables(), hold_back=hold_back)


def test_a_table_that_grew_is_refused(tmp_path: Path) -> None:
    net = Tables()
    touched = TouchedRows(net, hold_back=0.1)
    net.item.weight = torch.nn.Parameter(torch.zeros(ROWS + 1, DIM))
    with pytest.raises(InvalidInput, match=r"table 'item': expected the shape \[40, 4\].*got \[41, 4\]"):
        written(tmp_path, touched, 1)
