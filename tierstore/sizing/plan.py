"""`plan`: memory, disk, network and hit rate of a table, and which designs can serve it. Immutable values; any thread.

Every figure is computed from the constants below, each with where it was measured; `docs/scale.md` explains them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from tierstore.config.memory import PROCESS_BYTES
from tierstore.errors import InvalidInput
from tierstore.formats.row_times import TIME_BYTES
from tierstore.sizing.prices import ASSUMED, Kind, Prices
from tierstore.sizing.reuse import ADS, Measured, Reuse, hit_rate
from tierstore.tiers.disk.block_shape import block_shape
from tierstore.tiers.host.table_layout import ALL_ROWS
from tierstore.types import StorageDtype

GIB = 1 << 30
KEY_BYTES = 8
# of a row in the host tier: lines, absent keys and policy of a set of 56 (docs/decisions/host-tier.md)
HOST_ROW_BYTES = (8 * 64 + 2 * 64 + 128) / 56
INDEX_BYTES = 8  # a block of a sealed file, in memory and in the file (docs/decisions/sealed-base.md)
CHANGED_DISK_BYTES = 24  # of a row in RocksDB beyond the row: key, block, filter (82.2 bytes for rows of 64, same page)
FIXED_BYTES = (
    (256 << 20) + (32 << 20) + (512 << 20)
)  # overlay_budget and load_memory as they are by default, RocksDB's block cache
SYSTEM_SHARE = 0.1  # of a node's memory, for the system and its cache of files
# server CPU of a look-up over HTTP (docs/decisions/reactor.md), and of a key that is read from disk (sealed-base.md)
REQUEST_CPU_S, KEY_CPU_S, READ_CPU_S = 15e-6, 0.07e-6, 7e-6
# CPU of a front for a request of which it lacks keys (Python handles it), for each node that it asks and for each such
# key; and of the nodes that it asks, for a request and for a key (docs/decisions/upstream.md)
FRONT_MISS_CPU_S, FRONT_PART_CPU_S, FRONT_KEY_CPU_S = 770e-6, 80e-6, 0.6e-6
OWNER_PART_CPU_S, OWNER_KEY_CPU_S = 25e-6, 0.1e-6
PART_BYTES = 300  # of a request between nodes beside its codes, and of its answer beside its rows: their heads
REMOTE_KEY_CPU_S = (
    0.2e-6  # of a node, to read a key from a cluster; it is let in like one from a node (docs/decisions/remote-tier.md)
)
REDIS_KEY_CPU_S = 0.95e-6  # of the cluster (same page)
REDIS_ROW_BYTES = 72  # beyond the row, of a field of a hash with 8-byte fields: 136 for rows of 64 (same page)
# of an engine that has its rows on SSD (Kvrocks): bytes beyond the row, 121 for rows of 64; its processors for a key,
# at 256 keys a command; and memory for filters and index of a row (docs/decisions/beyond-one-machine.md)
SSD_ENGINE_ROW_BYTES, SSD_ENGINE_KEY_CPU_S, SSD_ENGINE_INDEX_BYTES = 57, 15e-6, 1.5
FRONT_SHARE = 0.25  # of the memory for rows of a machine that is an owner and a front
LOAD_ROWS_S = 3.1e6  # rows a second of a load of 400 million (docs/benchmarks.md)
LOAD_START_S = 2.0  # until helpers read, and until the version is on record; 10 million rows take 4.8 s in all (README)
USED = 0.7  # of what a node can do while all are there, so that there is room for peaks
MOST_SHARES = 4096  # that a table is cut into


@dataclass(frozen=True, slots=True)
class Load:
    """The table and its traffic. `keys` of a request; `answer_bytes` of a number in an answer: 4, or 2 for float16."""

    rows: float
    dim: int
    dtype: StorageDtype
    reuse: Reuse | Measured = ADS
    qps: float = 0.0
    keys: float = 1000
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

    def grown(self, factor: float) -> Load:
        """With so many times the rows and the requests."""
        return replace(self, rows=self.rows * factor, qps=self.qps * factor)


@dataclass(frozen=True, slots=True)
class Machine:
    """One node. `reads`: random reads of 4 KiB a second that its drives do. `network`: bytes a second, each way.

    `kind`: the name under which it is paid for whole.
    """

    memory: float = 64 * GIB
    disk: float = 2000 * GIB
    reads: float = 200_000
    network: float = 25e9 / 8
    cores: int = 16
    kind: str | None = None

    def __post_init__(self) -> None:
        for name in ("memory", "disk", "reads", "network", "cores"):
            if not getattr(self, name) > 0:
                raise InvalidInput(f"{name}: expected more than 0, got {getattr(self, name):g}")

    @classmethod
    def of_kind(cls, name: str, kind: Kind) -> Machine:
        return cls(kind.memory, kind.disk, kind.reads, kind.network * 1e9 / 8, kind.cores, name)


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
class PlannedNode:
    """One of the nodes of a design: what it holds and does."""

    host_budget: float  # bytes for rows: the setting of that name, of a machine that is owner and front both together
    cached_rows: float
    hit_rate: float  # share of the keys that are answered from memory, of whichever node
    memory: float
    disk: float  # at its peak
    network: float  # bytes a second, out: to clients and to other nodes
    between: float  # of these, those to other nodes
    parts: float  # requests a second that other nodes send to it
    reads: float  # a second, from its drive or from the cluster behind it
    cores: float


@dataclass(frozen=True, slots=True)
class Design:
    """A way to serve the table.

    `away`: the busiest node while one is away; None for a single node. `limits`: why it cannot serve, empty where it
    can, also while one is away. `monthly`: its price.
    """

    name: str
    machine: Machine
    nodes: int
    node: PlannedNode
    away: PlannedNode | None
    behind: str | None  # what holds the rows, where the nodes do not
    limits: list[str]
    monthly: float
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class SizingPlan:
    """`designs`: of each name the cheapest machine for it that can serve, or else the first. `chosen`: the cheapest of
    all that can serve, the simpler one where two cost the same."""

    load: Load
    prices: Prices
    table: Bytes
    designs: list[Design]
    chosen: Design | None


def plan(load: Load, machine: Machine, nodes: int | None = None, prices: Prices | None = None) -> SizingPlan:
    """Size a table. `nodes`: how many there are, where that is decided; else as many as are needed.

    Where the prices name kinds of nodes these take the place of `machine`.
    """
    if nodes is not None and nodes < 1:
        raise InvalidInput(f"nodes: expected at least 1, got {nodes}")
    prices = prices or ASSUMED
    machines = [Machine.of_kind(name, kind) for name, kind in prices.nodes.items()] or [machine]
    unfit = () if nodes is None else ("copies", "partitions") if nodes == 1 else (ONE,)
    names = [name for name in DESIGNS if name not in unfit]
    designs = [min((design(name, load, one, nodes, prices) for one in machines), key=_rank) for name in names]
    can = [design for design in designs if not design.limits]
    return SizingPlan(load, prices, bytes_of(load), designs, min(can, key=lambda of: of.monthly) if can else None)


def _rank(design: Design) -> tuple[int, float]:
    return len(design.limits), design.monthly


def design(name: str, load: Load, machine: Machine, nodes: int | None, prices: Prices) -> Design:
    """One design on such machines: on `nodes` of them, else on as many as are needed."""
    return DESIGNS[name](load, machine, nodes, prices)


def node_of(load: Load, machine: Machine, traffic: float, *, disk: bool = True) -> PlannedNode:
    """A node that gets `traffic` (a share of the requests) and has all rows, on its disk or in a cluster behind it."""
    table = bytes_of(load)
    budget = _memory_for_rows(machine, PROCESS_BYTES + FIXED_BYTES + (2 * table.index if disk else 0))
    budget = min(budget, table.all_in_memory)
    cached = _rows_in(budget, load, table.all_in_memory, load.rows)
    hits = hit_rate(load.reuse, cached, load.rows)
    requests = load.qps * traffic
    reads = requests * load.keys * (1 - hits)
    reading_s = reads * READ_CPU_S
    if not disk:
        of_requests = requests * parts_of(load.keys, 1 - hits, 1) * FRONT_MISS_CPU_S
        reading_s = of_requests + reads * (REMOTE_KEY_CPU_S + FRONT_KEY_CPU_S)
    return PlannedNode(
        budget, cached, hits, _memory_of(machine, budget, table.index if disk else 0.0),
        table.disk_peak if disk else 0.0,
        requests * load.keys * load.dim * load.answer_bytes + (0 if disk else reads * KEY_BYTES),
        0.0, 0.0, reads, requests * (REQUEST_CPU_S + load.keys * KEY_CPU_S) + reading_s,
    )  # fmt: skip


def owner_of(load: Load, machine: Machine, pairs: int, *, one_away: bool = False) -> PlannedNode:
    """One of `2 * pairs` machines, each a front and an owner of one of `pairs` shares of the rows, which two have.

    `one_away`: the machine whose share the one that is away has, too: it answers for both, and all fronts
    that remain for all clients.
    """
    table = bytes_of(load, 1 / pairs)
    share = load.rows / pairs
    budget = _memory_for_rows(machine, 2 * PROCESS_BYTES + FIXED_BYTES + 2 * table.index)
    own = min(budget * (1 - FRONT_SHARE), table.all_in_memory)
    front = min(budget - own, bytes_of(load).all_in_memory)
    # the hottest rows are in every front, so owners keep those that come next
    in_front = _rows_in(front, load, bytes_of(load).all_in_memory, load.rows)
    in_owner = _rows_in(own, load, table.all_in_memory, share)
    in_one, in_memory = (min(load.rows, in_front + in_owner * owners) for owners in (1, pairs))
    missed = 1 - hit_rate(load.reuse, in_front, load.rows)
    lacking = load.keys * missed  # keys of a request, for owners
    hits = hit_rate(load.reuse, in_memory, load.rows)
    parts = parts_of(load.keys, missed, pairs)
    front_s = parts_of(load.keys, missed, 1) * FRONT_MISS_CPU_S + parts * FRONT_PART_CPU_S + lacking * FRONT_KEY_CPU_S

    machines = 2 * pairs - one_away
    requests = load.qps / machines  # of clients, to each front
    shares = load.qps / pairs / (1 if one_away else 2)  # of all requests, that an owner gets its part of
    received, keys, reads = shares * parts, shares * lacking, shares * load.keys * (1 - hits)
    between = (
        requests * (lacking * KEY_BYTES + parts * PART_BYTES) + keys * (load.row_bytes + 1) + received * PART_BYTES
    )
    return PlannedNode(
        own + front, in_one, hits, _memory_of(machine, own + front, table.index, 2), table.disk_peak,
        requests * load.keys * load.dim * load.answer_bytes + between, between, received, reads,
        requests * (REQUEST_CPU_S + load.keys * KEY_CPU_S + front_s)
        + received * OWNER_PART_CPU_S + keys * OWNER_KEY_CPU_S + reads * READ_CPU_S,
    )  # fmt: skip


def parts_of(keys: float, missed: float, shares: int) -> float:
    """How many of so many shares have at least one of the keys of a request that are missed, on average: to
    so many nodes it goes on."""
    return shares * -math.expm1(keys * math.log1p(-missed / shares)) if missed < shares else 1.0


def _memory_for_rows(machine: Machine, other: float) -> float:
    return max(0.0, machine.memory * (1 - SYSTEM_SHARE) - other)


def _memory_of(machine: Machine, budget: float, index: float, processes: int = 1) -> float:
    """What a machine is to have for that, the system's part included."""
    needs = budget + processes * PROCESS_BYTES + FIXED_BYTES + 2 * index
    return min(machine.memory, needs / (1 - SYSTEM_SHARE))


