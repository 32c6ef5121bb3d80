"""apex.RNN against torch.nn, and against its own cells step by step."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch_defaults import float32_on_cpu

from apex import RNN, amp
from apex.amp._amp_state import _amp_state
from apex.RNN.cells import GRUCell, LSTMCell, RNNReLUCell, RNNTanhCell, mLSTMCell, mLSTMRNNCell
from apex.RNN.RNNBackend import RNNCell, bidirectionalRNN, flatten_list, is_iterable, stackedRNN

IN, H, T, B = 4, 6, 5, 3
TORCH = {
    "LSTM": nn.LSTM,
    "GRU": nn.GRU,
    "ReLU": lambda *args, **options: nn.RNN(*args, nonlinearity="relu", **options),
    "Tanh": lambda *args, **options: nn.RNN(*args, nonlinearity="tanh", **options),
}
NAMES = {"w_ih": "weight_ih", "w_hh": "weight_hh", "w_ho": "weight_hr", "b_ih": "bias_ih", "b_hh": "bias_hh"}


@float32_on_cpu()
def make(name, *sizes, **options):
    """One of apex.RNN's networks."""
    return getattr(RNN, name)(*sizes, **options)


@float32_on_cpu()
def pair(name, layers=1, **options):
    """Ours and torch's with the same weights."""
    torch.manual_seed(0)
    ours = make(name, IN, H, layers, **options)
    if options.get("output_size"):
        options["proj_size"] = options.pop("output_size")
    theirs = TORCH[name](IN, H, layers, **options)
    with torch.no_grad():
        stacks = (
            [("", ours)] if not options.get("bidirectional") else [("", ours.fwd), ("_reverse", ours.bckwrd)]
        )
        for suffix, stack in stacks:
            for layer, cell in enumerate(stack.rnns):
                for key, p in cell.named_parameters():
                    getattr(theirs, f"{NAMES[key]}_l{layer}{suffix}").copy_(p)
    return ours, theirs


def states(hidden):
    return list(hidden) if isinstance(hidden, tuple) else [hidden]


def close(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "options",
    [{}, {"layers": 3}, {"bias": False}, {"batch_first": True}, {"layers": 2, "dropout": 0.5}],
    ids=str,
)
@pytest.mark.parametrize("name", TORCH)
def test_like_torch(name, options):
    ours, theirs = pair(name, **options)
    ours.eval()
    theirs.eval()
    shape = (B, T, IN) if options.get("batch_first") else (T, B, IN)
    x = torch.randn(shape, requires_grad=True, dtype=torch.float32, device="cpu")
    y = x.detach().clone().requires_grad_()
    found, hidden = ours(x)
    wanted, wanted_hidden = theirs(y)
    close(found, wanted)
    for h, w in zip(hidden, states(wanted_hidden), strict=True):
        close(h, w)
    upstream = torch.randn_like(found)
    found.backward(upstream)
    wanted.backward(upstream)
    close(x.grad, y.grad)
    for layer, cell in enumerate(ours.rnns):
        for key, p in cell.named_parameters():
            close(p.grad, getattr(theirs, f"{NAMES[key]}_l{layer}").grad)


@pytest.mark.parametrize("name", TORCH)
def test_bidirectional(name):
    ours, theirs = pair(name, bidirectional=True)
    x = torch.randn(T, B, IN, dtype=torch.float32, device="cpu")
    found, hidden = ours(x)
    wanted, wanted_hidden = theirs(x)
    close(found, wanted)
    for h, w in zip(hidden, states(wanted_hidden), strict=True):
        assert h.shape == (1, B, 2 * H)
        close(h[0], torch.cat(list(w), -1))


@pytest.mark.filterwarnings("ignore:LSTM with projections")
def test_projection():
    ours, theirs = pair("LSTM", layers=2, output_size=2)
    x = torch.randn(T, B, IN, dtype=torch.float32, device="cpu")
    found, (h, c) = ours(x)
    wanted, (wanted_h, wanted_c) = theirs(x)
    assert found.shape == (T, B, 2) and h.shape == (2, B, 2) and c.shape == (2, B, H)
    close(found, wanted)
    close(h, wanted_h)
    close(c, wanted_c)
    for name in ("ReLU", "Tanh", "mLSTM"):
        assert make(name, IN, H, 2, output_size=2)(x)[0].shape == (T, B, 2)
    with pytest.raises(ValueError, match="output_size"):
        make("GRU", IN, H, 1, output_size=2)


