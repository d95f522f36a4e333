"""Events that the engine reports to others as they happen."""
