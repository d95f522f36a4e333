"""The state file of a model, and its document in memory (`document.py`): one change at a time, each published whole.

The caller holds the model's write lock. A failed change puts back the document before. If even that fails (such as on a
full disk), the file is in doubt: it may differ from what serves, and nothing more is acknowledged until `repair` has
written it again.

Beside versions or deltas a missing document is never that of a new model: it would bring undone deltas back. While it
is missing or damaged nothing of the model is served or changed.

After a crash: the rename of the document decides.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace

from tierstore.engine.serving.document import StateDocument, read_document
from tierstore.errors import Corruption, NotFound, StorageError
from tierstore.formats import files
from tierstore.formats.names import ModelDirectory


class StateFile:
    """The file with the document of one model, and that document in memory: `document`.

    Without `durable` it is only there: of a node that follows others, which say anew what it is to serve.
    """

    def __init__(self, where: ModelDirectory, model: str, *, durable: bool = True) -> None:
        self._where, self._model, self._durable = where, model, durable
        self.unreadable: StorageError | None = None  # why there is no document; set at construction
        self.document = StateDocument()
        try:
            if durable:
                self.document = self._read()
        except StorageError as error:
            self.unreadable = error
        self._published = self.document
        self._serial = self.document.serial  # of the last one that was written, if only to be withdrawn
        self.in_doubt = False  # whether the file may differ from what was published

    def _read(self) -> StateDocument:
        where = self._where
        try:
            document = read_document(where, self._model)
            if document.log_start is None and (deltas := _deltas_in(where)):
                raise Corruption(f"{where.state} does not say where the log begins, and there are {deltas}")
            return document
        except NotFound:
            what = _kept_in(where)
            if what is None:
                return StateDocument()
            raise Corruption(
                f"{where.state} is missing, beside {what} (if an earlier release wrote this directory, the log "
                f"of the start says which of its files is damaged); {self._what_to_do}"
            ) from None
        except Corruption as error:
            raise Corruption(f"{error}; {self._what_to_do}") from error

    @property
    def _what_to_do(self) -> str:
        return (
            "put back the last one, and start again; or mend it by hand and remove its line xxh3; or restore the model "
            f"from a backup. To begin anew, move {self._where.root} away and load a snapshot"
        )

    def check(self) -> None:
        """Corruption or StorageError if the next start could not read the document, or would read another one."""
        if self._durable and not self.in_doubt and self._read() != self._published:
            raise Corruption(
                f"{self._where.state} is not what this process has written; the next change of the model writes it "
                "again"
            )

    def check_readable(self) -> None:
        """StorageError if there is no document."""
        if self.unreadable is not None:
            raise self.unreadable

    def publish(self, document: StateDocument) -> None:
        """Put a new document in place of the one before; nothing is written for one that means the same. An error
        restores the one before.
        """
        self.check_readable()
        self.repair()
        used, published = self.document, self._published
        if document.means_the_same(published):
            self.document = replace(document, serial=published.serial)
            return
        try:
            self.document = self._write(document)
        except BaseException:  # it may have taken its name all the same, and be used already
            self.document, self._published, self.in_doubt = used, published, True
            with contextlib.suppress(StorageError):
                self.repair()
            raise

    def amend(self, document: StateDocument) -> None:
        """Use a document that need not be durable: the next publication brings its changes to disk."""
        self.document = document

    def repair(self) -> None:
        """Write what was published again after a failed change; nothing to do after any other. StorageError."""
        if self.in_doubt:
            self._write(self._published)

    def _write(self, document: StateDocument) -> StateDocument:
        self.in_doubt, self._serial = True, self._serial + 1
        document = replace(document, serial=self._serial)
        if self._durable:
            files.publish_record(self._where.state, document.to_json(self._model))
        self._published, self.in_doubt = document, False
        return document


def _kept_in(where: ModelDirectory) -> str | None:
    """What there is in a model's directory that a document must be beside; None for a new model."""
    try:
        versions = where.versions_on_disk()
    except OSError as error:
        return f"what cannot be read ({error})"
    return f"version {versions[-1][0]}" if versions else _deltas_in(where)


def _deltas_in(where: ModelDirectory) -> str | None:
    try:
        there = files.exists(where.log_end) or where.log_on_disk()
    except OSError as error:
        return f"what cannot be read ({error})"
    return f"deltas in {where.log}" if there else None
