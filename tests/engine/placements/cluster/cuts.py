"""Scripts that are cut off within, on a real server: what was written before stays, as Redis undoes nothing on an error.

So it is where a server dies within a script and each call of it is a step of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tierstore.engine.placements.cluster.shared_model import SharedModel
from tierstore.tiers.remote import write
from tierstore.tiers.remote.cluster import Cluster

# a server's `redis` that ends the script before a call, after so many
_CUT = """
local server, left = redis, %d
local function counted(name)
  return function(...)
    if left == 0 then error('cut off') end
    left = left - 1
    return server[name](...)
  end
end
local redis = {call = counted('call'), pcall = counted('pcall')}
"""


class Cuts:
    """Cuts off one run of a script after `calls` of its calls; `fit` says of which model's run, by its arguments."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._lock = threading.Lock()
        self._armed: tuple[str, int, Callable[..., bool]] | None = None
        self.runs, self.happened = 0, False  # of the script that was to be cut off
        self._sent: bytes | None = None  # the command of rows with it
        run, command, call = SharedModel._run, write.command, write.call

        def run_cut(shared: SharedModel, script: str, keys: list[str], *words: Any) -> Any:
            cut = self._take(script, shared, *words)
            if cut is None:
                return run(shared, script, keys, *words)
            return self._note(lambda: run(shared, _CUT % cut + script, keys, *words))

        def command_cut(*words: bytes) -> bytes:
            if words[0] == b"EVAL" and (cut := self._take(words[1].decode(), None, *words[2:])) is not None:
                self._sent = command(words[0], (_CUT % cut).encode() + words[1], *words[2:])
                return self._sent
            return command(*words)

        def call_cut(cluster: Cluster, slot: int, packed: Sequence[Any], *, timeout_s: float) -> list[Any]:
            if any(one is self._sent for one in packed):
                return self._note(lambda: call(cluster, slot, packed, timeout_s=timeout_s))  # type: ignore[no-any-return]
            return call(cluster, slot, packed, timeout_s=timeout_s)

        monkeypatch.setattr(SharedModel, "_run", run_cut)
        monkeypatch.setattr(write, "command", command_cut)
        monkeypatch.setattr(write, "call", call_cut)

    def after(self, calls: int, script: str, fit: Callable[..., bool] = lambda *_: True) -> None:
        """Cut off the next run of a script that fits, after `calls` calls."""
        with self._lock:
            self._armed, self.runs, self.happened = (script, calls, fit), 0, False

    def _take(self, script: str, *words: Any) -> int | None:
        with self._lock:
            if self._armed is None or self._armed[0] != script or not self._armed[2](*words):
                return None
            calls = self._armed[1]
            self._armed = None
            return calls

    def _note(self, run: Callable[[], Any]) -> Any:
        try:
            return run()
        except Exception as error:
            self.happened = "cut off" in str(error)
            raise
        finally:
            self.runs += 1
