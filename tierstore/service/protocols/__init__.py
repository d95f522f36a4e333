"""The protocols of look-ups and predictions, whatever transport they come over."""
