"""Fan-out, one node away, growth, prices and sensitivity of a plan: against cases computed by hand, and by what they promise."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tierstore.errors import InvalidInput
from tierstore.sizing.outlook import MONTHS, growth, sensitivity
from tierstore.sizing.plan import Design, Load, Machine, SizingPlan, bytes_of, owner_of, parts_of, plan
from tierstore.sizing.prices import Kind, Prices, read_prices
from tierstore.sizing.reuse import Zipf
from tierstore.types import StorageDtype

GIB = 1 << 30
TINY = 1 << 20  # memory that has no room for rows: every key is missed


def load(rows: float = 1e9, **options: object) -> Load:
    return Load(rows, 32, StorageDtype("float16"), **options)  # type: ignore[arg-type]


def named(made: SizingPlan, name: str) -> Design:
    return next(of for of in made.designs if of.name == name)


# --- fan-out


@pytest.mark.parametrize(
    ("keys", "missed", "shares", "parts"),
    [
        (1, 1.0, 8, 1.0),  # one key is in one share
        (2, 1.0, 2, 1.5),  # of four equally likely pairs of shares, two have both keys in one
        (2, 0.5, 1, 0.75),  # three of four times at least one of two keys is missed
        (3, 1.0, 2, 1.75),  # two of eight times all three are in one share
        (1000, 1.0, 4, 4.0),  # many keys are in all
        (1000, 0.0, 4, 0.0),
        (1000, 1.0, 1, 1.0),
    ],
)
def test_to_how_many_shares_the_keys_of_a_request_go(keys: float, missed: float, shares: int, parts: float) -> None:
    assert parts_of(keys, missed, shares) == pytest.approx(parts, abs=1e-9)


def test_work_and_traffic_of_machines_with_shares_by_hand() -> None:
    """Two shares on four machines, 4,000 requests a second of one key that no memory has.

    Each front gets 1,000 requests and sends each on to one share; each owner gets a quarter of these 4,000.
    """
    node = owner_of(load(qps=4000, keys=1), Machine(memory=TINY), 2)
    assert node.hit_rate == 0
    assert (node.parts, node.reads) == (1000, 1000)
    # a front: head and code of each request; an owner: head, one byte of state and 64 of the row of each answer
    assert node.between == pytest.approx(1000 * (300 + 8) + 1000 * (300 + 1 + 64))
    assert node.network == pytest.approx(node.between + 1000 * 32 * 4)
    # 15 µs a request, 0.07 a key, 770 + 80 + 0.6 because it misses one; 25 + 0.1 to be asked; 7 from the drive
    assert node.cores == pytest.approx(1000 * (15 + 0.07 + 770 + 80 + 0.6 + 25 + 0.1 + 7) * 1e-6)


def test_the_one_whose_partner_is_away_answers_for_both() -> None:
    here = owner_of(load(qps=4000, keys=1), Machine(memory=TINY), 2)
    away = owner_of(load(qps=4000, keys=1), Machine(memory=TINY), 2, one_away=True)
    assert (away.parts, away.reads) == (2 * here.parts, 2 * here.reads)
    # three fronts have the clients of four
    as_front, as_owner = (15 + 0.07 + 770 + 80 + 0.6) * 1e-6, (25 + 0.1 + 7) * 1e-6
    assert away.cores == pytest.approx(4000 / 3 * as_front + 2000 * as_owner)


def test_partitions_at_many_requests_a_second_cost_processors() -> None:
    made = plan(load(150e9, qps=50_000), Machine(memory=256 * GIB, disk=8000 * GIB))
    partitions = named(made, "partitions")
    each = partitions.node.parts * partitions.nodes / 50_000
    assert each == pytest.approx(partitions.nodes / 2, rel=0.01), "a thousand keys are in all shares"
    assert partitions.node.cores * partitions.nodes > 50_000 * 15e-6 + 50_000 * each * (80 + 25) * 1e-6
    twice = named(
        plan(load(150e9, qps=100_000), Machine(memory=256 * GIB, disk=8000 * GIB), partitions.nodes), "partitions"
    )
    assert twice.node.cores == pytest.approx(2 * partitions.node.cores)


# --- one node away


def test_nodes_are_enough_while_one_is_away() -> None:
    """150,000 requests a second of one key in memory take 2.26 cores, of one core a node: 4 nodes have room for peaks, and 3 carry it."""
    traffic = load(1e6, qps=150_000, keys=1)
    machine = Machine(cores=1)
    copies = named(plan(traffic, machine), "copies")
    assert copies.nodes == 4
    assert copies.node.cores == pytest.approx(150_000 * 15.07e-6 / 4)
    assert copies.away is not None
    assert copies.away.cores == pytest.approx(150_000 * 15.07e-6 / 3)
    assert copies.limits == []
    three = named(plan(traffic, machine, 3), "copies")
    assert [limit.partition(":")[0] for limit in three.limits] == ["processor", "processor"]
    assert "while one is away a node needs 1.13 cores, and has 1 for it" in three.limits[1]


@pytest.mark.parametrize("qps", [10, 1_000, 30_000, 400_000])
@pytest.mark.parametrize("rows", [1e7, 1e9, 2e10, 3e11])
def test_whatever_is_chosen_bears_the_loss_of_a_node(rows: float, qps: float) -> None:
    machine = Machine(memory=256 * GIB, disk=8000 * GIB)
    for of in plan(load(rows, qps=qps), machine).designs:
        if of.limits or of.away is None:
            continue
        assert of.away.cores <= machine.cores
        assert of.away.network <= machine.network
        assert of.away.reads <= machine.reads or not of.node.disk
        assert of.away.cores >= of.node.cores
        assert of.node.cores <= 0.7 * machine.cores


# --- growth


def test_when_a_disk_is_full() -> None:
    """It has room for twice the rows: growing by 10% a month these are there after more than 7 months (1.1 ** 7 is 1.949)."""
    rows = 1e9
    machine = Machine(disk=2 * bytes_of(load(rows)).disk_peak)
    made = plan(load(rows), machine, 1)
    (one,) = [end for end in growth(made, machine, 0.1).ends if end.design == "one machine"]
    assert one.month == 8
    assert one.why is not None
    assert one.why.startswith("disk: a node needs")


def test_requests_grow_as_rows_do() -> None:
    machine = Machine(memory=256 * GIB, disk=8000 * GIB)
    made = plan(load(1e9, qps=1000), machine)
    grown = growth(made, machine, 0.05)
    assert len(grown.months) == MONTHS + 1
    assert grown.months[12].rows == pytest.approx(1e9 * 1.7959, rel=1e-4)
    assert grown.months[12].qps == pytest.approx(1000 * 1.7959, rel=1e-4)
    prices = [month.monthly for month in grown.months if month.monthly is not None]
    assert prices == sorted(prices)
    assert made.chosen is not None
    assert (grown.months[0].design, grown.months[0].monthly) == (made.chosen.name, made.chosen.monthly)
    for end in grown.ends:
        if end.month:  # what holds until then is no limit
            before = plan(made.load.grown(1.05 ** (end.month - 1)), machine, end.nodes)
            assert named(before, end.design).limits == []


def test_what_is_not_enough_now_runs_out_in_month_zero() -> None:
    machine = Machine()
    grown = growth(plan(load(1e10, qps=20_000), machine), machine, 0.01)
    assert next(end.month for end in grown.ends if end.design == "one machine") == 0
    for share in (0, -0.1, 1.5, float("nan")):
        with pytest.raises(InvalidInput, match="growth: expected"):
            growth(plan(load(), machine), machine, share)


# --- prices


def test_a_price_is_that_of_what_is_used() -> None:
    made = plan(load(1e9, qps=1000), Machine(), prices=Prices(memory=2, disk=0, core=0))
    for of in made.designs:
        if of.behind is None:
            assert of.monthly == pytest.approx(of.nodes * of.node.memory / GIB * 2)
    cores = plan(load(1e9, qps=1000), Machine(), prices=Prices(memory=0, disk=0, core=7))
    for of in cores.designs:
        if of.behind is None:
            assert of.monthly == pytest.approx(of.nodes * of.node.cores * 10)  # 7 a core, of which 0.7 are used


def test_nodes_of_kinds_are_paid_whole_and_the_cheapest_that_can_serve_is_chosen() -> None:
    small = Kind(memory="16GiB", disk="500GiB", cores=4, price=100)  # type: ignore[arg-type]
    large = Kind(memory="256GiB", disk="8TiB", cores=64, price=900)  # type: ignore[arg-type]
    fits = plan(load(1e8, qps=100), Machine(), prices=Prices(nodes={"small": small, "large": large}))
    assert fits.chosen is not None
    assert (fits.chosen.name, fits.chosen.machine.kind, fits.chosen.monthly) == ("one machine", "small", 100)
    wide = plan(load(1e10, qps=100), Machine(), 1, Prices(nodes={"small": small, "large": large}))
    one = named(wide, "one machine")
    assert (one.machine.kind, one.monthly, one.limits) == ("large", 900, [])
    assert one.machine.memory == 256 * GIB
    none = plan(load(1e12), Machine(), 1, Prices(nodes={"small": small}))
    assert named(none, "one machine").limits


def test_prices_from_a_file(tmp_path: Path) -> None:
    document = {
        "currency": "EUR", "core": 12.5,
        "nodes": {"r8": {"memory": "64GiB", "disk": "2TiB", "cores": 8, "price": 300, "network": 10}},
    }  # fmt: skip
    (tmp_path / "p.json").write_text(json.dumps(document))
    (tmp_path / "p.toml").write_text(
        'currency = "EUR"\ncore = 12.5\n[nodes.r8]\nmemory = "64GiB"\ndisk = "2TiB"\ncores = 8\nprice = 300\nnetwork = 10\n'
    )
    assert read_prices(tmp_path / "p.json") == read_prices(tmp_path / "p.toml")
    found = read_prices(tmp_path / "p.toml")
    assert (found.currency, found.core, found.memory, found.nodes["r8"].memory) == ("EUR", 12.5, 3.0, 64 * GIB)
    assert Machine.of_kind("r8", found.nodes["r8"]).network == 10e9 / 8


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("memory = -1", "memory: Input should be greater than or equal to 0"),
        ("momory = 1", "momory: Extra inputs are not permitted"),
        ("[nodes.a]\nmemory = '1GiB'\ndisk = '1GiB'\ncores = 1", "nodes.a.price: Field required"),
        ("[nodes.a]\nmemory = 'much'\ndisk = '1GiB'\ncores = 1\nprice = 1", "nodes.a.memory"),
        ("[nodes.a]\nmemory = '1GiB'\ndisk = '1GiB'\ncores = 0\nprice = 1", "nodes.a.cores"),
        ("core = inf", "core"),
        ("= 1", "neither TOML nor JSON"),
    ],
)
def test_prices_that_make_no_sense_are_refused(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "p.toml").write_text(text)
    with pytest.raises(InvalidInput, match=reason):
        read_prices(tmp_path / "p.toml")
    with pytest.raises(InvalidInput, match="cannot read"):
        read_prices(tmp_path / "none.toml")


# --- sensitivity


def test_a_price_moves_by_the_share_that_an_input_has_in_it() -> None:
    """Memory alone costs something, and all rows are in it: its price and the rows move the price by as much as they are moved themselves."""
    machine, prices = Machine(memory=4096 * GIB, disk=1e6 * GIB), Prices(memory=1, disk=0, core=0)
    made = plan(load(1e10, reuse=Zipf(1.0), changed=0.0), machine, 1, prices)
    assert made.chosen is not None
    now = made.chosen.monthly
    swings = {swing.what: swing for swing in sensitivity(made, machine, 1)}
    assert swings["price of memory"].less == pytest.approx(0.75 * now)
    assert swings["price of memory"].more == pytest.approx(1.25 * now)
    assert swings["price of disk"].size(now) == swings["price of core"].size(now) == 0
    assert swings["rows"].more == pytest.approx(1.25 * now, rel=0.01)
    assert "requests a second" not in swings, "there are none"


def test_the_largest_swing_is_first_and_each_is_a_plan_of_its_own() -> None:
    machine = Machine(memory=256 * GIB, disk=8000 * GIB)
    made = plan(load(1e10, qps=20_000), machine)
    assert made.chosen is not None
    now = made.chosen.monthly
    swings = sensitivity(made, machine)
    sizes = [swing.size(now) for swing in swings]
    assert sizes == sorted(sizes, reverse=True)
    requests = next(swing for swing in swings if swing.what == "requests a second")
    less = plan(replace(made.load, qps=15_000), machine).chosen
    assert less is not None
    assert requests.less == less.monthly
