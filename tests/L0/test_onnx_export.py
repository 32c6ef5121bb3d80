"""torch.onnx.export of models with fused ops: the graph holds ONNX's own operators, which give the same numbers."""

import inspect
import io

import pytest
import torch
from torch_defaults import DEVICE, float32_on_cpu

from apex.contrib.bottleneck import Bottleneck
from apex.contrib.conv_bias_relu import ConvBiasReLU
from apex.contrib.group_norm import GroupNorm
from apex.contrib.layer_norm import FastLayerNorm
from apex.normalization import (
    FusedLayerNorm,
    FusedRMSNorm,
    MixedFusedLayerNorm,
    MixedFusedRMSNorm,
    fused_add_rms_norm,
)
from apex.normalization.fused_layer_norm import fused_layer_norm_affine, fused_rms_norm
from apex.transformer import functional
from apex.transformer.functional import fused_softmax

onnx = pytest.importorskip("onnx", reason="torch.onnx.export needs onnx: pip install onnx onnxscript")
pytest.importorskip("onnxscript", reason="torch.onnx.export needs onnxscript: pip install onnx onnxscript")


class Model(torch.nn.Module):
    """A function as a module."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *inputs):
        return self.function(*inputs)


def filled(module):
    """The module with weights that are not 1 and 0."""
    for i, p in enumerate(module.parameters()):
        torch.nn.init.normal_(p, mean=1.0 - i, std=0.3)
    return module.eval()


def values(*shape, seed=1):
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32, device="cpu"
    )


MASK = values(2, 1, 5, 6) > 0.8
CASES = {
    "layer norm": lambda: (filled(FusedLayerNorm((6, 8))), values(3, 6, 8)),
    "layer norm without weights": lambda: (FusedLayerNorm(8, elementwise_affine=False), values(3, 8)),
    "mixed layer norm": lambda: (filled(MixedFusedLayerNorm(8)), values(3, 8).half()),
    "fast layer norm": lambda: (filled(FastLayerNorm(8)), values(3, 8)),
    "function of layer norm": lambda: (
        Model(lambda x, w: fused_layer_norm_affine(x, w, w, (8,))),
        values(3, 8),
        values(8),
    ),
    "rms norm": lambda: (filled(FusedRMSNorm((6, 8))), values(3, 6, 8)),
    "mixed rms norm": lambda: (filled(MixedFusedRMSNorm(8)), values(3, 8).half()),
    "function of rms norm": lambda: (Model(lambda x: fused_rms_norm(x, 8)), values(3, 8)),
    "sum and rms norm": lambda: (
        Model(lambda x, r: fused_add_rms_norm(x, r, None, 8)),
        values(3, 8),
        values(3, 8, seed=2),
    ),
    "convolution, bias, relu": lambda: (
        Model(lambda x, w, b: ConvBiasReLU(x, w, b, 1, 2)),
        values(2, 3, 8, 6),
        values(5, 3, 3, 3),
        values(5),
    ),
    "bottleneck": lambda: (Bottleneck(8, 4, 16, stride=2, use_cudnn=True).eval(), values(2, 8, 6, 6)),
    "group norm": lambda: (filled(GroupNorm(2, 8, act="silu")), values(2, 8, 3, 5)),
    "masked softmax": lambda: (
        Model(lambda x, mask: fused_softmax.scaled_masked_softmax(x, mask, 0.5)),
        values(2, 3, 5, 6),
        MASK,
    ),
    "causal softmax": lambda: (
        Model(lambda x: fused_softmax.scaled_upper_triang_masked_softmax(x, None, 0.5)),
        values(2, 3, 5, 6),
    ),
    "rope": lambda: (Model(functional.fused_apply_rotary_pos_emb), values(7, 2, 3, 8), values(7, 1, 1, 6)),
    "bias swiglu": lambda: (Model(functional.fused_bias_swiglu), values(3, 8), values(8, seed=2)),
    "bias gelu": lambda: (Model(functional.fused_bias_gelu), values(3, 8), values(8, seed=2)),
}


class Together(torch.nn.Module):
    """All cases at once: the inputs one after another, the outputs likewise."""

    def __init__(self, models, counts):
        super().__init__()
        self.models = torch.nn.ModuleList(models)
        self.counts = counts

    def forward(self, *inputs):
        left, outputs = list(inputs), []
        for model, count in zip(self.models, self.counts, strict=True):
            outputs += as_list(model(*left[:count]))
            del left[:count]
        return tuple(outputs)


def as_list(outputs):
    return [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)


def exported(model, inputs, dynamo):
    if dynamo:
        return torch.onnx.export(model, inputs, dynamo=True).model_proto
    file = io.BytesIO()
    torch.onnx.export(model, inputs, file, dynamo=False)
    return onnx.load_from_string(file.getvalue())


def check(model, inputs, dynamo):
    expected = as_list(model(*inputs))
    proto = exported(model, tuple(inputs), dynamo)
    assert {node.domain for node in proto.graph.node} <= {"", "ai.onnx"}
    from onnx.reference import ReferenceEvaluator

    feeds = {i.name: x.numpy() for i, x in zip(proto.graph.input, inputs, strict=True)}
    found = map(torch.from_numpy, ReferenceEvaluator(proto).run(None, feeds))
    for output, value in zip(found, expected, strict=True):
        assert output.dtype == value.dtype
        tolerance = 2e-3 if output.dtype == torch.float16 else 1e-4
        torch.testing.assert_close(output, value.detach(), rtol=tolerance, atol=1e-5)


@pytest.mark.skipif(bool(DEVICE), reason="torch's older exporter makes its constants on the default device")
@pytest.mark.filterwarnings("ignore")  # torch's own, of deprecations
@pytest.mark.parametrize("case", CASES)
def test_torchscript_exporter(case):
    if "dynamo" not in inspect.signature(torch.onnx.export).parameters:
        pytest.skip("this torch has one exporter")
    model, *inputs = float32_on_cpu()(CASES[case])()
    check(model, inputs, dynamo=False)


@pytest.mark.filterwarnings("ignore")
def test_dynamo_exporter():
    models, inputs = zip(
        *((model, inputs) for model, *inputs in (float32_on_cpu()(make)() for make in CASES.values())),
        strict=True,
    )
    check(Together(models, [len(some) for some in inputs]), [x for some in inputs for x in some], dynamo=True)


@pytest.mark.filterwarnings("ignore")
def test_autocast():
    """The output has autocast's dtype, as it has where nothing is exported."""

    def function(x):
        with torch.autocast("cpu", torch.bfloat16):
            return fused_rms_norm(x, 8)

    proto = exported(Model(function), (values(3, 8),), True)
    assert proto.graph.output[0].type.tensor_type.elem_type == onnx.TensorProto.BFLOAT16


def test_other_traces_keep_the_op():
    program = torch.export.export(filled(float32_on_cpu()(FusedRMSNorm)(8)), (values(3, 8),))
    assert any("apex.rms_norm_forward" in str(node.target) for node in program.graph.nodes)
    compiled = torch.compile(Model(lambda x: fused_rms_norm(x, 8)), fullgraph=True, backend="eager")
    x = values(3, 8)
    torch.testing.assert_close(compiled(x), fused_rms_norm(x, 8), rtol=0, atol=0)
