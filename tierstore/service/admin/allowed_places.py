"""The allowed places of snapshots to load, and of exports and backups: below the roots, with symlinks resolved.

A function of the file system; any thread may call it. It may block on a slow mount, so not on the event loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tierstore.errors import Conflict, InvalidInput
from tierstore.formats.objects import is_url
from tierstore.formats.snapshot.reader import local_path

_LONGEST = 4096


def resolve_source(source: str, roots: Sequence[Path | str]) -> Path | str:
    """The absolute, resolved path of `source`: a path (a relative one is tried in each root), or a `file://` URL; other
    URLs unchanged.

    Raises InvalidInput for a chained URL, another scheme, a path that does not exist, and one outside every root,
    whether by `..` or by a symbolic link. The message never says whether something outside exists.
    """
    if not source or len(source) > _LONGEST or "\0" in source:
        raise InvalidInput(f"source: expected a path or a file:// URL of 1 to {_LONGEST} characters")
    if "::" in source:
        raise InvalidInput(f"source {source!r}: chained URLs are not allowed")
    if is_url(source):
        return _checked_url(source, roots)
    path = local_path(source)  # refuses other schemes
    resolved_roots = [root.resolve() for root in roots if isinstance(root, Path)]
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
    raise _outside(source, roots)


def check_still_there(source: Path | str, roots: Sequence[Path | str]) -> None:
    """InvalidInput if a result of `resolve_source` is a link by now: a load waits for its turn."""
    if resolve_source(str(source), roots) != source:
        raise InvalidInput(f"source {str(source)!r} was replaced by a link while its load waited")


def resolve_target(directory: str, root: Path | str, *, new: bool = True) -> Path | str:
    """The absolute, resolved path of a directory to write: one below `root`, which relative paths start from; or a URL
    below one.

    InvalidInput for another place, Conflict for a directory that exists where a `new` one is expected.
    """
    if not directory or len(directory) > _LONGEST or "\0" in directory or "::" in directory:
        raise InvalidInput(f"directory: expected a path or a URL of 1 to {_LONGEST} characters, got {directory[:80]!r}")
    if isinstance(root, str):
        return _target_url(directory, root.rstrip("/"))
    if is_url(directory):
        raise InvalidInput(f"directory {directory!r} is not below export_root ({root})")
    within = root.resolve()
    try:
        resolved = (within / directory).resolve()
        exists = resolved.is_relative_to(within) and resolved != within and resolved.exists()
    except (OSError, RuntimeError, UnicodeError) as error:
        raise InvalidInput(f"directory {directory!r} cannot be made: {error}") from error
    if not resolved.is_relative_to(within) or resolved == within:
        raise InvalidInput(f"directory {directory!r} is not below export_root ({root})")
    if new and exists:
        raise Conflict(f"{resolved} exists already; expected a directory that does not")
    return resolved


def _target_url(directory: str, root: str) -> str:
    url = (directory if "://" in directory else f"{root}/{directory}").rstrip("/")
    if not url.startswith(f"{root}/"):
        raise InvalidInput(f"directory {directory!r} is not below export_root ({root})")
    _check_parts("directory", url)
    return url


def _checked_url(source: str, roots: Sequence[Path | str]) -> str:
    _check_parts("source", source)
    if not any(f"{source}/".startswith(f"{root.rstrip('/')}/") for root in roots if isinstance(root, str)):
        raise _outside(source, roots)
    return source


def _check_parts(field: str, url: str) -> None:
    if any(part in ("", ".", "..") for part in url.rstrip("/").split("/")[3:]):
        raise InvalidInput(f"{field} {url!r}: expected names between its slashes")


def _outside(source: str, roots: Sequence[Path | str]) -> InvalidInput:
    listed = ", ".join(map(str, roots))
    return InvalidInput(
        f"source {source!r} lies outside the source roots ({listed}); start the service with --source-root to allow it"
    )
