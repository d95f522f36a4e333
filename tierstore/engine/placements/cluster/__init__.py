"""Rows in a cluster: a node follows what the cluster has, and one of the nodes brings deltas into the rows there."""
