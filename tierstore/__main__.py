"""`python -m tierstore` is the command line."""

from __future__ import annotations

from tierstore.cli import main

if __name__ == "__main__":
    main()