def test_cells():
    """By their formulas, in float64."""
    torch.manual_seed(0)
    x, h, c, m_ih, m_hh = (
        torch.randn(s, dtype=torch.float32, device="cpu").double()
        for s in ((B, IN), (B, H), (B, H), (H, IN), (H, H))
    )

    def weights(gates):
        return [
            torch.randn(s, dtype=torch.float32, device="cpu").double()
            for s in ((gates * H, IN), (gates * H, H), (gates * H,), (gates * H,))
        ]

    def lstm(h, w_ih, w_hh, b_ih, b_hh):
        i, f, g, o = (x @ w_ih.t() + b_ih + h @ w_hh.t() + b_hh).split(H, 1)
        new = f.sigmoid() * c + i.sigmoid() * g.tanh()
        return o.sigmoid() * new.tanh(), new

    w = weights(4)
    for found, wanted in zip(LSTMCell(x, [h, c], *w), lstm(h, *w), strict=True):
        close(found, wanted)
    m = (x @ m_ih.t()) * (h @ m_hh.t())
    for found, wanted in zip(mLSTMCell(x, [h, c], *w[:2], m_ih, m_hh, *w[2:]), lstm(m, *w), strict=True):
        close(found, wanted)
    w_ih, w_hh, b_ih, b_hh = weights(1)
    total = x @ w_ih.t() + b_ih + h @ w_hh.t() + b_hh
    close(RNNReLUCell(x, h, w_ih, w_hh, b_ih, b_hh), total.clamp(min=0))
    close(RNNTanhCell(x, h, w_ih, w_hh, b_ih, b_hh), total.tanh())
    w = weights(3)
    a, b = x @ w[0].t() + w[2], h @ w[1].t() + w[3]
    (r, z), n = ((a + b)[:, : 2 * H]).sigmoid().split(H, 1), a[:, 2 * H :]
    n = (n + r * b[:, 2 * H :]).tanh()
    close(GRUCell(x, h, *w), (1 - z) * n + z * h)


@pytest.mark.parametrize("bidirectional", [False, True])
def test_mlstm_network(bidirectional):
    """Two layers, step by step."""
    torch.manual_seed(0)
    model = make("mLSTM", IN, H, 2, bidirectional=bidirectional)
    x = torch.randn(T, B, IN, dtype=torch.float32, device="cpu")
    output, hidden = model(x)
    stacks = [(model.fwd, range(T)), (model.bckwrd, range(T)[::-1])] if bidirectional else [(model, range(T))]
    outputs, lasts = [], []
    for stack, order in stacks:
        state = [
            [
                torch.zeros(B, H, dtype=torch.float32, device="cpu"),
                torch.zeros(B, H, dtype=torch.float32, device="cpu"),
            ]
            for _ in range(2)
        ]
        found = [None] * T
        for t in order:
            value = x[t]
            for layer, cell in enumerate(stack.rnns):
                assert isinstance(cell, mLSTMRNNCell)
                w = (cell.w_ih, cell.w_hh, cell.w_mih, cell.w_mhh, cell.b_ih, cell.b_hh)
                state[layer] = mLSTMCell(value, state[layer], *w)
                value = state[layer][0]
            found[t] = value
        outputs.append(torch.stack(found))
        lasts.append([torch.stack([state[layer][i] for layer in range(2)]) for i in range(2)])
    close(output, torch.cat(outputs, -1))
    for i, h in enumerate(hidden):
        close(h, torch.cat([last[i] for last in lasts], -1))


@pytest.mark.parametrize("bidirectional", [False, True])
def test_collected_hidden_states(bidirectional):
    """After every step, in the order of time: the outputs are those of the last layer."""
    model = make("LSTM", IN, H, 2, bidirectional=bidirectional)
    x = torch.randn(T, B, IN, dtype=torch.float32, device="cpu")
    output, hidden = model(x, collect_hidden=True)
    assert len(hidden) == 2 and all(len(steps) == T for steps in hidden)
    width = 2 * H if bidirectional else H
    assert all(h.shape == (2, B, width) for steps in hidden for h in steps)
    close(torch.stack([h[-1] for h in hidden[0]]), output)
    model.reset_hidden(B)
    last = model(x)[1]
    for steps, h in zip(hidden, last, strict=True):
        close(h[..., :H], steps[-1][..., :H])
        if bidirectional:
            close(h[..., H:], steps[0][..., H:])


def test_state_is_kept():
    model = make("GRU", IN, H, 2)
    x = torch.randn(T, B, IN, dtype=torch.float32, device="cpu")
    whole = model(x)[0]
    model.reset_hidden(B)
    parts = [model(part)[0] for part in x.split(2)]
    close(torch.cat(parts), whole)

    model(x)[0].sum().backward()  # the graph of the first passes is used up
    with pytest.raises(RuntimeError, match="second time"):
        model(x)[0].sum().backward()
    model.detach_hidden()
    model(x)[0].sum().backward()
    model.init_hidden(B)  # leaves what is there
    assert not torch.equal(model.rnns[0].hidden[0], torch.zeros(B, H, dtype=torch.float32, device="cpu"))
    assert model(x[:, :1])[0].shape == (T, 1, H)  # another batch begins anew
    model.init_inference(B)
    assert torch.equal(model.rnns[1].hidden[0], torch.zeros(B, H, dtype=torch.float32, device="cpu"))
    assert list(model.state_dict()) == [
        f"rnns.{k}.{n}" for k in range(2) for n in ("w_ih", "w_hh", "b_ih", "b_hh")
    ]
    with pytest.raises(RuntimeError, match="no hidden state"):
        make("LSTM", IN, H, 1).detach_hidden()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [*TORCH, "mLSTM"])
