"""State that the parts of one model share, and that all models of a store share.

Locks are taken in the order `switch`, `live.write`, the publisher's condition. Opening, switching and deleting
versions hold `switch`, one thread at a time, while deltas and look-ups go on; changes of routing alone (share, labels,
withdraw) wait for none of that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from tierstore.access.audit import Audit
from tierstore.config import Settings
from tierstore.config.memory import decoding_bytes
from tierstore.engine.data.budget import DecodeBudget, HostBudget, OverlayBudget
from tierstore.engine.data.disk_room import DiskRoom
from tierstore.engine.deltas.dense_parts import DenseParts
from tierstore.engine.deltas.log import DeltaLog
from tierstore.engine.events.callbacks import SwitchLock
from tierstore.engine.events.observer import Observer
from tierstore.engine.lifecycle.catalogue import Catalogue
from tierstore.engine.lifecycle.devices import Devices
from tierstore.engine.lifecycle.recurring import RecurringTasks
from tierstore.engine.lifecycle.retiring import RetiringVersions
from tierstore.engine.lifecycle.sampler import CacheSampler
from tierstore.engine.lifecycle.throttle import LookupTimes, Throttle
from tierstore.engine.lifecycle.warm import Warmer
from tierstore.engine.placement import Placement
from tierstore.engine.serving.document import StateDocument
from tierstore.engine.serving.epochs import Epochs
from tierstore.engine.serving.live import LiveViews
from tierstore.engine.serving.publisher import Publisher
from tierstore.engine.serving.state_file import StateFile
from tierstore.formats.names import ModelDirectory
from tierstore.machine import processors
from tierstore.predict.runtime import Runtime
from tierstore.threads import Scheduler
from tierstore.tiers.background import register_requests
from tierstore.tiers.disk.reader_pool import ReaderPool
from tierstore.types import Progress

_MOST_FOLDING = 8  # threads, whatever the machine has
_TENDING = 2  # threads


@dataclass(slots=True)
class Shared:
    """State that all models of a store share."""

    settings: Settings
    root: Path  # the data directory
    readers: ReaderPool
    host_budget: HostBudget
    overlay_budget: OverlayBudget
    decoding: DecodeBudget
    dense: Runtime
    devices: Devices
    warmer: Warmer
    throttle: Throttle
    sampler: CacheSampler
    audit: Audit
    observers: list[Observer]
    folding: Scheduler  # folds overlays and closes what was replaced
    tending: Scheduler  # housekeeping
    memory: RecurringTasks = field(
        default_factory=lambda: RecurringTasks("the store")
    )  # deals memory to versions again
    epochs: Epochs = field(default_factory=Epochs)
    placement: Placement = field(init=False)  # set as the store opens
    copied: bool = False  # the data directory is a copy of one that was open, see `copied.py`


def make_shared(
    settings: Settings, root: Path, lookup_times: LookupTimes, publishers: Callable[[], list[Publisher]]
) -> Shared:
    """Make it. `root`: the data directory; `publishers` returns those of all models."""
    # warming a version while another serves uses half of the processors at most
    readers = ReaderPool(settings.disk_threads, background=min(settings.disk_threads, max(0, processors() // 2 - 1)))
    epochs, observers = Epochs(), list[Observer]()
    throttle = Throttle(lookup_times, epochs.collect, settings.load_p99_ratio)
    return Shared(
        settings,
        root,
        readers,
        HostBudget(settings.host_budget),
        OverlayBudget(settings.overlay_budget),
        DecodeBudget(decoding_bytes(settings.overlay_budget)),
        Runtime(settings),
        Devices(settings),
        Warmer(publishers, settings.warm_rate, settings.hot_keys_every_s, throttle),
        throttle,
        CacheSampler(publishers, epochs.collect, observers),
        Audit(root, size=settings.audit_size, kept=settings.audit_keep),
        observers,
        Scheduler(max(2, min(_MOST_FOLDING, processors())), "tierstore-fold"),
        Scheduler(_TENDING, "tierstore-tend"),
        epochs=epochs,
    )


class ModelState:
    """The parts of one model: its versions on disk, its delta log, what it serves, and the locks.

    Constant after construction.
    """

    def __init__(self, name: str, where: ModelDirectory, shared: Shared) -> None:
        self.name, self.where, self.shared = name, where, shared
        self.file = StateFile(where, name, durable=shared.placement.refusals.allow("keep_state"))
        self.log = DeltaLog(where, self.file)
        self.live = LiveViews(name, shared.overlay_budget, shared.epochs)
        register_requests(self.live.publisher)
        self.switch = SwitchLock()
        keep_loads = shared.settings.load_retention_s > 0
        self.catalogue = Catalogue(
            name, where, self.live, self.log, self.file, keep_loads=keep_loads, copied=shared.copied
        )
        self.dense = DenseParts(name, shared.dense, self.catalogue.get, lambda: self.live.current)
        quota = shared.settings.quota_of(name)
        self.room = DiskRoom(where, quota.log_bytes, shared.settings.disk_reserve)
        self.retiring = RetiringVersions(self.live.publisher)

    def publish(self, document: StateDocument) -> None:
        """Publish the model's document, with the versions that are there. Holds `write`. StorageError."""
        self.file.publish(replace(document, versions=tuple(self.catalogue.numbers)))


def ignore(progress: Progress) -> None:
    """A progress function for callers that want no reports."""
