"""Subclasses that drive amp_C's functions themselves, as fairseq and NeMo do, over what the optimizers offer them."""

from __future__ import annotations

import copy
import inspect
import pickle

import lists
import pytest
import torch
import training
from lists import F16, F32

from apex import optimizers
from apex._legacy import amp_C
from apex.multi_tensor_apply import multi_tensor_applier
from apex.optimizers import FusedAdam, FusedLAMB

ADAM = dict(lr=1e-2, betas=(0.9, 0.99), eps=1e-6, weight_decay=0.1)
# The attributes of public apex's classes, and the functions that these are.
FUNCTIONS = {
    "FusedAdam": {
        "multi_tensor_adam": "multi_tensor_adam",
        "multi_tensor_adam_capturable": "multi_tensor_adam_capturable",
        "multi_tensor_adam_capturable_master": "multi_tensor_adam_capturable_master",
    },
    "FusedLAMB": {"multi_tensor_l2norm": "multi_tensor_l2norm", "multi_tensor_lamb": "multi_tensor_lamb"},
    "FusedMixedPrecisionLamb": {
        "multi_tensor_l2norm": "multi_tensor_l2norm_mp",
        "multi_tensor_lamb": "multi_tensor_lamb_mp",
    },
    "FusedSGD": {"multi_tensor_sgd": "multi_tensor_sgd"},
    "FusedLARS": {"multi_tensor_l2norm": "multi_tensor_l2norm", "multi_tensor_lars": "multi_tensor_lars"},
    "FusedNovoGrad": {"multi_tensor_novograd": "multi_tensor_novograd"},
    "FusedAdagrad": {"multi_tensor_adagrad": "multi_tensor_adagrad"},
}


PLACES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def made(name, params):
    kind = getattr(optimizers, name)
    return kind(params, lr=0.1) if "lr" in inspect.signature(kind).parameters else kind(params)


def groups_by_dtype(params):
    """[[gradients, parameters], ...] of those that have a gradient, one for each dtype."""
    found = {}
    for p in params:
        if p.grad is not None:
            columns = found.setdefault(p.dtype, ([], []))
            columns[0].append(p.grad.detach())
            columns[1].append(p)
    return found


class InFullPrecision(FusedAdam):
    """As fairseq's: float16 parameters are updated through float32 copies that live for a step."""

    def __init__(self, params, **options):
        super().__init__(params, **options)
        if not hasattr(self, "multi_tensor_adam"):
            raise RuntimeError("apex is too old")

    def step(self, closure=None):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for dtype, (grads, params) in groups_by_dtype(group["params"]).items():
                for p in params:
                    for name in ("exp_avg", "exp_avg_sq"):
                        self.state[p].setdefault(name, torch.zeros_like(p, dtype=F32, requires_grad=False))
                moments = [[self.state[p][name] for p in params] for name in ("exp_avg", "exp_avg_sq")]
                working = [p.detach().float() for p in params]
                full = [grad.float() for grad in grads]
                options = (group["lr"], *group["betas"], group["eps"], group["step"], self.adam_w_mode)
                multi_tensor_applier(
                    self.multi_tensor_adam,
                    self._dummy_overflow_buf,
                    [full, working, *moments],
                    *options,
                    1 if group["bias_correction"] else 0,
                    group["weight_decay"],
                )
                if dtype != F32:
                    for p, value in zip(params, working, strict=True):
                        p.detach().copy_(value)


class Capturable(FusedAdam):
    """As NeMo's: capturable with masters; unscales, clips and skips on the device."""

    def __init__(self, params, max_norm=0.0, **options):
        super().__init__(params, capturable=True, master_weights=True, **options)
        self.max_norm = max_norm

    def step(self, closure=None, grad_scaler=None):
        for group, masters in zip(self.param_groups, self.param_groups_master, strict=True):
            device = group["params"][0].device
            found_inf, inv_scale = (
                torch.zeros(1, dtype=F32, device=device),
                torch.ones(1, device=device, dtype=F32),
            )
            if grad_scaler is not None:
                found_inf = grad_scaler._check_inf_per_device(self)[device]
                inv_scale = grad_scaler._get_scale_async().double().reciprocal().float()
            self._dummy_overflow_buf.copy_(found_inf)
            counts = (self._dummy_overflow_buf != 1).to(torch.int32)
            group["step"] = group["step"] + counts if "step" in group else counts
            by_master = {id(p): m for p, m in zip(group["params"], masters["params"], strict=True)}
            for grads, params in groups_by_dtype(group["params"]).values():
                scale = inv_scale
                if self.max_norm:
                    norm, _ = multi_tensor_applier(
                        amp_C.multi_tensor_unscale_l2norm, self._dummy_overflow_buf, [grads], inv_scale, False
                    )
                    scale = inv_scale * (self.max_norm / (norm + 1e-6)).clamp(max=1.0)
                for p in params:
                    for name in ("exp_avg", "exp_avg_sq"):
                        self.state[p].setdefault(name, torch.zeros_like(p, dtype=F32, requires_grad=False))
                moments = [[self.state[p][name] for p in params] for name in ("exp_avg", "exp_avg_sq")]
                multi_tensor_applier(
                    self.multi_tensor_adam_capturable_master,
                    self._dummy_overflow_buf,
                    [grads, params, *moments, [by_master[id(p)] for p in params]],
                    group["lr"],
                    *group["betas"],
                    group["eps"],
                    group["step"],
                    self.adam_w_mode,
                    1 if group["bias_correction"] else 0,
                    group["weight_decay"],
                    scale,
                )


