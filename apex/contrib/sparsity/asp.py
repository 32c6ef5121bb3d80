"""ASP: prunes a model's weights to 2:4 patterns and keeps them so under any optimizer."""

from __future__ import annotations

import dataclasses
import functools
import os
import time
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from apex import parallel
from apex.contrib.sparsity import _checks
from apex.contrib.sparsity._masters import masters_of, pairs_of
from apex.contrib.sparsity.permutation_lib import Permutation
from apex.contrib.sparsity.sparse_masklib import create_mask

_PRUNED_PARAMETERS: dict[type, list[str]] = {
    nn.Linear: ["weight"],
    nn.Conv1d: ["weight"],
    nn.Conv2d: ["weight"],
    nn.Conv3d: ["weight"],
    nn.modules.linear.NonDynamicallyQuantizableLinear: ["weight"],
    nn.MultiheadAttention: ["q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_weight"],
}
_WHITELIST = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.MultiheadAttention)


def eligible_modules(
    model: nn.Module,
    whitelist_layer_types: type | tuple[type, ...],
    allowed_layer_names: Iterable[str] | None,
    disallowed_layer_names: Iterable[str],
) -> list[tuple[str, nn.Module]]:
    """(name, module) of the model's modules of these types; of the allowed names alone unless they are None, and of
    none of the disallowed ones."""
    allowed = None if allowed_layer_names is None else set(allowed_layer_names)
    disallowed = set(disallowed_layer_names)
    return [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, whitelist_layer_types)
        and name not in disallowed
        and (allowed is None or name in allowed)
    ]


@dataclasses.dataclass(frozen=True)
class _SparseParameter:
    """A parameter that is pruned. Mask and pruned values are buffers of its module, looked up anew each time, since
    moving a module replaces them."""

    module_name: str
    module: nn.Module
    name: str
    keeps_pruned: bool

    def _buffer(self, kind):
        return self.module.get_buffer(f"__{self.name.split('.')[-1]}_mma_{kind}")

    @property
    def param(self):
        return self.module.get_parameter(self.name)

    @property
    def mask(self):
        return self._buffer("mask")

    @property
    def pruned(self):
        return self._buffer("pruned_p") if self.keeps_pruned else None

    @property
    def is_sparse(self):
        return not bool(self.mask.all())

    def register(self):
        param, short = self.param, self.name.split(".")[-1]
        with torch.inference_mode(False):  # where buffers could not be changed later
            mask = torch.ones_like(param, dtype=torch.bool, requires_grad=False)
            self.module.register_buffer(f"__{short}_mma_mask", mask)
            if self.keeps_pruned:
                pruned = torch.zeros_like(param, device="cpu", requires_grad=False)
                self.module.register_buffer(f"__{short}_mma_pruned_p", pruned)

    def unregister(self):
        for kind in ("mask", "pruned_p"):
            self.module._buffers.pop(f"__{self.name.split('.')[-1]}_mma_{kind}", None)

    def check_restorable(self):
        """Raises RuntimeError where the weight is pruned, and its pruned values were not kept."""
        if self.pruned is None and self.is_sparse:
            raise RuntimeError(
                f"ASP cannot restore the dense {self.module_name}.{self.name}, whose pruned values were not kept: call "
                "init_model_for_pruning(..., allow_recompute_mask=True)"
            )

    def restore(self, optimizer):
        """Puts the pruned values back, into master weights too."""
        for tensor in (self.param, *masters_of(optimizer, self.param)):
            tensor.add_(self.pruned.to(tensor))
        self.mask.fill_(True)
        self.pruned.zero_()

    def prune(self, optimizer, mask, pruned=None):
        """Takes a mask, and puts zeros where it is zero. pruned: what to keep of the weight, else what is there."""
        self.mask.copy_(mask)
        if self.pruned is not None:
            self.pruned.copy_(self.param.masked_fill(mask, 0) if pruned is None else pruned)
        for tensor in (self.param, *masters_of(optimizer, self.param)):
            _zero(tensor, mask)

    @property
    def full_name(self):
        return f"{self.module_name}.{self.name}".lstrip(".")

    def described(self):
        return f"{self.module_name}::{self.name} of size={self.param.shape} and type={self.param.dtype}"


