"""Deltas: reading and writing them."""
