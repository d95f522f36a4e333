"""Long work on a whole model or store: load, verify, status."""
