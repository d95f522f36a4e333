"""A version's data in memory: overlays, the cascade over a table's tiers, promotion between tiers, and memory
budgets.
"""
