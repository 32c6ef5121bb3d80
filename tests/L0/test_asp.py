"""apex.contrib.sparsity.ASP: which weights are pruned, and that they stay so under every optimizer."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from lists import BF16, F32, F64
from torch import nn

from apex import amp
from apex.amp._amp_state import _amp_state
from apex.contrib.sparsity import ASP, create_mask
from apex.contrib.sparsity.asp import eligible_modules
from apex.fp16_utils import FP16_Optimizer
from apex.fused_dense import FusedDense
from apex.optimizers import FusedAdam, FusedLAMB, FusedMixedPrecisionLamb, FusedNovoGrad, FusedSGD
from apex.parallel import DistributedDataParallel
from apex.parallel.LARC import LARC
from tests.torch_defaults import float32_on_cpu

OPTIMIZERS = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.1),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01),
    "FusedAdam": lambda params: FusedAdam(params, lr=0.01, weight_decay=0.1),
    "FusedLAMB": lambda params: FusedLAMB(params, lr=0.01),
    "FusedNovoGrad": lambda params: FusedNovoGrad(params, lr=0.01),
    "FusedSGD": lambda params: FusedSGD(params, lr=0.05, momentum=0.9),
    "LARC": lambda params: LARC(torch.optim.SGD(params, lr=0.05, momentum=0.9)),
}


pytestmark = pytest.mark.usefixtures("asp_forgotten")


@float32_on_cpu()
def network(dtype=F32):
    torch.manual_seed(1)
    layers = nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 3)
    return nn.Sequential(*layers).to(dtype)


def batch(dtype=F32, seed=0):
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(8, 16, dtype=F32, device="cpu", generator=generator).to(dtype)


def loss_of(model, seed=0, dtype=F32):
    return model(batch(dtype, seed)).float().square().mean()


def prune(model, optimizer=None, **options):
    ASP.init_model_for_pruning(model, **{"verbosity": 0, "allow_permutation": False, **options})
    if optimizer is not None:
        ASP.init_optimizer_for_pruning(optimizer)
    ASP.compute_sparse_masks()


def weights(model):
    return [model[0].weight, model[2].weight]


def assert_2_to_4(weight):
    """Each four has two zeros at least, and not all are."""
    groups = (weight.detach() != 0).reshape(-1, 4).sum(1)
    assert (groups <= 2).all() and (groups == 2).double().mean() > 0.9


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_keep_masks(name):
    """Gradients of pruned weights are zero in the step: what the optimizer remembers of them, too."""
    model = network()
    optimizer = OPTIMIZERS[name](model.parameters())
    loss_of(model).backward()
    optimizer.step()
    before = [w.detach().clone() for w in weights(model)]
    prune(model, optimizer)
    for w, dense in zip(weights(model), before, strict=True):
        assert torch.equal(w, dense * create_mask(dense))
    for seed in range(4):
        optimizer.zero_grad()
        loss_of(model, seed).backward()
        optimizer.step()
    for w, dense in zip(weights(model), before, strict=True):
        assert_2_to_4(w)
        assert torch.equal(w != 0, create_mask(dense).bool()) and not torch.equal(
            w, dense * create_mask(dense)
        )
        assert name == "FusedLAMB" or not w.grad[w == 0].any()  # where FusedLAMB leaves its update
    assert (model[4].weight != 0).all()


def test_a_closure_and_a_scheduler():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    prune(model, optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss

    first = optimizer.step(closure).item()
    scheduler.step()
    assert optimizer.step(closure).item() < first and optimizer.param_groups[0]["lr"] == 0.05
    for w in weights(model):
        assert_2_to_4(w)
        assert not optimizer.state[w]["momentum_buffer"][w == 0].any()


def test_a_grad_scaler():
    model = network()
    optimizer = FusedAdam(model.parameters(), lr=0.01)
    prune(model, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    scaler.scale(loss_of(model)).backward()
    scaler.step(optimizer)
    scaler.update()
    assert_2_to_4(model[0].weight)


def masters_of(kind, model, optimizer):
    if kind == "amp":
        return [_amp_state.masters.get(w) for w in weights(model)]
    if kind == "fp16_optimizer":
        return [p for p in optimizer.all_fp32_from_fp16_params if p.dim() == 2][:2]
    return [optimizer.state[w]["master_param"] for w in weights(model)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["FusedAdam", "FusedMixedPrecisionLamb", "amp", "fp16_optimizer"])
@pytest.mark.parametrize("stepped", [False, True], ids=["at_once", "after_steps"])
def test_master_weights_are_pruned_too(kind, stepped):
    model = network(F32 if kind == "amp" else BF16)
    if kind == "FusedAdam":
        optimizer = FusedAdam(model.parameters(), lr=0.01, master_weights=True)
    elif kind == "FusedMixedPrecisionLamb":
        optimizer = FusedMixedPrecisionLamb(model.parameters(), lr=0.01, reduced_precision_dtype=BF16)
    else:
        optimizer = FusedSGD(model.parameters(), lr=0.1, momentum=0.9)
    if kind == "amp":
        model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0, cast_model_type=BF16)
    elif kind == "fp16_optimizer":
        optimizer = FP16_Optimizer(optimizer, static_loss_scale=1.0, verbose=False)

    def step():
        optimizer.zero_grad()
        if kind == "amp":
            with amp.scale_loss(loss_of(model), optimizer) as loss:
                loss.backward()
        elif kind == "fp16_optimizer":
            optimizer.backward(loss_of(model, dtype=BF16))
        else:
            loss_of(model, dtype=BF16).backward()
        optimizer.step()

    if stepped:
        step()
    prune(model, optimizer, allow_recompute_mask=True)
    for _ in range(3):
        step()
    for w, master in zip(weights(model), masters_of(kind, model, optimizer), strict=True):
        assert_2_to_4(w)
        assert master.dtype == F32 and not master[w == 0].any()
        torch.testing.assert_close(master.to(w.dtype), w.detach(), rtol=0, atol=0)
    ASP.restore_pruned_weights()
    for w, master in zip(weights(model), masters_of(kind, model, optimizer), strict=True):
        assert (w != 0).double().mean() > 0.99
        torch.testing.assert_close(master.to(w.dtype), w.detach(), rtol=0.02, atol=1e-3)


def test_buffers_have_the_names_of_public_apex_and_a_checkpoint_goes_on():
    model = network()
    optimizer = FusedAdam(model.parameters(), lr=0.01)
    prune(model, optimizer, allow_recompute_mask=True)
    loss_of(model).backward()
    optimizer.step()
    buffers = dict(model.named_buffers())
    assert sorted(buffers) == [f"{i}.__weight_mma_{kind}" for i in (0, 2) for kind in ("mask", "pruned_p")]
    assert buffers["0.__weight_mma_mask"].dtype == torch.bool
    saved = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, saved)
    saved.seek(0)

    def go_on(model, optimizer):
        for seed in range(3):
            optimizer.zero_grad()
            loss_of(model, seed).backward()
            optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    wanted = go_on(model, optimizer)
    ASP.reset()
    other = network()
    second = FusedAdam(other.parameters(), lr=0.01)
    ASP.init_model_for_pruning(other, verbosity=0, allow_recompute_mask=True)
    ASP.init_optimizer_for_pruning(second)
    assert not ASP.is_sparsity_enabled()
    state = torch.load(saved)
    other.load_state_dict(state["model"])
    second.load_state_dict(state["optimizer"])
    assert ASP.is_sparsity_enabled()
    assert all(torch.equal(a, b) for a, b in zip(go_on(other, second), wanted, strict=True))


def test_dense_weights_come_back_and_masks_can_be_new():
    model = network()
    dense = [w.detach().clone() for w in weights(model)]
    prune(model, allow_recompute_mask=True)
    assert ASP.is_sparsity_enabled()
    ASP.restore_pruned_weights()
    assert not ASP.is_sparsity_enabled()
    assert all(torch.equal(w, d) for w, d in zip(weights(model), dense, strict=True))
    ASP.compute_sparse_masks()
    with torch.no_grad():
        model[0].weight.mul_(torch.tensor([3.0, 2.0, 0.1, 0.1] * 4, dtype=F32, device="cpu"))
    ASP.compute_sparse_masks()
    restored = model[0].weight + model[0].get_buffer("__weight_mma_pruned_p")
    assert torch.equal(model[0].weight, restored * create_mask(restored))
    assert ASP.is_sparsity_enabled()


def test_a_model_may_move_after_it_was_initialized():
    model = network()
    ASP.init_model_for_pruning(model, verbosity=0, allow_recompute_mask=True, allow_permutation=False)
    model.double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ASP.init_optimizer_for_pruning(optimizer)
    ASP.compute_sparse_masks()
    model(batch(F64)).sum().backward()
    optimizer.step()
    assert_2_to_4(model[0].weight)
    ASP.restore_pruned_weights()


def test_copies_are_sparse_models_of_their_own():
    model = network()
    optimizer = FusedAdam(model.parameters(), lr=0.01)
    prune(model, optimizer)
    twin, other = copy.deepcopy(model), copy.deepcopy(optimizer)
    assert torch.equal(twin[0].get_buffer("__weight_mma_mask"), model[0].get_buffer("__weight_mma_mask"))
    assert torch.equal(twin[0].weight, model[0].weight) and other.state_dict()["param_groups"]
    loss_of(model).backward()
    optimizer.step()
    assert not torch.equal(twin[0].weight, model[0].weight)


@float32_on_cpu()
def test_which_weights_are_pruned():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention, self.line, self.image = (
                nn.MultiheadAttention(16, 2),
                nn.Conv1d(16, 8, 3),
                nn.Conv2d(16, 8, 3),
            )
            self.volume, self.dense, self.odd = nn.Conv3d(16, 8, 1), FusedDense(16, 8), nn.Linear(12, 8)
            self.frozen = nn.Linear(16, 8).requires_grad_(False)

    def masks(**options):
        ASP.reset()
        model = Model()
        prune(model, **options)
        for name, mask in model.named_buffers():
            assert 2 * mask.sum() == mask.numel(), name
        return sorted(name.replace(".__", ".").removesuffix("_mma_mask") for name, _ in model.named_buffers())

    convolutions = ["image.weight", "line.weight", "volume.weight"]
    everything = ["attention.in_proj_weight", "attention.out_proj.weight", *convolutions]
    assert masks() == everything
    assert masks(custom_layer_dict={FusedDense: ["weight"]}) == sorted([*everything, "dense.weight"])
    assert masks(whitelist=[nn.Conv1d, nn.Conv2d]) == ["image.weight", "line.weight"]
    assert masks(allowed_layer_names=["line", "odd"]) == ["line.weight"]
    assert masks(disallowed_layer_names=["line", "attention"]) == [
        "attention.out_proj.weight",
        "image.weight",
        "volume.weight",
    ]
    names = [name for name, _ in eligible_modules(Model(), (nn.Linear,), None, ["odd"])]
    assert names == ["attention.out_proj", "frozen"]


def test_own_masks_and_2d_patterns():
    model = network()
    prune(model, mask_calculator=lambda p: p > 0)
    assert (model[0].weight >= 0).all()
    ASP.reset()
    model = network()
    prune(model, mask_calculator="m4n2_2d_greedy")
    assert ASP.is_sparsity_enabled()
    assert_2_to_4(model[0].weight.t())


def test_channels_are_reordered_first():
    model, plain = network(), network()
    with torch.no_grad():
        for m in (model, plain):
            m[2].weight[:, :16] *= 10
    wanted = model(batch())
    prune(plain)
    ASP.reset()
    ASP.init_model_for_pruning(model, verbosity=0, allow_recompute_mask=True)
    optimizer = FusedAdam(model.parameters(), lr=0.01)
    ASP.init_optimizer_for_pruning(optimizer)
    ASP.compute_sparse_masks()
    kept, before = (w.abs().sum() for w in (model[2].weight, plain[2].weight))
    assert kept > 1.1 * before
    ASP.restore_pruned_weights()
    torch.testing.assert_close(model(batch()), wanted, rtol=1e-4, atol=1e-4)


@float32_on_cpu()
def test_the_recipe_in_one_call(capsys):
    model = nn.Sequential(nn.Conv2d(16, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 8, 1))
    optimizer = FusedSGD(model.parameters(), lr=0.1, momentum=0.9)
    ASP.prune_trained_model(model, optimizer)
    assert "Enabled 50.00% sparsity for 0::weight" in capsys.readouterr().out
    model(torch.randn(2, 16, 5, 5, dtype=F32, device="cpu")).sum().backward()
    optimizer.step()
    assert ASP.is_sparsity_enabled() and ASP.already_init_asp_model()
    assert_2_to_4(model[3].weight.movedim(1, -1))


def test_the_graph_is_saved_where_it_is_said(tmp_path):
    ASP.set_permutation_saving_params(True, True, str(tmp_path))
    ASP.init_model_for_pruning(network(), verbosity=0)
    ASP.compute_sparse_masks()
    assert (tmp_path / "model_offline_permutation_graph.json").exists()


def test_reset_lets_the_optimizer_be():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prune(model, optimizer)
    ASP.reset()
    assert not ASP.already_init_asp_model()
    loss_of(model).backward()
    optimizer.step()
    assert (model[0].weight != 0).double().mean() > 0.9


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no distributed")
@pytest.mark.parametrize("wrapped", ["before", "after"])
def test_distributed_data_parallel(tmp_path, wrapped):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = network()
        optimizer = FusedAdam(model.parameters(), lr=0.01)
        ddp = DistributedDataParallel(model) if wrapped == "before" else model
        ASP.init_model_for_pruning(ddp, verbosity=0)
        ASP.init_optimizer_for_pruning(optimizer)
        ASP.compute_sparse_masks()
        ddp = ddp if wrapped == "before" else DistributedDataParallel(model)
        for seed in range(2):
            optimizer.zero_grad()
            loss_of(ddp, seed).backward()
            optimizer.step()
        for w in weights(model):
            assert_2_to_4(w)
    finally:
        torch.distributed.destroy_process_group()


def initialized():
    ASP.init_model_for_pruning(network(), verbosity=0, allow_permutation=False)
    return torch.optim.SGD(network().parameters(), lr=0.1)


pruned = ASP.compute_sparse_masks


@pytest.mark.parametrize(
    "call, error, text",
    [
        (lambda: (initialized(), initialized()), RuntimeError, r"initialized already; ASP.reset\(\)"),
        (lambda: ASP.compute_sparse_masks(), RuntimeError, "init_model_for_pruning comes before"),
        (lambda: ASP.init_optimizer_for_pruning(None), RuntimeError, "comes before ASP.init_optimizer"),
        (lambda: [ASP.init_optimizer_for_pruning(o) for o in [initialized()] * 2], RuntimeError, "optimizer already"),
        (lambda: ASP.init_model_for_pruning(network(), "m2n1_1d"), ValueError, "no pattern 'm2n1_1d'"),
        (lambda: ASP.init_model_for_pruning(network(), whitelist=[nn.ReLU]), TypeError, "which parameters of ReLU"),
        (lambda: (initialized(), pruned(), pruned()), RuntimeError, "allow_recompute_mask=True"),
        (lambda: (initialized(), pruned(), ASP.restore_pruned_weights()), RuntimeError, "allow_recompute_mask=True"),
    ],
)  # fmt: skip
def test_refused(call, error, text):
    with pytest.raises(error, match=text):
        call()


def test_sparsity_of_two_kinds_is_told():
    model = network()
    prune(model, allow_recompute_mask=True)
    model[0].get_buffer("__weight_mma_mask").fill_(True)
    with pytest.raises(RuntimeError, match="inconsistent"):
        ASP.is_sparsity_enabled()
