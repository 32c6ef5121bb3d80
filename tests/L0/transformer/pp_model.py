"""A small GPT in as many parts as a split has, and a step of it at any split, against other splits and float64."""

from __future__ import annotations

import contextlib
import warnings

import torch
import torch.distributed as dist
from torch import nn
from tp_common import split, words
from tp_model import HIDDEN, SEQUENCE, WORDS, Block, _whole

from apex.transformer import parallel_state, tensor_parallel
from apex.transformer.pipeline_parallel import build_model, get_forward_backward_func, utils
from apex.transformer.tensor_parallel import mappings

BLOCKS, SAMPLES, MICRO = 8, 16, 2


def draw(seed, make):
    """A module whose weights follow from the seed alone, wherever it lies."""
    torch.manual_seed(seed)
    return make()


class Part(nn.Module):
    """Some of the blocks; the first part has word embeddings, the last one the loss's."""

    def __init__(self, dtype, sequence, checkpointed, *, pre_process, post_process):
        super().__init__()
        self.sequence, self.checkpointed, self.input = sequence, checkpointed, None
        self.post_process = post_process
        embedding = dict(params_dtype=dtype)
        if pre_process:
            self.first = draw(1, lambda: tensor_parallel.VocabParallelEmbedding(WORDS, HIDDEN, **embedding))
        names = [f"block{i}" for i in blocks_of_part()]
        self.blocks = nn.ModuleDict(
            {name: draw(100 + int(name[5:]), lambda: Block(dtype, sequence)) for name in names}
        )
        if post_process:
            self.last = draw(2, lambda: tensor_parallel.VocabParallelEmbedding(WORDS, HIDDEN, **embedding))

    def set_input_tensor(self, tensors):
        (self.input,) = tensors

    def forward(self, text):
        """[sequence, batch] -> [sequence / ranks, batch, hidden], or the loss of each word."""
        x = self.input
        if x is None:
            x = self.first(text)
            x = mappings.scatter_to_sequence_parallel_region(x) if self.sequence else x
        for block in self.blocks.values():
            x = tensor_parallel.checkpoint(block, False, x) if self.checkpointed else block(x)
        if not self.post_process:
            return x
        if self.sequence:
            x = mappings.gather_from_sequence_parallel_region(x)
        else:
            x = mappings.copy_to_tensor_model_parallel_region(x)
        return tensor_parallel.vocab_parallel_cross_entropy((x @ self.last.weight.t())[:-1], text[1:])


def blocks_of_part():
    """Numbers of the blocks of the part that build_model asks for."""
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    chunks = parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1
    chunk = parallel_state.get_virtual_pipeline_model_parallel_rank() or 0
    size = BLOCKS // (stages * chunks)
    first = (chunk * stages + parallel_state.get_pipeline_model_parallel_rank()) * size
    return range(first, first + size)


def forward_step(batch, model, checkpointed=None):
    output = model(batch[0].t())

    def loss_of(output):
        loss = output.mean()
        return loss, loss.detach()

    return output, loss_of


def batch_of(data_rank, data_size):
    """Words of this rank's samples: [samples, sequence]."""
    samples = SAMPLES // data_size
    text = words(WORDS, (SAMPLES, SEQUENCE), 1)
    return [text[data_rank * samples : (data_rank + 1) * samples]]


@contextlib.contextmanager
def pipeline(tensor, stages, chunks=1, micro=MICRO, samples=SAMPLES, **options):
    """Groups, and microbatches, within."""
    with split(tensor, stages, chunks if chunks > 1 else None, **options):
        utils._reconfigure_microbatch_calculator(
            0, None, samples, micro, parallel_state.get_data_parallel_world_size()
        )
        yield


def make(dtype, sequence=False, checkpointed=False, wrap=None):
    chunks = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    wrap = parallel_state.get_data_parallel_world_size() > 1 if wrap is None else wrap
    return build_model(Part, wrap, chunks, dtype=dtype, sequence=sequence, checkpointed=checkpointed)


def step(models, dtype, **options):
    """The schedule of the split over one batch: the losses, on every rank of the pipeline."""
    chunks = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    run = get_forward_backward_func(chunks, parallel_state.get_pipeline_model_parallel_world_size())
    data = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    options = dict(
        dict(forward_only=False, tensor_shape=(SEQUENCE, MICRO, HIDDEN), dtype=dtype, disable_autocast=True)
        | options
    )
    options.setdefault("batch", batch_of(*data))
    return run(forward_step, model=models, **options)


def losses_of(found):
    """Those of all microbatches, on every rank: the last stage has them, the data parallel ranks a part each."""
    everyone = [None] * dist.get_world_size()
    place = parallel_state.get_data_parallel_rank(), [loss.double().item() for loss in found]
    dist.all_gather_object(everyone, place)
    by_rank = {rank: losses for rank, losses in everyone if losses}
    for rank, losses in everyone:
        assert not losses or losses == by_rank[rank]
    found = [loss for rank in sorted(by_rank) for loss in by_rank[rank]]
    return torch.tensor(found, dtype=torch.float64, device="cpu")


def grads_of(models):
    """Gradients of the whole model by name, on every rank, on the CPU."""
    mine = {}
    for model in utils.unwrap_model(models):
        for name, p in model.named_parameters():
            mine[name] = _whole(p, p.grad).cpu()
    group = parallel_state.get_pipeline_model_parallel_group()
    everyone = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    return {name: grad for part in everyone for name, grad in part.items()}


def run_split(dtype, sizes, sequence=False, checkpointed=False, **options):
    """(losses, gradients) of the whole model at a split: (tensor, pipeline, virtual)."""
    with pipeline(*sizes), warnings.catch_warnings():
        models = make(dtype, sequence, checkpointed)
        losses = losses_of(step(models, dtype, sequence_parallel_enabled=sequence, **options))
        return losses, grads_of(models)


def reference(dtype):
    """In float64, of the weights in `dtype`, all on each rank."""
    utils._reconfigure_microbatch_calculator(0, None, SAMPLES, MICRO, 1)
    with split(1):
        (model,) = make(dtype, wrap=False)
        (exact,) = make(torch.float64, wrap=False)
        exact.load_state_dict(model.state_dict())
        run = get_forward_backward_func(None, 1)
        losses = run(forward_step, batch_of(0, 1), exact, forward_only=False)
        return torch.stack(losses).cpu(), {name: p.grad.cpu() for name, p in exact.named_parameters()}
