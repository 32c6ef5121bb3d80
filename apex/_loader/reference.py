"""The reference implementations as dispatcher ops: library `apex_reference`.

Each op of ops.schemas is defined there under the same name and schema; its implementation is the function of
that name in `apex/reference/<unit>.py`, imported at the first call. It serves every device (NPU, XPU and MPS
among them); the bindings call it through the dispatcher wherever no other variant runs.
"""

from __future__ import annotations

import functools
import importlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

from apex._loader import registry
from apex._loader.once import Once

NAMESPACE = "apex_reference"
Kernel = Callable[..., Any]
Arguments = Sequence[Any]
Keywords = Mapping[str, Any]
Given = tuple[str, Any, bool]  # what errors call a tensor, the tensor, whether it is written


@Once
def register() -> Any:
    """Defines the ops, once a process. Imports torch; raises InstallationError without ops.schemas."""
    return define(NAMESPACE, implementation)


def define(
    namespace: str,
    implementation: Callable[[str], Kernel],
    names: Iterable[str] | None = None,
    kind: str = "DEF",
) -> Any:
    """Defines ops of ops.schemas in `namespace` and returns the library that keeps them alive.

    implementation: op name -> callable, registered for every device
    names: the ops, by default all
    kind: "DEF", or "FRAGMENT" where the namespace exists
    """
    import torch

    library = _make_library(namespace, kind)
    for name in registry.schemas() if names is None else names:
        schema = registry.schemas()[name]
        library.define(schema.text, tags=(torch.Tag.pt2_compliant_tag,))
        library.impl(schema.name, implementation(schema.name), "CompositeExplicitAutograd")
        if schema.launch:  # nothing to infer, and the implementation would touch data
            library.impl(schema.name, _nothing(namespace, schema.name), "Meta")
        if schema.writes:  # torch resolves lazy bits only where no argument is written; its own ops within do
            for key in ("Negative", "Conjugate", "ZeroTensor"):
                library.impl(schema.name, torch.library.fallthrough_kernel, key)
    return library


# torch hands the file name of who makes a library to C++, which takes UTF-8 alone; and where UTF-8 is off, Python has
# another string for a path that is not ASCII. So code makes it whose file name is. torch looks one or two callers up.
_MAKER = """
import torch

def make(namespace, kind):
    return torch.library.Library(namespace, kind)

def call(namespace, kind):
    return make(namespace, kind)
"""


def _make_library(namespace: str, kind: str) -> Any:
    scope: dict[str, Any] = {}
    exec(compile(_MAKER, "apex/_loader/reference.py", "exec"), scope)
    return scope["call"](namespace, kind)


_plain = threading.local()


class PlainTorch:
    """While it lasts, torch's functions are to compute in the dtypes that they are given, on this thread: a reference
    has chosen them. (A generator's context takes 2 us more.)"""

    def __enter__(self) -> None:
        _plain.depth = getattr(_plain, "depth", 0) + 1

    def __exit__(self, *_: object) -> None:
        _plain.depth -= 1


def wants_plain_torch() -> bool:
    """Whether `PlainTorch` lasts on this thread: what casts for torch's functions asks."""
    return getattr(_plain, "depth", 0) > 0


def _in_plain_torch(function: Kernel) -> Kernel:
    @functools.wraps(function)
    def plain(*arguments: Any) -> Any:
        with PlainTorch():
            return function(*arguments)

    return plain


def implementation(name: str) -> Kernel:
    """The callable that imports the reference's module when it is first called."""

    @functools.cache
    def function() -> Kernel:
        return getattr(module(name), name)

    @functools.cache
    def has_no_derivative() -> bool:
        return getattr(module(name), "NO_DERIVATIVE", False)

    def reference(*arguments: Any, **keywords: Any) -> Any:
        import torch

        _check_arguments(name, arguments, keywords)
        if has_no_derivative():
            _refuse_gradients(name, arguments, keywords)
        # Gradients belong to the differentiable op above; in-place ops may write leaves that require grad.
        with torch.no_grad(), PlainTorch():
            return function()(*arguments, **keywords)

    return reference


def target(name: str) -> Kernel:
    """Calls the op of `apex_reference`."""
    import torch

    op = getattr(torch.ops.apex_reference, name).default
    return lambda *arguments, **keywords: op(*arguments, **keywords)


def module(name: str) -> ModuleType:
    """The module of `apex.reference` that holds an op, by the op's name."""
    return importlib.import_module(f"apex.reference.{registry.schemas()[name].unit}")