def _rows_in(budget: float, load: Load, for_all: float, rows: float) -> float:
    return rows if budget >= for_all else min(rows, budget / (load.row_bytes + HOST_ROW_BYTES))


def _limits(node: PlannedNode, machine: Machine, used: float, when: str = "") -> list[str]:
    """What of the machine is not enough."""
    found = []
    for name, needs, has, unit in (
        ("disk", node.disk / GIB, machine.disk / GIB, "GiB"),
        ("drive", node.reads if node.disk else 0.0, machine.reads * used, "random reads a second"),
        ("network", node.network / 1e9, machine.network * used / 1e9, "GB a second"),
        ("processor", node.cores, machine.cores * used, "cores"),
    ):
        if needs > has and not (when and name == "disk"):
            found.append(f"{name}: {when}a node needs {_shown(needs)} {unit}, and has {_shown(has)} for it")
    if node.host_budget <= 0 and not when:
        found.append("memory: none of it remains for rows")
    return found


def _all_limits(node: PlannedNode, away: PlannedNode | None, machine: Machine) -> list[str]:
    found = _limits(node, machine, USED)
    return found + (_limits(away, machine, 1.0, "while one is away ") if away is not None else [])


def _monthly(machine: Machine, node: PlannedNode, nodes: int, prices: Prices) -> float:
    if machine.kind is not None:
        return nodes * prices.nodes[machine.kind].price
    return nodes * (node.memory / GIB * prices.memory + node.disk / GIB * prices.disk + node.cores / USED * prices.core)


