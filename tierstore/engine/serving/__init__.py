"""The served state: what is served at this moment, and what the next start will serve."""
