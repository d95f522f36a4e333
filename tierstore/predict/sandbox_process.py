"""The sandbox's process, in which one graph is tried: `python -m tierstore.predict.sandbox_process` (`sandbox.py`).

It makes a session, which may take all time and memory there is, or crash, and says when it is done, whether ONNX
Runtime took the graph or not:

    argument         the number of an open file: the graph
    stdin            one line: {"settings": …fields of SessionSettings, "seconds": how long it may live}
    stdout           "done"

When stdin ends, which it does when the parent dies however it dies, it exits at once; where a session being made keeps
it from that, the alarm ends it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from contextlib import suppress

from tierstore.predict.making import SessionSettings, make_session

DONE = b"done"


def main() -> None:
    """Try one graph."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then ends this one
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # it ends the process, whatever that does
    signal.alarm(60)
    question = json.loads(sys.stdin.readline())
    signal.alarm(question["seconds"])
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write("1000")  # where memory is short, this one goes, not the service
    answers = os.dup(1)
    os.dup2(2, 1)  # what a library prints must not look like an answer
    threading.Thread(target=_watch_stdin, daemon=True).start()
    with open(int(sys.argv[1]), "rb") as file:
        model = file.read()
    import onnxruntime

    with suppress(Exception):  # the service will be given the same error, and knows what to make of it
        make_session(onnxruntime, model, SessionSettings(**question["settings"]))
    os.write(answers, DONE)
    os._exit(0)


def _watch_stdin() -> None:
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main()
