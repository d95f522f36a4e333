"""The command line: `tierstore …` and `python -m tierstore …`.

One process, one command, called from its main thread. Exit codes: 0 done, 1 refused or failed, 2 used
wrongly, 130 interrupted. Results go to standard output, progress and errors to standard error, an error
in one line.

Start-up is kept short: a command imports what it needs when it runs, so that `--help` loads neither the
store nor the service.
"""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from tierstore.errors import ConfigError, TierstoreError, explained


def main() -> NoReturn:
    """Run the command that the process was started with, and exit."""
    from tierstore.cli.app import app

    try:
        app(prog_name="tierstore")
    except ConfigError as error:
        fail(error, 2)
    except TierstoreError as error:
        fail(error, 1)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # Whoever read our output has gone (`| head`). Nothing may be flushed to it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    sys.exit(0)


def fail(error: Exception, code: int) -> NoReturn:
    """Say in one line what went wrong, and exit."""
    text = " ".join(explained(error).split()) or type(error).__name__
    sys.stderr.write(f"tierstore: {text}\n")
    sys.exit(code)
