"""The format number of a data directory, in `format.json`, which is read before anything else there.

It changes when an earlier release would misread the directory. Additions do not change it: records have formats of
their own. docs/upgrade.md describes going back.

Format 1 had several files in place of a model's document. Such a directory becomes one of format 2 when it is opened:
first `format.json` says so, with the models that are still to be converted, and no earlier release opens it any more;
then each model is converted by itself (`earlier_form.py`). After a crash the next start goes on. A model with a damaged
file is left as it is, and converted once that is mended.

On the thread that opens the store, which holds the directory's lock.
"""

from __future__ import annotations

import logging

from tierstore.engine.lifecycle import earlier_form
from tierstore.errors import Corruption, NotFound, StorageError
from tierstore.formats import files
from tierstore.formats.names import DataDirectory
from tierstore.formats.release import of_another_release

log = logging.getLogger(__name__)

FORMAT = 2
_TO_CONVERT = "to_convert"  # names of models, while there are some


def check(root: DataDirectory) -> None:
    """Corruption, naming the release that wrote it, if the directory has a format that this release does not know.

    A directory without the file is new, or of a release that wrote none: format 1. A damaged file is written again:
    then a model is converted if it has files of the earlier form and no document.
    """
    try:
        document = files.read_json(root.format)
        found, listed = document.get("format"), document.get(_TO_CONVERT) or []
    except NotFound:
        document, found, listed = {}, None, []
    except Corruption as error:
        log.warning("%s; it is written again", error)
        document, found, listed = {}, None, []
    if found not in (1, FORMAT, None):
        raise of_another_release(root.format, found, f"1 or {FORMAT}", document)
    models = _models(root)
    if found == FORMAT:
        owed = [name for name in models if name in listed]
    else:
        owed = [name for name in models if found == 1 or earlier_form.is_there(root.model(name))]
        _write(root, owed)
    left = [name for name in owed if not _convert(root, name)]
    if left != (listed if found == FORMAT else owed):
        _write(root, left)


def _models(root: DataDirectory) -> list[str]:
    try:
        return root.models_on_disk()
    except OSError as error:
        raise StorageError(f"cannot read {root.models}: {error.strerror or error}") from error


def _convert(root: DataDirectory, name: str) -> bool:
    try:
        earlier_form.convert(root.model(name), name)
    except (StorageError, OSError) as error:  # it does not serve; the others do
        log.error("model %s: its directory is not converted: %s", name, error)
        return False
    return True


def _write(root: DataDirectory, to_convert: list[str]) -> None:
    document = {"format": FORMAT, **({_TO_CONVERT: to_convert} if to_convert else {})}
    try:
        files.publish_record(root.format, document)
    except StorageError:  # of a full disk, which must not keep the store from opening: the next start writes it
        if to_convert:  # but no earlier release may open what is converted
            raise
