"""The life of versions: the catalogue of versions on disk, switches, warm-up, housekeeping."""
