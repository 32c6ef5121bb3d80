"""Every tensor argument of every op, given as a tensor whose bytes are not its values, or that shares or lacks memory.

The op does what it does to plain tensors of the same values, or raises an exception that names the argument and leaves
everything as it was. What a schema marks as written has a new version afterwards, nothing else has.
"""

from __future__ import annotations

import re

import pytest
import torch
import variants
from lists import FP8, comparable
from op_calls import call_of

from apex import _loader
from apex._loader import bindings, reference, registry

F32 = torch.float32
NAMESPACE = "apex_plain_arguments"


@pytest.fixture(scope="module")
def from_python():
    """The ops as the loader defines them where no binding fits this torch, in a namespace of their own."""
    _loader.load()

    def forward(name):
        target = getattr(torch.ops.apex_reference, name).default
        return lambda *arguments, **keywords: target(*arguments, **keywords)

    library = reference.define(NAMESPACE, forward, list(registry.schemas()))
    yield getattr(torch.ops, NAMESPACE)
    library._destroy()


SERVED = [
    pytest.param("python", id="python"),
    pytest.param("reference", id="reference"),
    pytest.param("cpu", id="cpu"),
    pytest.param("cuda", id="cuda", marks=pytest.mark.gpu),
]


@pytest.fixture(params=SERVED)
def ops(request, from_python):
    """(namespace of the ops, device)."""
    if request.param == "python":
        yield from_python, "cpu"
        return
    reason = variants.why_not("cpu-v1" if request.param == "cpu" else request.param)
    if reason:
        pytest.skip(reason)
    with variants.served_by(request.param) as served:
        yield torch.ops.apex, served.device
        served.mixed = True  # the reference helps where a layout is none of a kernel's


# ---- the kinds of tensors -----------------------------------------------------------------------------------