def _enough(one: PlannedNode, machine: Machine) -> int:
    """Nodes among which the traffic of one is shared, so that they have room for peaks, and what remains
    is enough when one fails."""
    busy = max((one.reads / machine.reads) if one.disk else 0, one.network / machine.network, one.cores / machine.cores)
    return max(2, math.ceil(busy / USED), math.ceil(busy) + 1)


def _one(load: Load, machine: Machine, nodes: int | None, prices: Prices) -> Design:
    return _copies(load, machine, 1, prices)


def _copies(load: Load, machine: Machine, nodes: int | None, prices: Prices) -> Design:
    nodes = nodes or _enough(node_of(load, machine, 1.0), machine)
    node = node_of(load, machine, 1 / nodes)
    away = node_of(load, machine, 1 / (nodes - 1)) if nodes > 1 else None
    notes = [
        f"a load of the snapshot takes about {_span(LOAD_START_S + load.rows / LOAD_ROWS_S)} a node, at "
        f"{LOAD_ROWS_S / 1e6:g} million rows a second; built versions less"
    ]
    if nodes == 1:
        notes.append("while it is down nothing answers")
    limits, monthly = _all_limits(node, away, machine), _monthly(machine, node, nodes, prices)
    return Design(ONE if nodes == 1 else "copies", machine, nodes, node, away, None, limits, monthly, notes)


