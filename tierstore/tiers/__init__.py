"""The tiers: one file each, one batched protocol."""
