"""Rows in a cluster: a node follows what the cluster has, and one of the nodes applies deltas to the rows there."""
