"""`plan`: memory, disk, network and hit rate of a table, and which designs can serve it. Immutable values; any thread.

Every figure is computed from the constants below, each with where it was measured; `docs/scale.md` explains them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from tierstore.errors import InvalidInput
from tierstore.formats.row_times import TIME_BYTES
from tierstore.sizing.reuse import ADS, Measured, Reuse, hit_rate
from tierstore.tiers.disk.block_shape import block_shape
from tierstore.tiers.host.layout import ALL_ROWS
from tierstore.types import StorageDtype

GIB = 1 << 30
KEY_BYTES = 8
# of a row in the host tier: lines, absent keys and policy of a set of 56 (docs/decisions/host-tier.md)
HOST_ROW_BYTES = (8 * 64 + 2 * 64 + 128) / 56
INDEX_BYTES = 8  # a block of a sealed file, in memory and in the file (docs/decisions/sealed-base.md)
CHANGED_DISK_BYTES = 24  # of a row in RocksDB beyond the row: key, block, filter (82.2 bytes for rows of 64, same page)
PROCESS_BYTES = 350 << 20  # Python, libraries and compiled kernels of a service
FIXED_BYTES = (
    (256 << 20) + (32 << 20) + (512 << 20)
)  # overlay_budget and load_memory as they are by default, RocksDB's block cache
SYSTEM_SHARE = 0.1  # of a node's memory, for the system and its cache of files
# server CPU of a look-up over HTTP (docs/decisions/reactor.md), and of a key that is read from disk (sealed-base.md)
REQUEST_CPU_S, KEY_CPU_S, READ_CPU_S = 15e-6, 0.07e-6, 7e-6
LOAD_ROWS_S = 3.1e6  # rows a second of a load of 400 million (docs/benchmarks.md)
REDIS_ROW_BYTES = 72  # beyond the row, of a field of a hash with 8-byte fields: an estimate, not measured here
USED = 0.7  # of what a node can do, so that there is room for peaks and for one that fails


@dataclass(frozen=True, slots=True)
class Load:
    """The table and its traffic. `keys` of a request; `answer_bytes` of a number in an answer: 4, or 2 for float16."""

    rows: float
    dim: int
    dtype: StorageDtype
    reuse: Reuse | Measured = ADS
    qps: float = 0.0
    keys: int = 1000
    answer_bytes: int = 4
    changed: float = 0.05  # share of the rows that deltas change between two snapshots
    keep_versions: int = 1
    expires: bool = (
        False  # whether rows have a ttl; then their times are a table of their own (docs/decisions/row-ttl.md)
    )

    def __post_init__(self) -> None:
        for name, value, least in (("rows", self.rows, 1), ("dim", self.dim, 1), ("keys", self.keys, 1)):
            if not least <= value < math.inf:
                raise InvalidInput(f"{name}: expected at least {least}, got {value:g}")
        if not 0 <= self.qps < math.inf:
            raise InvalidInput(f"qps: expected requests a second, got {self.qps:g}")

    @property
    def row_bytes(self) -> int:
        return self.dtype.row_bytes(self.dim)


@dataclass(frozen=True, slots=True)
class Machine:
    """One node. `reads`: random reads of 4 KiB a second that its drives do. `network`: bytes a second, each way.

    Prices are of a GiB and a month, in any currency; only their ratio decides.
    """

    memory: float = 64 * GIB
    disk: float = 2000 * GIB
    reads: float = 200_000
    network: float = 25e9 / 8
    cores: int = 16
    memory_price: float = 3.0
    disk_price: float = 0.1

    def __post_init__(self) -> None:
        for name in ("memory", "disk", "reads", "network", "cores", "memory_price", "disk_price"):
            if not getattr(self, name) > 0:
                raise InvalidInput(f"{name}: expected more than 0, got {getattr(self, name):g}")


@dataclass(frozen=True, slots=True)
class Bytes:
    """The bytes that one version of the table, or a part of it, needs."""

    version: float  # files of a version as loaded
    changed: float  # and what deltas changed of it, in RocksDB
    index: float  # in memory, while the version is open
    disk: float  # versions that stay: the active one and those kept
    disk_peak: float  # and one that is being loaded, with its sorted runs
    all_in_memory: float  # of the host tier, to hold every row


def bytes_of(load: Load, share: float = 1.0) -> Bytes:
    """What `share` of the table needs."""
    rows = load.rows * share
    version = changed = scratch = index = 0.0
    for row_bytes in (load.row_bytes, TIME_BYTES) if load.expires else (load.row_bytes,):
        block, per_block = block_shape(row_bytes)
        blocks = math.ceil(rows / per_block)
        version += blocks * (block + INDEX_BYTES)
        changed += rows * load.changed * (row_bytes + CHANGED_DISK_BYTES)
        scratch += rows * (row_bytes + KEY_BYTES)
        index += blocks * INDEX_BYTES + rows * load.changed * 3
    disk = (version + changed) * (1 + load.keep_versions)
    return Bytes(
        version,
        changed,
        index,
        disk,
        disk + version + scratch,
        rows * (load.row_bytes + HOST_ROW_BYTES) * ALL_ROWS,
    )


@dataclass(frozen=True, slots=True)
class Node:
    """One of the nodes of a design: what it holds and does."""

    host_budget: float  # bytes for the setting of that name
    cached_rows: float
    hit_rate: float
    memory: float
    disk: float  # at its peak
    network: float  # bytes a second, out
    reads: float  # a second, from its drive or from the nodes behind it
    cores: float


@dataclass(frozen=True, slots=True)
class Design:
    """A way to serve the table. `limits`: why it cannot, empty where it can. `monthly`: memory and disk by price."""

    name: str
    nodes: int
    node: Node
    behind: str | None  # what holds the rows, where the nodes do not
    limits: list[str]
    monthly: float
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Plan:
    """`chosen`: the name of the cheapest design that can serve it, the simpler one where two cost the same."""

    load: Load
    machine: Machine
    table: Bytes
    designs: list[Design]
    chosen: str | None


def plan(load: Load, machine: Machine, nodes: int | None = None) -> Plan:
    """Size a table. `nodes`: how many there are, where that is decided; else as many as are needed."""
    if nodes is not None and nodes < 1:
        raise InvalidInput(f"nodes: expected at least 1, got {nodes}")
    designs = [
        *([_copies(load, machine, 1, "one machine")] if nodes in (None, 1) else []),
        *([_copies(load, machine, _enough(load, machine, nodes), "copies")] if nodes != 1 else []),
        _cluster(load, machine, _enough(load, machine, nodes)),
        *([_partitions(load, machine, nodes)] if nodes != 1 else []),
    ]
    can = [design for design in designs if not design.limits]
    chosen = min(can, key=lambda design: design.monthly).name if can else None
    return Plan(load, machine, bytes_of(load), designs, chosen)


def node_of(load: Load, machine: Machine, traffic: float, held: float, *, disk: bool = True) -> Node:
    """A node that gets `traffic` (a share of the requests) for `held` (a share) of the rows."""
    table = bytes_of(load, held)
    spare = machine.memory * (1 - SYSTEM_SHARE) - PROCESS_BYTES - FIXED_BYTES - (2 * table.index if disk else 0)
    budget = max(0.0, min(spare, table.all_in_memory))
    rows = load.rows * held
    cached = rows if budget >= table.all_in_memory else budget / (load.row_bytes + HOST_ROW_BYTES)
    hits = hit_rate(load.reuse, cached, rows)
    requests = load.qps * traffic
    reads = requests * load.keys * (1 - hits)
    return Node(
        budget,
        min(cached, rows),
        hits,
        machine.memory - max(0.0, spare - budget),
        table.disk_peak if disk else 0.0,
        requests * load.keys * load.dim * load.answer_bytes,
        reads,
        requests * (REQUEST_CPU_S + load.keys * KEY_CPU_S) + reads * READ_CPU_S,
    )


def _limits(node: Node, machine: Machine) -> list[str]:
    found = []
    for name, needs, has, unit in (
        ("disk", node.disk / GIB, machine.disk / GIB, "GiB"),
        ("drive", node.reads, machine.reads * USED, "random reads a second"),
        ("network", node.network / 1e9, machine.network * USED / 1e9, "GB a second"),
        ("processor", node.cores, machine.cores * USED, "cores"),
    ):
        if needs > has:
            found.append(f"{name}: a node needs {needs:,.4g} {unit}, and has {has:,.4g} for it")
    if node.host_budget <= 0:
        found.append("memory: none of it remains for rows")
    return found


def _monthly(machine: Machine, node: Node, nodes: int) -> float:
    return nodes * (node.memory * machine.memory_price + node.disk * machine.disk_price) / GIB


def _enough(load: Load, machine: Machine, nodes: int | None) -> int:
    """Nodes among which the traffic is shared: at least two, so that one may fail."""
    if nodes is not None:
        return nodes
    one = node_of(load, machine, 1.0, 1.0)
    return max(
        2,
        math.ceil(one.reads / (machine.reads * USED)),
        math.ceil(one.network / (machine.network * USED)),
        math.ceil(one.cores / (machine.cores * USED)),
    )


def _copies(load: Load, machine: Machine, nodes: int, name: str) -> Design:
    node = node_of(load, machine, 1 / nodes, 1.0)
    hours = load.rows / LOAD_ROWS_S / 3600
    notes = [f"a load of the snapshot takes about {_hours(hours)} a node, built versions less"]
    if nodes == 1:
        notes.append("while it is down nothing answers")
    return Design(name, nodes, node, None, _limits(node, machine), _monthly(machine, node, nodes), notes)


def _cluster(load: Load, machine: Machine, nodes: int) -> Design:
    node = node_of(load, machine, 1 / nodes, 1.0, disk=False)
    behind = load.rows * (load.row_bytes + REDIS_ROW_BYTES) * 2 * (1 + load.keep_versions)
    machines = math.ceil(behind / (machine.memory * USED))
    limits = [limit for limit in _limits(node, machine) if not limit.startswith("drive")]
    monthly = _monthly(machine, node, nodes) + behind / GIB * machine.memory_price
    notes = [
        f"{REDIS_ROW_BYTES} bytes a row beyond the vector, a replica, and {1 + load.keep_versions} versions are assumed",
        f"the cluster answers {nodes * node.reads:,.0f} keys a second",
    ]
    text = f"a Redis-protocol cluster with {behind / GIB:,.0f} GiB of memory on {machines:,} machines"
    return Design("cluster", nodes, node, text, limits, monthly, notes)


def _partitions(load: Load, machine: Machine, nodes: int | None) -> Design:
    """Each partition on two nodes, and a front beside each, which asks the nodes for what it does not hold."""
    pairs = max(
        1, math.ceil(bytes_of(load).disk_peak / (machine.disk * 0.9)), math.ceil(_enough(load, machine, None) / 2)
    )
    if nodes is not None:
        pairs = max(1, nodes // 2)
    node = node_of(load, machine, 1 / (2 * pairs), 1 / pairs)
    note = f"{pairs:,} shares of the rows, each on two nodes, with fronts (`--upstream`) on the same machines; a request goes to all that have keys of it"
    limits = _limits(node, machine)
    return Design("partitions", 2 * pairs, node, None, limits, _monthly(machine, node, 2 * pairs), [note])


def _hours(hours: float) -> str:
    return f"{hours:.1f} hours" if hours >= 1 else f"{hours * 60:.0f} minutes" if hours * 60 >= 1 else "a minute"