def _caches(load: Load, machine: Machine, nodes: int | None) -> tuple[int, PlannedNode, PlannedNode | None]:
    """How many nodes without a disk are in front of a cluster, one of them, and one while another is away."""
    nodes = nodes or _enough(node_of(load, machine, 1.0, disk=False), machine)
    away = node_of(load, machine, 1 / (nodes - 1), disk=False) if nodes > 1 else None
    return nodes, node_of(load, machine, 1 / nodes, disk=False), away


def _cluster(load: Load, machine: Machine, nodes: int | None, prices: Prices) -> Design:
    nodes, node, away = _caches(load, machine, nodes)
    behind = load.rows * (load.row_bytes + REDIS_ROW_BYTES) * 2 * (1 + load.keep_versions)
    machines, keys = math.ceil(behind / (machine.memory * USED)), nodes * node.reads
    cores = keys * REDIS_KEY_CPU_S
    monthly = _monthly(machine, node, nodes, prices)
    if machine.kind is None:
        monthly += behind / GIB * prices.memory + cores / USED * prices.core
    else:
        monthly += machines * prices.nodes[machine.kind].price
    notes = [
        f"{REDIS_ROW_BYTES} bytes a row beyond the vector, a replica, and {1 + load.keep_versions} versions are "
        "assumed",
        f"the cluster answers {keys:,.0f} keys a second, for which its masters need {cores:,.1f} cores",
    ]
    text = f"a Redis-protocol cluster with {behind / GIB:,.0f} GiB of memory on {machines:,} machines"
    limits = _all_limits(node, away, machine)
    return Design("cluster", machine, nodes, node, away, text, limits, monthly, notes)


