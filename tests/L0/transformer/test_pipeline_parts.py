"""Of apex.transformer.pipeline_parallel, what needs one process: timers, microbatches, masks, freed outputs."""

from __future__ import annotations

import types

import pytest
import torch
from torch import nn
from torch_defaults import float32_on_cpu

from apex.normalization import FusedLayerNorm
from apex.parallel import DistributedDataParallel
from apex.transformer.enums import ModelType
from apex.transformer.pipeline_parallel import _timers, utils
from apex.transformer.pipeline_parallel.p2p_communication import FutureTensor
from apex.transformer.pipeline_parallel.schedules import common, forward_backward_no_pipelining

F32, CPU = torch.float32, torch.device("cpu")


@pytest.fixture
def clock(monkeypatch):
    """What the timers read."""
    now = types.SimpleNamespace(seconds=100.0)
    monkeypatch.setattr(_timers.time, "perf_counter", lambda: now.seconds)
    return now


def test_a_timer(clock):
    timer = _timers._Timers()("step")
    timer.start()
    clock.seconds += 2
    timer.stop()
    clock.seconds += 50
    timer.start()
    clock.seconds += 3
    assert timer.elapsed(reset=False) == 5
    clock.seconds += 1
    assert timer.elapsed() == 6  # and it runs on, from 0
    clock.seconds += 4
    timer.stop()
    assert timer.elapsed() == 4 and timer.elapsed() == 0
    with pytest.raises(RuntimeError, match="'step' does not run"):
        timer.stop()
    timer.start()
    with pytest.raises(RuntimeError, match="'step' runs already"):
        timer.start()
    timer.reset()
    timer.start()


def test_timers_are_written_and_logged(clock, capsys):
    timers = _timers._Timers()
    for name, seconds in (("forward", 1.5), ("backward", 3.0)):
        timers(name).start()
        clock.seconds += seconds
        timers(name).stop()
    assert timers("forward") is timers("forward")
    written = []
    writer = types.SimpleNamespace(add_scalar=lambda *scalar: written.append(scalar))
    timers.write(["forward", "backward"], writer, 7, normalizer=3.0)
    assert written == [("forward-time", 0.5, 7), ("backward-time", 1.0, 7)]
    timers.log(["forward"], normalizer=2.0)
    timers.log(["forward", "backward"])
    assert capsys.readouterr().out.splitlines() == [
        "time (ms) | forward: 750.00",
        "time (ms) | forward: 0.00 | backward: 3000.00",
    ]
    for call in (timers.log, lambda *rest: timers.write(rest[0], writer, 1, *rest[1:])):
        with pytest.raises(ValueError, match="normalizer 0.0"):
            call(["forward"], 0.0)
        with pytest.raises(KeyError, match="no such"):
            call(["no such"])


def test_timers_of_the_process(monkeypatch):
    monkeypatch.setattr(utils, "_GLOBAL_TIMERS", None)
    with pytest.raises(RuntimeError, match="call _set_timers first"):
        utils.get_timers()
    utils._set_timers()
    assert isinstance(utils.get_timers(), _timers._Timers)
    with pytest.raises(RuntimeError, match="there already"):
        utils._set_timers()
    assert utils.get_autoresume() is None


@pytest.fixture
def microbatches(monkeypatch):
    """Six samples a step, two a microbatch."""
    monkeypatch.setattr(utils, "_GLOBAL_NUM_MICROBATCHES_CALCULATOR", None)
    utils.setup_microbatch_calculator(0, None, 6, 2, 1)


def test_a_microbatch(microbatches):
    batch = [torch.arange(6, dtype=F32, device=CPU), torch.arange(12, dtype=F32, device=CPU).view(6, 2)]
    assert (utils.get_micro_batch_size(), utils.get_num_microbatches()) == (2, 3)
    for kind in (list, tuple):
        first, second = utils.get_kth_microbatch(kind(batch), 1)
        assert first.tolist() == [2, 3] and second.tolist() == [[4, 5], [6, 7]]
        assert first.data_ptr() == batch[0][2:].data_ptr()
    assert utils.get_kth_microbatch(None, 5) is None
    assert utils.get_kth_microbatch(batch[0], 1) is batch[0]
    for short in (batch[0][:5], batch[0][:4], batch[0][:0]):
        with pytest.raises(
            ValueError, match=f"{len(short)} samples has no whole microbatch 2: 3 microbatches of 2"
        ):
            utils.get_kth_microbatch([batch[1], short], 2)


