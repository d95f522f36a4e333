"""File formats: every byte that others see, and every name on disk."""
