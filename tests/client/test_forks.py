"""A client of the parent in a forked child, whatever other threads were doing as it was forked."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np

from tests.client.conftest import same
from tests.client.fake_service import FakeService, rows
from tierstore.client import Client

FORKS, BUSY, CHILD_S = 40, 4, 10

# Threads look up all the time, and let each other run after every few instructions.
BESIDE_BUSY_THREADS = """
import faulthandler, os, sys, threading
import tierstore

url, forks, busy, child_s = sys.argv[1], *map(int, sys.argv[2:])
client = tierstore.Client([url, url.replace("127.0.0.1", "localhost")], split_keys=10, max_connections=2)
ended = threading.Event()

def look_up():
    while not ended.is_set():
        client.lookup("m", "f", range(40))

threads = [threading.Thread(target=look_up) for _ in range(busy)]
for thread in threads:
    thread.start()
client.lookup("m", "f", [1])
sys.setswitchinterval(1e-6)
unanswered = None
for number in range(forks):
    child = os.fork()
    if child == 0:
        faulthandler.dump_traceback_later(child_s, exit=True)
        rows = client.lookup("m", "f", range(40))
        connections = client.figures()["connections"]
        os._exit(0 if rows[39, 1] == 40 and connections["busy"] == 0 else 1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code:
        unanswered = number, code
        break
ended.set()
for thread in threads:
    thread.join()
assert unanswered is None, f"child {unanswered} got no answer"
"""


def test_a_child_that_is_forked_beside_busy_threads_looks_up_too(service: FakeService) -> None:
    words = [service.url, *map(str, (FORKS, BUSY, CHILD_S))]
    command = [sys.executable, "-W", "ignore", "-c", BESIDE_BUSY_THREADS, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_a_child_has_no_lock_no_count_and_no_connection_of_its_parents_threads(service: FakeService) -> None:
    """Every lock of the client is held, and its connections are all busy, as the child is forked."""
    with Client([service.url, "http://127.0.0.1:1"], max_connections=1) as client:
        client.lookup("m", "f", [1])
        held, fork = threading.Event(), threading.Event()
        pools = client._transport._pools
        connections = [pool.acquire(fresh=False, wait=False, until=time.monotonic() + 5) for pool in pools[:1]]
        client._balancer.started(0)

        def hold() -> None:
            with client._budget._lock, client._balancer._lock, client._operations._cache._lock, pools[0]._changed:
                held.set()
                fork.wait(30)

        holder = threading.Thread(target=hold)
        holder.start()
        held.wait()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                signal.alarm(CHILD_S)
                for key in range(4):
                    same(client.lookup("m", "f", [key]), rows(np.array([key])))
                closed = connections[0].fileno() == -1
                code = 0 if closed and not client.figures()["connections"]["busy"] else 2
            finally:
                os._exit(code)
        fork.set()
        holder.join()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        pools[0].release(connections[0])
        same(client.lookup("m", "f", [1]), rows(np.array([1])))
