"""Rows of a version in a cluster that speaks the protocol of Redis Cluster. Needs the extra `redis`."""
