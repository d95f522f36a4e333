"""TensorFlow Serving, over any transport: signatures, requests, responses, model status."""
