"""A model for Triton's Python backend that answers look-ups and predictions of a tierstore model, as tensors.

`tierstore triton-model MODEL OUT` writes its folder of a model repository. There `model.py` is

    from tierstore.triton import TritonPythonModel

    __all__ = ["TritonPythonModel"]

Needs tierstore in the Python of the backend. Nothing else of Triton is needed: the backend brings its own module.
"""

from __future__ import annotations

from tierstore.triton.model import TritonPythonModel

__all__ = ["TritonPythonModel"]
