"""What limits the service: worker threads with bounded queues, budgets of bytes, load
shedding, loads in the background.
"""
