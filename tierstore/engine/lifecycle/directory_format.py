"""The format number of a data directory, in `format.json`, which is read before anything else there.

It changes when an earlier release would misread the directory. Additions do not change it: records have formats of
their own. docs/upgrade.md describes going back.

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
    """Corruption, naming the release that wrote it, if the directory has a format that this release does not know.

    A directory without the file is new, or of a release that wrote none: both are of format 1. A damaged file is
    written again, as the records in the directory have formats of their own.
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
    ):  # of a full disk, which must not keep the store from opening: the next start writes it
        files.publish_record(root.format, {"format": FORMAT})
