"""Rows on upstream nodes, for a front: connections, what is sent over them, and look-ups in a table."""
