"""The command line: `tierstore …` and `python -m tierstore …`.

One command runs on the main thread. Exit codes: 0 done, 1 refused or failed, 2 used wrongly, 130 interrupted. Results
go to standard output, progress and errors to standard error; an error is one line.

A command imports what it needs when it runs, so that `--help` starts fast.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import NoReturn

from tierstore.cli.signals import end_at_once
from tierstore.errors import ConfigError, TierstoreError, explained


def main() -> NoReturn:
    """Run the command that the process was started with, and exit."""
    if os.getpid() == 1:  # of a container: without a handler it ignores SIGTERM, and the imports below take their time
        signal.signal(signal.SIGTERM, end_at_once)
    try:
        from tierstore.cli.app import application
    except ModuleNotFoundError as error:  # as on a machine that only asks
        sys.stderr.write(
            f"tierstore: the command line needs the package {error.name}, which is not installed: "
            "`pip install tierstore` without --no-deps installs all that it needs; Python programs go on without\n"
        )
        sys.exit(1)

    try:
        application(*sys.argv[1:2])(prog_name="tierstore")
    except ConfigError as error:
        fail(error, 2)
    except TierstoreError as error:
        fail(error, 1)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # The reader of our output has closed it (`| head`). Nothing may be flushed to it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    sys.exit(0)


def fail(error: Exception, code: int) -> NoReturn:
    """Print in one line what went wrong, and exit."""
    text = " ".join(explained(error).split()) or type(error).__name__
    sys.stderr.write(f"tierstore: {text}\n")
    sys.exit(code)
