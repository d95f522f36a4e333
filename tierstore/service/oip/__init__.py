"""The Open Inference Protocol's words, over any transport: requests, answers, documents, shared memory."""
