"""Settings of the dense part (extra `dense`)."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ByteSize, Field

from tierstore.config.values import (
    Size,
)


class DenseSettings(BaseModel):
    """Fields of `Settings`."""

    dense_intra_threads: int = Field(
        1, ge=1, description="threads of one run of a dense part; look-up threads run several at once anyway"
    )
    dense_inter_threads: int = Field(1, ge=1, description="branches of a dense part's graph that run at once")
    dense_affinity: str | None = Field(
        None,
        description="processors for the threads of a run, all but its first one, in ONNX Runtime's form, such as `2;3` (counted from 1)",
    )
    dense_spinning: bool = Field(False, description="let the threads of a run spin while they wait for work")
    dense_graph_optimization: Literal["off", "basic", "extended", "all"] = Field(
        "all", description="how much ONNX Runtime optimizes the graph of a dense part when it is loaded"
    )
    dense_arena: bool = Field(True, description="let ONNX Runtime keep memory between runs")
    dense_timeout_s: float = Field(
        10.0, gt=0, description="seconds that one run of a dense part may take; after that it is ended, and gets 504"
    )
    dense_memory: Size = Field(
        ByteSize(2 << 30),
        description="bytes of CPU memory for the tensors of each dense part, all its runs together, without its weights (provider `cpu`)",
    )
    dense_buffers: Size = Field(
        ByteSize(64 << 20), description="bytes of row buffers that a dense part keeps for reuse"
    )
    dense_provider: Literal["cpu", "cuda"] = Field(
        "cpu", description="what dense parts run on; `cuda` needs the extra `dense-gpu` in place of `dense`"
    )
    dense_device_memory: Size = Field(
        ByteSize(2 << 30), description="bytes of a GPU's memory that each dense part's session may keep for its tensors"
    )
    dense_provider_options: dict[str, str] = Field({}, description="further options of ONNX Runtime's CUDA provider")
    dense_options: dict[str, str] = Field({}, description="further entries of ONNX Runtime's session configuration")