@dataclasses.dataclass
class _State:
    model: nn.Module | None = None
    optimizer: Any = None
    verbosity: int = 0
    calculate_mask: Callable[[torch.Tensor], torch.Tensor] | None = None
    allow_permutation: bool = True
    save_permutation_graph: bool = False
    permutation_output_dir: str = "."
    parameters: list[_SparseParameter] = dataclasses.field(default_factory=list)

    def tell(self, level, text):
        if self.verbosity >= level:
            print(f"[ASP] {text}")


def _fits_sparse_kernels(param):
    """Whether tensor cores take the weight [K, C, ...] in 2:4 form."""
    dense = param.layout == torch.strided and param.dim() >= 2
    return dense and param.shape[0] % 8 == 0 and param.shape[1] % 16 == 0


def _tensors_with_masks(optimizer, parameters):
    """(tensor, its mask) of every parameter and its master weights."""
    pairs = pairs_of(optimizer)
    for sparse in parameters:
        param, mask = sparse.param, sparse.mask
        for tensor in (param, *masters_of(optimizer, param, pairs)):
            yield tensor, mask


def _zero(tensor, mask):
    """Puts zeros where the mask is zero. A product would leave infinities and NaN there."""
    tensor.masked_fill_(~mask.to(tensor.device), 0)


@torch.no_grad()
def _mask_gradients(optimizer, parameters):
    for tensor, mask in _tensors_with_masks(optimizer, parameters):
        if tensor.grad is not None:
            _zero(tensor.grad, mask)


@torch.no_grad()
def _mask_weights(optimizer, parameters):
    for tensor, mask in _tensors_with_masks(optimizer, parameters):
        _zero(tensor, mask)


def _masked_step(step, parameters, optimizer, closure=None, *args, **kwargs):
    """The optimizer's own step between masked gradients and masked weights."""

    @functools.wraps(closure if callable(closure) else _masked_step)
    def masked_closure():
        loss = closure()
        _mask_gradients(optimizer, parameters)
        return loss

    _mask_gradients(optimizer, parameters)
    given = masked_closure if callable(closure) else closure
    returned = step(**kwargs) if given is None and not args else step(given, *args, **kwargs)
    _mask_weights(optimizer, parameters)
    return returned


