"""What bounds the service: threads and queues, who waits and until when, loads in the background."""
