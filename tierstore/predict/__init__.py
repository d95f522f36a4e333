"""Dense parts: the part of a model that is not in tables, an ONNX graph run by ONNX Runtime.

The only place that imports `onnxruntime` (extra `dense`), and only where it is used.
"""
