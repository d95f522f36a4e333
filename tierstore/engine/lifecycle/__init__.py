"""How versions come and go: the catalogue of those on disk, switches, warm-up, housekeeping."""
