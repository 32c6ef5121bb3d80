"""Random numbers of tensor parallel ranks, and activation checkpoints that repeat them.

They are those of the current GPU, or of the CPU where there is none.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from apex.transformer.parallel_state import get_tensor_model_parallel_rank
from apex.transformer.tensor_parallel.memory import MemoryBuffer, allocate_mem_buff
from apex.transformer.tensor_parallel.utils import refuse_create_graph
from apex.transformer.utils import divide, gather_split_1d_tensor, split_tensor_into_1d_equal_chunks

_MODEL_PARALLEL_RNG_TRACKER_NAME = "model-parallel-rng"
_OFFSET = 2718  # between the seed of what all ranks draw alike and those of each

_checkpointed_activations: MemoryBuffer | None = None


def _generator(device=-1):
    """The default generator of a GPU, -1: the current one; of the CPU where there is none."""
    if not torch.cuda.is_available():
        return torch.default_generator
    torch.cuda.init()
    index = device if isinstance(device, int) else torch.device(device).index
    if index is None or index == -1:
        index = torch.cuda.current_device()
    return torch.cuda.default_generators[index]


def _set_cuda_rng_state(new_state, device=-1):
    _generator(device).set_state(new_state)


class CudaRNGStatesTracker:
    """States of the random number generator by name: within `fork(name)` numbers are drawn from that one."""

    def __init__(self) -> None:
        self.states_: dict[str, torch.Tensor] = {}
        self.seeds_: set[int] = set()

    def reset(self) -> None:
        """Forgets all states."""
        self.states_, self.seeds_ = {}, set()

    def get_states(self) -> dict[str, torch.Tensor]:
        """The states by name, in a dict of their own."""
        return dict(self.states_)

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        """Puts others in their place, those of `get_states`."""
        self.states_ = dict(states)

    def add(self, name: str, seed: int) -> None:
        """Adds a state that begins with `seed`. Raises ValueError where the seed or the name is taken."""
        if seed in self.seeds_:
            raise ValueError(f"the seed {seed} is another state's already")
        if name in self.states_:
            raise ValueError(f"there is a state {name!r} already")
        generator = _generator()
        before = generator.get_state()
        try:
            generator.manual_seed(seed)
            self.states_[name] = generator.get_state()
        finally:
            generator.set_state(before)
        self.seeds_.add(seed)

    @contextlib.contextmanager
    def fork(self, name: str = _MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
        """Draws from the state of that name within; behind, all is as before. Raises KeyError where there is none."""
        if name not in self.states_:
            raise KeyError(
                f"there is no random state {name!r}: call model_parallel_cuda_manual_seed, or add it to the tracker"
            )
        generator = _generator()
        before = generator.get_state()
        generator.set_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = generator.get_state()
            generator.set_state(before)


_CUDA_RNG_STATE_TRACKER = CudaRNGStatesTracker()


def get_cuda_rng_tracker() -> CudaRNGStatesTracker:
    """The tracker of this process."""
    return _CUDA_RNG_STATE_TRACKER


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seeds what tensor parallel ranks draw alike, and what each draws for itself.

    The default generator begins with `seed`: the ranks of one tensor parallel group that pass the same one draw the
    same numbers, as dropout does outside of tensor parallel layers. Within get_cuda_rng_tracker().fork() each rank
    draws others, the same over data parallel groups, as dropout does inside of them.
    """
    _CUDA_RNG_STATE_TRACKER.reset()
    _generator().manual_seed(seed)
    _CUDA_RNG_STATE_TRACKER.add(
        _MODEL_PARALLEL_RNG_TRACKER_NAME, seed + _OFFSET + get_tensor_model_parallel_rank()
    )


def init_checkpointed_activations_memory_buffer(
    micro_batch_size: int,
    max_position_embeddings: int,
    hidden_size: int,
    num_layers: int,
    tensor_model_parallel_size: int,
    checkpoint_num_layers: int,
    fp16: bool,
) -> None:
    """Allocates the memory into which checkpoints with distribute_saved_activations put their inputs' parts.

    It has room for one checkpoint every `checkpoint_num_layers` layers, of float16, or float32 without `fp16`; it is to
    be reset before each pass. Raises RuntimeError where it is there already, ValueError for sizes that do not divide.
    """
    global _checkpointed_activations
    if _checkpointed_activations is not None:
        raise RuntimeError("the memory buffer of checkpointed activations is there already")
    of_layer = divide(micro_batch_size * max_position_embeddings * hidden_size, tensor_model_parallel_size)
    numel = of_layer * divide(num_layers, checkpoint_num_layers)
    dtype = torch.float16 if fp16 else torch.float32
    _checkpointed_activations = allocate_mem_buff("checkpointed activations", numel, dtype, False)


