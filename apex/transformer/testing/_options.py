"""The options of apex.transformer.testing.arguments, by group. Names, types and defaults are public apex's."""

from __future__ import annotations

import argparse
from typing import Any

Options = tuple[tuple[str, Any, str], ...]
# A line of a group: option names, (type, default[, choices]) or "on"/"off" for a switch, what it says.
_ON, _OFF = "on", "off"

NETWORK = (
    ("--num-layers", (int, None), "transformer layers of the whole model"),
    ("--hidden-size", (int, None), "size of hidden states"),
    ("--ffn-hidden-size", (int, None), "size within the perceptrons; 4 x hidden size"),
    ("--num-attention-heads", (int, None), "attention heads, over all tensor parallel ranks"),
    ("--kv-channels", (int, None), "size of a head; hidden size / heads"),
    ("--max-position-embeddings", (int, None), "longest sequence"),
    (
        "--make-vocab-size-divisible-by",
        (int, 128),
        "what the padded vocabulary is a multiple of, for each rank",
    ),
    ("--layernorm-epsilon", (float, 1e-5), "eps of layer norms"),
    ("--apply-residual-connection-post-layernorm", _ON, "residuals start behind the layer norms"),
    ("--openai-gelu", _ON, "the tanh form of gelu; needs --no-bias-gelu-fusion"),
    ("--onnx-safe", (bool, None), "functions that export to ONNX"),
    ("--bert-no-binary-head", (_OFF, "bert_binary_head"), "BERT without the head that classifies pairs"),
    ("--num-experts", (int, None), "experts of a mixture; these models have none"),
)
LOGGING = (
    ("--log-params-norm", _ON, "log the norm of the parameters"),
    ("--log-num-zeros-in-grad", _ON, "log how many gradients are 0"),
    ("--tensorboard-log-interval", (int, 1), "steps between entries"),
    ("--tensorboard-queue-size", (int, 1000), "entries that wait to be written"),
    ("--log-timers-to-tensorboard", _ON, "write timers"),
    ("--log-batch-size-to-tensorboard", _ON, "write batch sizes"),
    (
        "--no-log-learnig-rate-to-tensorboard",
        (_OFF, "log_learning_rate_to_tensorboard"),
        "leave out learning rates",
    ),
    ("--no-log-loss-scale-to-tensorboard", (_OFF, "log_loss_scale_to_tensorboard"), "leave out loss scales"),
    ("--log-validation-ppl-to-tensorboard", _ON, "write perplexities of the validation"),
    ("--log-memory-to-tensorboard", _ON, "write memory use"),
    ("--log-world-size-to-tensorboard", _ON, "write the world size"),
)
REGULARIZATION = (
    ("--attention-dropout", (float, 0.1), "dropout of attention probabilities"),
    ("--hidden-dropout", (float, 0.1), "dropout of hidden states"),
    ("--weight-decay", (float, 0.01), "weight decay"),
    ("--start-weight-decay", (float, None), "weight decay of the first step"),
    ("--end-weight-decay", (float, None), "weight decay of the last step"),
    (
        "--weight-decay-incr-style",
        (str, "constant", ["constant", "linear", "cosine"]),
        "how weight decay grows",
    ),
    ("--clip-grad", (float, 1.0), "largest norm of the gradient"),
    ("--adam-beta1", (float, 0.9), "Adam's first beta"),
    ("--adam-beta2", (float, 0.999), "Adam's second beta"),
    ("--adam-eps", (float, 1e-8), "Adam's eps"),
    ("--sgd-momentum", (float, 0.9), "SGD's momentum"),
)
TRAINING = (
    ("--micro-batch-size", (int, None), "samples of a microbatch"),
    ("--batch-size", (int, None), "no longer valid: --micro-batch-size"),
    (
        "--global-batch-size",
        (int, None),
        "samples of a step over all ranks; micro batch size x data parallel size",
    ),
    ("--rampup-batch-size", ("*", None), "START INCREMENT SAMPLES: global batches that grow"),
    ("--recompute-activations", _ON, "as --recompute-granularity selective"),
    (
        "--recompute-granularity",
        (str, None, ["full", "selective"]),
        "run layers, or their attention, again backward",
    ),
    (
        "--distribute-saved-activations",
        _ON,
        "each tensor parallel rank keeps a part of what layers run again from",
    ),
    (
        "--recompute-method",
        (str, None, ["uniform", "block"]),
        "all layers in groups, or the first ones one by one",
    ),
    ("--recompute-num-layers", (int, 1), "layers of a group, or how many first ones"),
    ("--checkpoint-activations", _ON, "as --recompute-granularity full --recompute-method uniform"),
    ("--train-iters", (int, None), "steps"),
    ("--train-samples", (int, None), "samples, in place of steps"),
    ("--log-interval", (int, 100), "steps between reports"),
    ("--exit-interval", (int, None), "end after so many steps"),
    ("--exit-duration-in-mins", (int, None), "end after so many minutes"),
    ("--tensorboard-dir", (str, None), "write to tensorboard there"),
    ("--no-masked-softmax-fusion", (_OFF, "masked_softmax_fusion"), "scale, mask and softmax by torch's ops"),
    ("--no-bias-gelu-fusion", (_OFF, "bias_gelu_fusion"), "bias and the erf form of gelu, in two"),
    (
        "--no-bias-dropout-fusion",
        (_OFF, "bias_dropout_fusion"),
        "bias, dropout and residual are torch's in any case",
    ),
    ("--optimizer", (str, "adam", ["adam", "sgd"]), "optimizer"),
    ("--dataloader-type", (str, None, ["single", "cyclic"]), "one pass over the data, or several"),
    (
        "--async-tensor-model-parallel-allreduce",
        _ON,
        "sum input gradients beside the weight gradients' products",
    ),
    (
        "--no-async-tensor-model-parallel-allreduce",
        (_OFF, "async_tensor_model_parallel_allreduce", False),
        "sum input gradients when all products are done: the default",
    ),
    ("--no-persist-layer-norm", _ON, "layer norms are apex's own in any case"),
    ("--sequence-parallel", _ON, "split norms and dropout along the sequence"),
    (
        "--no-gradient-accumulation-fusion",
        (_OFF, "gradient_accumulation_fusion"),
        "weight.grad in place of main_grad",
    ),
)
INITIALIZATION = (
    ("--seed", (int, 1234), "of random numbers"),
    ("--init-method-std", (float, 0.02), "standard deviation of new weights"),
    ("--init-method-xavier-uniform", _ON, "Xavier's uniform distribution"),
)
LEARNING_RATE = (
    ("--lr", (float, None), "learning rate"),
    ("--lr-decay-style", (str, "linear", ["constant", "linear", "cosine"]), "how it falls"),
    ("--lr-decay-iters", (int, None), "steps over which it falls"),
    ("--lr-decay-samples", (int, None), "samples over which it falls"),
    ("--lr-warmup-fraction", (float, None), "part of these over which it rises first"),
    ("--lr-warmup-iters", (int, 0), "steps over which it rises first"),
    ("--lr-warmup-samples", (int, 0), "samples over which it rises first"),
    ("--warmup", (int, None), "no longer valid: --lr-warmup-fraction"),
    ("--min-lr", (float, 0.0), "lowest learning rate"),
    ("--override-lr-scheduler", _ON, "a checkpoint's schedule is left out"),
    ("--use-checkpoint-lr-scheduler", _ON, "a checkpoint's schedule is taken"),
)
CHECKPOINTING = (
    ("--save", (str, None), "folder to save to"),
    ("--save-interval", (int, None), "steps between checkpoints"),
    ("--no-save-optim", (_ON, None), "leave out the optimizer"),
    ("--no-save-rng", (_ON, None), "leave out random states"),
    ("--load", (str, None), "folder to load from"),
    ("--no-load-optim", (_ON, None), "leave out the optimizer"),
    ("--no-load-rng", (_ON, None), "leave out random states"),
    ("--finetune", _ON, "take the weights alone, and begin with step 0"),
)
MIXED_PRECISION = (
    ("--fp16", _ON, "float16 parameters"),
    ("--bf16", _ON, "bfloat16 parameters"),
    ("--loss-scale", (float, None), "constant loss scale"),
    ("--initial-loss-scale", (float, 2**32), "first loss scale"),
    ("--min-loss-scale", (float, 1.0), "lowest loss scale"),
    ("--loss-scale-window", (float, 1000), "steps without overflow after which it grows"),
    ("--hysteresis", (int, 2), "overflows after which it shrinks"),
    ("--fp32-residual-connection", _ON, "residuals are float32"),
    (
        "--no-query-key-layer-scaling",
        (_OFF, "apply_query_key_layer_scaling"),
        "scores are not divided by the layer's number",
    ),
    ("--attention-softmax-in-fp32", _ON, "softmax in float32"),
    ("--accumulate-allreduce-grads-in-fp32", _ON, "gradients are summed in float32"),
    ("--fp16-lm-cross-entropy", _ON, "the loss takes float16 logits"),
)
DISTRIBUTED = (
    ("--tensor-model-parallel-size", (int, 1), "ranks that share each layer"),
    ("--pipeline-model-parallel-size", (int, 1), "stages of the pipeline"),
    ("--pipeline-model-parallel-split-rank", (int, None), "the decoder's first stage"),
    ("--model-parallel-size", (int, None), "no longer valid: --tensor-model-parallel-size"),
    ("--num-layers-per-virtual-pipeline-stage", (int, None), "layers of a part, of interleaved schedules"),
    ("--distributed-backend", (None, "nccl", ["nccl", "gloo"]), "what connects ranks"),
    ("--DDP-impl", (None, "local", ["local", "torch"]), "which DistributedDataParallel"),
    (
        "--no-contiguous-buffers-in-local-ddp",
        (_OFF, "use_contiguous_buffers_in_local_ddp"),
        "gradients lie apart",
    ),
    (
        "--no-scatter-gather-tensors-in-pipeline",
        (_OFF, "scatter_gather_tensors_in_pipeline"),
        "stages send whole tensors",
    ),
    ("--local_rank", (int, None), "the launcher's"),
    ("--lazy-mpu-init", (bool, None), "groups are made by another one"),
    ("--use-cpu-initialization", (_ON, None), "parameters stay on the CPU"),
    ("--empty-unused-memory-level", (int, 0, [0, 1, 2]), "how often cached GPU memory is given back"),
    ("--standalone-embedding-stage", _ON, "the first stage holds embeddings alone"),
)
VALIDATION = (
    ("--eval-iters", (int, 100), "steps of a validation"),
    ("--eval-interval", (int, 1000), "steps between validations"),
)
DATA = (
    ("--data-path", ("*", None), "data sets, or their weights and paths in turn"),
    ("--split", (str, "969, 30, 1"), "parts for training, validation and test"),
    ("--vocab-file", (str, None), "vocabulary"),
    ("--merge-file", (str, None), "merges of byte pairs"),
    ("--vocab-extra-ids", (int, 0), "words behind the vocabulary"),
    ("--seq-length", (int, None), "words of a sample"),
    ("--encoder-seq-length", (int, None), "the same, of encoders"),
    ("--decoder-seq-length", (int, None), "the same, of decoders"),
    ("--retriever-seq-length", (int, 256), "the same, of retrievers"),
    ("--sample-rate", (float, 1.0), "part of the data that is drawn"),
    ("--mask-prob", (float, 0.15), "probability of a masked word"),
    ("--short-seq-prob", (float, 0.1), "probability of a short sample"),
    ("--mmap-warmup", _ON, "read mapped files once before"),
    ("--num-workers", (int, 2), "processes that load data"),
    (
        "--tokenizer-type",
        (str, None, ["BertWordPieceLowerCase", "BertWordPieceCase", "GPT2BPETokenizer"]),
        "tokenizer",
    ),
    ("--data-impl", (str, "infer", ["lazy", "cached", "mmap", "infer"]), "how files are read"),
    ("--reset-position-ids", _ON, "positions begin anew with every document"),
    ("--reset-attention-mask", _ON, "attention ends with every document"),
    ("--eod-mask-loss", _ON, "no loss for ends of documents"),
)
AUTORESUME = (
    ("--adlr-autoresume", _ON, "resume by userlib.auto_resume"),
    ("--adlr-autoresume-interval", (int, 1000), "steps between looks at it"),
)
BIENCODER: Options = (
    ("--ict-head-size", (int, None), "size of block embeddings"),
    ("--biencoder-projection-dim", (int, 0), "size of the projection"),
    ("--biencoder-shared-query-context-model", _ON, "one model for queries and contexts"),
    ("--ict-load", (str, None), "folder of an ICT model"),
    ("--bert-load", (str, None), "folder of a BERT model"),
    ("--titles-data-path", (str, None), "titles"),
    ("--query-in-block-prob", (float, 0.1), "probability that a query stays in its block"),
    ("--use-one-sent-docs", _ON, "documents of one sentence, too"),
    ("--evidence-data-path", (str, None), "evidence"),
    ("--retriever-report-topk-accuracies", ("+", [], int), "accuracies of which k"),
    ("--retriever-score-scaling", _ON, "scores are divided by the root of the hidden size"),
    ("--block-data-path", (str, None), "blocks"),
    ("--embedding-path", (str, None), "their embeddings"),
    ("--indexer-batch-size", (int, 128), "batch size of the indexer"),
    ("--indexer-log-interval", (int, 1000), "batches between its reports"),
)
VISION = (
    ("--num-classes", (int, 1000), "classes"),
    ("--img-h", (int, 224), "height of images"),
    ("--img-w", (int, 224), "width of images"),
    ("--num-channels", (int, 3), "their channels"),
    ("--patch-dim", (int, 16), "side of a patch"),
    ("--classes-fraction", (float, 1.0), "part of the classes"),
    ("--data-per-class-fraction", (float, 1.0), "part of the data of a class"),
    ("--no-data-sharding", (_OFF, "data_sharding"), "every rank reads all data"),
    ("--head-lr-mult", (float, 1.0), "factor of the head's learning rate"),
    ("--vision-pretraining", _ON, "pretraining"),
    ("--vision-pretraining-type", (str, "classify", ["classify", "inpaint", "dino"]), "of which kind"),
    ("--vision-backbone-type", (str, "vit", ["vit", "mit", "swin"]), "backbone"),
    ("--swin-backbone-type", (str, "tiny", ["tiny", "base", "h3"]), "its size"),
    ("--mask-type", (str, "random", ["random", "row"]), "masks of inpainting"),
    ("--mask-factor", (float, 1.0), "their size"),
    ("--iter-per-epoch", (int, 1250), "steps of an epoch"),
    ("--dino-local-img-size", (int, 96), "side of local crops"),
    ("--dino-local-crops-number", (int, 10), "their number"),
    ("--dino-head-hidden-size", (int, 2048), "hidden size of the head"),
    ("--dino-bottleneck-size", (int, 256), "its bottleneck"),
    ("--dino-freeze-last-layer", (float, 1), "epochs without its last layer"),
    ("--dino-norm-last-layer", _ON, "normalize its last layer"),
    ("--dino-warmup-teacher-temp", (float, 0.04), "first temperature of the teacher"),
    ("--dino-teacher-temp", (float, 0.07), "its temperature"),
    ("--dino-warmup-teacher-temp-epochs", (int, 30), "epochs between them"),
)
OTHER = (("--cpu-offload", _ON, "activations wait in the CPU's memory for the backward pass"),)

