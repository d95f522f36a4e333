"""The format of a data directory as a whole: a number in `format.json`, read before anything else there.

It moves where an earlier release would take the directory for something else than it is. What only adds to a directory
leaves it: records have formats of their own. docs/upgrade.md says what that means for going back.

On the thread that opens the store, which holds the directory's lock.
"""

from __future__ import annotations

import contextlib
import logging

from tierstore.errors import Corruption, NotFound, StorageError
from tierstore.formats import files
from tierstore.formats.names import DataDirectory
from tierstore.formats.release import of_another_release

log = logging.getLogger(__name__)

FORMAT = 1


def check(root: DataDirectory) -> None:
    """Corruption, naming the release that wrote it, where the directory has a format that this one does not know.

    A directory without the file is new, or of a release that wrote none: both are of format 1. A file that is damaged
    says nothing, and the records beneath say what they are themselves: it is written again.
    """
    try:
        document = files.read_json(root.format)
    except NotFound:
        _write(root)
        return
    except Corruption as error:
        log.warning("%s; it is written again", error)
        _write(root)
        return
    if document.get("format") != FORMAT:
        raise of_another_release(root.format, document.get("format"), str(FORMAT), document)


def _write(root: DataDirectory) -> None:
    with contextlib.suppress(
        StorageError
    ):  # of a full disk, which must not keep the store from opening: the next start does it
        files.publish_record(root.format, {"format": FORMAT})
