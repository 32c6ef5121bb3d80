"""What amp.initialize does once its options are known: first every check, then every change."""

import torch
from torch.utils.weak import WeakIdKeyDictionary

from apex.amp import _combined, _convert, amp
from apex.amp._amp_state import _amp_state, warn_or_err
from apex.amp._convert import HALVES, O2StateDictHook, applier, to_type  # noqa: F401  public apex has them here
from apex.amp._errors import AmpTypeError, AmpUsageError, AmpValueError, warn
from apex.amp._policies.gradients import FULL, holds_no_gradient
from apex.amp._process_optimizer import _process_optimizer
from apex.amp.scaler import LossScaler

# Models that went through; a model may go through again only in another process.
_seen = WeakIdKeyDictionary()


def _initialize(
    models, optimizers, properties, num_losses=1, cast_model_outputs=None, scaling=None, verbosity=1
):
    """Checks, then casts models, fits optimizers, makes loss scalers and patches functions.

    Returns models and optimizers in the form that they were given in. For its arguments see amp.initialize;
    scaling: keywords of LossScaler.
    """
    models_given, optimizers_given = models, optimizers
    models = _as_models(models)
    optimizers = _as_optimizers(optimizers)
    if not isinstance(num_losses, int) or num_losses < 1:
        raise AmpValueError(f"num_losses must be a whole number from 1 on, not {num_losses!r}")
    check_models(models)
    if properties.cast_model_type:
        _check_castable(models, properties)
    _check_new(models, optimizers)
    if not _amp_state.allow_incoming_model_not_fp32:
        check_params_fp32(models)
    _check_belong(models, optimizers)
    _check_parameters(optimizers, properties)
    if properties.master_weights:
        _check_own_masters(optimizers)
    _combined.check(optimizers, properties)

    _amp_state.verbosity = verbosity
    _combined.prepare(models, optimizers, properties)
    _amp_state.cast_devices = _device_types(models)
    originals = _originals(models, optimizers, properties)
    _cast_models(models, properties, cast_model_outputs)
    for optimizer in optimizers:
        _process_optimizer(optimizer, properties, originals)
    for model in models:
        _seen[_convert.innermost(model)] = True

    scaling = scaling or {}
    _amp_state.loss_scalers = [LossScaler(properties.loss_scale, **scaling) for _ in range(num_losses)]
    _amp_state.min_loss_scale = scaling.get("min_loss_scale")
    _amp_state.max_loss_scale = scaling.get("max_loss_scale", 2.0**24)
    _patch(properties, verbosity)
    _amp_state.opt_properties = properties

    models = models if isinstance(models_given, list) else models[0]
    if optimizers_given is None:
        return models
    return models, optimizers if isinstance(optimizers_given, list) else optimizers[0]


def disable(properties, verbosity):
    """What amp.initialize(enabled=False) does: nothing of amp's is in force, of an earlier call neither."""
    before = getattr(_amp_state, "opt_properties", None)
    if before is not None and before.enabled:
        warn(
            "amp.initialize(enabled=False) after a call that enabled amp: its patches are taken back, and its "
            "losses are scaled no more"
        )
    amp.unpatch()
    _amp_state.verbosity, _amp_state.opt_properties = verbosity, properties
    _amp_state.loss_scalers = []


def _as_models(models):
    found = models if isinstance(models, list) else [models]
    for model in found:
        if not isinstance(model, torch.nn.Module):
            raise AmpTypeError(
                "models is neither a module nor a list of modules",
                found=type(model if isinstance(models, list) else models).__name__,
                remedy="[model1, model2], optimizer = amp.initialize([model1, model2], optimizer, ...)",
            )
    return found


def _is_optimizer(optimizer):
    """torch's and ours; and LARC, which holds one."""
    return isinstance(optimizer, torch.optim.Optimizer) or isinstance(
        getattr(optimizer, "optim", None), torch.optim.Optimizer
    )


def _as_optimizers(optimizers):
    if optimizers is None:
        return []
    found = optimizers if isinstance(optimizers, list) else [optimizers]
    check_optimizers(found)
    for optimizer in found:
        if not _is_optimizer(optimizer):
            raise AmpTypeError(
                "optimizers is neither an optimizer nor a list of optimizers",
                found=type(optimizer if isinstance(optimizers, list) else optimizers).__name__,
                remedy="model, [first, second] = amp.initialize(model, [first, second], ...)",
            )
    return found


# ---- checks ----------------------------------------------------------------------------------------------


def check_models(models):
    """Raises AmpUsageError for models that are wrapped for data parallelism."""
    for model in models:
        for kind in type(_convert.innermost(model)).__mro__:
            if kind.__name__ in ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel"):
                raise AmpUsageError(
                    f"a model is wrapped in {kind.__module__}.{kind.__name__} already",
                    remedy="model, optimizer = amp.initialize(model, optimizer, ...); "
                    f"model = {kind.__name__}(model)",
                )


def _check_castable(models, properties):
    """TorchScript takes no hooks of state dicts, and calls the forward that it compiled."""
    for model in models:
        for name, module in model.named_modules():
            if isinstance(module, torch.jit.ScriptModule):
                raise AmpUsageError(
                    f"{properties.opt_level} casts the model, and cannot cast TorchScript: "
                    f"{name or 'the model itself'}",
                    remedy='opt_level="O1" or "O4", which leave weights float32; or torch.compile in its place',
                )


