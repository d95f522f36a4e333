"""The data of a version in memory: overlays, the cascade over the tiers of a table, promotion
between them, and their budgets.
"""
