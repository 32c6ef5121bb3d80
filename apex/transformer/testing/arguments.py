"""The arguments of standalone GPT and BERT models, from the command line: names and defaults of Megatron-LM's.

The world size and this process's rank are the environment's WORLD_SIZE and RANK, as torchrun sets them.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch

from apex.transformer.testing import _options

_REQUIRED = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "max_position_embeddings",
    "micro_batch_size",
)
_GONE = {
    "batch_size": "--batch-size is no longer valid: use --micro-batch-size",
    "warmup": "--warmup is no longer valid: use --lr-warmup-fraction",
    "model_parallel_size": "--model-parallel-size is no longer valid: use --tensor-model-parallel-size",
}


def parse_args(
    extra_args_provider: Callable[[argparse.ArgumentParser], argparse.ArgumentParser] | None = None,
    defaults: Mapping[str, Any] = {},
    ignore_unknown_args: bool = False,
) -> argparse.Namespace:
    """The arguments of this process's command line, checked, with what follows from them.

    Args:
        extra_args_provider: adds options of its own to the parser, and returns it.
        defaults: values of options that are None otherwise, by name.
        ignore_unknown_args: options that there are not are left out; False: the process ends.

    Returns:
        the options, and rank, world_size, data_parallel_size, transformer_pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size, params_dtype, consumed_train_samples, consumed_valid_samples. Rank 0
        prints them. Models also need padded_vocab_size and take model_type, which scripts set.

    Raises:
        ValueError: arguments that are missing or exclude each other, or sizes that do not divide.
    """
    parser = argparse.ArgumentParser(
        description="a transformer whose layers are split over ranks", allow_abbrev=False
    )
    _options.add_all(parser)
    if extra_args_provider is not None:
        parser = extra_args_provider(parser)
    args = parser.parse_known_args()[0] if ignore_unknown_args else parser.parse_args()
    args.rank, args.world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    _replace_old_options(args)
    for name, value in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
        else:
            _say(args, f"{name}: {getattr(args, name)} of the command line in place of the default {value}")
    for name in _REQUIRED:
        _require(getattr(args, name) is not None, f"--{name.replace('_', '-')} is required")
    for set_and_check in (_split, _batches, _precision, _schedule, _sizes, _checkpoints):
        set_and_check(args)
    _print(args)
    return args


def _require(condition, message):
    if not condition:
        raise ValueError(message)


def _divides(part, whole, what):
    _require(part > 0 and whole % part == 0, f"{what}: {whole} is not divisible by {part}")


def _say(args, text):
    if args.rank == 0:
        print(text, flush=True)


def _replace_old_options(args):
    for name, message in _GONE.items():
        _require(getattr(args, name) is None, message)
        delattr(args, name)
    if args.checkpoint_activations:
        args.recompute_granularity, args.recompute_method = "full", "uniform"
    if args.recompute_activations:
        args.recompute_granularity = "selective"
    del args.checkpoint_activations, args.recompute_activations


def _split(args):
    """Ranks of each kind."""
    tensor, pipeline = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    _require(tensor > 0 and pipeline > 0, "tensor and pipeline model parallel sizes must be positive")
    _divides(
        tensor * pipeline,
        args.world_size,
        f"the world size, by tensor size {tensor} x pipeline size {pipeline}",
    )
    args.data_parallel_size = args.world_size // (tensor * pipeline)
    args.transformer_pipeline_model_parallel_size = pipeline - bool(args.standalone_embedding_stage)
    _require(
        args.transformer_pipeline_model_parallel_size > 0,
        "--standalone-embedding-stage needs a pipeline of 2 stages or more",
    )
    split = args.pipeline_model_parallel_split_rank
    if pipeline > 1 and split is not None:
        _require(0 < split < pipeline, f"split rank {split} is no stage behind the first of {pipeline}")
    args.virtual_pipeline_model_parallel_size = None
    layers = args.num_layers_per_virtual_pipeline_stage
    if layers is not None:
        _require(pipeline > 1, "--num-layers-per-virtual-pipeline-stage needs a pipeline of 2 stages or more")
        stages = args.transformer_pipeline_model_parallel_size
        _divides(stages * layers, args.num_layers, f"layers, by {stages} stages x {layers} layers of a part")
        args.virtual_pipeline_model_parallel_size = args.num_layers // stages // layers


def _batches(args):
    _require(args.micro_batch_size > 0, "--micro-batch-size must be positive")
    if args.global_batch_size is None:
        args.global_batch_size = args.micro_batch_size * args.data_parallel_size
    _require(args.global_batch_size > 0, "--global-batch-size must be positive")
    args.dataloader_type = args.dataloader_type or "single"
    args.consumed_train_samples = args.consumed_valid_samples = 0


def _precision(args):
    _require(not (args.fp16 and args.bf16), "--fp16 and --bf16 exclude each other")
    args.params_dtype = torch.float16 if args.fp16 else torch.bfloat16 if args.bf16 else torch.float32
    args.accumulate_allreduce_grads_in_fp32 |= args.bf16
    if args.DDP_impl == "torch":
        args.use_contiguous_buffers_in_local_ddp = False
    if args.accumulate_allreduce_grads_in_fp32:
        _require(
            args.DDP_impl == "local" and args.use_contiguous_buffers_in_local_ddp,
            "gradients that are summed in float32 (--bf16, --accumulate-allreduce-grads-in-fp32) need --DDP-impl local "
            "with contiguous buffers",
        )
    else:
        args.gradient_accumulation_fusion = False
    _require(args.fp16 or not args.fp16_lm_cross_entropy, "--fp16-lm-cross-entropy needs --fp16")
    _require(
        args.fp16 or args.bf16 or not args.fp32_residual_connection,
        "--fp32-residual-connection needs --fp16 or --bf16",
    )


def _schedule(args):
    """Steps or samples; learning rate and weight decay."""
    _require(
        not (args.train_iters and args.train_samples), "--train-iters and --train-samples exclude each other"
    )
    for own, other, unset in (
        ("train_iters", "lr_decay_samples", None),
        ("train_iters", "lr_warmup_samples", 0),
        ("train_iters", "rampup_batch_size", None),
        ("train_samples", "lr_decay_iters", None),
        ("train_samples", "lr_warmup_iters", 0),
    ):
        allowed = not getattr(args, own) or getattr(args, other) == unset
        _require(allowed, f"--{own.replace('_', '-')} and --{other.replace('_', '-')} exclude each other")
    for own, other in (("train_iters", "lr_warmup_iters"), ("train_samples", "lr_warmup_samples")):
        both = getattr(args, own) and args.lr_warmup_fraction is not None and getattr(args, other)
        _require(not both, f"--lr-warmup-fraction and --{other.replace('_', '-')} exclude each other")
    _require(args.lr is None or args.min_lr <= args.lr, f"--min-lr {args.min_lr} is above --lr {args.lr}")
    _require(args.save is None or args.save_interval is not None, "--save needs --save-interval")
    ends = args.start_weight_decay, args.end_weight_decay
    if args.weight_decay_incr_style == "constant":
        _require(
            ends == (None, None), "a constant weight decay has no --start-weight-decay and --end-weight-decay"
        )
        args.start_weight_decay = args.end_weight_decay = args.weight_decay
    else:
        _require(
            None not in ends, "a weight decay that grows needs --start-weight-decay and --end-weight-decay"
        )


def _sizes(args):
    args.ffn_hidden_size = args.ffn_hidden_size or 4 * args.hidden_size
    if args.kv_channels is None:
        _divides(args.num_attention_heads, args.hidden_size, "--hidden-size, by --num-attention-heads")
        args.kv_channels = args.hidden_size // args.num_attention_heads
    given = [length for length in (args.seq_length, args.encoder_seq_length) if length is not None]
    _require(len(given) == 1, "one of --seq-length and --encoder-seq-length is required")
    args.seq_length = args.encoder_seq_length = given[0]
    longest = max(args.seq_length, args.decoder_seq_length or 0)
    _require(
        args.max_position_embeddings >= longest,
        f"--max-position-embeddings {args.max_position_embeddings} are fewer than a sequence's {longest} words",
    )
    if args.sequence_parallel:
        args.async_tensor_model_parallel_allreduce = False
        _divides(
            args.tensor_model_parallel_size,
            args.seq_length,
            "--seq-length with --sequence-parallel, by ranks",
        )


def _checkpoints(args):
    """Activation checkpoints."""
    if args.distribute_saved_activations:
        _require(
            args.tensor_model_parallel_size > 1, "--distribute-saved-activations needs tensor parallel ranks"
        )
        _require(
            args.recompute_granularity == "full" and args.recompute_method is not None,
            "--distribute-saved-activations needs --recompute-granularity full and a --recompute-method",
        )
    _require(
        args.recompute_granularity != "full" or args.recompute_method is not None,
        "--recompute-granularity full needs --recompute-method uniform or block",
    )
    _require(
        args.recompute_granularity != "selective" or args.recompute_method is None,
        "--recompute-method goes with --recompute-granularity full",
    )
    _require(args.recompute_num_layers > 0, "--recompute-num-layers must be positive")


def _print(args):
    width = max(map(len, vars(args))) + 2
    lines = (
        f"  {name:.<{width}} {value}"
        for name, value in sorted(vars(args).items(), key=lambda x: x[0].lower())
    )
    _say(args, "\n".join(["arguments:", *lines]))
