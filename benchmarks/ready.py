"""Waiting for a service that was started to measure it: until its hot rows are in memory, and its reactors answer.

A service answers first and reads its hot rows beside (docs/versions.md); figures of rows in memory begin after that. One of a
release that has never run here compiles its reactors first, for minutes on a busy machine.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request

SETTINGS: dict[str, object] = {
    "ready_warm_share": 1.0,
    "warm_rate": 10**9,
}  # ready says warm; nobody waits for look-ups


def wait_until_warm(port: int, timeout_s: float = 300.0) -> None:
    """Return once the service on a port of this machine is ready, with SETTINGS among its own."""
    until = time.monotonic() + timeout_s
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/health/ready", timeout=30):
                return
        except urllib.error.HTTPError as error:
            error.close()
        if time.monotonic() > until:
            raise TimeoutError(f"the service was not warm after {timeout_s:.0f} s")
        time.sleep(0.02)


def wait_for_reactors(port: int, timeout_s: float = 600.0) -> None:
    """Return once nothing is compiled any more: until then Python answers, or the compiler takes a processor."""
    until = time.monotonic() + timeout_s
    while True:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/admin/models", timeout=30) as answer:
            service = json.load(answer)["service"]
            if "compiling" not in (service.get("reactors"), service.get("http2")):
                return
        if time.monotonic() > until:
            raise TimeoutError(f"the service had no reactors after {timeout_s:.0f} s")
        time.sleep(0.1)
