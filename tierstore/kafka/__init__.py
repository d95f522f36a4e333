"""Deltas and Kafka: how a delta becomes messages, the writer for trainers, the reader of
a topic, and what is parked.
"""
