"""Settings of the dense part (extra `dense`)."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ByteSize, Field, field_validator

from tierstore.config.values import (
    Size,
)


class DenseSettings(BaseModel):
    """Fields of `Settings`."""

    dense_timeout_s: float = Field(
        10.0, gt=0, description="seconds that one run of a dense part may take; after that it is ended, and gets 504"
    )
    dense_memory: Size = Field(
        ByteSize(2 << 30),
        description="bytes of CPU memory for the tensors of each dense part, all its runs together, without its "
        "weights (provider `cpu`)",
    )
    dense_provider: Literal["cpu", "cuda"] = Field(
        "cpu", description="what dense parts run on; `cuda` needs the extra `dense-gpu` in place of `dense`"
    )
    dense_options: dict[str, str] = Field(
        {},
        description="ONNX Runtime's session options by its own names: `intra_op_num_threads`, `inter_op_num_threads`, "
        "`graph_optimization_level`, `enable_cpu_mem_arena`, entries of its configuration (`session.…`), and "
        "options of its CUDA provider (`cuda.…`), such as `cuda.gpu_mem_limit`: bytes of a GPU's memory that "
        "each session may keep for its tensors, 2 GiB by default",
    )

    @field_validator("dense_options", mode="before")
    @classmethod
    def _as_text(cls, given: Any) -> Any:
        """TOML and JSON have numbers and booleans; ONNX Runtime's entries are text."""
        if not isinstance(given, dict):
            return given
        plain = {True: "1", False: "0"}
        return {key: plain[value] if isinstance(value, bool) else str(value) for key, value in given.items()}
