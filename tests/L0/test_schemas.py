"""The dispatcher's schemas (csrc/ops.schemas) keep to what torch can carry."""

from __future__ import annotations

import pytest
import torch
from op_calls import call_of, checks_of

from apex import _loader
from apex._loader import reference, registry


@pytest.mark.parametrize("op", registry.schemas())
def test_no_argument_has_a_name_that_torch_uses(op):
    """An op with an argument `mode` fails under torch.compile and opcheck: torch's handler has one."""
    _loader.load()
    names = [a.name for a in getattr(torch.ops.apex, op).default._schema.arguments]
    assert not {"mode", "self", "args", "kwargs"} & set(names)


@pytest.mark.parametrize("op", registry.schemas())
def test_the_reference_takes_the_same_arguments(op):
    import inspect

    _loader.load()
    wanted = getattr(torch.ops.apex, op).default._schema.arguments
    function = getattr(reference.module(op), op)
    found = inspect.signature(function).parameters.values()
    assert [a.name for a in wanted] == [p.name for p in found]
    for argument, parameter in zip(wanted, found, strict=True):
        if argument.has_default_value() and parameter.default is not inspect.Parameter.empty:
            assert parameter.default == argument.default_value


@pytest.mark.parametrize("op", registry.schemas())
def test_every_op_passes_opcheck(op):
    """Its schema, its shapes on tensors without values, its autograd and its tracing, as torch's own test has them."""
    _loader.load()
    schema = registry.schemas()[op]
    arguments = call_of(op, "cpu")
    for name in schema.differentiable:
        if arguments.get(name) is not None and not schema.double_backward:
            arguments[name].requires_grad_()
    torch.library.opcheck(getattr(torch.ops.apex, op).default, (), arguments, test_utils=checks_of(arguments))