class Wrapper(torch.Tensor):
    """A tensor whose data is in another; ops go to that one."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, inner.stride(), dtype=inner.dtype, device=inner.device
        )

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        unwrap = lambda t: t.inner if isinstance(t, cls) else t  # noqa: E731
        return func(
            *torch.utils._pytree.tree_map(unwrap, args), **torch.utils._pytree.tree_map(unwrap, kwargs or {})
        )


def _number(tensor):
    return tensor.dtype not in (torch.bool, torch.uint8, *FP8)


def negative(tensor):
    return torch._neg_view(-tensor) if _number(tensor) else None


def zero(tensor):
    return torch._efficientzerotensor(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def copy_on_write(tensor):
    return torch._lazy_clone(tensor.clone())


def strided(tensor):
    if tensor.dim() == 0:
        return None
    wide = tensor.new_zeros((*tensor.shape[:-1], 2 * tensor.shape[-1]))
    wide[..., ::2] = tensor
    return wide[..., ::2]


def transposed(tensor):
    return tensor.t().contiguous().t() if tensor.dim() == 2 else None


def channels_last(tensor):
    return tensor.to(memory_format=torch.channels_last) if tensor.dim() == 4 else None


def unaligned(tensor):
    buffer = tensor.new_zeros(tensor.numel() + 1)
    return buffer[1:].view(tensor.shape).copy_(tensor)


def strides_of_one(tensor):
    """Strides of dimensions of one element say nothing."""
    if 1 not in tensor.shape:
        return None
    strides = [7 if size == 1 else stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return tensor.as_strided(tensor.shape, strides)


def wrapped(tensor):
    return Wrapper(tensor.clone())


SAME = [negative, copy_on_write, strided, transposed, channels_last, unaligned, strides_of_one, wrapped]


def freed(tensor):
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(0)
    return tensor


def shrunk(tensor):
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(tensor.untyped_storage().nbytes() - 1)
    return tensor


def meta(tensor):
    return tensor.to("meta")


def sparse(tensor):
    return tensor.to_sparse() if tensor.dim() and tensor.is_floating_point() and _number(tensor) else None


def quantized(tensor):
    scales = (0.1, 0, torch.qint8)
    return (
        torch.quantize_per_tensor(tensor, *scales)
        if tensor.dtype == torch.float32 and tensor.is_cpu
        else None
    )


def conjugate(tensor):
    return tensor.to(torch.complex64).conj() if tensor.dtype == torch.float32 else None


def overlapping(tensor):
    return tensor.flatten()[:1].expand(tensor.shape) if tensor.numel() > 1 else None


# ---- what is done with them ---------------------------------------------------------------------------------


def arguments_of(name):
    """(name, written) of every tensor argument."""
    schema = getattr(torch.ops.apex_reference, name).default._schema
    return [
        (a.name, a.alias_info is not None and a.alias_info.is_write)
        for a in schema.arguments
        if "Tensor" in str(a.type)
    ]


def place(call, argument, make):
    """The call with `make` of that argument (of the second tensor of a list), and what was made."""
    value = call[argument]
    made = make(value[1] if isinstance(value, list) else value)
    return call | {argument: [value[0], made] if isinstance(value, list) else made}, made


def tensors_of(call):
    return {
        (name, i): tensor
        for name, value in call.items()
        for i, tensor in enumerate(value if isinstance(value, list) else [value])
        if isinstance(tensor, torch.Tensor)
    }


def plain_value(tensor):
    tensor = tensor.inner if isinstance(tensor, Wrapper) else tensor
    return tensor.resolve_neg().clone().contiguous()


def outputs_of(found):
    return [] if found is None else [found] if isinstance(found, torch.Tensor) else list(found)


def each_case(name, device, kinds):
    for argument, written in arguments_of(name):
        for kind in kinds:
            call = call_of(name, device)
            if call.get(argument) is None or kind is meta and len(tensors_of(call)) == 1:
                continue
            call, made = place(call, argument, kind)
            if made is not None:
                yield f"{argument}, {kind.__name__}", argument, written, call


def close(found, expected, message):
    assert found.dtype == expected.dtype, message
    torch.testing.assert_close(
        comparable(found),
        comparable(expected),
        rtol=1e-5,
        atol=1e-6,
        equal_nan=True,
        msg=lambda m: f"{message}: {m}",
    )


@pytest.fixture(autouse=True)
def loaded():
    _loader.load()


@pytest.mark.parametrize("name", registry.schemas())
def test_calls_hold_every_tensor_that_an_op_writes(name):
    call = call_of(name, "cpu")
    assert not [
        argument for argument, written in arguments_of(name) if written and call.get(argument) is None
    ]


@pytest.mark.usefixtures("exact_convolutions")
@pytest.mark.parametrize("name", registry.schemas())
def test_the_same_values_in_another_form(ops, name):
    namespace, device = ops
    op, plain = getattr(namespace, name), call_of(name, device)
    expected = outputs_of(op(**plain))
    for case, argument, _, call in each_case(name, device, SAME):
        before = {key: plain_value(t) for key, t in tensors_of(call).items()}
        try:
            found = outputs_of(op(**call))
        except (TypeError, ValueError) as error:
            assert argument in str(error), f"{case}: {error}"
            for key, tensor in tensors_of(call).items():
                close(plain_value(tensor), before[key], f"{case}, which was refused: {key}")
            continue
        for i, (a, b) in enumerate(zip(found, expected, strict=True)):
            close(plain_value(a), plain_value(b), f"{case}: output {i}")
        for key, tensor in tensors_of(call).items():
            close(plain_value(tensor), plain_value(tensors_of(plain)[key]), f"{case}: {key}")


@pytest.mark.parametrize("name", registry.schemas())
def test_the_other_copy_on_write_tensor_stays_as_it_is(ops, name):
    namespace, device = ops
    for argument, _ in arguments_of(name):
        call = call_of(name, device)
        if call.get(argument) is None:
            continue
        base = call[argument][1] if isinstance(call[argument], list) else call[argument]
        value = base.clone()
        call, clone = place(call, argument, torch._lazy_clone)
        getattr(namespace, name)(**call)
        torch.testing.assert_close(base, value, rtol=0, atol=0, msg=lambda m, a=argument: f"{a}: {m}")


@pytest.mark.parametrize("name", registry.schemas())
def test_versions_say_what_was_written(ops, name):
    namespace, device = ops
    call = call_of(name, device)
    versions = {key: t._version for key, t in tensors_of(call).items()}
    getattr(namespace, name)(**call)
    written = dict(arguments_of(name))
    for (argument, i), tensor in tensors_of(call).items():
        assert (tensor._version > versions[argument, i]) == written[argument], (argument, i)


@pytest.mark.parametrize("name", registry.schemas())
def test_zero_tensors_are_read_and_never_written(ops, name):
    namespace, device = ops
    for case, argument, written, call in each_case(name, device, [zero]):
        if (
            torch.device(device).type == "cuda"
            and name == "transducer_loss_forward"
            and argument in ("f_len", "y_len")
        ):
            continue  # a GPU answers lengths that are none with a loss of nan; what else it returns is not written
        zeros, _ = place(call_of(name, device), argument, lambda t: torch.zeros_like(t))
        try:
            expected = outputs_of(getattr(namespace, name)(**zeros))
        except ValueError:  # zeros are no sensible lengths
            continue
        try:
            found = outputs_of(getattr(namespace, name)(**call))
        except (TypeError, ValueError, RuntimeError) as error:
            assert argument in str(error) or "ZeroTensors are immutable" in str(error), f"{case}: {error}"
            continue
        assert not written, case
        for i, (a, b) in enumerate(zip(found, expected, strict=True)):
            close(plain_value(a), plain_value(b), f"{case}: output {i}")


@pytest.mark.parametrize("name", registry.schemas())
def test_what_has_no_values_here_is_refused(ops, name):
    namespace, device = ops
    for case, argument, _, call in each_case(
        name, device, [freed, shrunk, meta, sparse, quantized, conjugate]
    ):
        with pytest.raises((TypeError, ValueError, RuntimeError)) as raised:
            getattr(namespace, name)(**call)
            raise AssertionError(f"{case}: something was computed")
        text = str(raised.value)
        if "freed" in case or "shrunk" in case:
            assert "has no memory" in text and argument in text, f"{case}: {text}"


@pytest.mark.parametrize("name", [n for n, schema in registry.schemas().items() if schema.writes])
def test_memory_that_several_elements_share_is_not_written(ops, name):
    namespace, device = ops
    for case, argument, written, call in each_case(name, device, [overlapping]):
        if written:
            with pytest.raises((TypeError, ValueError, RuntimeError)) as raised:
                getattr(namespace, name)(**call)
            assert argument in str(raised.value), f"{case}: {raised.value}"


LISTS_WRITTEN = [
    (name, argument)
    for name, schema in registry.schemas().items()
    for argument in re.findall(r"Tensor\(\w!\)\[\] (\w+)", schema.text)
    if argument != "grads"  # autograd makes them
]


@pytest.mark.parametrize("name, argument", LISTS_WRITTEN)
def test_outputs_that_share_memory_are_refused(name, argument):
    """On a GPU blocks would write them at the same time."""
    if bindings.load().module is None:
        pytest.skip("no binding fits this torch")
    call = call_of(name, "cpu")
    first, second = call[argument][:2]
    length = first.numel()
    buffer = torch.zeros(length + second.numel() - 1, dtype=first.dtype, device="cpu")
    call[argument] = [buffer[:length].view(first.shape), buffer[length - 1 :].view(second.shape)]
    with pytest.raises(ValueError, match=rf"{argument}\[[01]\] and {argument}\[[01]\] share memory"):
        getattr(torch.ops.apex, name)(**call)
    call[argument][1] = torch.zeros(second.shape, dtype=first.dtype, device="cpu")
    getattr(torch.ops.apex, name)(**call)


def test_the_bindings_own_entries_look_too():
    native = bindings.load().module
    if native is None:
        pytest.skip("no binding fits this torch")
    x, y = (torch.ones(3, dtype=F32, device="cpu") for _ in range(2))
    with pytest.raises(TypeError, match=r"inputs\[1\] is a wrapper whose data is elsewhere"):
        native.multi_tensor_scale([[x, Wrapper(x)], [x, y]], None, 2.0)
    native.multi_tensor_scale([[torch._neg_view(x)], [torch._neg_view(y)]], None, 2.0)
    assert y.tolist() == [2.0, 2.0, 2.0]  # its negative view became -2
