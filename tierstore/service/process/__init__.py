"""Processes of a service: worker processes, the one that owns them, and what goes between them."""
