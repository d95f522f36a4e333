"""Every byte that others see, and every name on disk: snapshots, deltas, row keys."""