GROUPS = {
    "network size": NETWORK,
    "regularization": REGULARIZATION,
    "training": TRAINING,
    "initialization": INITIALIZATION,
    "learning rate": LEARNING_RATE,
    "checkpointing": CHECKPOINTING,
    "mixed precision": MIXED_PRECISION,
    "distributed": DISTRIBUTED,
    "validation": VALIDATION,
    "data and dataloader": DATA,
    "autoresume": AUTORESUME,
    "biencoder": BIENCODER,
    "vision": VISION,
    "logging": LOGGING,
    "offloading": OTHER,
}


def add_all(parser: argparse.ArgumentParser) -> None:
    """Adds every option to a parser."""
    for title, options in GROUPS.items():
        group = parser.add_argument_group(title)
        for name, kind, told in options:
            group.add_argument(name, help=told, **_kind(kind))


def _kind(kind: Any) -> dict[str, Any]:
    """What argparse is told of an option."""
    if kind == _ON:
        return dict(action="store_true", default=False)
    first, default, *more = kind
    if first == _ON:
        return dict(action="store_true", default=default)
    if first == _OFF:
        return dict(action="store_false", dest=default, default=more[0] if more else True)
    if first in ("*", "+"):
        return dict(nargs=first, default=default, type=more[0] if more else None)
    return dict(type=first, default=default, choices=more[0] if more else None)
