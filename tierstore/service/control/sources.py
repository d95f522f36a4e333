"""Which snapshots a client may have loaded: those under the source roots, symlinks resolved.

A function of the file system; any thread may call it. It may block on a slow mount, so not on the event loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tierstore.errors import InvalidInput
from tierstore.formats.snapshot import local_path

_LONGEST = 4096


def resolve_source(source: str, roots: Sequence[Path]) -> Path:
    """The absolute, resolved path of `source`: a path (a relative one is sought in each root) or a `file://` URL.

    Raises InvalidInput for a chained URL, another scheme, what does not exist, and what lies outside every root,
    be it through `..` or through a symbolic link. The message never tells whether something outside exists.
    """
    if not source or len(source) > _LONGEST or "\0" in source:
        raise InvalidInput(f"source: expected a path or a file:// URL of 1 to {_LONGEST} characters")
    if "::" in source:
        raise InvalidInput(f"source {source!r}: chained URLs are not allowed")
    path = local_path(source)  # refuses other schemes
    resolved_roots = [root.resolve() for root in roots]
    candidates = [path] if path.is_absolute() else [root / path for root in resolved_roots]
    inside = False
    for candidate in candidates:
        try:
            resolved = candidate.resolve()
            if not any(resolved.is_relative_to(root) for root in resolved_roots):
                continue
            inside = True
            if resolved.exists():
                return resolved
        except (OSError, RuntimeError, UnicodeError) as error:  # a loop of links, a name too long, one that is no text
            raise InvalidInput(f"source {source!r} cannot be read: {error}") from error
    if inside:
        raise InvalidInput(f"source {source!r} does not exist")
    listed = ", ".join(map(str, roots))
    raise InvalidInput(
        f"source {source!r} lies outside the source roots ({listed}); start the service with --source-root to allow it"
    )
