"""Modules and names of the public engine by which programs reach for FP8's state, casts and checkpoints."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from te_common import (
    ALL_RECIPES,
    RECIPES,
    clean,  # noqa: F401  a fixture
    near,
    random,
    train,
)

import apex.transformer_engine.pytorch as te
from apex.reference import fp8 as reference
from apex.transformer_engine.common import recipe
from apex.transformer_engine.pytorch import cpp_extensions, distributed, fp8, utils
from apex.transformer_engine.pytorch.module.base import TransformerEngineBaseModule

pytestmark = pytest.mark.usefixtures("clean")
State = fp8.FP8GlobalStateManager
E4M3 = torch.float8_e4m3fn


def test_state_of_the_innermost_autocast():
    assert not State.is_fp8_enabled() and not State.is_fp8_calibration() and State.get_fp8_group() is None
    assert State.get_fp8_recipe() == recipe.DelayedScaling() == fp8.get_default_fp8_recipe()
    of = RECIPES["current"]
    with te.fp8_autocast(fp8_recipe=of):
        assert State.is_fp8_enabled() and State.get_fp8_recipe() is of
        kept = State.get_fp8_autocast_state()
        with te.fp8_autocast(enabled=False, calibrating=True):
            assert not State.is_fp8_enabled() and State.is_fp8_calibration()
            State.set_fp8_autocast_state(kept)
            assert State.is_fp8_enabled() and State.get_fp8_recipe() is of
    assert not State.is_fp8_enabled()
    with te.fp8_model_init(preserve_high_precision_init_val=True):
        assert State.with_fp8_parameters() and State.with_high_precision_init_val()
    assert not State.with_fp8_parameters()


def test_directions_of_a_layer_s_state():
    made = te.Linear(16, 16)
    for forward, of in ((True, made._state.forward), (False, made._state.backward)):
        assert made.fp8_meta[State.get_meta_tensor_key(forward=forward)] is of


def test_helpers():
    weight = torch.empty(400, 100, dtype=torch.float32, device="cpu")
    for init, deviation in (
        (utils.get_default_init_method(), 0.023),
        (utils.init_method_normal(0.5), 0.5),
        (utils.scaled_init_method_normal(0.5, 8), 0.125),
    ):
        assert init(weight) is weight and abs(weight.std() / deviation - 1) < 0.05
    assert torch.all(utils.init_method_constant(2.5)(weight) == 2.5)
    scores = torch.zeros(2, 2, dtype=torch.float32, device="cpu")
    mask = torch.tensor([[False, True], [False, False]], dtype=torch.bool, device="cpu")
    assert utils.attention_mask_func(scores, mask).tolist() == [[0, -10000], [0, 0]]
    assert utils.divide(12, 4) == 3 and utils.is_bf16_compatible() is True
    with pytest.raises(ValueError, match="13 is not divisible by 4"):
        utils.divide(13, 4)
    if not torch.cuda.is_available():
        assert utils.get_device_compute_capability() == (0, 0)


def test_what_is_offered():
    for told in (fp8.check_fp8_support, State.is_fp8_available, State.is_fp8_block_scaling_available):
        assert told() == (True, "")
    for told in (fp8.check_mxfp8_support, State.is_mxfp8_available):
        assert told()[0] is False and "MXFP8" in told()[1]
    for name, text in (
        ("MXFP8BlockScaling", "E8M0"),
        ("NVFP4BlockScaling", "FP4"),
        ("CustomRecipe", "quantizers"),
    ):
        with pytest.raises(AttributeError, match=f"{name}.*{text}.*DelayedScaling"):
            getattr(recipe, name)
        with pytest.raises(ImportError, match=f"{name}.*{text}.*DelayedScaling"):
            exec(f"from apex.transformer_engine.common.recipe import {name}")
    assert not hasattr(recipe, "NVFP4BlockScaling")


# Of transformer_engine.pytorch, releases 1.13 and 2.14.
PUBLIC = """
    constants DType LayerNormLinear Linear LayerNormMLP LayerNorm RMSNorm GroupedLinear Fp8Padding Fp8Unpadding
    initialize_ub destroy_ub UserBufferQuantizationMode DotProductAttention FusedMLAQUpProjRopeQuant MultiheadAttention
    InferenceParams RotaryPositionEmbedding TransformerLayer moe_permute moe_permute_with_probs
    moe_permute_and_pad_with_probs moe_unpermute moe_sort_chunks_by_index moe_sort_chunks_by_index_with_probs
    fp8_autocast fp8_model_init autocast quantized_model_init is_fp8_available is_mxfp8_available
    is_fp8_block_scaling_available
    is_nvfp4_available get_default_recipe QuantizerRole QuantizerRequest DelayedScalingRequest get_cudnn_version
    get_device_compute_capability is_bf16_available deinterleave_glu_tensor interleave_glu_tensor make_graphed_callables
    checkpoint CudaRNGStatesTracker get_cpu_offload_context mark_not_offload ManualOffloadSynchronizer ops optimizers
    onnx_export parallel_cross_entropy CusolverMpCtx newton_schulz QuantizedTensorStorage QuantizedTensor Quantizer
    prepare_for_saving restore_from_saved restore_from_func_ctx Float8Quantizer Float8CurrentScalingQuantizer
    MXFP8Quantizer Float8BlockQuantizer NVFP4Quantizer Float8TensorStorage MXFP8TensorStorage
    Float8BlockwiseQTensorStorage NVFP4TensorStorage Float8Tensor MXFP8Tensor Float8BlockwiseQTensor NVFP4Tensor
    HybridQuantizer HybridQuantizedTensorStorage IdentityQuantizer IdentityTensorStorage HybridQuantizedTensor
    IdentityTensor
