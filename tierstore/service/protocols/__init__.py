"""The protocols of look-ups and predictions, for every transport."""
