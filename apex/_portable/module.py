"""The object that stands for the compiled module `_C`, and the kernels of torch's dispatcher."""

from __future__ import annotations

import types

from apex._loader import reference, registry
from apex._portable import (  # noqa: F401 (kernels enter themselves)
    activation,
    channels,
    conv_bias_relu,
    dense,
    fp8,
    functional,
    group_norm,
    interface,
    kept_magnitudes,
    losses,
    merge,
    multi_tensor,
    norms,
    optimizer_plan,
    plan,
    rope,
    softmax,
    tensors,
    transducer,
    wgrad,
)

_SCALE = "update_scale_hysteresis"


def implementation(name):
    """What serves an op in torch's dispatcher: its kernel here, or its reference where there is none yet."""
    if name in functional.KERNELS:
        return functional.KERNELS[name].run
    if name in multi_tensor.names():
        return multi_tensor.op(name).run
    if name == _SCALE:
        return activation.update_scale_hysteresis
    return reference.target(name)


def without_kernel():
    """The ops that have no portable form: they run on their reference."""
    served = {*functional.KERNELS, *multi_tensor.names(), _SCALE}
    return tuple(name for name in registry.schemas() if name not in served)


def lend_threads():
    """CPU variants run on torch's own threads, where torch has a C function for that: from 2.10 on."""
    import ctypes

    from apex._loader import system, vendor

    folder = vendor.torch_folder()
    if not folder:
        return
    try:
        of_torch = ctypes.CDLL(str(folder / system.torch_library("torch_cpu")))
        found = ctypes.cast(of_torch.torch_parallel_for, ctypes.c_void_p).value
    except (OSError, AttributeError):
        return
    interface.function("apex_lend_torch_threads")(found)


def make():
    """The module. To be called when torch.ops.apex has its ops."""
    made = types.ModuleType("apex._C", __doc__)
    made.OptimizerPlan, made.StateWatch = optimizer_plan.OptimizerPlan, optimizer_plan.StateWatch
    made.is_plain, made.is_dense = tensors.is_plain, plan.is_dense
    made.separate_gradients = lambda owners: False  # apex/_gradients.py does it
    for name in multi_tensor.names():
        setattr(made, name, _lists_entry(multi_tensor.op(name)))
    for name in functional.KERNELS:
        op = registry.schemas()[name]
        if op.differentiable and not name.endswith("_backward"):
            setattr(made, op.unit if not name.startswith("add_") else f"add_{op.unit}", _entry(name))
        elif not op.differentiable:  # the ops of batch norm
            setattr(made, name, functional.Entry(name, None).function)
    made.update_scale_hysteresis = activation.update_scale_hysteresis
    return made


def _entry(name):
    return functional.Entry(name, _pair(name)).function


def _pair(name):
    module = reference.module(name)
    return next((p for p in getattr(module, "PAIRS", ()) if f"{p.name}_forward" == name), None)


def _lists_entry(op):
    def entry(tensors, *scalars, **keywords):
        call = op.call(dict(zip(op.names, scalars, strict=False)) | keywords)
        if isinstance(tensors, optimizer_plan.OptimizerPlan):
            op.step(tensors, call)
        else:
            op.entry(tensors, call)

    entry.__name__ = op.name
    return entry


def load():
    """Defines torch.ops.apex and returns (the module, what keeps the ops alive)."""
    lend_threads()
    names = list(registry.schemas())
    alive = reference.define("apex", implementation, names)
    for name in functional.KERNELS:
        if name not in reference.own_shapes(registry.schemas()[name].unit):
            # The reference looks at no element of them.
            alive.impl(name, reference.of_shapes("apex", name, reference.target(name)), "Meta")
    reference.record("apex", alive, names)
    return make(), alive
