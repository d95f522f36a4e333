"""Compiled look-ups over a view's tiers: by plan (`by_plan.py`), of several features, of rows for a front, from disk."""
