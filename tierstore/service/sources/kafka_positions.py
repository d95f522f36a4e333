"""The positions in a topic, from which a start goes on.

Each delta is logged with its origin, which has the lowest offset of each partition that was still needed after that
delta. That stays true, so a start takes the highest offsets of the newest entries. `positions.json` records the same
from time to time, for messages without an entry (duplicates, parked messages).

A rewind makes earlier records void: it begins a new `epoch`, and only records of the epoch in `positions.json` count.
If that file is lost, the topic is read from its beginning; deltas that the store has are skipped.

A topic that was deleted and made again has the same name, and another id: its offsets say nothing. An id that either
side does not know says nothing either: releases before it was recorded wrote none. One thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tierstore.engine.deltas.origin import Origin
from tierstore.errors import NotFound, StorageError
from tierstore.formats import files
from tierstore.kafka.reader import Topic

logger = logging.getLogger(__name__)

SOURCE = "kafka"
OLDEST_S = 600.0  # after which a record is written again, as its age says how long nobody read


class Positions:
    """The record of one topic. `models` are those that were followed up to the positions.

    source: names this record in the entries of logs. For a topic of rows, each model has a record of its own.
    """

    def __init__(self, path: Path, topic: str, source: str = SOURCE) -> None:
        self._path, self._topic, self._source = path, topic, source
        self.cluster = self.topic_id = ""
        self._recorded_id = ""  # that the record has
        self.made_anew = False  # whether what is known is of a topic of this name that was deleted since
        self.epoch = 0
        self.saved: dict[int, int] = {}
        self.models: set[str] = set()
        self.seq = 0  # the newest of the model's log when the record was written, if it is of one model
        self.written_s = 0.0  # up to when the topic was read for the positions, by `time.time`; 0 if not known
        self.missed: dict[str, Any] | None = None  # deletions that are not to be had any more, see `kafka_rows.py`
        self._is_noted = True  # whether the record has `missed`

    def load(self, topic: Topic, origins: Mapping[str, Origin | None]) -> bool:
        """Read what is known of a topic; `origins` are the newest ones, by model. False if nothing is."""
        self.cluster, self.topic_id = topic.cluster, topic.topic_id
        record = self._read()
        is_here = (record.get("topic"), record.get("cluster")) == (self._topic, self.cluster)
        self._recorded_id = str(record.get("topic_id", ""))
        self.epoch = int(record.get("epoch", 0))
        self.models = set(record["models"]) if is_here else set()
        self.missed = record.get("missed")  # of what is served, whatever topic goes on
        newer = [one for model, one in origins.items() if model in self.models and one and self._counts(one)]
        ids = [str(one["topic_id"]) for one in (record, *newer) if one.get("topic_id")] if is_here else []
        self.made_anew = any(self._is_other(one) for one in ids)
        if not is_here or self.made_anew:
            epochs = [int(origin.get("epoch", 0)) for origin in origins.values() if origin is not None]
            self.epoch = max([*epochs, self.epoch]) + 1
            self.saved, self.models = {}, set()
            return False
        self.topic_id = self.topic_id or next(iter(ids), "")
        self.seq = int(record.get("seq", 0))
        self.written_s = max(float(one.get("written_s", 0)) for one in (record, *newer))
        self.saved = {int(partition): int(offset) for partition, offset in record["positions"].items()}
        for origin in newer:
            for partition, offset in origin["resume"].items():
                self.saved[int(partition)] = max(self.saved.get(int(partition), 0), int(offset))
        return True

    def adopt(self, origin: Origin | None) -> bool:
        """Take over an entry's positions, if the record is lost. False if it is of another topic or cluster.

        Only if the entry itself is the only evidence: a log that was begun anew has none from before.
        """
        if origin is None or (origin.get("topic"), origin.get("cluster")) != (self._topic, self.cluster):
            return False
        self.made_anew = self.made_anew or self._is_other(str(origin.get("topic_id", "")))
        if self.made_anew:
            return False
        self.saved = {int(partition): int(offset) for partition, offset in origin["resume"].items()}
        self.written_s = float(origin.get("written_s", 0))  # of the entry: a record of later speaks of another log
        return True

    def _is_other(self, topic_id: str) -> bool:
        return bool(topic_id and self.topic_id and topic_id != self.topic_id)

    def _counts(self, origin: Origin) -> bool:
        return (origin.get("topic"), origin.get("cluster"), origin.get("epoch")) == (
            self._topic,
            self.cluster,
            self.epoch,
        )

    def _read(self) -> dict[str, Any]:
        try:
            return files.read_json(self._path)
        except NotFound:
            return {}
        except StorageError as error:
            logger.warning("%s; the topic is read again from its beginning", error)
            return {}

    def origin(self, resume: Mapping[int, int], **more: object) -> Origin:
        """The origin to log with a delta."""
        return {
            "source": self._source,
            "topic": self._topic,
            "cluster": self.cluster,
            "topic_id": self.topic_id,
            "epoch": self.epoch,
            **more,
            "resume": {str(one): offset for one, offset in resume.items()},
        }

    def note_missed(self, missed: dict[str, Any]) -> None:
        """Have the next record say it."""
        self.missed, self._is_noted = missed, False

    def save(
        self,
        positions: Mapping[int, int],
        models: Iterable[str],
        *,
        new_epoch: bool = False,
        read_s: float | None = None,
        oldest_s: float = OLDEST_S,
    ) -> None:
        """Make a record durable. With `new_epoch` no earlier record counts any more. `read_s`: up to when the topic was
        read for these positions, now if it is None; a record that is older by `oldest_s` is written again.
        """
        epoch, wanted = self.epoch + new_epoch, set(models)
        written_s = time.time() if read_s is None else read_s
        is_recorded = self._recorded_id == self.topic_id and self._is_noted and written_s - self.written_s < oldest_s
        if not new_epoch and is_recorded and self.saved == positions and self.models == wanted:
            return
        files.make_dir(self._path.parent)
        files.publish_record(
            self._path,
            {
                "topic": self._topic,
                "cluster": self.cluster,
                "topic_id": self.topic_id,
                "epoch": epoch,
                "positions": {str(partition): offset for partition, offset in positions.items()},
                "models": sorted(wanted),
                "seq": self.seq,
                "written_s": written_s,
                **({} if self.missed is None else {"missed": self.missed}),
            },
        )
        self.epoch, self.saved, self.models = epoch, dict(positions), wanted
        self.written_s, self._is_noted = written_s, True
        self._recorded_id = self.topic_id
