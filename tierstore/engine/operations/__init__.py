"""Long operations on a whole model or store: load, verify, export, backup, status."""
