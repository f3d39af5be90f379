"""How a Python function becomes an operator of torch."""

import functools
import sys
from collections.abc import Callable

import torch


def operator(name: str) -> Callable[[Callable], torch._ops.OpOverload]:
    """Decorates a function of tensors, which changes none of them, as the operator `name`, such as
    "mixer::triangular_conv": what `torch.library.custom_op(name, mutates_args=())` does, but for
    the first call of that, which imports torch's compiler in a second or more. An operator cannot
    be defined again, so a module with one cannot be reloaded.
    """

    def register(function: Callable) -> torch._ops.OpOverload:
        @functools.cache
        def uncompiled() -> Callable:
            return torch.compiler.disable(function)

        def call(*arguments):
            # Where torch.compile gives a caller up, it tries to compile what that calls, also this;
            # and a call that it may not look into, inside of `try`, makes it give up at once.
            is_compiler_here = "torch._dynamo" in sys.modules
            try:
                return (uncompiled() if is_compiler_here else function)(*arguments)
            finally:
                pass

        schema = torch.library.infer_schema(function, mutates_args=())
        torch.library.define(name, schema, tags=torch.Tag.pt2_compliant_tag)
        torch.library.impl(name, "default", call)
        namespace, _, operation = name.partition("::")
        return getattr(getattr(torch.ops, namespace), operation).default

    return register
