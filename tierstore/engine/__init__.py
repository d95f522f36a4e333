"""The engine: versions, views and deltas, which make the tiers one store."""