def _cluster_on_ssd(load: Load, machine: Machine, nodes: int | None, prices: Prices) -> Design:
    """Kvrocks: masters read what the nodes lack from their drives, and each has a replica."""
    nodes, node, away = _caches(load, machine, nodes)
    keys = nodes * node.reads
    disk = load.rows * (load.row_bytes + SSD_ENGINE_ROW_BYTES) * (1 + load.keep_versions)
    memory, cores = load.rows * SSD_ENGINE_INDEX_BYTES * (1 + load.keep_versions), keys * SSD_ENGINE_KEY_CPU_S
    needs = {
        "disk": disk / (machine.disk * 0.9),
        "drive": keys / (machine.reads * USED),
        "processor": cores / (machine.cores * USED),
        "memory": memory / (machine.memory * USED),
    }
    masters = max(1, math.ceil(max(needs.values())))
    monthly = _monthly(machine, node, nodes, prices)
    if machine.kind is None:
        drives = max(disk, needs["drive"] * machine.disk)  # reads are bought with whole drives
        monthly += 2 * (drives / GIB * prices.disk + memory / USED / GIB * prices.memory + cores / USED * prices.core)
    else:
        monthly += 2 * masters * prices.nodes[machine.kind].price
    notes = [
        f"{SSD_ENGINE_ROW_BYTES} bytes a row beyond the vector, a replica, and {1 + load.keep_versions} versions are "
        "assumed; measured once, on a release of 2024",
        f"the cluster answers {keys:,.0f} keys a second, each a read of a drive, for which its masters need "
        f"{cores:,.1f} cores; their number is decided by the {max(needs, key=lambda name: needs[name])}",
    ]
    text = f"a cluster of Kvrocks with {2 * disk / GIB:,.0f} GiB of SSD on {2 * masters:,} machines"
    return Design(ON_SSD, machine, nodes, node, away, text, _all_limits(node, away, machine), monthly, notes)


def _partitions(load: Load, machine: Machine, nodes: int | None, prices: Prices) -> Design:
    """Each share of the rows on two nodes, and a front beside each, which asks the nodes for what it does not hold."""
    if nodes is not None:
        pairs = max(1, nodes // 2)
    else:
        pairs = first = max(1, math.ceil(bytes_of(load).disk_peak / (machine.disk * 0.9)))
        while _limits_of_pairs(load, machine, pairs) and pairs < max(MOST_SHARES, first):
            pairs = math.ceil(pairs * 1.1)
        if _limits_of_pairs(load, machine, pairs):
            pairs = first  # more of them do not help
    node, away = owner_of(load, machine, pairs), owner_of(load, machine, pairs, one_away=True)
    each = node.parts * 2 * pairs / load.qps if load.qps else 0.0
    notes = [
        f"{pairs:,} shares of the rows, each on two nodes, with fronts (`--upstream`) on the same machines"
        + (
            f"; a request goes on to {each:.1f} nodes, and {node.between / 1e6:,.0f} MB a second leave each node for "
            "others"
            if each
            else ""
        )
    ]
    monthly = _monthly(machine, node, 2 * pairs, prices)
    return Design("partitions", machine, 2 * pairs, node, away, None, _all_limits(node, away, machine), monthly, notes)


def _limits_of_pairs(load: Load, machine: Machine, pairs: int) -> list[str]:
    return _all_limits(owner_of(load, machine, pairs), owner_of(load, machine, pairs, one_away=True), machine)


ONE, ON_SSD = "one machine", "cluster on SSD"
DESIGNS = {ONE: _one, "copies": _copies, "cluster": _cluster, ON_SSD: _cluster_on_ssd, "partitions": _partitions}


def _shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _span(seconds: float) -> str:
    if seconds >= 2 * 3600:
        return f"{seconds / 3600:.1f} hours"
    return f"{seconds / 60:.0f} minutes" if seconds >= 2 * 60 else f"{max(1, math.ceil(seconds))} s"
