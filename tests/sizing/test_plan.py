"""The plan against what is measured: a real store, the published runs, and its own arithmetic."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

import tierstore
from tierstore.errors import InvalidInput
from tierstore.formats.files import tree_bytes
from tierstore.sizing.plan import HOST_ROW_BYTES, Load, Machine, SizingPlan, bytes_of, node_of, plan
from tierstore.sizing.reuse import ADS, Classes, Measured, Zipf, hit_rate, read_classes
from tierstore.tiers.host.table_layout import Layout
from tierstore.types import KeyType, StorageDtype, TableSpec

GIB = 1 << 30


def load(rows: float, dim: int = 32, dtype: str = "float16", **options: object) -> Load:
    return Load(rows, dim, StorageDtype(dtype), **options)  # type: ignore[arg-type]


# --- against a store


def test_bytes_and_hit_rate_of_a_real_store(tmp_path: Path) -> None:
    """Bytes within 20%, hit rate within 5 points; `--rows` of `tools/plan_check.py` does the same with more."""
    from tools.plan_check import measure

    for found in measure(tmp_path, rows=200_000, lookups=1_000_000, exponents=(1.0,), share=0.1):
        assert found.disk_bytes == pytest.approx(found.planned_disk_bytes, rel=0.2)
        assert found.memory_bytes == pytest.approx(found.planned_memory_bytes, rel=0.2)
        assert found.hit_rate == pytest.approx(found.planned_hit_rate, abs=0.05)
        assert 0.5 < found.hit_rate < 0.95, "neither trivial"


@pytest.mark.parametrize(
    ("dim", "dtype", "ttl_s"), [(1, "int8", None), (300, "float32", None), (8, "int8", "30d"), (64, "int4", None)]
)
def test_bytes_of_a_version_of_any_shape(tmp_path: Path, dim: int, dtype: str, ttl_s: str | None) -> None:
    rows = 6_000
    with tierstore.SnapshotWriter(tmp_path / "s", model="m", version=1, delta_seq=0) as snapshot:
        vectors = np.random.default_rng(0).normal(size=(rows, dim)).astype(np.float32)
        snapshot.table("t", dim=dim, dtype=dtype, ttl_s=ttl_s).write(np.arange(rows), vectors)
        snapshot.feature("f", table="t")
    tierstore.build_snapshot(tmp_path / "s", tmp_path / "out")
    planned = bytes_of(load(rows, dim, dtype, expires=ttl_s is not None)).version
    assert tree_bytes(tmp_path / "out") == pytest.approx(planned, rel=0.2, abs=20_000)


# --- against published figures


@pytest.mark.parametrize(
    ("reuse", "share", "measured"),
    [  # miss ratios of the host tier, docs/decisions/promotion-policy.md
        (Zipf(0.8), 0.01, 0.6589),
        (Zipf(0.8), 0.1, 0.4281),
        (Zipf(0.9), 0.01, 0.5033),
        (Zipf(0.9), 0.1, 0.2971),
        (Zipf(1.0), 0.01, 0.3361),
        (Zipf(1.0), 0.1, 0.1778),
        (Zipf(1.1), 0.1, 0.0903),
        (Zipf(1.2), 0.01, 0.0971),
        (ADS, 0.01, 0.5894),
        (ADS, 0.1, 0.3497),
    ],
)
def test_hit_rates_are_those_of_the_measured_cache(reuse: Zipf | Classes, share: float, measured: float) -> None:
    assert 1 - hit_rate(reuse, share * 1e6, 1e6) == pytest.approx(measured, abs=0.02)


def test_bytes_are_those_of_published_runs() -> None:
    assert bytes_of(load(4e6)).version / 4e6 == pytest.approx(73.3, rel=0.02)  # sealed-base.md
    assert bytes_of(load(1.5e6, expires=True)).version / 1.5e6 == pytest.approx(85.4, rel=0.01)  # row-ttl.md
    assert bytes_of(load(1e7)).index / 1e7 == pytest.approx(0.143, rel=0.1, abs=0.16)
    assert pytest.approx(128 + 13.99, abs=0.5) == 128 + HOST_ROW_BYTES  # benchmarks.md, 10 million rows
    table = bytes_of(load(5e9, 64))  # bulk-load.md: in all 1.57 TB, of which scratch 0.71
    scratch = table.disk_peak - table.disk - table.version
    assert scratch == pytest.approx(5e9 * 136)
    assert 5e9 * 136 < table.version < 5e9 * 171
    # restart: 400 million rows of 16 float16, 92 million of them in a cache of 4 GiB
    assert pytest.approx(92e6, rel=0.05) == 4 * GIB / (32 + HOST_ROW_BYTES)


def test_the_overhead_of_a_cached_row_is_that_of_the_layout() -> None:
    spec = TableSpec("t", KeyType.INT64, 32, StorageDtype.FLOAT16, "zeros")
    assert Layout(spec, 1 << 20).set_bytes / 56 == pytest.approx(spec.row_bytes + HOST_ROW_BYTES)


@pytest.mark.parametrize(
    ("share", "rate"),
    [
        (0.1, 0.5),
        (0.2, 0.6),  # half of the way from 0.1 to 0.4, which is four times as much
        (0.4, 0.7),
        (math.sqrt(0.4), 0.85),  # half of the way from 0.4 to all
        (0.05, 0.4),  # as it goes on from 0.4 to 0.1
        (0.001, 0.005),  # never less than if all rows of the first point were alike
        (1.0, 1.0),
    ],
)
def test_hit_rates_between_and_beyond_those_that_a_cache_has_tried(share: float, rate: float) -> None:
    tried = Measured("tried", [(0.1, 0.5), (0.4, 0.7), (1.0, 0.99)])
    assert hit_rate(tried, share * 1000, 1000) == pytest.approx(rate)


# --- its own arithmetic


@pytest.mark.parametrize("reuse", [ADS, Zipf(0), Zipf(0.7), Zipf(1.0), Zipf(1.3)])
@pytest.mark.parametrize("rows", [10.0, 1e4, 1e9, 4e12])
def test_a_larger_cache_answers_more(reuse: Zipf | Classes, rows: float) -> None:
    rates = [hit_rate(reuse, rows * share, rows) for share in (0, 1e-6, 1e-4, 0.01, 0.1, 0.3, 0.9, 1.0)]
    assert rates == sorted(rates)
    assert (rates[0], rates[-1]) == (0.0, 1.0)


def test_classes_are_whole() -> None:
    assert sum(rows for rows, _ in ADS.shares) == pytest.approx(1, abs=1e-3)
    assert sum(lookups for _, lookups in ADS.shares) == pytest.approx(1, abs=1e-3)
    heat = [lookups / rows for rows, lookups in ADS.shares]
    assert heat == sorted(heat, reverse=True)


def test_a_distribution_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "reuse.csv"
    file.write_text("rows,look-ups\n# cold\n900,100\n100,900\n")
    classes = read_classes(file)
    assert classes.shares == ((0.1, 0.9), (0.9, 0.1))
    for text, reason in (
        ("1,2\nx,3\n", "got 'x,3'"),
        ("0,1\n", "positive"),
        ("1,0\n", "none with"),
        ("1,2\n1,2,3\n", "got '1,2,3'"),
    ):
        file.write_text(text)
        with pytest.raises(InvalidInput, match=reason):
            read_classes(file)
    with pytest.raises(InvalidInput, match="cannot read"):
        read_classes(tmp_path / "none")


def names(made: SizingPlan) -> list[str]:
    return [design.name for design in made.designs if not design.limits]


def test_which_design_serves_what() -> None:
    small = plan(load(1e7, qps=100), Machine())
    assert small.chosen is not None
    assert small.chosen.name == "one machine"
    busy = plan(load(1e9, qps=20_000), Machine())
    assert "one machine" not in names(busy)
    assert busy.chosen is not None
    big = plan(load(1e11), Machine())
    assert names(big) == ["cluster", "cluster on SSD", "partitions"]
    assert "disk" in big.designs[0].limits[0]
    assert plan(load(1e11), Machine(memory=1 * GIB)).chosen is None


def test_from_a_gigabyte_to_a_hundred_terabytes_nothing_shrinks() -> None:
    before = None
    for rows in (1e7, 1e8, 1e9, 1e10, 1e11, 1e12, 1.6e12):
        made = plan(load(rows, qps=1000), Machine())
        table = made.table
        if before is not None:
            assert table.version > before.version
            assert table.disk_peak > table.disk > table.version
        before = table
        for design in made.designs:
            assert 0 <= design.node.hit_rate <= 1
            assert design.node.memory <= Machine().memory
    assert before is not None
    assert 1e14 < before.version < 1.3e14


def test_a_cluster_on_ssd_is_as_large_as_its_rows_and_the_reads_that_its_drives_bear() -> None:
    def behind(rows: float, qps: float, **machine: float) -> tuple[str, float, str]:
        of = Machine(disk=1000 * GIB, reads=100_000, memory=256 * GIB, cores=64, **machine)
        found = next(one for one in plan(load(rows, qps=qps), of).designs if one.name == "cluster on SSD")
        return str(found.behind), found.monthly, found.notes[-1]

    # rows of 64 bytes take 121, two versions of them: 9e9 are 2,028 GiB, of which a machine holds 900
    text, price, why = behind(9e9, 0)
    assert text.endswith("with 4,057 GiB of SSD on 6 machines")
    assert "decided by the disk" in why
    in_memory = next(one for one in plan(load(9e9), Machine()).designs if one.name == "cluster")
    assert price < in_memory.monthly
    text, busy, why = behind(9e9, 2000)
    node = next(
        one for one in plan(load(9e9, qps=2000), Machine(memory=256 * GIB, cores=64)).designs if one.name == "cluster"
    )
    keys = node.nodes * node.node.reads
    assert text.endswith(f"on {2 * math.ceil(keys / 70_000)} machines")
    assert "decided by the drive" in why
    assert busy > price


def test_more_nodes_share_the_traffic() -> None:
    traffic = load(1e10, qps=10_000)
    one, four = (node_of(traffic, Machine(), 1 / nodes) for nodes in (1, 4))
    assert one.reads == pytest.approx(4 * four.reads)
    assert one.hit_rate == four.hit_rate
    half = node_of(load(5e9, qps=10_000), Machine(), 1.0)
    assert half.hit_rate > one.hit_rate, "half of the rows in the same memory"


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (lambda: load(0), "rows: expected at least 1"),
        (lambda: load(float("nan")), "rows"),
        (lambda: load(1, qps=-1.0), "qps"),
        (lambda: Machine(memory=0), "memory"),
        (lambda: Zipf(9), "exponent"),
        (lambda: plan(load(1), Machine(), 0), "nodes"),
    ],
)
def test_what_makes_no_sense_is_refused(wrong: object, reason: str) -> None:
    with pytest.raises(InvalidInput, match=reason):
        wrong()  # type: ignore[operator]
