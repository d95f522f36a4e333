"""JSON of inference requests."""
