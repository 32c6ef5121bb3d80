"""torch.fx.symbolic_trace takes every layer of apex as a leaf, as it takes torch's own; torch.jit.script compiles the
norms that test_normalization.py does not look at."""

from __future__ import annotations

import copy
import importlib
import io
import pkgutil
import types

import pytest
import torch
from torch import nn
from torch_defaults import float32_on_cpu

import apex
import apex.transformer_engine.pytorch as te
from apex import RNN, fused_dense, mlp, normalization
from apex.contrib.bottleneck import HaloExchangerNoComm, SpatialBottleneck
from apex.contrib.bottleneck.bottleneck import Bottleneck, FrozenBatchNorm2d
from apex.contrib.cudnn_gbn import GroupBatchNorm2d
from apex.contrib.fmha.fmha import FMHA
from apex.contrib.focal_loss.focal_loss import focal_loss
from apex.contrib.group_norm import GroupNorm
from apex.contrib.group_norm.group_norm import group_norm
from apex.contrib.groupbn import BatchNorm2d_NHWC
from apex.contrib.index_mul_2d import index_mul_2d
from apex.contrib.layer_norm import FastLayerNorm
from apex.contrib.multihead_attn import EncdecMultiheadAttn, SelfMultiheadAttn
from apex.contrib.transducer import TransducerJoint, TransducerLoss
from apex.contrib.xentropy import SoftmaxCrossEntropyLoss
from apex.fp16_utils import FP16Model, tofp16
from apex.normalization import fused_layer_norm
from apex.parallel import DistributedDataParallel, SyncBatchNorm
from apex.RNN.cells import mLSTMRNNCell
from apex.RNN.RNNBackend import RNNCell, bidirectionalRNN, stackedRNN
from apex.transformer import functional, layers, parallel_state, tensor_parallel
from apex.transformer.enums import AttnMaskType
from apex.transformer.functional.fused_softmax import GenericFusedScaleMaskSoftmax
from apex.transformer_engine.pytorch.module.base import TransformerEngineBaseModule


