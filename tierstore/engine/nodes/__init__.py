"""A node of a cluster: it follows what the cluster has, and one of the nodes brings deltas into the rows there."""
