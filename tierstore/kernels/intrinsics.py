"""Functions for kernels that are written as LLVM instructions: what numba wants around them."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from numba.extending import intrinsic


def emits(signature: Any) -> Callable[[Callable[..., Any]], Any]:
    """Make an intrinsic of a function that emits its instructions; `signature` has the types of its arguments and result.

    The function is given an `ir.IRBuilder` and a value for each argument. It returns a value, or None where the result is `types.void`.
    """

    def made(emit: Callable[..., Any]) -> Any:
        @wraps(emit)  # numba reads the number of arguments off the signature, less the first
        def typed(typingctx: Any, *given: Any) -> Any:
            def codegen(context: Any, builder: Any, _: Any, args: Any) -> Any:
                value = emit(builder, *args)
                return context.get_dummy_value() if value is None else value

            return signature, codegen

        return intrinsic(typed)

    return made
