"""Tests of every byte that others see, and of every name on disk."""
