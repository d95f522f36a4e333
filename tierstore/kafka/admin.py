"""Questions to brokers that a consumer cannot ask: a topic's id, how far its partitions go, also beyond a
transaction that is open, and how long it keeps deletions.

One thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from functools import cached_property
from typing import Any

from tierstore.kafka import client

_ID_TIMEOUT_S = 5.0
_NO_ID = "AAAAAAAAAAAAAAAAAAAAAA"  # a UUID of zeros: of brokers that have none


class TopicAdmin:
    """An admin client of one topic; it connects at the first question. options: properties of librdkafka."""

    def __init__(self, brokers: str, topic: str, options: Mapping[str, str]) -> None:
        self._kafka = client.confluent_kafka()
        # the consumer beside it logs the same
        self._properties = {**options, "bootstrap.servers": brokers, "log_level": 0}
        self._brokers, self._topic = brokers, topic
        self._asked: Future[Any] | None = None

    @cached_property
    def _client(self) -> Any:
        return client.make("AdminClient", self._properties)

    def ask_id(self) -> None:
        """Begin to ask for the topic's id, unless an answer is still to come."""
        if self._asked is None:
            topics = self._kafka.TopicCollection([self._topic])
            self._asked = self._client.describe_topics(topics, request_timeout=_ID_TIMEOUT_S)[self._topic]

    def topic_id(self, wait_s: float) -> str:
        """What `ask_id` has asked for; empty where no broker says it, or none in time. The next call may have it."""
        assert self._asked is not None
        try:
            found = str(self._asked.result(wait_s).topic_id)
        except TimeoutError:
            return ""
        except self._kafka.KafkaException:
            found = _NO_ID
        self._asked = None
        return "" if found == _NO_ID else found

    def deletions_kept_s(self, timeout_s: float) -> float | None:
        """For how long a deletion stays in a compacted topic; None for another topic, and where the brokers never say
        it (no right to describe its settings). Unreachable if they do not answer now.
        """
        topic = self._kafka.admin.ConfigResource(self._kafka.admin.ResourceType.TOPIC, self._topic)
        try:
            found = self._client.describe_configs([topic], request_timeout=timeout_s)[topic].result(2 * timeout_s)
            if "compact" not in found["cleanup.policy"].value.split(","):
                return None
            return int(found["delete.retention.ms"].value) / 1000
        except self._kafka.KafkaException as error:
            codes = self._kafka.KafkaError
            if error.args[0].code() in (
                codes.TOPIC_AUTHORIZATION_FAILED,
                codes.CLUSTER_AUTHORIZATION_FAILED,
                codes.UNSUPPORTED_VERSION,
                codes._UNSUPPORTED_FEATURE,
            ):
                return None
            raise client.unreachable(self._brokers, error) from error
        except TimeoutError as error:
            raise client.unreachable(self._brokers, f"no answer in {2 * timeout_s:.0f} s") from error
        except (KeyError, AttributeError, ValueError):
            return None

    def ends(self, partitions: Iterable[int], timeout_s: float, *, committed: bool) -> dict[int, int | str]:
        """Partition → the offset of the next message that is written, or why it is not known. committed: the last
        stable offset instead, where the first transaction begins that is still open.
        """
        kafka = self._kafka
        level = kafka.IsolationLevel.READ_COMMITTED if committed else kafka.IsolationLevel.READ_UNCOMMITTED
        latest = kafka.admin.OffsetSpec.latest()
        asked = {kafka.TopicPartition(self._topic, one): latest for one in partitions}
        if not asked:
            return {}
        found: dict[int, int | str] = {}
        answers = self._client.list_offsets(asked, isolation_level=level, request_timeout=timeout_s)
        for at, answer in answers.items():
            try:
                found[at.partition] = int(answer.result(2 * timeout_s).offset)
            except TimeoutError:
                found[at.partition] = f"no answer in {2 * timeout_s:.0f} s"
            except kafka.KafkaException as error:
                found[at.partition] = client.text_of(error)
        return found