def record(namespace: str, library: Any, names: Iterable[str]) -> None:
    """Makes the functional pairs among `names` differentiable, and gives them their autocast rule.

    For ops that are defined from Python (`define`): 3a does it in C++. A module of functional ops lists its
    pairs as PAIRS, objects with what torch.library.register_autograd takes (see apex/reference/_norm.py).
    """
    from apex._loader import autograd

    units = dict.fromkeys(registry.schemas()[name].unit for name in names if name.endswith("_forward"))
    for unit in units:
        for name, shapes in own_shapes(unit).items():
            library.impl(name, of_shapes(namespace, name, shapes), "Meta")
        for pair in importlib.import_module(f"apex.reference.{unit}").PAIRS:
            if f"{pair.name}_forward" not in names:
                continue
            for end, backward, setup in (
                ("forward", pair.backward, pair.setup_context),
                ("backward", _in_plain_torch(pair.double_backward), pair.setup_double_context),
            ):
                autograd.register(library, namespace, f"{pair.name}_{end}", backward, setup)
            for device_type, key in (("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA")):
                library.impl(f"{pair.name}_forward", _autocast(namespace, pair, device_type), key)


def own_shapes(unit: str) -> dict[str, Kernel]:
    """op -> function of a unit whose reference would not do for tensors that are a shape alone."""
    return getattr(importlib.import_module(f"apex.reference.{unit}"), "SHAPES", {})


def of_shapes(namespace: str, name: str, function: Kernel) -> Kernel:
    """The meta kernel of an op: `function`, once every tensor is a meta tensor."""

    def shapes(*arguments: Any, **keywords: Any) -> Any:
        _refuse_meta_beside_others(_tensors(namespace, name, arguments, keywords))
        return function(*arguments, **keywords)

    return shapes


def _autocast(namespace: str, pair: Any, device_type: str) -> Kernel:
    def forward(*arguments: Any, **keywords: Any) -> Any:
        import torch

        op = getattr(getattr(torch.ops, namespace), f"{pair.name}_forward")
        changed = pair.autocast(device_type, arguments, keywords)
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(_autocast_key(device_type))):
            return op(**changed)

    return forward


def _autocast_key(device_type: str) -> Any:
    import torch

    return torch._C.DispatchKey.AutocastCPU if device_type == "cpu" else torch._C.DispatchKey.AutocastCUDA


def _nothing(namespace: str, name: str) -> Kernel:
    """The meta kernel of an op that writes its arguments.

    torch comes to it where one is a meta tensor: where others are not, they would be left as they are without a word.
    """

    def nothing(*arguments: Any, **keywords: Any) -> None:
        _refuse_meta_beside_others(_tensors(namespace, name, arguments, keywords))

    return nothing


def _check_arguments(name: str, arguments: Arguments, keywords: Keywords) -> None:
    from apex._plain import check_argument  # it imports torch

    tensors = list(_tensors(NAMESPACE, name, arguments, keywords))
    read = "" if _unscales(name, arguments, keywords) else f"{name}: grads["
    for where, tensor, written in tensors:
        check_argument(tensor, where, written and not (read and where.startswith(read)))
    _refuse_meta_beside_others(tensors)


def _refuse_gradients(name: str, arguments: Arguments, keywords: Keywords) -> None:
    """Of an op without derivative, as the bindings do: raises RuntimeError where its input asks for a gradient."""
    import torch

    tensors = _tensors(NAMESPACE, name, arguments, keywords)
    if torch.is_grad_enabled() and any(t.requires_grad for where, t, _ in tensors if ": input" in where):
        raise RuntimeError(
            f"{name} has no derivative: call it under torch.no_grad() or in a torch.autograd.Function"
        )


def _unscales(name: str, arguments: Arguments, keywords: Keywords) -> bool:
    """Whether a call writes its gradients: ops that can unscale them do where they are asked to; others as their schema
    says."""
    op = registry.schemas()[name]
    if op.argument("unscale_grads") is None:
        return True
    given = {**dict(zip((a.name for a in op.arguments), arguments, strict=False)), **keywords}
    return bool(given.get("unscale_grads")) and given.get("inv_scale") is not None


def _refuse_meta_beside_others(tensors: Iterable[Given]) -> None:
    """Raises ValueError; the words are csrc/bindings/register.h's."""
    on_meta: list[tuple[str, Any]] = []
    elsewhere: list[tuple[str, Any]] = []
    for where, tensor, _ in tensors:
        (on_meta if tensor.device.type == "meta" else elsewhere).append((where, tensor.device))
    if on_meta and elsewhere:
        other, device = elsewhere[0]
        raise ValueError(
            f"{on_meta[0][0]} is on meta, {other.partition(': ')[2]} is not: tensors on {device} and on the meta "
            "device, which has no data, do not go together"
        )


def _tensors(namespace: str, name: str, arguments: Arguments, keywords: Keywords) -> Iterator[Given]:
    """(what errors call it, the tensor, whether it is written) for each tensor that an op is given."""
    import torch

    schema = getattr(getattr(torch.ops, namespace), name).default._schema
    for i, argument in enumerate(schema.arguments):
        value = arguments[i] if i < len(arguments) else keywords.get(argument.name)
        written = argument.alias_info is not None and argument.alias_info.is_write
        where = f"{name}: {argument.name}"
        if isinstance(value, torch.Tensor):
            yield where, value, written
        elif isinstance(value, (list, tuple)):
            for k, item in enumerate(value):
                if isinstance(item, torch.Tensor):
                    yield f"{where}[{k}]", item, written
