"""Arguments, timers and microbatches of apex.transformer.testing, without ranks."""

from __future__ import annotations

import sys

import pytest
import torch
from standalone_common import arguments

from apex.transformer.testing import global_vars
from apex.transformer.testing.arguments import parse_args

# Public apex's, of options whose default is neither None nor a switch that is off.
DEFAULTS = {
    **dict(make_vocab_size_divisible_by=128, layernorm_epsilon=1e-5, bert_binary_head=True, weight_decay=0.01),
    **dict(weight_decay_incr_style="constant", clip_grad=1.0, adam_beta1=0.9, adam_beta2=0.999, adam_eps=1e-8),
    **dict(sgd_momentum=0.9, recompute_num_layers=1, log_interval=100, masked_softmax_fusion=True),
    **dict(bias_gelu_fusion=True, bias_dropout_fusion=True, optimizer="adam", seed=1234, lr_decay_style="linear"),
    **dict(lr_warmup_iters=0, lr_warmup_samples=0, min_lr=0.0, initial_loss_scale=2.0**32, min_loss_scale=1.0),
    **dict(loss_scale_window=1000, hysteresis=2, apply_query_key_layer_scaling=True, distributed_backend="nccl"),
    **dict(DDP_impl="local", use_contiguous_buffers_in_local_ddp=True, scatter_gather_tensors_in_pipeline=True),
    **dict(empty_unused_memory_level=0, eval_iters=100, eval_interval=1000, split="969, 30, 1", vocab_extra_ids=0),
    **dict(retriever_seq_length=256, sample_rate=1.0, mask_prob=0.15, short_seq_prob=0.1, num_workers=2),
    **dict(data_impl="infer", adlr_autoresume_interval=1000, biencoder_projection_dim=0, query_in_block_prob=0.1),
    **dict(retriever_report_topk_accuracies=[], indexer_batch_size=128, indexer_log_interval=1000, img_h=224),
    **dict(num_classes=1000, img_w=224, num_channels=3, patch_dim=16, classes_fraction=1.0, head_lr_mult=1.0),
    **dict(data_per_class_fraction=1.0, data_sharding=True, vision_pretraining_type="classify", mask_factor=1.0),
    **dict(vision_backbone_type="vit", swin_backbone_type="tiny", mask_type="random", iter_per_epoch=1250),
    **dict(dino_local_img_size=96, dino_local_crops_number=10, dino_head_hidden_size=2048, dino_freeze_last_layer=1),
    **dict(dino_bottleneck_size=256, dino_warmup_teacher_temp=0.04, dino_teacher_temp=0.07),
    **dict(dino_warmup_teacher_temp_epochs=30, tensorboard_log_interval=1, tensorboard_queue_size=1000),
    **dict(log_loss_scale_to_tensorboard=True, log_learning_rate_to_tensorboard=True,
            async_tensor_model_parallel_allreduce=False),
}  # fmt: skip
# What follows from the arguments of standalone_common.SIZES, in one process.
DERIVED = {
    **dict(
        rank=0,
        world_size=1,
        data_parallel_size=1,
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
    ),
    **dict(
        transformer_pipeline_model_parallel_size=1, virtual_pipeline_model_parallel_size=None, kv_channels=4
    ),
    **dict(
        params_dtype=torch.float32,
        global_batch_size=2,
        ffn_hidden_size=64,
        encoder_seq_length=8,
        seq_length=8,
    ),
    **dict(
        start_weight_decay=0.01, end_weight_decay=0.01, dataloader_type="single", consumed_train_samples=0
    ),
    **dict(consumed_valid_samples=0, gradient_accumulation_fusion=False),
}


def test_defaults():
    with arguments() as args:
        found = vars(args)
    assert {name: found[name] for name in (*DEFAULTS, *DERIVED)} == {**DEFAULTS, **DERIVED}
    given = (
        "num_layers",
        "hidden_size",
        "num_attention_heads",
        "max_position_embeddings",
        "micro_batch_size",
    )
    of_sizes = {*given, "hidden_dropout", "attention_dropout", "init_method_std", "padded_vocab_size"}
    others = found.keys() - DEFAULTS.keys() - DERIVED.keys() - of_sizes
    assert {name: found[name] for name in others if found[name] not in (None, False)} == {}
    assert len(found) == 176


def test_what_follows_from_others():
    with arguments("--bf16 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2", world=8) as args:
        assert args.data_parallel_size == 2 and args.global_batch_size == 4
        assert args.params_dtype == torch.bfloat16 and args.accumulate_allreduce_grads_in_fp32
        assert args.gradient_accumulation_fusion
    with arguments("--fp16 --checkpoint-activations") as args:
        assert args.params_dtype == torch.float16
        assert (args.recompute_granularity, args.recompute_method) == ("full", "uniform")
        assert not hasattr(args, "checkpoint_activations")
    with arguments("--recompute-activations") as args:
        assert args.recompute_granularity == "selective"
    options = "--num-layers 8 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2"
    with arguments(options, world=2) as args:
        assert args.virtual_pipeline_model_parallel_size == 2
    both = "--sequence-parallel --async-tensor-model-parallel-allreduce --tensor-model-parallel-size 2"
    with arguments(both, world=2) as args:
        assert not args.async_tensor_model_parallel_allreduce
    with arguments("--async-tensor-model-parallel-allreduce") as args:
        assert args.async_tensor_model_parallel_allreduce
    with arguments("--no-async-tensor-model-parallel-allreduce") as args:
        assert not args.async_tensor_model_parallel_allreduce
    with arguments("--DDP-impl torch") as args:
        assert not args.use_contiguous_buffers_in_local_ddp
    with arguments("--weight-decay-incr-style linear --start-weight-decay 0 --end-weight-decay 1") as args:
        assert (args.start_weight_decay, args.end_weight_decay) == (0.0, 1.0)


