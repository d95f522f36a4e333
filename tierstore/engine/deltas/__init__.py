"""Deltas: the log, the overlays over what is served, the fold into the tiers, and the replay for a version that
opens.
"""
