"""Compiled look-ups over the tiers of a view: by plan (`by_plan.py`), for several features, for a front, and from disk."""