def check_optimizers(optimizers):
    """Raises AmpUsageError for optimizers that keep master weights in a wrapper, or gradients to themselves."""
    for optimizer in optimizers:
        if getattr(optimizer, "_custom_amp_unscale_grads", False):
            raise AmpUsageError(
                f"{type(optimizer).__name__} takes gradients away before amp could unscale them, and keeps master "
                "weights itself",
                remedy="scaler = torch.amp.GradScaler(); scaler.scale(loss).backward(); scaler.step(optimizer); "
                "scaler.update(), with the model in half precision or under torch.autocast",
            )
        if type(optimizer).__name__ in ("FP16_Optimizer", "OptimWrapper"):
            raise AmpUsageError(
                f"an optimizer is wrapped in {type(optimizer).__name__} already",
                remedy="pass the bare one: amp.initialize(model, torch.optim.SGD(...), ...)",
            )


def check_params_fp32(models):
    """Refuses models that hold half precision: no level wants model.half() before it."""
    for model in models:
        for what, tensors in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
            for name, tensor in tensors:
                if tensor.dtype in HALVES:
                    warn_or_err(
                        f"{what} {name} of a model is {tensor.dtype} before amp.initialize",
                        remedy="leave out model.half() and model.bfloat16(); the opt_level casts the model",
                    )


def _check_new(models, optimizers):
    again = [m for m in models if _seen.get(_convert.innermost(m))]
    what = "model" if again else "optimizer"
    if again or any(hasattr(o, "_amp_stash") for o in optimizers):
        raise AmpUsageError(
            f"a {what} went through amp.initialize before",
            remedy="call it once, for all: models, optimizers = amp.initialize(models, optimizers, ...); "
            "a new run in this process needs a new model and a new optimizer",
        )
    for objects, kind in ((models, "model"), (optimizers, "optimizer")):
        if len({id(o) for o in objects}) < len(objects):
            raise AmpUsageError(f"one {kind} is in the list twice", remedy=f"list each {kind} once")
    if getattr(_amp_state, "opt_properties", None) is not None:
        warn(
            "amp.initialize is called again: its loss scalers and patches replace those of the call before, "
            "for the optimizers of that call too"
        )


def _check_belong(models, optimizers):
    """An optimizer over other tensors than the models' trains nothing: the usual cause is a model that was
    replaced after the optimizer was made."""
    known = {id(p) for model in models for p in model.parameters()}
    held = [{id(p) for group in o.param_groups for p in group["params"]} for o in optimizers]
    foreign = [i for i, ids in enumerate(held) if ids and known and not ids & known]
    if not foreign:
        return
    remedy = "make it last: optimizer = torch.optim.SGD(model.parameters(), lr=0.1)"
    if len(foreign) == len(optimizers):
        raise AmpUsageError(
            "no optimizer holds a parameter of the models: none of them is trained", remedy=remedy
        )
    warn(f"optimizer {foreign[0]} holds no parameter of the models; if it is to train them, {remedy}")


def _check_parameters(optimizers, properties):
    """Refuses parameters that amp cannot unscale, or cannot copy yet."""
    for optimizer in optimizers:
        for param in (p for group in optimizer.param_groups for p in group["params"]):
            if not torch.nn.parameter.is_lazy(param):
                holds_no_gradient(param)
            elif properties.master_weights:
                raise AmpUsageError(
                    f"a parameter of {type(optimizer).__name__} has no shape yet, and so can have no master weight",
                    remedy="run the model once, model(inputs), before amp.initialize",
                )


def _check_own_masters(optimizers):
    for optimizer in optimizers:
        if getattr(optimizer, "master_weights", False) is True:
            raise AmpUsageError(
                f"{type(optimizer).__name__}(master_weights=True) keeps master weights, and so would amp",
                remedy="leave master_weights=True out of the optimizer",
            )


def _device_types(models):
    types = {p.device.type for model in models for p in model.parameters()}
    return frozenset(types) or None


# ---- changes ---------------------------------------------------------------------------------------------


def _originals(models, optimizers, properties):
    """Parameter -> its data in float32, for those that are to have master weights."""
    originals = WeakIdKeyDictionary()
    if properties.master_weights:
        held = {id(p) for o in optimizers for group in o.param_groups for p in group["params"]}
        for p in (p for model in models for p in model.parameters()):
            if id(p) in held and p.dtype in FULL:
                originals[p] = p.data.float()
    return originals


def _cast_models(models, properties, cast_model_outputs):
    dtype = properties.cast_model_type
    if not dtype:
        for model in models:
            if cast_model_outputs is not None:
                _convert.patch_forward(model, None, cast_model_outputs)
        return
    for model in models:
        _convert.convert_model(model, dtype, bool(properties.keep_batchnorm_fp32))
        _convert.patch_forward(model, dtype, cast_model_outputs or torch.float32)
        _convert.keep_state_dicts_in_float32(model)


def _patch(properties, verbosity):
    amp.unpatch()
    if properties.patch_torch_functions:
        half = properties.cast_model_type if properties.cast_model_type in HALVES else torch.float16
        amp.init(
            loss_scale=properties.loss_scale,
            patch_type=properties.patch_torch_functions_type or half,
            verbose=verbosity >= 2,
            user_cast_preferred=bool(properties.user_cast_preferred),
        )