def random(*shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(len(shape))
    return torch.randn(shape, generator=generator, dtype=dtype, device="cpu")


def softmax(kind, **options):
    return kind(
        False,
        True,
        scaled_masked_softmax_fusion=True,
        mask_func=None,
        softmax_in_fp32=True,
        scale=0.5,
        **options,
    )


def alone():
    """The upper one of two ranks, whose neighbour says nothing."""
    return (2, 0, None, HaloExchangerNoComm([0, 1], 0), 1, False)


lengths = torch.tensor([2, 3], dtype=torch.int32, device="cpu")
scores = random(1, 2, 3, 4).bfloat16()
# class -> [(how it is made, its inputs)]
LAYERS = {
    FrozenBatchNorm2d: [(lambda: FrozenBatchNorm2d(3), (random(2, 3, 4, 4),))],
    Bottleneck: [
        (lambda: Bottleneck(8, 4, 8, use_cudnn=True), (random(2, 8, 4, 4),)),
        (lambda: Bottleneck(8, 4, 16, stride=2, use_cudnn=True), (random(2, 8, 4, 4),)),
        (lambda: Bottleneck(8, 4, 16), (random(2, 8, 4, 4),)),
        (lambda: Bottleneck(8, 4, 8, use_cudnn=True, explicit_nhwc=True), (random(2, 4, 4, 8),)),
    ],
    SpatialBottleneck: [
        (lambda: SpatialBottleneck(8, 4, 16, stride=2, use_cudnn=True), (random(2, 8, 4, 4),)),
        (lambda: SpatialBottleneck(8, 4, 8, spatial_parallel_args=alone()), (random(2, 8, 4, 4),)),
    ],
    fused_dense.FusedDense: [(lambda: fused_dense.FusedDense(8, 4), (random(2, 8),))],
    fused_dense.FusedDenseGeluDense: [(lambda: fused_dense.FusedDenseGeluDense(8, 16, 4), (random(2, 8),))],
    mlp.MLP: [
        (lambda: mlp.MLP([8, 16, 4]), (random(2, 8),)),
        (lambda: mlp.MLP([8, 4], False, "sigmoid"), (random(2, 8),)),
    ],
    normalization.FusedLayerNorm: [
        (lambda: normalization.FusedLayerNorm(8), (random(2, 8),)),
        (lambda: normalization.FusedLayerNorm(8, elementwise_affine=False), (random(2, 8),)),
        (lambda: normalization.FusedLayerNorm(8), (random(2, 8).bfloat16(),)),
    ],
    normalization.FusedRMSNorm: [(lambda: normalization.FusedRMSNorm(8), (random(2, 8),))],
    normalization.MixedFusedLayerNorm: [
        (lambda: normalization.MixedFusedLayerNorm(8), (random(2, 8).bfloat16(),))
    ],
    normalization.MixedFusedRMSNorm: [(lambda: normalization.MixedFusedRMSNorm(8), (random(2, 8),))],
    layers.FusedLayerNorm: [(lambda: layers.FusedLayerNorm(8), (random(2, 8),))],
    layers.MixedFusedLayerNorm: [(lambda: layers.MixedFusedLayerNorm(8), (random(2, 8),))],
    FastLayerNorm: [(lambda: FastLayerNorm(8), (random(2, 8),))],
    layers.FastLayerNorm: [(lambda: layers.FastLayerNorm(8), (random(2, 8),))],
    GroupNorm: [
        (lambda: GroupNorm(2, 8), (random(2, 8, 3),)),
        (lambda: GroupNorm(2, 8, act="silu", affine=False), (random(2, 8, 3),)),
    ],
    BatchNorm2d_NHWC: [(lambda: BatchNorm2d_NHWC(8, torch_channels_last=True), (random(2, 8, 3, 3),))],
    GroupBatchNorm2d: [(lambda: GroupBatchNorm2d(8, 1), (random(2, 8, 3, 3),))],
    SyncBatchNorm: [
        (lambda: SyncBatchNorm(8), (random(2, 8, 3),)),
        (lambda: SyncBatchNorm(8, fuse_relu=True), (random(2, 8, 3), random(2, 8, 3))),
    ],
    functional.FusedScaleMaskSoftmax: [
        (
            lambda: softmax(functional.FusedScaleMaskSoftmax, attn_mask_type=AttnMaskType.causal),
            (scores, None),
        )
    ],
    GenericFusedScaleMaskSoftmax: [(lambda: softmax(GenericFusedScaleMaskSoftmax), (scores, None))],
    TransducerJoint: [(lambda: TransducerJoint(), (random(2, 3, 4), random(2, 3, 4), lengths, lengths))],
    TransducerLoss: [
        (
            lambda: TransducerLoss(),
            (random(2, 3, 4, 5), torch.ones(2, 3, dtype=torch.int32, device="cpu"), lengths, lengths, 0),
        )
    ],
    SelfMultiheadAttn: [
        (lambda: SelfMultiheadAttn(8, 2, 0.0, True, True), (random(3, 2, 8),)),
        (lambda: SelfMultiheadAttn(8, 2, 0.0, False, False, "default", True), (random(3, 2, 8),)),
    ],
    EncdecMultiheadAttn: [
        (lambda: EncdecMultiheadAttn(8, 2), (random(3, 2, 8), random(4, 2, 8))),
        (lambda: EncdecMultiheadAttn(8, 2, 0.0, True, True, "default"), (random(3, 2, 8), random(4, 2, 8))),
    ],
    FMHA: [
        (
            lambda: FMHA(
                types.SimpleNamespace(attention_probs_dropout_prob=0.0, num_attention_heads=2, hidden_size=8)
            ),
            (random(3, 24), torch.tensor([0, 1, 3], dtype=torch.int32, device="cpu"), 2),
        )
    ],
    tensor_parallel.ColumnParallelLinear: [
        (lambda: tensor_parallel.ColumnParallelLinear(8, 4, use_cpu_initialization=True), (random(3, 2, 8),))
    ],
    tensor_parallel.RowParallelLinear: [
        (lambda: tensor_parallel.RowParallelLinear(8, 4, use_cpu_initialization=True), (random(3, 2, 8),))
    ],
    tensor_parallel.VocabParallelEmbedding: [
        (
            lambda: tensor_parallel.VocabParallelEmbedding(5, 8, use_cpu_initialization=True),
            (torch.tensor([[1, 4], [0, 1]], dtype=torch.int64, device="cpu"),),
        )
    ],
    te.Linear: [(lambda: te.Linear(8, 4), (random(2, 8),))],
    te.GroupedLinear: [(lambda: te.GroupedLinear(2, 8, 4), (random(5, 8), [2, 3]))],
    te.Fp8Padding: [(lambda: te.Fp8Padding(2), (random(5, 8), [2, 3]))],
    te.Fp8Unpadding: [(lambda: te.Fp8Unpadding(2), (random(32, 8), [2, 3]))],
    te.LayerNorm: [(lambda: te.LayerNorm(8), (random(2, 8),))],
    te.RMSNorm: [(lambda: te.RMSNorm(8), (random(2, 8),))],
    te.LayerNormLinear: [(lambda: te.LayerNormLinear(8, 4, return_bias=True), (random(2, 8),))],
    te.LayerNormMLP: [(lambda: te.LayerNormMLP(8, 4, activation="swiglu"), (random(2, 8),))],
    te.DotProductAttention: [
        (lambda: te.DotProductAttention(2, 4), (random(3, 2, 2, 4), random(3, 2, 2, 4), random(3, 2, 2, 4)))
    ],
    te.MultiheadAttention: [(lambda: te.MultiheadAttention(8, 2), (random(3, 2, 8),))],
    te.TransformerLayer: [(lambda: te.TransformerLayer(8, 16, 2), (random(3, 2, 8), None, "no_mask"))],
    stackedRNN: [(lambda: RNN.LSTM(8, 8, 1), (random(2, 3, 8),))],
    bidirectionalRNN: [(lambda: RNN.GRU(8, 8, 1, bidirectional=True), (random(2, 3, 8),))],
}
_PLAIN_OPERATIONS = (
    "Identity MakeExtraOutput AllReduce AllGather ReduceScatter GELU ReLU SReLU QGELU SiLU GEGLU ReGLU SReGLU QGEGLU "
    "SwiGLU GLU"
)
LAYERS |= {
    getattr(te.ops, name): [(getattr(te.ops, name), (random(2, 8),))] for name in _PLAIN_OPERATIONS.split()
}
LAYERS |= {
    te.ops.Linear: [(lambda: te.ops.Linear(8, 4), (random(2, 8),))],
    te.ops.BasicLinear: [(lambda: te.ops.BasicLinear(8, 4), (random(2, 8),))],
    te.ops.LayerNorm: [(lambda: te.ops.LayerNorm(8), (random(2, 8),))],
    te.ops.RMSNorm: [(lambda: te.ops.RMSNorm(8), (random(2, 8),))],
    te.ops.Bias: [(lambda: te.ops.Bias(8), (random(2, 8),))],
    te.ops.ConstantScale: [(lambda: te.ops.ConstantScale(2.0), (random(2, 8),))],
    te.ops.Dropout: [(lambda: te.ops.Dropout(0.5), (random(2, 8),))],
    te.ops.Reshape: [(lambda: te.ops.Reshape((4, 4)), (random(2, 8),))],
    te.ops.AddExtraInput: [(te.ops.AddExtraInput, (random(2, 8), random(2, 8)))],
    te.ops.AddInPlace: [(te.ops.AddInPlace, (random(2, 8), random(2, 8)))],
    te.ops.Sequential: [
        (lambda: te.ops.Sequential(te.ops.LayerNorm(8), te.ops.Linear(8, 4), te.ops.GELU()), (random(2, 8),))
    ],
}
# These hold a layer of the user, which is what is to be traced; cells are parts of the networks, and the base of layers
# has no forward. Angles are made of a number, which is no proxy.
WRAPPERS = {tofp16, FP16Model, DistributedDataParallel, RNNCell, mLSTMRNNCell}
WRAPPERS |= {TransformerEngineBaseModule, te.RotaryPositionEmbedding, te.ops.FusibleOperation}
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
CASES = [case for cases in LAYERS.values() for case in cases]


@pytest.fixture(autouse=True)
def one_tensor_parallel_rank():
    """What the tensor parallel layers ask for."""
    parallel_state.set_tensor_model_parallel_world_size(1)
    parallel_state.set_tensor_model_parallel_rank(0)
    yield
    parallel_state.set_tensor_model_parallel_world_size(None)
    parallel_state.set_tensor_model_parallel_rank(None)


def first(value):
    return value[0] if isinstance(value, (tuple, list)) else value


class Model(nn.Module):
    """Gives the layer its input, and what else it takes."""

    def __init__(self, layer, inputs):
        super().__init__()
        self.layer, self.rest = layer, inputs[1:]

    def forward(self, x):
        return self.layer(x, *self.rest)


@pytest.mark.parametrize(("made", "inputs"), CASES)
def test_a_layer_is_a_leaf(made, inputs):
    torch.manual_seed(0)
    layer = float32_on_cpu()(made)().eval()
    twin = copy.deepcopy(layer)
    traced = torch.fx.symbolic_trace(Model(layer, inputs))
    assert [(node.op, node.target) for node in traced.graph.nodes if node.op.startswith("call")] == [
        ("call_module", "layer")
    ]
    x, y = inputs[0].clone(), inputs[0].clone()
    leaf, twins = (x, y) if x.is_floating_point() else (layer.weight, twin.weight)
    leaf.requires_grad_(), twins.requires_grad_()
    one, other = first(traced(x)), first(twin(y, *inputs[1:]))
    assert torch.equal(one, other) and one.dtype == other.dtype
    one.float().square().sum().backward()
    other.float().square().sum().backward()
    assert torch.equal(leaf.grad, twins.grad)


def test_every_layer_of_apex_is_tried():
    found = set()
    for module in pkgutil.walk_packages(apex.__path__, "apex."):
        # Models of apex.transformer.testing are what is to be traced; their layers are found elsewhere.
        if module.name.startswith(("apex._C", "apex.__main__", "apex.transformer.testing")):
            continue
        values = vars(importlib.import_module(module.name)).values()
        classes = [value for value in values if isinstance(value, type) and issubclass(value, nn.Module)]
        found |= {c for c in classes if c.__module__.startswith("apex.") and not c.__name__.startswith("_")}
    assert found - WRAPPERS == {*LAYERS}


NORMS = [
    lambda: normalization.FusedLayerNorm(8),
    lambda: normalization.FusedLayerNorm(8, elementwise_affine=False),
    lambda: normalization.FusedRMSNorm(8),
    lambda: normalization.MixedFusedLayerNorm(8),
    lambda: normalization.MixedFusedRMSNorm(8),
    lambda: FastLayerNorm(8),
    lambda: GroupNorm(2, 8),
]


@pytest.mark.parametrize("made", NORMS)
def test_a_norm_that_is_itself_traced(made):
    layer, x = float32_on_cpu()(made)(), random(2, 8)
    assert torch.equal(torch.fx.symbolic_trace(layer)(x), layer(x))


w, b = random(8), random(8)
angles = random(3, 1, 1, 8)
cosines, sines = angles.cos(), angles.sin()
index = torch.tensor([0, 1, 1], device="cpu", dtype=torch.int64)
FUNCTIONS = {
    "layer norm": (lambda x: fused_layer_norm.fused_layer_norm_affine(x, w, b, (8,)), random(2, 8)),
    "rms norm": (lambda x: fused_layer_norm.fused_rms_norm_affine(x, w, (8,)), random(2, 8)),
    "mixed": (lambda x: fused_layer_norm.mixed_dtype_fused_rms_norm_affine(x, w, (8,)), random(2, 8)),
    "add and norm": (lambda x: normalization.fused_add_layer_norm(x, x, w, b)[1], random(2, 8)),
    "group norm": (lambda x: group_norm(x, 2, w, b, act="silu"), random(2, 8, 3)),
    "swiglu": (lambda x: functional.fused_bias_swiglu(x, b), random(2, 8)),
    "softmax": (lambda x: functional.fused_softmax.scaled_masked_softmax(x, None, 0.5), random(1, 2, 3, 4)),
    "rope": (lambda x: functional.fused_apply_rotary_pos_emb(x, angles), random(3, 2, 1, 8)),
    "cached rope": (
        lambda x: functional.fused_apply_rotary_pos_emb_cached(x, cosines, sines),
        random(3, 2, 1, 8),
    ),
    "cross entropy": (lambda x: SoftmaxCrossEntropyLoss.apply(x, index, 0.1, -1), random(3, 8)),
    "focal loss": (
        lambda x: focal_loss(x, torch.ones(2, dtype=torch.int64, device="cpu"), random(1), 8, 0.25, 2.0),
        random(2, 8),
    ),
    "index_mul_2d": (lambda x: index_mul_2d(x, random(3, 8), index), random(2, 8)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_in_a_traced_model(name):
    class Calls(nn.Module):
        def forward(self, x):
            return FUNCTIONS[name][0](x)

    x = FUNCTIONS[name][1]
    assert torch.equal(torch.fx.symbolic_trace(Calls())(x), Calls()(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("options", [{}, {"act": "silu"}, {"act": "SWISH"}, {"affine": False}])
def test_a_scripted_group_norm(dtype, options):
    made = torch.float32 if dtype == torch.bfloat16 else dtype
    layer = GroupNorm(2, 8, dtype=made, device="cpu", **options)
    run_script(layer, random(2, 8, 5, dtype=torch.float64).to(dtype), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_scripted_fast_layer_norm(dtype):
    run_script(
        float32_on_cpu()(FastLayerNorm)(8).to(dtype), random(4, 8, dtype=torch.float64).to(dtype), dtype
    )


def run_script(layer, x, dtype):
    for p in layer.parameters():
        nn.init.normal_(p)
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(nn.Sequential(layer, nn.Identity())), file)
    file.seek(0)
    script = torch.jit.load(file)
    for batch in (x, torch.cat([x, x])):
        y = script(batch)
        assert y.dtype == layer(batch).dtype
        tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float64: 1e-12}[dtype]
        torch.testing.assert_close(y, layer(batch), rtol=tolerance, atol=tolerance)