def reset_checkpointed_activations_memory_buffer() -> None:
    """Empties the memory of checkpointed activations, where there is any."""
    if _checkpointed_activations is not None:
        _checkpointed_activations.reset()


class _Random:
    """The random numbers of a moment."""

    def __init__(self):
        self._cpu, self._gpu = torch.get_rng_state(), _generator().get_state()
        self._tracked = get_cuda_rng_tracker().get_states()

    def restore(self):
        torch.set_rng_state(self._cpu)
        _generator().set_state(self._gpu)
        get_cuda_rng_tracker().set_states(self._tracked)


def _autocasts():
    """Contexts in which autocast is as it is now."""
    kinds = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    options = [
        dict(
            device_type=kind,
            enabled=torch.is_autocast_enabled(kind),
            dtype=torch.get_autocast_dtype(kind),
            cache_enabled=torch.is_autocast_cache_enabled(),
        )
        for kind in kinds
    ]

    @contextlib.contextmanager
    def enter():
        with contextlib.ExitStack() as stack:
            for option in options:
                stack.enter_context(torch.autocast(**option))
            yield

    return enter


class CheckpointFunction(torch.autograd.Function):
    """apply(run_function, distribute_saved_activations, *arguments): see `checkpoint`."""

    @staticmethod
    def forward(ctx, run_function, distribute_saved_activations, *args):
        ctx.run_function, ctx.random, ctx.autocast = run_function, _Random(), _autocasts()
        ctx.part = None
        if not any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args):
            warnings.warn(
                "checkpoint: no input requires a gradient, so that no parameter within gets one", stacklevel=2
            )
        with torch.no_grad():
            outputs = run_function(*args)
        kept = list(args)
        if distribute_saved_activations:
            ctx.shape, kept[0] = args[0].shape, None
            ctx.part = split_tensor_into_1d_equal_chunks(args[0].detach())
            if _checkpointed_activations is None:
                ctx.part = ctx.part.clone()
            else:
                ctx.part = _checkpointed_activations.add(ctx.part)
        ctx.places = [i for i, arg in enumerate(kept) if isinstance(arg, torch.Tensor)]
        ctx.others = [None if isinstance(arg, torch.Tensor) else arg for arg in kept]
        ctx.save_for_backward(*(kept[i] for i in ctx.places))
        return outputs

    @staticmethod
    def backward(ctx, *grads):
        refuse_create_graph("checkpoint")
        if not torch.autograd._is_checkpoint_valid():
            raise RuntimeError("checkpoint: torch.autograd.grad does not go through it; use backward()")
        inputs = list(ctx.others)
        for i, tensor in zip(ctx.places, ctx.saved_tensors, strict=True):
            inputs[i] = tensor
        if ctx.part is not None:
            inputs[0] = gather_split_1d_tensor(ctx.part).view(ctx.shape)
        wanted = ctx.needs_input_grad[2:]
        inputs = [
            value.detach().requires_grad_(want) if isinstance(value, torch.Tensor) else value
            for value, want in zip(inputs, wanted, strict=True)
        ]
        now = _Random()
        try:
            ctx.random.restore()
            with torch.enable_grad(), ctx.autocast():
                outputs = ctx.run_function(*inputs)
        finally:
            now.restore()
        outputs = (outputs,) if isinstance(outputs, torch.Tensor) else outputs
        pairs = [
            (output, grad)
            for output, grad in zip(outputs, grads, strict=True)
            if isinstance(output, torch.Tensor) and output.requires_grad and grad is not None
        ]
        if pairs:
            torch.autograd.backward(*map(list, zip(*pairs, strict=True)))
        found = (value.grad if isinstance(value, torch.Tensor) else None for value in inputs)
        return (None, None, *found)


def checkpoint(function: Callable[..., Any], distribute_saved_activations: bool, *args: Any) -> Any:
    """function(*args), which is run again in the backward pass, with the same random numbers and autocast.

    Args:
        function: takes tensors and anything else, and returns a tensor, or a tuple that may hold other things.
        distribute_saved_activations: each tensor parallel rank keeps a part of the first argument, which must be a
            tensor that all of them hold, in place of all of it.
        args: its arguments; one must require a gradient, or no parameter within gets one.

    Raises:
        ValueError: the first argument is to be distributed, and its elements cannot be divided by the ranks.
        RuntimeError: in the backward pass, under torch.autograd.grad.
    """
    return CheckpointFunction.apply(function, distribute_saved_activations, *args)