class ASP:
    """Automatic sparsity of one model and one optimizer of the process.

    A trained model is pruned by ``ASP.prune_trained_model(model, optimizer)`` and trained on with the same
    hyperparameters. With more control: ``init_model_for_pruning``, ``init_optimizer_for_pruning``,
    ``compute_sparse_masks``. To go on from a checkpoint, the first two come before ``load_state_dict``, and the masks
    come with it: they are buffers of the modules (``__weight_mma_mask``, bool).
    """

    _state = _State()

    @classmethod
    def init_model_for_pruning(
        cls,
        model: nn.Module,
        mask_calculator: str | Callable[[torch.Tensor], torch.Tensor] = "m4n2_1d",
        verbosity: int = 3,
        whitelist: Sequence[type] = _WHITELIST,
        allowed_layer_names: Iterable[str] | None = None,
        disallowed_layer_names: Iterable[str] = (),
        allow_recompute_mask: bool = False,
        custom_layer_dict: dict[type, list[str]] | None = None,
        allow_permutation: bool = True,
    ) -> None:
        """Chooses the parameters to prune, and gives their modules buffers for masks. Nothing is pruned yet.

        Weights [K, C, ...] whose K is no multiple of 8 or whose C is none of 16 are left out.

        Args:
            model: of any device; DistributedDataParallel around it may come before or after.
            mask_calculator: a pattern of ``create_mask``, or a function from a parameter to its mask, zeros and ones of
                its shape.
            verbosity: what is printed: 2, every weight that is pruned; 3, every one that is looked at, too.
            whitelist: types of layers to prune; others are named in custom_layer_dict.
            allowed_layer_names, disallowed_layer_names: names of ``model.named_modules()``.
            allow_recompute_mask: keep pruned values (buffers ``__weight_mma_pruned_p``, made on the CPU), so that
                ``restore_pruned_weights`` and new masks are possible.
            custom_layer_dict: {type of layer: names of its parameters to prune}.
            allow_permutation: let ``compute_sparse_masks`` reorder channels first, so that more magnitude is kept,
                unless ``set_permutation_saving_params`` forbade it.

        Raises RuntimeError if there is a model already, TypeError for what is no model, type, list of names or mask
        function and for a type that ASP knows no parameters of, and ValueError for an unknown pattern or names that the
        model does not have. Nothing has changed then.
        """
        _checks.check_model(model)
        if cls._state.model is not None:
            raise RuntimeError(
                "ASP has been initialized already; ASP.reset() forgets its model and optimizer"
            )
        custom = custom_layer_dict or {}
        known = {**_PRUNED_PARAMETERS, **custom}
        types_ = _checks.check_types(whitelist, custom, known)
        allowed = _checks.set_of_names("allowed_layer_names", allowed_layer_names, model)
        disallowed = _checks.set_of_names("disallowed_layer_names", disallowed_layer_names, model) or set()
        _checks.check_custom(custom, list(model.modules()))
        before = cls._state
        state = _State(model, None, verbosity, _mask_function(mask_calculator))
        state.allow_permutation = allow_permutation and before.allow_permutation
        state.save_permutation_graph = before.save_permutation_graph
        state.permutation_output_dir = before.permutation_output_dir
        for name, module in eligible_modules(model, types_, allowed, disallowed):
            names = next(known[base] for base in type(module).__mro__ if base in known)
            _choose_parameters(state, name, module, names, allow_recompute_mask)
        for sparse in state.parameters:
            sparse.register()
        cls._state = state

    @classmethod
    def already_init_asp_model(cls) -> bool:
        """Whether init_model_for_pruning was called."""
        there = cls._state.model is not None
        cls._state.tell(3, f"ASP has {'' if there else 'not '}been initialized{' already' if there else ''}.")
        return there

    @classmethod
    def init_optimizer_for_pruning(cls, optimizer: Any) -> None:
        """Makes ``optimizer.step()`` mask gradients before it and weights after it, those of master weights too.

        To be called after init_model_for_pruning and, with apex.amp, after ``amp.initialize``. Raises RuntimeError
        if it is not, or if there is an optimizer already, and TypeError for what has no ``step``.
        """
        state = cls._state
        if state.optimizer is not None:
            raise RuntimeError("ASP has initialized an optimizer already; ASP.reset() forgets it")
        if state.model is None:
            raise RuntimeError("ASP.init_model_for_pruning comes before ASP.init_optimizer_for_pruning")
        _checks.check_optimizer(optimizer)
        own_step, parameters = optimizer.step, state.parameters

        @functools.wraps(own_step)
        def step(self, *args, **kwargs):
            return _masked_step(own_step, parameters, self, *args, **kwargs)

        optimizer.step = types.MethodType(step, optimizer)
        state.optimizer = optimizer

    @classmethod
    @torch.no_grad()
    def compute_sparse_masks(cls) -> None:
        """Prunes: reorders channels if that is allowed, computes the masks, and puts zeros where they are zero.

        Weights that are pruned already are restored before. Raises RuntimeError where that needs
        allow_recompute_mask, or before init_model_for_pruning; TypeError, ValueError for weights that cannot be pruned
        and for masks that are none; FileNotFoundError where the graph is to be saved in no directory. After an error
        model and optimizer are as they were.
        """
        state = cls._state
        if state.calculate_mask is None:
            raise RuntimeError("ASP.init_model_for_pruning comes before ASP.compute_sparse_masks")
        cls._check()
        before = [
            (s, s.mask.clone(), s.pruned if s.pruned is None else s.pruned.clone())
            for s in state.parameters
            if s.is_sparse
        ]
        permutes = False
        try:
            for sparse, _, _ in before:
                sparse.restore(state.optimizer)
            permutes = state.allow_permutation
            told = cls._permute() if state.allow_permutation else []
            masks = [
                _checks.checked_mask(s.full_name, s.param, state.calculate_mask(s.param))
                for s in state.parameters
            ]
        except BaseException:
            if permutes:
                Permutation.undo_offline_permutation()
            for sparse, mask, pruned in before:
                sparse.prune(state.optimizer, mask, pruned)
            raise
        for sparse, mask in zip(state.parameters, masks, strict=True):
            sparse.prune(state.optimizer, mask)
        for line in (*told, *map(_enabled, state.parameters)):  # all is done when stdout may fail
            state.tell(2, line)

    @classmethod
    def _check(cls):
        """Raises what compute_sparse_masks says before it changes anything."""
        state = cls._state
        for sparse in state.parameters:
            _checks.check_weight(sparse.full_name, sparse.param)
            sparse.check_restorable()
        saves = state.allow_permutation and state.save_permutation_graph
        if saves and not os.path.isdir(state.permutation_output_dir):
            raise FileNotFoundError(
                f"the permutation graph cannot be saved: there is no directory {state.permutation_output_dir!r}; "
                "make it, or name another in ASP.set_permutation_saving_params"
            )

    @classmethod
    def _permute(cls):
        """Reorders channels; what to tell of it."""
        state = cls._state
        model = _unwrapped(state.model)
        tuples = [(s.module_name, s.module, s.name, s.param, s.mask, s.pruned) for s in state.parameters]
        named = [
            (name, m, n, p) for name, m in model.named_modules() for n, p in m.named_parameters(recurse=False)
        ]
        Permutation.set_permutation_params_from_asp(
            model, tuples, named, state.verbosity, optimizer=state.optimizer
        )
        saved = os.path.join(state.permutation_output_dir, "model_offline_permutation_graph.json")
        began = time.perf_counter()
        done = Permutation.permute_model(model, state.save_permutation_graph, saved)
        return [f"found and applied permutations in {time.perf_counter() - began:.4f} s"] if done else []

    @classmethod
    @torch.no_grad()
    def restore_pruned_weights(cls) -> None:
        """Makes all weights dense again; masters get the values that the model's dtype has of them. Raises RuntimeError
        without allow_recompute_mask, before anything changes."""
        sparse_ones = [sparse for sparse in cls._state.parameters if sparse.is_sparse]
        for sparse in sparse_ones:
            sparse.check_restorable()
        for sparse in sparse_ones:
            sparse.restore(cls._state.optimizer)
        for sparse in sparse_ones:
            cls._state.tell(
                2, f"Disabled sparsity for {sparse.module_name}::{sparse.name} (dense weights restored)"
            )

    @classmethod
    def is_sparsity_enabled(cls) -> bool:
        """Whether every mask keeps half (or less, as greedy ones may); False if all keep everything, as before
        ``compute_sparse_masks``. Raises RuntimeError where masks are of both kinds or of another."""
        kept = {(s.mask.sum().item(), s.mask.numel()) for s in cls._state.parameters}
        if all(count == size for count, size in kept):
            return False
        if all(2 * count <= size for count, size in kept):
            return True
        raise RuntimeError(
            "the model's sparsity is inconsistent: masks do neither all keep half nor all keep all"
        )

    @classmethod
    def prune_trained_model(cls, model: nn.Module, optimizer: Any) -> None:
        """Prunes a trained model's Linear, Conv2d and MultiheadAttention weights to 2:4, and keeps them so under
        `optimizer`: the three calls above in one. Raises what they raise; all is as before then."""
        _checks.check_optimizer(optimizer)
        layers = (nn.Linear, nn.Conv2d, nn.MultiheadAttention)
        cls.init_model_for_pruning(model, "m4n2_1d", verbosity=2, whitelist=layers)
        own = getattr(optimizer, "__dict__", {}).get("step")
        try:
            cls.init_optimizer_for_pruning(optimizer)
            cls.compute_sparse_masks()
        except BaseException:
            cls._forget(optimizer, own)
            raise

    @classmethod
    def _forget(cls, optimizer, own_step):
        """Takes back the init calls of before a failed compute_sparse_masks."""
        if any(sparse.is_sparse for sparse in cls._state.parameters):
            return  # all is pruned, and only telling of it failed
        for sparse in cls._state.parameters:
            sparse.unregister()
        optimizer.__dict__.pop("step", None)
        if own_step is not None:
            optimizer.step = own_step
        before, cls._state = cls._state, _State()
        cls._state.allow_permutation = before.allow_permutation
        cls._state.save_permutation_graph = before.save_permutation_graph
        cls._state.permutation_output_dir = before.permutation_output_dir

    @classmethod
    def set_permutation_saving_params(
        cls,
        allow_permutation: bool = True,
        save_permutation_graph: bool = False,
        permutation_output_dir: str = ".",
    ) -> None:
        """Whether channels are reordered, and whether and where the model's graph is saved as JSON then, until
        ``reset``. Before init_model_for_pruning as well, whose allow_permutation has to allow it too."""
        cls._state.allow_permutation = allow_permutation
        cls._state.save_permutation_graph = save_permutation_graph
        cls._state.permutation_output_dir = permutation_output_dir
        Permutation.set_permutation_saving_params(
            allow_permutation, save_permutation_graph, permutation_output_dir
        )

    @classmethod
    def reset(cls) -> None:
        """Forgets the model, the optimizer, whose ``step`` masks nothing any more, and what
        ``set_permutation_saving_params`` said. Masks stay buffers of the model."""
        cls._state.parameters.clear()
        cls._state = _State()
        Permutation.set_permutation_saving_params()


