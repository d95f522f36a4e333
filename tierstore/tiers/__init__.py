"""The tiers that hold rows: one folder each, one batched protocol (`base.py`)."""