def test_weights_of_another_dtype_begin_anew(name, dtype):
    model = float32_on_cpu()(getattr(RNN, name))(3, 4, 2)
    fresh = copy.deepcopy(model).to(dtype)
    inputs = torch.randn(5, 2, 3, dtype=torch.float32, device="cpu")
    model(inputs)
    model.to(dtype)
    found, expected = (net(inputs.to(dtype))[0] for net in (model, fresh))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", [*TORCH, "mLSTM"])
def test_training_goes_on_from_inference_mode(name):
    model, twin = (float32_on_cpu()(getattr(RNN, name))(3, 4, 2) for _ in range(2))
    twin.load_state_dict(model.state_dict())
    inputs = torch.randn(5, 2, 3, dtype=torch.float32, device="cpu")
    with torch.inference_mode():
        model(inputs)
    with torch.no_grad():
        twin(inputs)
    for net in (model, twin):
        net(inputs)[0].sum().backward()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=0, atol=0)


def test_copies_begin_anew():
    model = make("LSTM", IN, H, 1, bidirectional=True)
    x = torch.randn(T, B, IN, dtype=torch.float32, device="cpu")
    wanted = model(x)[0]
    other = copy.deepcopy(model)
    close(other(x)[0], wanted)
    other.detach_hidden()


def test_dropout_is_between_layers():
    torch.manual_seed(0)
    x = torch.randn(T, B, IN, dtype=torch.float32, device="cpu")
    for layers, differs in ((1, False), (2, True)):
        model = make("Tanh", IN, H, layers, dropout=0.5)
        outputs = []
        for training in (True, True, False, False):
            model.train(training)
            model.reset_hidden(B)
            outputs.append(model(x)[0])
        assert torch.equal(outputs[2], outputs[3])
        assert torch.equal(outputs[0], outputs[1]) != differs
        assert torch.equal(outputs[0], outputs[2]) != differs


def test_own_cells():
    def twice(input, hidden, w_ih, w_hh, b_ih=None, b_hh=None):
        return 2 * (input @ w_ih.t() + hidden @ w_hh.t())

    x = torch.randn(T, B, IN, dtype=torch.float32, device="cpu")
    with float32_on_cpu():
        cell = RNNCell(1, IN, H, twice, n_hidden_states=1)
        other = cell.new_like(9)
        stacked, both = stackedRNN(cell, 3), bidirectionalRNN(cell)
        assert stackedRNN([cell, cell.new_like(H)], 2).nLayers == 2
    assert sorted(n for n, _ in cell.named_parameters()) == ["w_hh", "w_ih"]
    assert other.w_ih.shape == (H, 9) and other.cell is twice and other.n_hidden_states == 1
    assert stacked(x)[0].shape == (T, B, H) and both(x)[0].shape == (T, B, 2 * H)
    with pytest.raises(ValueError, match="num_layers=2"):
        stackedRNN([cell], 2)
    with pytest.raises(TypeError, match="Linear"):
        stackedRNN(nn.Linear(1, 1))
    one, two = (torch.ones(n, dtype=torch.float32, device="cpu") for n in (1, 2))
    assert is_iterable([]) and is_iterable(()) and not is_iterable(one)
    assert flatten_list([two, two]).shape == (2, 2)
    assert flatten_list(cell.w_ih) is cell.w_ih


def test_weights_within_bounds():
    model = make("mLSTM", IN, 100, 2)
    for p in model.parameters():
        assert 0.09 < p.abs().max() <= 0.1
    before = [p.detach().clone() for p in model.parameters()]
    model.reset_parameters()
    assert not any(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
@pytest.mark.parametrize("name", [*TORCH, "mLSTM"])
def test_with_amp(name, level):
    model = make(name, IN, H, 2)
    x = torch.randn(T, B, IN, dtype=torch.float32, device="cpu")
    exact = model(x)[0].detach()
    model.reset_hidden(B)
    try:
        model, optimizer = amp.initialize(
            model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level=level, verbosity=0
        )
        model.reset_hidden(B)
        output, _ = model(x)
        with amp.scale_loss(output.float().square().mean(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        tolerance = 2e-3 if level in ("O1", "O2") else 2e-2
        torch.testing.assert_close(output.float(), exact, rtol=tolerance, atol=tolerance)
    finally:
        amp.amp.unpatch()
        vars(_amp_state).clear()
        _amp_state.__init__()
