"""A real server that does with scripts what another engine does: it cuts them off within, or says less of itself.

What a script has written before an error stays, as Redis undoes nothing. So it is where a server dies within a script
and each call of it is a step of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tierstore.engine.placements.cluster.shared_model import SharedModel
from tierstore.tiers.cluster import write
from tierstore.tiers.cluster.topology import Cluster

_READS = "TIME INFO HGET HMGET HGETALL XREVRANGE ZRANGE ZRANGEBYSCORE GET XINFO"
# a server's `redis` that ends the script before a call, after so many that are not passed over
_CUT = """
local server, left, passed = redis, %d, ' %s '
local function counted(kind)
  return function(name, ...)
    if not string.find(passed, ' ' .. name .. ' ', 1, true) then
      if left == 0 then error('cut off') end
      left = left - 1
    end
    return server[kind](name, ...)
  end
end
local redis = {call = counted('call'), pcall = counted('pcall')}
"""

# a server's `redis` that says less of itself
_HIDING = """
local server = redis
local function call(name, ...)
  local said = server.call(name, ...)
  if name == 'INFO' then
    %s
  end
  return said
end
local redis = {call = call, pcall = server.pcall}
"""


def hide(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Have scripts not find these lines in what a server says of itself."""
    run, hiding = SharedModel._run, _HIDING % "".join(f"said = string.gsub(said, '{name}:%w+', '')\n" for name in names)

    def run_hiding(shared: SharedModel, script: str, keys: list[str], *words: Any) -> Any:
        return run(shared, hiding + script if names else script, keys, *words)

    monkeypatch.setattr(SharedModel, "_run", run_hiding)


class Cuts:
    """Cuts off a run of a script after some of its calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._lock = threading.Lock()
        self._armed: tuple[str, str, Callable[..., bool]] | None = None  # the script, what comes before it, which run
        self.runs, self.happened = 0, False  # of the script that was to be cut off
        self._sent: bytes | None = None  # the command of rows with it
        run, command, call = SharedModel._run, write.command, write.call

        def run_cut(shared: SharedModel, script: str, keys: list[str], *words: Any) -> Any:
            cut = self._take(script, shared, *words)
            if cut is None:
                return run(shared, script, keys, *words)
            return self._note(lambda: run(shared, cut + script, keys, *words))

        def command_cut(*words: bytes) -> bytes:
            if words[0] == b"EVAL" and (cut := self._take(words[1].decode(), None, *words[2:])) is not None:
                self._sent = command(words[0], cut.encode() + words[1], *words[2:])
                return self._sent
            return command(*words)

        def call_cut(cluster: Cluster, slot: int, packed: Sequence[Any], *, timeout_s: float) -> list[Any]:
            if any(one is self._sent for one in packed):
                return self._note(lambda: call(cluster, slot, packed, timeout_s=timeout_s))  # type: ignore[no-any-return]
            return call(cluster, slot, packed, timeout_s=timeout_s)

        monkeypatch.setattr(SharedModel, "_run", run_cut)
        monkeypatch.setattr(write, "command", command_cut)
        monkeypatch.setattr(write, "call", call_cut)

    def after(
        self, calls: int, script: str, fit: Callable[..., bool] = lambda *_: True, *, writes_only: bool = False
    ) -> None:
        """Cut off the next run of a script that fits, after so many calls."""
        cut = _CUT % (calls, _READS if writes_only else "")
        with self._lock:
            self._armed, self.runs, self.happened = (script, cut, fit), 0, False

    def _take(self, script: str, *words: Any) -> str | None:
        with self._lock:
            if self._armed is None or self._armed[0] != script or not self._armed[2](*words):
                return None
            cut = self._armed[1]
            self._armed = None
            return cut

    def _note(self, run: Callable[[], Any]) -> Any:
        try:
            return run()
        except Exception as error:
            self.happened = "cut off" in str(error)
            raise
        finally:
            self.runs += 1