"""
HERE = """
    constants DType LayerNormLinear Linear LayerNormMLP LayerNorm RMSNorm GroupedLinear Fp8Padding Fp8Unpadding
    DotProductAttention MultiheadAttention InferenceParams RotaryPositionEmbedding TransformerLayer fp8_autocast
    fp8_model_init autocast quantized_model_init is_fp8_available is_mxfp8_available is_fp8_block_scaling_available
    get_default_recipe make_graphed_callables checkpoint CudaRNGStatesTracker ops optimizers onnx_export Float8Tensor
"""


def test_names_of_the_public_package_are_here_or_say_why():
    for name in PUBLIC.split():
        if name in HERE.split():
            assert hasattr(te, name)
            continue
        with pytest.raises(AttributeError, match=f"no attribute '{name}': "):
            getattr(te, name)
        with pytest.raises(ImportError, match=f"no attribute '{name}': "):
            exec(f"from apex.transformer_engine.pytorch import {name}")
    with pytest.raises(AttributeError, match="no attribute 'no_such'$"):
        _ = te.no_such
    assert te.is_mxfp8_available() is False and te.is_mxfp8_available(return_reason=True)[0] is False
    assert (
        te.is_fp8_block_scaling_available(True) == (True, "")
        and te.get_default_recipe() == recipe.DelayedScaling()
    )


@pytest.mark.parametrize("sizes", [(3, 0, 16), (16, 32, 16), (1, 1, 1)], ids=str)
def test_padded_parts(sizes):
    """Rows of 0 behind each part, which come off again; gradients go the same way."""
    x, pad, unpad = random(sum(sizes), 8, grad=True), te.Fp8Padding(3), te.Fp8Unpadding(3)
    padded, grown = pad(x, list(sizes))
    assert grown == [-(-size // 16) * 16 for size in sizes] and padded.shape == (sum(grown), 8)
    for part, own, size in zip(padded.split(grown), x.split(list(sizes)), sizes, strict=True):
        assert torch.equal(part[:size], own) and not part[size:].any()
    back = unpad(padded * 2, list(sizes))
    back.sum().backward()
    assert torch.equal(back, 2 * x) and (x.grad == 2).all()
    assert te.Fp8Padding(1, align_size=32)(random(33, 4), [33])[1] == [64]
    for call in (lambda: pad(x, [1, 2]), lambda: pad(x, [1, 2, 90]), lambda: unpad(random(3, 2), [1, 1, 1])):
        with pytest.raises(ValueError, match="Fp8"):
            call()


def test_reset_after_a_step_that_failed():
    made, x = te.Linear(32, 48, device="cpu"), random(5, 32)
    te.fp8_autocast(fp8_recipe=RECIPES["delayed"]).__enter__()
    made(x)
    State.reset()
    assert not State.is_fp8_enabled()
    with te.fp8_autocast(fp8_recipe=RECIPES["delayed"]):
        pass
    assert (
        made.fp8_meta["scaling_fwd"].scale.eq(1).all() and made.fp8_meta["scaling_fwd"].amax_history[0].any()
    )


def test_scales_are_made_when_asked_for():
    made, other, x = te.Linear(32, 48, device="cpu"), te.Linear(32, 48, device="cpu"), random(5, 32)
    other.load_state_dict(made.state_dict())
    for module in (made, other):
        train(module, RECIPES["delayed"], x)
    State.reduce_and_update_fp8_tensors(forward=False)
    scale = made.fp8_meta["scaling_bwd"].scale
    assert scale[0] != 1
    with te.fp8_autocast(fp8_recipe=RECIPES["delayed"]):  # makes none a second time
        pass
    assert made.fp8_meta["scaling_bwd"].scale is scale
    assert torch.equal(scale, other.fp8_meta["scaling_bwd"].scale)


def test_casts_by_a_layer_s_state():
    made, x = te.Linear(32, 48, device="cpu"), random(5, 32)
    train(made, RECIPES["delayed"], x)
    with te.fp8_autocast(fp8_recipe=RECIPES["delayed"]):
        pass
    meta = made.fp8_meta["scaling_fwd"]
    codes = cpp_extensions.cast_to_fp8(3 * x, meta, 1, E4M3)
    expected = reference.quantize(3 * x, meta.scale[1], E4M3)
    assert torch.equal(codes.view(torch.uint8), expected.view(torch.uint8))
    assert meta.amax_history[0, 1] == (3 * x).abs().max()
    out = torch.empty(160, dtype=torch.uint8, device="cpu")[:160].view(5, 32)
    cpp_extensions.cast_to_fp8(3 * x, meta, 1, E4M3, out=out)
    assert torch.equal(out, expected.view(torch.uint8))
    wide = cpp_extensions.cast_from_fp8(out, meta, 1, E4M3, torch.float32)
    assert torch.equal(wide, reference.dequantize(expected, meta.scale_inv[1], torch.float32))
    with pytest.raises(ValueError, match="cast_to_fp8"):
        cpp_extensions.cast_to_fp8(x, meta, 1, E4M3, out=out[:4])


def test_a_recipe_takes_what_megatron_passes():
    of = recipe.DelayedScaling(amax_history_len=4, params_dtype=torch.float32, device="cpu")
    assert of == recipe.DelayedScaling(amax_history_len=4)


def test_layers_say_how_ranks_share_them():
    for made in (te.Linear(8, 8, device="cpu"), te.LayerNormMLP(8, 8, device="cpu")):
        assert isinstance(made, TransformerEngineBaseModule)
        assert made.tp_size == 1 and made.parallel_mode is None and made.tp_group is None
        made.tp_size = 2  # Megatron-LM writes it


def test_a_state_of_that_name_is_drawn_from():
    names = []

    class Tracker:
        def fork(self, name="default"):
            names.append(name)
            return torch.no_grad()

    options = dict(tp_size=2, get_rng_state_tracker=Tracker, device="cpu")
    te.Linear(8, 8, parallel_mode="column", rng_tracker_name="experts", **options)
    te.LayerNormLinear(8, 8, parallel_mode="column", rng_tracker_name="experts", **options)
    te.GroupedLinear(2, 8, 8, parallel_mode="column", rng_tracker_name="experts", **options)
    te.Linear(8, 8, parallel_mode="row", **options)
    assert names == ["experts"] * 4 + ["default"]


# ---- checkpoints of somebody else ------------------------------------------------------------------------------------


@ALL_RECIPES
def test_recompute_phases(of):
    """Two microbatches run first, and again, in order, with other scales in between: the same bits."""
    made, xs = te.LayerNormMLP(32, 48, device="cpu"), [random(5, 32, seed=s) for s in (1, 2)]
    first, again = [], []
    train(made, of, xs[0])
    with te.fp8_autocast(fp8_recipe=of):
        for x in xs:
            with distributed.activation_recompute_forward(True, False), torch.no_grad():
                assert distributed.is_fp8_activation_recompute_enabled()
                assert not distributed.in_fp8_activation_recompute_phase()
                first.append(made(x))
    history = made.fp8_meta["scaling_fwd"].amax_history.clone()
    state = State.get_fp8_autocast_state()
    with te.fp8_autocast(fp8_recipe=of):  # of which each has new scales
        for x in xs:
            with distributed.activation_recompute_forward(True, True):
                assert distributed.in_fp8_activation_recompute_phase()
                again.append(made(x))
    assert all(map(torch.equal, first, again)) and state == State.get_fp8_autocast_state()
    if of.delayed():
        now = made.fp8_meta["scaling_fwd"].amax_history
        assert torch.equal(
            now, history.roll(-1, 0).index_fill(0, torch.tensor([0], dtype=torch.int64, device="cpu"), 0.0)
        )
        with (
            te.fp8_autocast(fp8_recipe=of),
            distributed.activation_recompute_forward(True, True),
            pytest.raises(RuntimeError, match="run again"),
        ):
            made(xs[0])


# ---- several layers of one size --------------------------------------------------------------------------------------


@ALL_RECIPES
@pytest.mark.parametrize("splits", [(3, 5), (0, 8), (8, 0)], ids=str)
def test_grouped_layers(of, splits):
    """The same bits as one layer for each part."""
    made = te.GroupedLinear(2, 32, 48, device="cpu")
    layers = [te.Linear(32, 48, device="cpu") for _ in splits]
    for index, layer in enumerate(layers):
        torch.nn.init.normal_(getattr(made, f"bias{index}"))
        state = {name: getattr(made, f"{name}{index}") for name in ("weight", "bias")}
        layer.load_state_dict(state)
    x, grad = random(2, 4, 32, grad=True), random(2, 4, 48, seed=1)
    for _ in range(2):
        y = train(made, of, x, grad, m_splits=splits)
        assert y.shape == (2, 4, 48)
        begin = 0
        for index, (layer, size) in enumerate(zip(layers, splits, strict=True)):
            part = x.detach().flatten(0, 1)[begin : begin + size].requires_grad_()
            found = train(layer, of, part, grad.flatten(0, 1)[begin : begin + size])
            assert torch.equal(y.flatten(0, 1)[begin : begin + size], found)
            assert torch.equal(x.grad.flatten(0, 1)[begin : begin + size], part.grad)
            assert torch.equal(getattr(made, f"weight{index}").grad, layer.weight.grad)
            assert torch.equal(getattr(made, f"bias{index}").grad, layer.bias.grad)
            begin += size


def test_what_grouped_layers_return_and_refuse():
    made, x = te.GroupedLinear(2, 16, 32, return_bias=True, device="cpu"), random(6, 16)
    y, biases = made(x, [2, 4])
    assert biases[0] is made.bias0 and biases[1] is made.bias1
    near(y[:2], x[:2].double() @ made.weight0.double().t().detach(), torch.float32, 16)
    assert torch.equal(copy.deepcopy(made)(x, [2, 4])[0], y)
    plain = te.GroupedLinear(2, 16, 32, bias=False, device="cpu")
    assert [name for name, _ in plain.named_parameters()] == ["weight0", "weight1"]
    for splits in ([2, 3], [6], [1, 2, 3]):
        with pytest.raises(ValueError, match="m_splits"):
            made(x, splits)
    with pytest.raises(ValueError, match="sequence_parallel"):
        te.GroupedLinear(2, 16, 32, tp_size=2, parallel_mode="column", sequence_parallel=True, device="cpu")
    with pytest.raises(TypeError):
        te.GroupedLinear(2, 16, 32, device="cpu", nothing=1)


# ---- layers that are made without memory -----------------------------------------------------------------------------


def makers(**options):
    return [
        te.LayerNorm(16, **options),
        te.RMSNorm(16, zero_centered_gamma=True, **options),
        te.Linear(16, 32, **options),
        te.Linear(16, 32, parameters_split=("a_", "b_"), **options),
        te.LayerNormLinear(16, 32, **options),
        te.LayerNormMLP(16, 32, activation="swiglu", **options),
        te.GroupedLinear(2, 16, 32, **options),
    ]


@pytest.mark.parametrize("to_empty", [False, True])
def test_parameters_are_made_where_they_were_not(to_empty):
    """As FSDP does: device="meta", then reset_parameters, behind to_empty or without it."""
    for shadow, whole in zip(makers(device="meta"), makers(device="cpu"), strict=True):
        assert all(p.is_meta for p in shadow.parameters())
        if to_empty:
            shadow.to_empty(device="cpu")
        torch.manual_seed(5)
        shadow.reset_parameters()
        torch.manual_seed(5)
        whole.reset_parameters()
        assert [*dict(shadow.named_parameters())] == [*dict(whole.named_parameters())]
        for p, q in zip(shadow.parameters(), whole.parameters(), strict=True):
            assert torch.equal(p, q) and p.requires_grad and p.dtype == q.dtype
            assert p.dim() == 1 or 0.01 < p.std() < 0.04
        if not to_empty:
            marks = ("tensor_model_parallel", "partition_dim", "sequence_parallel")
            for p, q in zip(shadow.parameters(), whole.parameters(), strict=True):
                assert all(getattr(p, mark, None) == getattr(q, mark, None) for mark in marks)


def test_a_whole_layer_is_made_by_its_parts():
    made = te.TransformerLayer(32, 64, 4, hidden_dropout=0.0, attention_dropout=0.0, device="meta")
    for module in made.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert not any(p.is_meta for p in made.parameters())
    assert train(made, RECIPES["delayed"], random(4, 2, 32, grad=True)).isfinite().all()


def test_weights_in_fp8_alone_are_made_so_again():
    for device in ("meta", "cpu"):
        with te.fp8_model_init():
            made = te.Linear(16, 32, device=device)
        before = made.weight
        made.reset_parameters()
        assert type(made.weight) is te.Float8Tensor and 0.01 < made.weight.dequantize().std() < 0.04
        assert (made.weight is before) == (device == "cpu")


def test_how_weights_were_made_goes_with_copies():
    made = te.Linear(16, 32, init_method=lambda weight: weight.fill_(3.0), device="cpu")
    for copied in (copy.deepcopy(made), pickle.loads(pickle.dumps(te.Linear(16, 32, device="cpu")))):
        copied.weight.data.zero_()
        copied.reset_parameters()
        assert copied.weight.abs().min() > 0
    with pytest.raises(RuntimeError, match="init_method"):
        pickle.loads(pickle.dumps(made)).reset_parameters()
