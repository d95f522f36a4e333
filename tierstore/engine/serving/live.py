"""The live views of a model: what it serves now, and the lock under which that changes.

Look-ups hold no lock but the publisher's, for a moment. The thread that changes the delta log, the records of what
serves, or a view holds `write`; locks are taken in the order switch lock, `write`, the publisher's condition.
"""

from __future__ import annotations

import threading

from tierstore.engine.data.budget import OverlayBudget
from tierstore.engine.data.overlay import Overlay
from tierstore.engine.reads.view import View
from tierstore.engine.serving.epochs import Epochs
from tierstore.engine.serving.publisher import Publisher
from tierstore.engine.serving.routing import Routing
from tierstore.engine.versions.version import Version
from tierstore.errors import Closed


class LiveViews:
    """The published views of one model. `overlay_budget` counts the bytes of their overlays."""

    def __init__(self, model: str, overlay_budget: OverlayBudget, epochs: Epochs | None = None) -> None:
        # constant after construction
        self.model, self.overlay_budget = model, overlay_budget
        self.publisher = Publisher(model, epochs)
        self.write = threading.Lock()
        # guarded by write
        self.folding: Overlay | None = None  # being folded: no delta merges into it
        self.start_problem: str | None = None  # why the start could not serve; None after the first switch
        self._closed = False

    @property
    def served(self) -> Routing:
        return self.publisher.served

    @property
    def current(self) -> View | None:
        """The active version's view."""
        return self.publisher.current

    @property
    def active_version(self) -> int | None:
        """The active version's number; None if nothing serves."""
        view = self.publisher.current
        return None if view is None else view.version

    def set(self, served: Routing) -> list[Version]:
        """Publish a routing that is caught up. Holds `write`. Returns the versions that are no longer served."""
        before = self.served.views
        self.publisher.publish(served)
        gone = [view for view in before if served.view_of(view.open_version) is None]
        self.overlay_budget.release(sum(view.overlay_bytes for view in gone))
        return [view.open_version for view in gone]

    def renew(self, version: Version) -> bool:
        """Publish the view of a version anew, so that the readers of the view before end. False if it is not served."""
        with self.write:
            view = self.served.view_of(version)
            if view is not None:
                self.publisher.publish(self.served.with_views([View(version, view.overlays, view.seq)]))
            return view is not None

    def check_open(self) -> None:
        """Raise Closed if the model was closed; its directory may be another process's then."""
        if self._closed:
            raise Closed(f"the store of model {self.model!r} was closed")

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self) -> list[Version]:
        """Serve nothing from now on. Holds `write`. Returns the versions that were served."""
        self._closed = True
        return self.set(Routing(problem="the store was closed"))