@pytest.mark.parametrize("reset_mask", [False, True])
@pytest.mark.parametrize("reset_positions", [False, True])
def test_masks_and_positions(reset_mask, reset_positions):
    """Against the definition, word by word; documents that begin, end, and are one word long."""
    end = 9
    texts = [[1, 2, 9, 3, 4, 5], [9, 9, 1, 2, 3, 9], [1, 2, 3, 4, 5, 6], [1, 9, 2, 9, 9, 3]]
    data = torch.tensor(texts, dtype=torch.int64, device=CPU)
    for mask_loss in (False, True):
        hidden, weights, places = utils.get_ltor_masks_and_position_ids(
            data, end, reset_positions, reset_mask, mask_loss
        )
        assert hidden.shape == (4 if reset_mask else 1, 1, 6, 6) and hidden.dtype == torch.bool
        assert weights.dtype == F32 and places.dtype == torch.int64
        assert weights.tolist() == [
            [float(not (mask_loss and word == end)) for word in text] for text in texts
        ]
        for row, text in enumerate(texts):
            begins = [
                max([i + 1 for i, word in enumerate(text[:place]) if word == end], default=0)
                for place in range(6)
            ]
            assert places[row].tolist() == [i - begins[i] if reset_positions else i for i in range(6)]
            seen = ~hidden[row if reset_mask else 0, 0]
            for i in range(6):
                first = begins[i] if reset_mask else 0
                assert seen[i].tolist() == [first <= j <= i for j in range(6)]


@float32_on_cpu()
def test_models_are_unwrapped():
    class Wrapper(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

    inner = nn.Linear(2, 2)
    wrapped = Wrapper(Wrapper(inner))
    assert (
        utils.unwrap_model(wrapped, Wrapper) is utils.unwrap_model(wrapped, (Wrapper, nn.Bilinear)) is inner
    )
    assert utils.unwrap_model([wrapped, inner], (Wrapper,)) == [inner, inner]
    assert utils.unwrap_model(wrapped) is wrapped
    assert DistributedDataParallel in utils.unwrap_model.__defaults__[0]
    assert utils.listify_model(inner) == [inner] and utils.listify_model([inner]) == [inner]
    assert utils.get_model_type(inner) is ModelType.encoder_or_decoder
    inner.model_type = ModelType.encoder_and_decoder
    assert utils.get_model_type(inner) is ModelType.encoder_and_decoder


@float32_on_cpu()
def test_parameters_that_decay():
    model = nn.Sequential(nn.Linear(2, 3), FusedLayerNorm(3), nn.Sequential(nn.Linear(3, 1, bias=False)))
    for given in (model, [model[:2], model[2:]]):
        decaying, others = common._get_params_for_weight_decay_optimization(given)
        assert [id(p) for p in decaying["params"]] == [id(model[0].weight), id(model[2][0].weight)]
        assert [id(p) for p in others["params"]] == [id(p) for p in (model[0].bias, *model[1].parameters())]
        assert others["weight_decay"] == 0.0 and "weight_decay" not in decaying


def test_a_future():
    x = torch.ones(2, dtype=F32, device=CPU)
    calls = []
    assert FutureTensor(x, None).get() is x
    future = FutureTensor(x, lambda: calls.append(1))
    assert future.get() is x and future.get() is x and calls == [1]
    assert torch.equal(FutureTensor(x, lambda: x + 1).get(), x + 1)


def test_an_output_that_was_given_up():
    """It holds no memory, its backward pass is as ever; leaves, views and nothing stay as they are."""
    x = torch.arange(3.0, dtype=F32, device=CPU).requires_grad_()
    grad = torch.tensor([1.0, 2.0, 3.0], dtype=F32, device=CPU)
    output = x.sin() * 2
    wanted = torch.autograd.grad(output, x, grad, retain_graph=True)[0]
    common.free_output_tensor(output)
    assert output.numel() == 3
    with pytest.raises(ValueError, match="3 elements was not given up"):
        common.custom_backward(output, grad)
    common.free_output_tensor([None, output], True)
    common.free_output_tensor(None, True)
    assert output.numel() == 1
    common.custom_backward(output, grad)
    assert torch.equal(x.grad, wanted)
    view = (x * 2)[1:]
    common.free_output_tensor(x, True)
    common.free_output_tensor(view, True)
    assert x.numel() == 3 and view.numel() == 2
    loss = (x * 3).sum()
    common.custom_backward(loss, None)
    assert torch.equal(x.grad, wanted + 3)


@pytest.mark.parametrize("deallocated", [False, True])
def test_a_backward_pass(deallocated):
    """One tensor or several, futures, outputs that need no gradient, inputs that nothing depends on."""
    x, y, z = (torch.full((2,), value, dtype=F32, device=CPU).requires_grad_() for value in (1.0, 2.0, 3.0))
    grad = torch.tensor([1.0, 10.0], dtype=F32, device=CPU)
    output = x * y
    common.free_output_tensor(output, deallocated)
    options = dict(deallocate_pipeline_outputs=deallocated)
    found = common.backward_step(x, output, FutureTensor(grad, None), ModelType.encoder_or_decoder, **options)
    assert found.tolist() == [2, 20]
    x.grad = None
    outputs = [x * 2, y * x.detach(), z.detach()]
    common.free_output_tensor(outputs, deallocated)
    found = common.backward_step(
        [x, FutureTensor(y, None), z, None], outputs, [grad, grad * 2, grad], **options
    )
    # y has its gradient of the first pass besides.
    assert [None if g is None else g.tolist() for g in found] == [[2, 20], [3, 30], None, None]


def test_one_module_is_required():
    with pytest.raises(RuntimeError, match="one module is required, of 2 parts"):
        forward_backward_no_pipelining(None, None, [None, None], forward_only=True)
