"""The outlook of a plan: when its designs run out as rows and requests grow, and which of what it was given moves the
price most. Any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from tierstore.errors import InvalidInput
from tierstore.sizing.plan import Design, Load, Machine, SizingPlan, design, plan
from tierstore.sizing.prices import Prices

MONTHS = 36
SWING = 0.25  # by which each input is made smaller and larger


@dataclass(frozen=True, slots=True)
class End:
    """When a design, with the nodes that it has now, is not enough any more: the first month (0: now), and
    by what; None within MONTHS.
    """

    design: str
    nodes: int
    month: int | None
    why: str | None


@dataclass(frozen=True, slots=True)
class Month:
    """What is needed then: the cheapest design on as many nodes as it takes; None where none can serve it."""

    month: int
    rows: float
    qps: float
    design: str | None
    nodes: int | None
    monthly: float | None


@dataclass(frozen=True, slots=True)
class Growth:
    """The growth of rows and of requests, by `share` a month (0.05: 5%)."""

    share: float
    ends: list[End]
    months: list[Month]


def growth(made: SizingPlan, machine: Machine, share: float) -> Growth:
    """Both grow by `share` each month; what is needed later is as many nodes as it takes."""
    if not 0 < share <= 1:
        raise InvalidInput(f"growth: expected more than 0% and at most 100% a month, got {100 * share:g}%")
    months = []
    for month in range(MONTHS + 1):
        load = made.load.grown((1 + share) ** month)
        then = made if month == 0 else plan(load, machine, None, made.prices)
        best = then.chosen
        found = (None, None, None) if best is None else (best.name, best.nodes, best.monthly)
        months.append(Month(month, load.rows, load.qps, *found))
    return Growth(share, [_end(of, made, share) for of in made.designs], months)


def _end(of: Design, made: SizingPlan, share: float) -> End:
    for month in range(MONTHS + 1):
        limits = design(of.name, made.load.grown((1 + share) ** month), of.machine, of.nodes, made.prices).limits
        if limits:
            return End(of.name, of.nodes, month, limits[0])
    return End(of.name, of.nodes, None, None)


@dataclass(frozen=True, slots=True)
class Swing:
    """The price of the cheapest design with less and with more of one input; None where nothing can serve it then."""

    what: str
    less: float | None
    more: float | None

    def size(self, now: float) -> float:
        """By how much the price moves at most, as a share of `now`; infinite where nothing can serve it."""
        return max(abs(price / now - 1) if price is not None else float("inf") for price in (self.less, self.more))


def sensitivity(made: SizingPlan, machine: Machine, nodes: int | None = None) -> list[Swing]:
    """What SWING less and more of each input changes, the largest first.

    Empty where no design can serve it or it costs nothing.
    """
    if made.chosen is None or made.chosen.monthly <= 0:
        return []
    swings = [Swing(what, _price(less, nodes), _price(more, nodes)) for what, less, more in _inputs(made, machine)]
    return sorted(swings, key=lambda swing: -swing.size(made.chosen.monthly if made.chosen else 1.0))


_Case = tuple[Load, Machine, Prices]


def _price(case: _Case, nodes: int | None) -> float | None:
    load, machine, prices = case
    best = plan(load, machine, nodes, prices).chosen
    return None if best is None else best.monthly


def _inputs(made: SizingPlan, machine: Machine) -> Iterator[tuple[str, _Case, _Case]]:
    """(name, with less, with more) of each input that the plan has."""
    load, prices = made.load, made.prices

    def case(what: str, scaled: Callable[[float], _Case]) -> tuple[str, _Case, _Case]:
        return what, scaled(1 - SWING), scaled(1 + SWING)

    yield case("rows", lambda by: (replace(load, rows=max(1.0, load.rows * by)), machine, prices))
    yield case("numbers of a row", lambda by: (replace(load, dim=max(1, round(load.dim * by))), machine, prices))
    yield case("changed by deltas", lambda by: (replace(load, changed=load.changed * by), machine, prices))
    if load.qps:
        yield case("requests a second", lambda by: (replace(load, qps=load.qps * by), machine, prices))
        yield case("keys of a request", lambda by: (replace(load, keys=max(1.0, load.keys * by)), machine, prices))
    if prices.nodes:
        for name, kind in prices.nodes.items():

            def priced(by: float, name: str = name, price: float = kind.price) -> _Case:
                others = {**prices.nodes, name: prices.nodes[name].model_copy(update={"price": price * by})}
                return load, machine, prices.model_copy(update={"nodes": others})

            yield case(f"price of {name}", priced)
        return
    yield case("memory of a node", lambda by: (load, replace(machine, memory=machine.memory * by), prices))
    for name, of in (("memory", prices.memory), ("disk", prices.disk), ("core", prices.core)):

        def at(by: float, name: str = name, price: float = of) -> _Case:
            return load, machine, prices.model_copy(update={name: price * by})

        yield case(f"price of {name}", at)
