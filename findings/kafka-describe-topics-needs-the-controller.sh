#!/usr/bin/env bash
# The guess: `AdminClient.describe_topics` is a request for metadata, as `list_topics` is, so any broker answers it.
#
# What happens: librdkafka sends it to the controller alone, and waits for one until the request's timeout, though every broker has
# the answer. `list_topics` and `list_offsets` of the same client, to the same brokers, answer at once meanwhile. The Java client
# asks the least loaded broker.
#
# Why it matters to who serves embeddings: only `describe_topics` gives a topic's id, by which a topic that was deleted and made again
# under its name is told from the one whose offsets were recorded. Who asks for it on the thread that reads the stream stands
# still for the whole timeout (60 seconds by default) while a controller is elected, or where the one that is named cannot be reached:
# rows get late though every partition can be read. Ask beside the reading, and take a late answer as unknown.
#
# Source: https://github.com/confluentinc/librdkafka/blob/master/src/rdkafka_admin.c (rd_kafka_DescribeTopics); Java's client, since
# KAFKA-8962: https://github.com/apache/kafka/pull/7421
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check 'confluent-kafka==2.16.1'
cat > "$folder/run.py" <<'PY'
import time

import confluent_kafka
from confluent_kafka import KafkaException, TopicCollection, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec

print("confluent-kafka", confluent_kafka.__version__, "librdkafka", confluent_kafka.libversion()[0])
# librdkafka's own cluster for tests: three brokers that all answer, none of which is the controller
producer = confluent_kafka.Producer({"test.mock.num.brokers": 3, "log_level": 0})
producer.produce("rows", b"1")
assert producer.flush(30) == 0
brokers = producer.list_topics(timeout=10).brokers.values()
admin = AdminClient({"bootstrap.servers": ",".join(f"{one.host}:{one.port}" for one in brokers), "log_level": 0})


def seconds(ask):
    begin = time.monotonic()
    try:
        answer = ask()
    except KafkaException as error:
        answer = error.args[0].str()
    return round(time.monotonic() - begin, 1), answer


metadata_s, found = seconds(lambda: sorted(admin.list_topics("rows", timeout=10).topics))
at = TopicPartition("rows", 0)
end_s, end = seconds(lambda: admin.list_offsets({at: OffsetSpec.latest()}, request_timeout=10)[at].result(20).offset)
describe_s, described = seconds(
    lambda: str(admin.describe_topics(TopicCollection(["rows"]), request_timeout=3)["rows"].result(20).topic_id)
)
print(f"list_topics: {found} after {metadata_s} s")
print(f"list_offsets: {end} after {end_s} s")
print(f"describe_topics, with a timeout of 3 s: {described!r} after {describe_s} s")
as_said = found == ["rows"] and metadata_s < 2 and end_s < 2 and "controller" in described and describe_s >= 2.9
raise SystemExit(0 if as_said else "it is not as this finding says any more")
PY
"$folder/venv/bin/python" "$folder/run.py"