REFUSED = {
    "--batch-size 1": "--micro-batch-size",
    "--warmup 1": "--lr-warmup-fraction",
    "--model-parallel-size 2": "--tensor-model-parallel-size",
    "--fp16 --bf16": "exclude each other",
    "--tensor-model-parallel-size 2": "the world size",
    "--pipeline-model-parallel-size 0": "positive",
    "--num-layers-per-virtual-pipeline-stage 1": "needs a pipeline",
    "--standalone-embedding-stage": "needs a pipeline",
    "--micro-batch-size 0": "--micro-batch-size",
    "--global-batch-size 0": "--global-batch-size",
    "--num-attention-heads 3": "--num-attention-heads",
    "--encoder-seq-length 4": "--seq-length",
    "--decoder-seq-length 9": "--max-position-embeddings",
    "--max-position-embeddings 4": "--max-position-embeddings",
    "--lr 0.1 --min-lr 0.2": "--min-lr",
    "--save x": "--save-interval",
    "--train-iters 1 --train-samples 1": "--train-samples",
    "--train-iters 1 --lr-decay-samples 1": "--lr-decay-samples",
    "--train-iters 1 --rampup-batch-size 1 1 1": "--rampup-batch-size",
    "--train-iters 1 --lr-warmup-fraction 0.1 --lr-warmup-iters 1": "--lr-warmup-iters",
    "--train-samples 1 --lr-decay-iters 1": "--lr-decay-iters",
    "--fp16-lm-cross-entropy": "--fp16",
    "--fp32-residual-connection": "--bf16",
    "--bf16 --DDP-impl torch": "--DDP-impl",
    "--start-weight-decay 1": "--start-weight-decay",
    "--weight-decay-incr-style cosine": "--end-weight-decay",
    "--distribute-saved-activations": "tensor parallel ranks",
    "--recompute-granularity selective --recompute-method block": "--recompute-method",
    "--recompute-granularity full": "--recompute-method",
    "--checkpoint-activations --recompute-num-layers 0": "--recompute-num-layers",
}


@pytest.mark.parametrize("options", REFUSED)
def test_refused(options):
    with pytest.raises(ValueError, match=REFUSED[options]), arguments(options):
        pass


def test_refused_of_several_ranks():
    for options, words in {
        "--pipeline-model-parallel-size 2 --pipeline-model-parallel-split-rank 2": "split rank",
        "--pipeline-model-parallel-size 2 --num-layers 3 --num-layers-per-virtual-pipeline-stage 1": "layers",
        "--tensor-model-parallel-size 2 --sequence-parallel --seq-length 7": "--seq-length",
        "--tensor-model-parallel-size 2 --distribute-saved-activations": "--recompute-granularity",
    }.items():
        with pytest.raises(ValueError, match=words), arguments(options, world=2):
            pass


@pytest.mark.parametrize(
    "missing", ["num-layers", "hidden-size", "micro-batch-size", "max-position-embeddings"]
)
def test_required(missing, monkeypatch):
    given = dict.fromkeys(("num-layers", "hidden-size", "num-attention-heads", "micro-batch-size"), 2)
    given.update({"max-position-embeddings": 2, "seq-length": 2})
    monkeypatch.setattr(
        sys, "argv", ["x", *(f"--{name}={value}" for name, value in given.items() if name != missing)]
    )
    with pytest.raises(ValueError, match=f"--{missing} is required"):
        parse_args()
    name = missing.replace("-", "_")
    assert getattr(parse_args(defaults={name: 2}), name) == 2


def test_own_options_and_unknown_ones(monkeypatch, capsys):
    def more(parser):
        parser.add_argument("--own", type=int)
        return parser

    with arguments():
        sizes = "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --max-position-embeddings 8"
        monkeypatch.setattr(sys, "argv", ["x", *f"{sizes} --micro-batch-size 1 --own 3 --other 4".split()])
        assert parse_args(more, ignore_unknown_args=True).own == 3
        assert "own" in capsys.readouterr().out
        monkeypatch.setenv("RANK", "1")
        parse_args(more, ignore_unknown_args=True)
        assert capsys.readouterr().out == ""
        with pytest.raises(SystemExit):
            parse_args(more)


def test_global_variables(capsys):
    for get in (global_vars.get_args, global_vars.get_num_microbatches, global_vars.get_timers):
        with pytest.raises(RuntimeError, match="set_global_variables"):
            get()
    with arguments("--global-batch-size 8 --rampup-batch-size 4 2 8"):
        with pytest.raises(RuntimeError, match="already"):
            global_vars.set_global_variables()
        assert global_vars.get_tensorboard_writer() is None and global_vars.get_adlr_autoresume() is None
        assert (global_vars.get_num_microbatches(), global_vars.get_current_global_batch_size()) == (2, 4)
        global_vars.update_num_microbatches(100)
        assert (global_vars.get_num_microbatches(), global_vars.get_current_global_batch_size()) == (4, 8)
        global_vars.get_timers()("step").start()
        global_vars.get_timers().log(["step"])
        assert capsys.readouterr().out.startswith("time (ms) | step: 0.")
    with arguments("--global-batch-size 3"), pytest.raises(ValueError, match="not divisible"):
        global_vars.get_num_microbatches()
