"""The Open Inference Protocol, over any transport: requests, responses, documents, shared memory."""
