"""What the engine reports to others as it happens."""
