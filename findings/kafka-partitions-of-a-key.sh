#!/usr/bin/env bash
# Two Kafka clients put one key into two partitions.
#
# Guess: a message's partition follows from its key and the number of partitions, whoever sends it.
# What happens: confluent-kafka (librdkafka) takes CRC-32 of the key by default; Java's client, kafka-python and aiokafka take murmur2. Of 200 keys
# over 4 partitions a third meet, by chance. With `"partitioner": "murmur2_random"` librdkafka agrees for keys that are not empty.
# Why it matters: only within a partition is there an order. If Flink or Java writes the rows of a table and a Python job repairs some, two values of one key lie in
# two partitions, and which of them a store ends with depends on who is read first; compaction keeps both.
# Source: https://github.com/confluentinc/librdkafka/blob/master/CONFIGURATION.md (partitioner)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check confluent-kafka==2.16.1 kafka-python==3.0.12 aiokafka==0.14.0

cat > "$work/run.py" <<'PY'
import confluent_kafka
from aiokafka.partitioner import DefaultPartitioner as OfAiokafka
from kafka.partitioner.default import murmur2

KEYS = [str(id).encode() for id in range(200)]
PARTITIONS = list(range(8))


def of_confluent(**options):
    producer = confluent_kafka.Producer(
        {"test.mock.num.brokers": 1, "test.mock.broker.rtt": 0, "log_level": 0, **options}
    )  # librdkafka's own broker for tests, whose topics have 4 partitions
    found = {}
    for key in KEYS:
        producer.produce("rows", b"", key, on_delivery=lambda _, message: found.update({message.key(): message.partition()}))
    assert producer.flush(60) == 0
    return [found[key] for key in KEYS], len(producer.list_topics("rows", timeout=30).topics["rows"].partitions)


ours, count = of_confluent()
of_murmur2, _ = of_confluent(partitioner="murmur2_random")
every = list(range(count))
python = [(murmur2(key) & 0x7FFFFFFF) % count for key in KEYS]  # as its DefaultPartitioner
aio = [OfAiokafka()(key, every, every) for key in KEYS]


def alike(left, right):
    return f"{sum(a == b for a, b in zip(left, right))} of {len(KEYS)}"


print("partitions:", count)
print("confluent-kafka and kafka-python:", alike(ours, python))
print("confluent-kafka with murmur2_random and kafka-python:", alike(of_murmur2, python))
print("aiokafka and kafka-python:", alike(aio, python))
PY

echo "confluent-kafka 2.16.1, kafka-python 3.0.12, aiokafka 0.14.0"
(cd "$work" && venv/bin/python run.py) | tee "$work/seen"
diff "$work/seen" - <<'WANT'
partitions: 4
confluent-kafka and kafka-python: 65 of 200
confluent-kafka with murmur2_random and kafka-python: 200 of 200
aiokafka and kafka-python: 200 of 200
WANT
