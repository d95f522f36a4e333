"""Versions, views, deltas: what makes the tiers one store."""
