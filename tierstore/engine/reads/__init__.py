"""What answers a request: a view, and the look-ups and predictions on it."""