def _enabled(sparse):
    """What is told of a pruned weight."""
    dropped = 100 - 100 * sparse.mask.double().mean().item()
    magnitude = sparse.param.abs().sum(dtype=torch.float64).item()
    return f"Enabled {dropped:.2f}% sparsity for {sparse.described()} with magnitude {magnitude:.6g}"


def _unwrapped(model):
    """The model inside of DistributedDataParallel and its kin. Other modules may have an attribute of that name."""
    wrappers = nn.DataParallel, nn.parallel.DistributedDataParallel, parallel.DistributedDataParallel
    while isinstance(model, wrappers):
        model = model.module
    return model


def _mask_function(mask_calculator):
    if callable(mask_calculator):
        return mask_calculator
    if not isinstance(mask_calculator, str):
        raise TypeError(
            f"mask_calculator is a pattern's name or a function from a weight to its mask, not {mask_calculator!r}"
        )
    create_mask(
        torch.ones(4, dtype=torch.float32, device="cpu"), mask_calculator
    )  # raises for an unknown pattern
    return lambda param: create_mask(param, mask_calculator).bool()


def _choose_parameters(state, module_name, module, names, keeps_pruned):
    for name, param in module.named_parameters():
        sparse = _SparseParameter(module_name, module, name, keeps_pruned)
        if name not in names or not param.requires_grad:
            state.tell(3, f"Not sparsifying {sparse.described()}")
        elif not _fits_sparse_kernels(param):
            state.tell(1, f"Auto skipping pruning {sparse.described()} for sparsity")
        else:
            state.tell(3, f"Sparsifying {sparse.described()} for sparsity")
            state.parameters.append(sparse)
