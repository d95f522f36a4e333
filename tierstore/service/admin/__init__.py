"""The interface for operators and producers: admin requests, metrics, pages, deltas."""
