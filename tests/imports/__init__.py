"""Imports of what other tools leave."""
