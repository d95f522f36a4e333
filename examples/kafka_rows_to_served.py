"""Rows that a plain producer writes to Kafka, one a message, served as they come: no deltas, no seqs.

python examples/kafka_rows_to_served.py 127.0.0.1:9092      # needs a broker and tierstore[kafka]; makes a topic, writes `data/` and `empty/`
"""

import json
import subprocess
import sys
import time
import uuid

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

import tierstore

ROWS = 1000


def make_topic(brokers: str) -> str:
    topic = f"item-embeddings-{uuid.uuid4().hex[:8]}"
    admin = AdminClient({"bootstrap.servers": brokers})
    admin.create_topics([NewTopic(topic, 2)])[topic].result(60)
    return topic


def produce(brokers: str, topic: str) -> None:
    producer = Producer({"bootstrap.servers": brokers})
    for key in range(ROWS):
        value = json.dumps({"key": key, "vector": [key, key / 2, key / 4, 1]})
        producer.produce(topic, value, str(key))
    producer.produce(topic, None, "17")  # no value: row 17 is deleted
    producer.flush(60)


def main() -> None:
    brokers = sys.argv[1]
    topic = make_topic(brokers)
    with tierstore.SnapshotWriter("empty", model="shop", version=1) as snapshot:  # the tables, without rows yet
        snapshot.table("item", dim=4)
        snapshot.feature("item_id", table="item")
    command = [sys.executable, "-m", "tierstore"]
    subprocess.run([*command, "load", "empty"], check=True)
    rows = ["--kafka", brokers, "--kafka-rows", f"{topic}=shop/item"]
    service = subprocess.Popen(
        [*command, "serve", "--port", "0", "--grpc-port", "off", *rows], stdout=subprocess.PIPE, text=True
    )
    assert service.stdout is not None
    try:
        url = service.stdout.readline().split()[-1]
        produce(brokers, topic)
        until = time.monotonic() + 120
        with tierstore.Client(url) as client:
            while True:
                vectors, found = client.lookup("shop", "item_id", [17, 18, ROWS - 1], return_found=True)
                if found.tolist() == [False, True, True]:
                    break
                assert time.monotonic() < until, client.status()["service"]["kafka_rows"]
                time.sleep(0.2)
        assert vectors.tolist() == [[0, 0, 0, 0], [18, 9, 4.5, 1], [ROWS - 1, (ROWS - 1) / 2, (ROWS - 1) / 4, 1]]
    finally:
        service.terminate()
        service.wait()
    print("every row is served as the producer wrote it")


if __name__ == "__main__":
    main()
