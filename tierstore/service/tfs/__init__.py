"""TensorFlow Serving's words, over any transport: signatures, requests, answers, model status."""
