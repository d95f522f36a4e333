"""The way of a delta: the log, the overlays of what is served, the fold into the tiers, the
replay onto a version that opens.
"""
