"""Rows on the nodes that a node in front reads from: connections, what is sent over them, and look-ups in a table."""
