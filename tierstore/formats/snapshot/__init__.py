"""Snapshots: reading and writing them, shard by shard; and built versions of them."""
