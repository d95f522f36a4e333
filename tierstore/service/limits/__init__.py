"""Limits of the service: worker threads with bounded queues, byte budgets, load shedding, background jobs."""