class OwnLamb(FusedLAMB):
    """A step of LAMB over self.multi_tensor_l2norm and self.multi_tensor_lamb."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for grads, params in groups_by_dtype(group["params"]).values():
                norm, _ = multi_tensor_applier(
                    self.multi_tensor_l2norm, self._dummy_overflow_buf, [grads], False
                )
                for p in params:
                    for name in ("exp_avg", "exp_avg_sq"):
                        self.state[p].setdefault(name, torch.zeros_like(p, dtype=F32, requires_grad=False))
                moments = [[self.state[p][name] for p in params] for name in ("exp_avg", "exp_avg_sq")]
                multi_tensor_applier(
                    self.multi_tensor_lamb,
                    self._dummy_overflow_buf,
                    [grads, params, *moments],
                    group["lr"],
                    *group["betas"],
                    group["eps"],
                    group["step"],
                    1 if group["bias_correction"] else 0,
                    group["weight_decay"],
                    1 if group["grad_averaging"] else 0,
                    self.adam_w_mode,
                    norm,
                    group["max_grad_norm"],
                    self.use_nvlamb,
                )


def test_fairseq_like(device):
    params = training.parameters(F32, device) + training.parameters(F16, device, seed=2)
    twins = training.twins_of(params)
    optimizer, oracle = InFullPrecision(params, **ADAM), torch.optim.AdamW(twins, **ADAM)
    training.train(optimizer, oracle, params, twins, without=(3,))
    training.assert_trained(params, twins)


@pytest.mark.parametrize("dtype", [F32, F16])
def test_nemo_like(device, dtype):
    params = training.parameters(dtype, device)
    twins = training.twins_of(params)
    optimizer, oracle = Capturable(params, **ADAM), torch.optim.AdamW(twins, **ADAM)
    training.train(optimizer, oracle, params, twins)
    training.assert_trained(params, twins)
    assert optimizer.param_groups[0]["step"].item() == 3


def test_nemo_like_clips(device):
    params = training.parameters(F32, device)
    twins = training.twins_of(params)
    optimizer, oracle = Capturable(params, max_norm=0.5, **ADAM), torch.optim.AdamW(twins, **ADAM)
    for step in range(1, 4):
        training.give_gradients(params, twins, step)
        torch.nn.utils.clip_grad_norm_(twins, 0.5)
        optimizer.step()
        oracle.step()
    training.assert_trained(params, twins, arithmetic=32)


def test_nemo_like_skips_an_overflow(device):
    params = training.parameters(F32, device)
    twins = training.twins_of(params)
    optimizer, oracle = Capturable(params, **ADAM), torch.optim.AdamW(twins, **ADAM)
    scaler = torch.amp.GradScaler(torch.device(device).type, init_scale=8.0)
    scaler.scale(torch.ones((), device=device, dtype=F32))  # makes the scale's tensor
    for step in (1, 2, 3):
        training.give_gradients(params, twins, step, scale=8.0)
        if step == 2:
            params[3].grad[0, 0] = float("inf")
        optimizer.step(grad_scaler=scaler)
        if step != 2:
            oracle.step()
    assert optimizer.param_groups[0]["step"].item() == 2
    training.assert_trained(params, twins)


def test_lamb_over_its_functions(device):
    params = training.parameters(F32, device)
    others = [torch.nn.Parameter(p.detach().clone()) for p in params]
    one, other = OwnLamb(params, lr=1e-2), FusedLAMB(others, lr=1e-2)
    for step in (1, 2, 3):
        training.give_gradients(params, training.twins_of(params), step)
        for p, q in zip(params, others, strict=True):
            q.grad = p.grad.clone()
        one.step()
        other.step()
    lists.assert_near(params, lists.exact(others), smallest=1e-6)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_those_of_amp_c(name):
    optimizer = made(name, training.parameters(F32, "cpu"))
    for attribute, function in FUNCTIONS[name].items():
        assert getattr(optimizer, attribute) is getattr(amp_C, function)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_overflow_flag(place, name):
    optimizer = made(name, training.parameters(F32, place))
    assert "_dummy_overflow_buf" not in vars(optimizer)  # construction makes nothing
    flag = optimizer._dummy_overflow_buf
    assert flag.dtype == torch.int32 and flag.tolist() == [0]
    assert flag.device.type == place
    flag.fill_(1)
    assert optimizer._dummy_overflow_buf is flag
    copies = copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))
    for one in copies:
        assert one._dummy_overflow_buf.tolist() == [0]
        for attribute in FUNCTIONS[name]:
            assert callable(getattr(one, attribute))


def test_a_subclass_may_put_its_own_in_place():
    optimizer = FusedAdam(training.parameters(F32, "cpu"))
    flag = torch.ones(1, dtype=torch.int32, device="cpu")
    optimizer.multi_tensor_adam, optimizer._dummy_overflow_buf = print, flag
    assert optimizer.multi_tensor_adam is print and optimizer._dummy_overflow_buf is flag


@pytest.mark.parametrize("place", PLACES)
def test_overflow_flag_follows_no_default(place):
    optimizer = FusedAdam([{"params": []}, {"params": training.parameters(F32, place)}])
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            flag = optimizer._dummy_overflow_buf
    finally:
        torch.set_default_dtype(torch.float32)
    assert flag.dtype == torch.int32 and flag.device.type == place


@pytest.mark.gpu
def test_overflow_flag_of_a_capture_is_the_graphs():
    optimizer = FusedAdam(training.parameters(F32, "cuda"))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer._dummy_overflow_buf.add_(1)
    graph.replay()
    assert "_dummy_overflow_buf" not in vars(optimizer)
    assert optimizer._dummy_overflow_buf.tolist() == [0]
