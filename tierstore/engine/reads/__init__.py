"""Answers to requests: a view, and the look-ups and predictions on it."""
