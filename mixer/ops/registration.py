"""How a Python function becomes an operator of torch, which refuses what derivatives it lacks, or a
constant of compiled code.
"""

import functools
import sys
from collections.abc import Callable
from typing import NoReturn

import torch


def operator(name: str) -> Callable[[Callable], torch._ops.OpOverload]:
    """Decorates a function of tensors, which changes none of them, as the operator `name`, such as
    "mixer::short_conv": what `torch.library.custom_op(name, mutates_args=())` does, but for the
    first call of that, which imports torch's compiler in a second or more. An operator cannot be
    defined again, so a module with one cannot be reloaded.
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


def refuse_second_derivatives(operator: str) -> None:
    """To be called in backward, where create_graph=True turns gradients on. torch's own
    once_differentiable refuses too little: torch.autograd.grad with respect to an argument goes
    round its error, and leaves out terms of a Hessian without a word.
    """
    if torch.is_grad_enabled():
        no_second_derivatives(operator)


def no_second_derivatives(operator: str) -> NoReturn:
    raise NotImplementedError(
        f"second derivatives of {operator} need backend 'dense': use it here (for a model, load it "
        "with mixing_backend='dense')"
    )


def without_derivative(gradients_operator: str, operator: str) -> None:
    """Registers that an operator which computes the gradients of another has no derivative."""
    name = f"mixer::{gradients_operator}"
    torch.library.register_autograd(name, lambda ctx, *_: no_second_derivatives(operator))


def constant_in_a_graph(function: Callable) -> Callable:
    """Has torch.compile call the function, whose arguments are constants of a compiled graph, while
    it compiles. torch.compiler.assume_constant_result does the same, but imports the compiler,
    which takes longer than the rest of PyTorch.
    """
    function._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
    return function
