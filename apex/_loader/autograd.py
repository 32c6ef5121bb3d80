"""Autograd of ops that are defined from Python, at the dispatcher's key Autograd.

torch.library.register_autograd would do, but for three things: forward mode goes on with silent zeros,
torch.func.grad refuses, and a call takes 70 us more. Here forward mode is refused, and the node is one that
functorch's own levels take.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from apex._loader import registry
from apex._loader.op_model import Op

Function = Callable[..., Any]


def register(library: Any, namespace: str, name: str, backward: Function, setup_context: Function) -> None:
    """Makes the op `name` of `library` differentiable.

    backward: (ctx, *gradients of the results) -> gradients of the arguments. setup_context: (ctx, arguments, results)
    keeps what that needs. Both as torch.library.register_autograd takes them.
    """
    library.impl(name, _recording(namespace, name, backward, setup_context), "Autograd", with_keyset=True)


@functools.cache
def function() -> Any:
    """The class that nodes which are written in Python derive from: an autograd function that functorch's own levels
    take, too."""
    import torch

    base = getattr(torch.autograd.function, "_SingleLevelFunction", torch.autograd.Function)

    class Node(base):  # type: ignore[misc, valid-type]
        @staticmethod
        def _compiled_autograd_key(ctx: Any) -> Any:
            """What compiled autograd tells functions apart by; torch.autograd.Function has it, its base has not."""
            return (ctx._autograd_function_id,)

    return Node


def _recording(namespace: str, name: str, backward: Function, setup_context: Function) -> Function:
    op = registry.schemas()[name]
    tensors = [i for i, argument in enumerate(op.arguments) if argument.is_tensor]
    words = name.removesuffix("_forward").removesuffix("_backward")

    @functools.cache
    def node() -> tuple[Any, Function]:
        import torch

        after = torch._C._after_autograd_keyset
        overload = getattr(getattr(torch.ops, namespace), name).default

        def below(keys: Any, *arguments: Any) -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                return overload.redispatch(keys & after, *arguments)

        class Node(function()):  # type: ignore[misc]
            @staticmethod
            def forward(ctx: Any, keys: Any, *arguments: Any) -> Any:
                with _as_the_caller():
                    found = below(keys, *arguments)
                setup_context(ctx, arguments, found)
                return found

            @staticmethod
            def backward(ctx: Any, *gradients: Any) -> Any:
                ctx = _Shifted(ctx)
                made = backward(ctx, *gradients)
                return None, *(made if isinstance(made, tuple) else (made,))

        return Node, below

    def record(keys: Any, *arguments: Any, **keywords: Any) -> Any:
        import torch

        arguments = _complete(op, arguments, keywords)
        given = [arguments[i] for i in tensors]
        refuse_forward_mode(words, given)
        made, below = node()
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in given):
            with _single_level():
                return made.apply(keys, *arguments)
        return below(keys, *arguments)

    return record


class _Shifted:
    """The context as `backward` knows it: without the keys, which the node takes first."""

    def __init__(self, ctx: Any) -> None:
        self._ctx = ctx

    @property
    def needs_input_grad(self) -> Any:
        return self._ctx.needs_input_grad[1:]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)


def _complete(op: Op, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> tuple[Any, ...]:
    """All arguments in the schema's order: torch leaves those out that have their default and come last."""
    rest = op.arguments[len(arguments) :]
    return (*arguments, *(keywords.get(argument.name, argument.default) for argument in rest))


def _single_level() -> contextlib.AbstractContextManager[Any]:
    """Lets a node be made within torch.func's levels, as functorch itself makes them."""
    from torch._functorch import autograd_function

    allowed = getattr(autograd_function, "enable_single_level_autograd_function", None)
    return allowed() if allowed else contextlib.nullcontext()


def _as_the_caller() -> contextlib.AbstractContextManager[Any]:
    """Grad mode as it was before the node's forward, which turns it off: torch.func's outer levels, which the op goes
    on to, record it too, or the gradient of a gradient would be silently wrong."""
    import torch

    inside = torch._C._functorch.maybe_current_level() is not None
    return torch.enable_grad() if inside else contextlib.nullcontext()


def refuse_forward_mode(op: str, given: Iterable[Any]) -> None:
    """Raises NotImplementedError for a dual tensor: a node is backward mode alone, and forward mode would go on with
    silent zeros."""
    from torch.autograd import forward_ad

    if getattr(forward_ad, "_current_level", 0) < 0:
        return
    for tensor in given:
        if tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None:
            raise NotImplementedError(f"apex {op}: forward-mode automatic differentiation is not implemented")
