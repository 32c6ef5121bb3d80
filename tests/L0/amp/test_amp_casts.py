"""O1 and O4: which functions are cast, that every layer of torch.nn runs, and how users add functions."""

from __future__ import annotations

import types
import warnings

import amp_runs as runs
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch_defaults import float32_on_cpu

from apex import amp
from apex.amp import amp as registration
from apex.amp import utils
from apex.amp._amp_state import _amp_state

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
BOTH = pytest.mark.parametrize("level", ["O1", "O4"])


def start(level="O1", **options):
    """Patches torch; returns the half dtype."""
    runs.initialize(nn.Linear(1, 1, dtype=torch.float32, device="cpu"), opt_level=level, **options)
    return runs.HALF[level]


def test_torch_has_every_function_of_the_lists():
    with warnings.catch_warnings():
        warnings.simplefilter("error", amp.MovedFunctionWarning)
        start()


def test_a_function_that_torch_moved_is_a_warning(monkeypatch):
    monkeypatch.setattr(registration.functional_overrides, "FP16_FUNCS", ["linear", "conv_of_old"])
    monkeypatch.setattr(registration.torch_overrides, "CASTS", ["mul_of_old"])
    with pytest.warns(amp.MovedFunctionWarning) as caught:
        start()
    text = "\n".join(str(w.message) for w in caught)
    assert "no torch.nn.functional.conv_of_old" in text and "no torch.mul_of_old" in text
    assert "register_half_function" in text
    assert (
        F.linear(
            torch.ones(1, 1, dtype=torch.float32, device="cpu"),
            torch.ones(1, 1, dtype=torch.float32, device="cpu"),
        ).dtype
        == F16
    )


def test_patches_are_taken_back():
    names = [(torch, "matmul"), (torch.Tensor, "__add__"), (F, "linear"), (torch.linalg, "norm")]
    names += [(nn.modules.rnn, "_VF"), (nn.RNNBase, "check_input")]
    before = [getattr(module, name) for module, name in names]
    own = dict(vars(torch.Tensor))
    start()
    assert [getattr(module, name) for module, name in names] != before
    runs.forget()
    assert [getattr(module, name) for module, name in names] == before
    assert dict(vars(torch.Tensor)) == own


# ---- dtypes ----------------------------------------------------------------------------------------------


def x(*shape, dtype=F32):
    return torch.rand(*(shape or (4, 4)), dtype=dtype, device="cpu") + 0.5


LOW = {
    "F.linear": lambda a: F.linear(a, a),
    "F.conv1d": lambda a: F.conv1d(a[None], a[:, :, None]),
    "F.conv2d": lambda a: F.conv2d(a[None, :, :, None], a[:, :, None, None]),
    "F.conv_transpose2d": lambda a: F.conv_transpose2d(a[None, :, :, None], a[:, :, None, None]),
    "F.prelu": lambda a: F.prelu(a, a[0]),
    "F.scaled_dot_product_attention": lambda a: F.scaled_dot_product_attention(a[None], a[None], a[None]),
    "sdpa with a mask": lambda a: F.scaled_dot_product_attention(a[None], a[None], a[None], attn_mask=a),
    "torch.matmul": lambda a: torch.matmul(a, a),
    "@": lambda a: a @ a,
    "Tensor.mm": lambda a: a.mm(a),
    "torch.mv": lambda a: torch.mv(a, a[0]),
    "torch.bmm": lambda a: torch.bmm(a[None], a[None]),
    "torch.baddbmm": lambda a: torch.baddbmm(a[None], a[None], a[None]),
    "torch.addmm": lambda a: torch.addmm(a, a, a, beta=0.5),
    "torch.einsum": lambda a: torch.einsum("ij,jk->ik", a, a),
    "torch.einsum of a list": lambda a: torch.einsum("ij,jk->ik", [a, a]),
    "torch.tensordot": lambda a: torch.tensordot(a, a, dims=1),
    "torch.linalg.multi_dot": lambda a: torch.linalg.multi_dot([a, a, a]),
    "torch.linalg.matmul": lambda a: torch.linalg.matmul(a, a),
}
FULL = {  # looked up when they are called
    "F.softmax": lambda a: F.softmax(a, -1),
    "Tensor.softmax": lambda a: a.softmax(-1),
    "F.layer_norm": lambda a: F.layer_norm(a, (4,)),
    "F.rms_norm": lambda a: F.rms_norm(a, (4,)),
    "F.group_norm": lambda a: F.group_norm(a, 2),
    "F.gelu": lambda a: F.gelu(a),
    "F.mse_loss": lambda a: F.mse_loss(a, a),
    "F.huber_loss": lambda a: F.huber_loss(a, a),
    "F.cross_entropy": lambda a: F.cross_entropy(a, torch.zeros(4, dtype=torch.long, device="cpu")),
    "torch.exp": lambda a: torch.exp(a),
    "Tensor.exp": lambda a: a.exp(),
    "**": lambda a: a**2,
    "2 **": lambda a: 2**a,
    "torch.sum": lambda a: torch.sum(a),
    "torch.norm": lambda a: torch.norm(a),
    "torch.logsumexp": lambda a: torch.logsumexp(a, 0),
    "torch.cdist": lambda a: torch.cdist(a, a),
    "torch.linalg.norm": lambda a: torch.linalg.norm(a),
    "torch.linalg.inv": lambda a: torch.linalg.inv(a + 3 * torch.eye(4, dtype=a.dtype, device="cpu")),
    "torch.linalg.svdvals": lambda a: torch.linalg.svdvals(a),
    "torch.linalg.qr": lambda a: torch.linalg.qr(a)[0],
    "torch.fft.fft": lambda a: torch.fft.fft(a).real,
    "Tensor.cpu": lambda a: a.cpu(),
}
WIDEST = {
    "+": lambda a, b: a + b,
    "- by a scalar tensor": lambda a, b: a - b[0, 0],
    "*": lambda a, b: a * b,
    "torch.addcmul": lambda a, b: torch.addcmul(a, b, a),
    "torch.lerp": lambda a, b: torch.lerp(a, b, 0.5),
    "torch.cat": lambda a, b: torch.cat([a, b]),
    "torch.stack": lambda a, b: torch.stack((a, b)),
    "torch.dot": lambda a, b: torch.dot(a[0], b[0]),
    "torch.linalg.cross": lambda a, b: torch.linalg.cross(a[:, :3], b[:, :3]),
    "F.bilinear": lambda a, b: F.bilinear(a, b, x(2, 4, 4, dtype=b.dtype)),
    "Tensor.scatter_add": lambda a, b: a.scatter_add(0, torch.zeros(1, 4, dtype=torch.long, device="cpu"), b),
    "Tensor.index_add": lambda a, b: a.index_add(
        0, torch.tensor([0, 1, 2, 3], device="cpu", dtype=torch.int64), b
    ),
}


@BOTH
@pytest.mark.parametrize("name", LOW)
def test_half_precision_functions(level, name):
    half = start(level)
    for dtype in (F32, half):
        assert LOW[name](x(dtype=dtype)).dtype == half


@BOTH
@pytest.mark.parametrize("name", FULL)
def test_float32_functions(level, name):
    half = start(level)
    for dtype in (F32, half):
        assert FULL[name](x(dtype=dtype)).dtype == F32


@BOTH
@pytest.mark.parametrize("name", WIDEST)
def test_widening_functions(level, name):
    half = start(level)
    function = WIDEST[name]
    assert function(x(dtype=half), x()).dtype == function(x(), x(dtype=half)).dtype == F32
    assert function(x(dtype=half), x(dtype=half)).dtype == half
    assert function(x(dtype=half), x(dtype=F64)).dtype == F64


def test_comparisons():
    start()
    a = x(dtype=F16)
    assert (a == a.float()).all() and torch.equal(a, a.float()) and torch.allclose(a, a.float())
    assert not (a < a.float()).any() and a.ne(a.float() + 1).all()


@BOTH
def test_float64_is_left_alone(level):
    start(level)
    a = x(dtype=F64)
    for function in (*LOW.values(), *FULL.values()):
        assert function(a).dtype == F64
    assert F.linear(a, x()).dtype == runs.HALF[level]  # beside float32 weights it is an input like any other


@BOTH
def test_values_are_those_of_the_cast_call(level):
    half = start(level)
    a, b = x(), x()
    with amp.disable_casts():
        expected = F.linear(a.to(half), b.to(half)), F.softmax(a.to(half).float(), -1)
    assert torch.equal(F.linear(a, b), expected[0]) and torch.equal(F.softmax(a.to(half), -1), expected[1])


def test_other_arguments_stay():
    start()
    assert torch.sum(torch.arange(3, device="cpu", dtype=torch.int64)).dtype == torch.int64
    assert torch.exp(torch.ones(2, dtype=torch.complex64, device="cpu")).dtype == torch.complex64
    assert F.softmax(x(dtype=F16), -1, dtype=F64).dtype == F64
    assert (
        torch.cat(
            [
                torch.arange(2, device="cpu", dtype=torch.int64),
                torch.arange(2, device="cpu", dtype=torch.int64),
            ]
        ).dtype
        == torch.int64
    )


def test_sequences_by_name():
    start()
    pair = [torch.ones(2, dtype=torch.float32, device="cpu"), torch.ones(2, dtype=F16, device="cpu")]
    assert torch.cat(tensors=pair, dim=0).dtype == F32 and torch.stack(tensors=tuple(pair)).dtype == F32
    with pytest.raises(TypeError, match="cat"):  # torch's own
        torch.cat()


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_what_the_caller_writes_to_is_written(level):
    """A cast of `out` would take the result, and the caller's tensor stay what it was."""
    start(level)
    a, half = (
        torch.full((2, 2), 2.0, dtype=torch.float32, device="cpu"),
        torch.full((2, 2), 2.0, dtype=F16, device="cpu"),
    )
    for function, arguments, dtype in (
        (torch.mm, (a, a), F32),  # of the half-precision list
        (torch.exp, (half,), F16),  # of float32's
        (torch.sum, (half, 0), F16),
        (torch.linalg.matmul, (a, a), F32),
        (torch.linalg.inv, (torch.eye(2, dtype=torch.float32, device="cpu"),), F32),
        (torch.fft.fft, (a,), torch.complex64),
        (torch.add, (a, half), F16),  # of those that widen
        (torch.cat, ([a, half],), F32),
    ):
        with amp.disable_casts():
            expected = function(*arguments).to(dtype)
        out = torch.zeros_like(expected)
        returned = function(*arguments, out=out)
        assert returned is out and torch.equal(out, expected), function


def test_in_place():
    start()
    a = x(dtype=F16)
    with pytest.raises(NotImplementedError, match=r"exp_.*disable_casts"):
        a.exp_()
    with pytest.raises(NotImplementedError, match="exp_"):
        torch.exp_(a)
    with amp.disable_casts():
        a.exp_()
    assert x().exp_().dtype == F32
    assert x(dtype=F16).add_(x()).dtype == F16 and x().add_(x(dtype=F16)).dtype == F32
    assert x().scatter_add_(0, torch.zeros(1, 4, dtype=torch.long, device="cpu"), x(dtype=F16)).dtype == F32


def test_tensors_of_other_devices_stay():
    """A script that trains on a GPU may compute on the CPU beside it, and public apex left that alone."""
    start()
    _amp_state.cast_devices = frozenset({"cuda"})
    assert F.linear(x(), x()).dtype == F32
    assert (x(dtype=F16) + x(dtype=F16)).exp_().dtype == F16


def test_banned_functions():
    start()
    probability, target = torch.sigmoid(x(dtype=F16)), torch.ones(4, 4, dtype=torch.float32, device="cpu")
    with pytest.raises(NotImplementedError, match="BCEWithLogitsLoss"):
        F.binary_cross_entropy(probability, target)
    F.binary_cross_entropy(probability.float(), target)
    runs.forget()
    amp.register_float_function(torch, "sigmoid")
    start()
    F.binary_cross_entropy(torch.sigmoid(x(dtype=F16)), target)
    registration.init(allow_banned=True)
    assert (
        F.binary_cross_entropy(
            torch.full((2,), 0.5, dtype=F16, device="cpu"), torch.ones(2, dtype=torch.float32, device="cpu")
        ).dtype
        == F32
    )


# ---- layers ----------------------------------------------------------------------------------------------


def normal(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float32, device="cpu")


def after_conv(layer):
    return lambda: (
        nn.Sequential(nn.Conv1d(4, 4, 1, dtype=torch.float32, device="cpu"), float32_on_cpu()(layer)()),
        (normal(3, 4, 6),),
    )


LAYERS = {
    "Linear": lambda: (nn.Linear(8, 4, dtype=torch.float32, device="cpu"), (normal(5, 8),)),
    "Conv3d": lambda: (nn.Conv3d(2, 3, 3, dtype=torch.float32, device="cpu"), (normal(2, 2, 5, 5, 5),)),
    "ConvTranspose1d": lambda: (
        nn.ConvTranspose1d(2, 3, 3, dtype=torch.float32, device="cpu"),
        (normal(2, 2, 9),),
    ),
    "ConvTranspose2d": lambda: (
        nn.ConvTranspose2d(2, 3, 3, dtype=torch.float32, device="cpu"),
        (normal(2, 2, 9, 9),),
    ),
    "Bilinear": lambda: (
        nn.Bilinear(4, 5, 3, dtype=torch.float32, device="cpu"),
        (normal(2, 4), normal(2, 5)),
    ),
    "Embedding": lambda: (
        nn.Sequential(
            nn.Embedding(10, 4, dtype=torch.float32, device="cpu"),
            nn.Linear(4, 3, dtype=torch.float32, device="cpu"),
        ),
        (torch.arange(5, device="cpu", dtype=torch.int64),),
    ),
    "MultiheadAttention": lambda: (
        nn.MultiheadAttention(8, 2, batch_first=True, dtype=torch.float32, device="cpu"),
        (normal(2, 5, 8),) * 3,
    ),
    "TransformerEncoder": lambda: (
        nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dtype=torch.float32, device="cpu"), 2
        ),
        (normal(2, 5, 8),),
    ),
    "TransformerDecoderLayer": lambda: (
        nn.TransformerDecoderLayer(8, 2, 16, dtype=torch.float32, device="cpu"),
        (normal(2, 5, 8), normal(3, 5, 8)),
    ),
    "weight_norm": lambda: (
        nn.utils.parametrizations.weight_norm(nn.Linear(4, 3, dtype=torch.float32, device="cpu")),
        (normal(5, 4),),
    ),
    "spectral_norm": lambda: (
        nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3, dtype=torch.float32, device="cpu")),
        (normal(5, 4),),
    ),
    **{
        kind.__name__: after_conv(kind)
        for kind in (nn.PReLU, nn.GELU, nn.SiLU, nn.Softplus, nn.LogSigmoid, nn.ELU, nn.Mish, nn.Dropout)
    },
    "RReLU": after_conv(nn.RReLU),
    "BatchNorm1d": after_conv(lambda: nn.BatchNorm1d(4, dtype=torch.float32, device="cpu")),
    "BatchNorm1d without weights": after_conv(
        lambda: nn.BatchNorm1d(4, affine=False, dtype=torch.float32, device="cpu")
    ),
    "InstanceNorm1d": after_conv(
        lambda: nn.InstanceNorm1d(4, affine=True, track_running_stats=True, dtype=torch.float32, device="cpu")
    ),
    "GroupNorm": after_conv(lambda: nn.GroupNorm(2, 4, dtype=torch.float32, device="cpu")),
    "LayerNorm": after_conv(lambda: nn.LayerNorm(6, dtype=torch.float32, device="cpu")),
    "RMSNorm": after_conv(lambda: nn.RMSNorm(6, dtype=torch.float32, device="cpu")),
    "LocalResponseNorm": after_conv(lambda: nn.LocalResponseNorm(2)),
    "Softmax": after_conv(lambda: nn.Softmax(-1)),
    "Upsample": after_conv(lambda: nn.Upsample(scale_factor=2)),
    "AvgPool1d": after_conv(lambda: nn.AvgPool1d(2)),
    "MaxPool1d": after_conv(lambda: nn.MaxPool1d(2)),
}
for _kind in (nn.RNN, nn.GRU, nn.LSTM):
    LAYERS[_kind.__name__] = lambda kind=_kind: (
        kind(4, 5, dtype=torch.float32, device="cpu"),
        (normal(7, 2, 4),),
    )
    LAYERS[f"{_kind.__name__} of two layers, both ways"] = lambda kind=_kind: (
        kind(4, 5, num_layers=2, bidirectional=True, dtype=torch.float32, device="cpu"),
        (normal(7, 2, 4),),
    )
    LAYERS[f"{_kind.__name__} of half inputs"] = lambda kind=_kind: (
        nn.Sequential(
            nn.Linear(4, 4, dtype=torch.float32, device="cpu"), kind(4, 5, dtype=torch.float32, device="cpu")
        ),
        (normal(7, 2, 4),),
    )
    LAYERS[f"{_kind.__name__} of packed inputs"] = lambda kind=_kind: (
        kind(4, 5, dtype=torch.float32, device="cpu"),
        (nn.utils.rnn.pack_padded_sequence(normal(7, 2, 4), [7, 4]),),
    )
for _kind in (nn.RNNCell, nn.GRUCell, nn.LSTMCell):
    LAYERS[_kind.__name__] = lambda kind=_kind: (
        kind(4, 5, dtype=torch.float32, device="cpu"),
        (normal(2, 4),),
    )


def tensors(output):
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, nn.utils.rnn.PackedSequence):
        yield output.data
    elif isinstance(output, (tuple, list)):
        for part in output:
            yield from tensors(part)


def outputs_and_gradients(model, arguments):
    outputs = [t.float() for t in tensors(model(*arguments)) if t.is_floating_point()]
    sum((t * t).mean() for t in outputs).backward()
    return outputs, [p.grad for p in model.parameters()]


@pytest.mark.filterwarnings("ignore:enable_nested_tensor", "ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_runs_near_float32(level, name):
    if (level, name) == ("O2", "RReLU"):
        pytest.skip("torch has no float16 kernel of rrelu for the CPU")
    torch.manual_seed(0)
    model, arguments = LAYERS[name]()
    for module in model.modules():
        if isinstance(module, (nn.Dropout, nn.RReLU)):
            module.eval()
        if isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0
    expected, gradients = outputs_and_gradients(model, [a for a in arguments])
    model.zero_grad()
    runs.initialize(model, opt_level=level)
    found, cast_gradients = outputs_and_gradients(model, arguments)
    tolerance = 4e-3 if runs.HALF[level] == F16 else 6e-2
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
    for p, a, b in zip(model.parameters(), cast_gradients, gradients, strict=True):
        if b is not None:
            assert a.dtype == p.dtype
            torch.testing.assert_close(a.float(), b, rtol=4 * tolerance, atol=tolerance)
    if level in ("O1", "O4"):
        with torch.no_grad():
            with amp.disable_casts():
                evaluated = list(tensors(model.eval()(*arguments)))
            for a, b in zip(tensors(model(*arguments)), evaluated, strict=True):
                torch.testing.assert_close(a.float(), b, rtol=tolerance, atol=tolerance)


def test_flat_weights_of_recurrent_networks():
    """As cuDNN wants them: casts in one piece of memory, in the order of the originals, seen by autograd."""
    memory = torch.randn(3 * 4 + 5, dtype=torch.float32, device="cpu")
    weights = [memory[:12].view(3, 4).requires_grad_(), memory[12:].requires_grad_()]
    flat = torch.empty(17, dtype=F16, device="cpu")
    cast = utils.new_synthesize_flattened_rnn_weights(weights, flat, "lstm", F16)
    assert torch.equal(flat, memory.half()) and [c.data_ptr() for c in cast] == [
        flat.data_ptr(),
        flat.data_ptr() + 24,
    ]
    sum(c.float().sum() * 2 for c in cast).backward()
    assert all(w.grad.eq(2).all() and w.grad.dtype == F32 for w in weights)


# ---- the cache of cast weights ---------------------------------------------------------------------------


def casts_of(monkeypatch):
    """A counter of casts, by shape."""
    counted = []
    cast = utils._cast

    def counting(t, dtype, *rest):
        if isinstance(t, torch.Tensor) and t.dtype != dtype:
            counted.append(tuple(t.shape))
        return cast(t, dtype, *rest)

    monkeypatch.setattr(utils, "_cast", counting)
    return counted


@BOTH
def test_a_weight_is_cast_once_an_iteration(level, monkeypatch):
    model = nn.Linear(3, 3, dtype=torch.float32, device="cpu")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    runs.initialize(model, optimizer, opt_level=level)
    counted = casts_of(monkeypatch)
    for iteration in (1, 2):
        loss = model(model(torch.ones(2, 3, dtype=torch.float32, device="cpu"))).float().sum()
        assert counted.count((3, 3)) == iteration
        runs.backward(loss, optimizer)
        optimizer.step()
    assert not _amp_state.handle.cache


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_amp_does_not_know_is_seen(fused):
    model = nn.Linear(3, 3, bias=False, dtype=torch.float32, device="cpu")
    runs.initialize(model, opt_level="O1")
    optimizer = torch.optim.SGD(model.parameters(), 0.5, fused=fused)
    for _ in range(2):
        y = model(torch.eye(3, dtype=torch.float32, device="cpu"))
        assert torch.equal(y, model.weight.detach().t().half())
        y.float().sum().backward()
        optimizer.step()


def test_weights_that_change_are_cast_anew():
    model = nn.Linear(3, 3, bias=False, dtype=torch.float32, device="cpu")
    runs.initialize(model, opt_level="O1")
    eye = torch.eye(3, dtype=torch.float32, device="cpu")
    for evaluate in (False, True):
        with torch.set_grad_enabled(not evaluate):
            model(eye)
            model.load_state_dict({"weight": torch.full((3, 3), 2.0, dtype=torch.float32, device="cpu")})
            assert model(eye).eq(2).all()
            model.weight.data = torch.full((3, 3), 3.0, dtype=torch.float32, device="cpu")
            assert model(eye).eq(3).all()
    with torch.no_grad():
        model.weight.data.fill_(4.0)  # averaged weights are swapped in like this
        assert model(eye).eq(4).all()
    assert model(eye).requires_grad


def test_a_weight_that_thaws_between_two_calls():
    model = nn.Linear(3, 3, bias=False, dtype=torch.float32, device="cpu")
    runs.initialize(model, opt_level="O1")
    eye = torch.eye(3, dtype=torch.float32, device="cpu")
    for wanted in (False, True, False):
        model.weight.requires_grad_(wanted)
        assert model(eye).requires_grad == wanted


def test_evaluation_before_training_keeps_gradients():
    model = nn.Linear(3, 3, dtype=torch.float32, device="cpu")
    runs.initialize(model, opt_level="O1")
    with torch.no_grad():
        model(torch.eye(3, dtype=torch.float32, device="cpu"))
    model(torch.eye(3, dtype=torch.float32, device="cpu")).float().sum().backward()
    assert model.weight.grad is not None


@BOTH
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(level, reentrant):
    from torch.utils.checkpoint import checkpoint

    results = []
    for checkpointed in (False, True):
        runs.forget()
        model = runs.plain()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        runs.initialize(model, optimizer, opt_level=level)
        inputs = runs.batch()[0].requires_grad_()
        for _ in range(2):
            if checkpointed:
                y = checkpoint(lambda t, m=model: m(m[0](t)[:, :6]), inputs, use_reentrant=reentrant)
            else:
                y = model(model[0](inputs)[:, :6])
            runs.backward(y.float().square().mean(), optimizer)
        results.append([p.grad for p in model.parameters()])
    assert runs.equal(*results)


# ---- functions of the user -------------------------------------------------------------------------------


@BOTH
def test_decorators(level):
    half = amp.half_function(lambda t, scale=None: t)
    bfloat16 = amp.bfloat16_function(lambda t: t)
    full = amp.float_function(lambda t: t)
    widest = amp.promote_function(lambda a, b: a)
    assert half(x()).dtype == F32  # before amp.initialize
    start(level)
    assert half(x()).dtype == F16 and bfloat16(x()).dtype == BF16 and full(x(dtype=F16)).dtype == F32
    assert half(scale=x(), t=x()).dtype == F16 and half([x(), (x(),)])[1][0].dtype == F16
    assert widest(x(dtype=F16), x()).dtype == F32 and widest(x(dtype=F16), x(dtype=F16)).dtype == F16
    with amp.disable_casts():
        assert half(x()).dtype == F32


def test_decorators_under_other_levels():
    half = amp.half_function(lambda t: t)
    for level in ("O0", "O2"):
        runs.forget()
        runs.initialize(runs.plain(), opt_level=level)
        assert half(x()).dtype == F32


def test_registered_functions():
    module = types.ModuleType("theirs")
    module.a = module.b = module.c = lambda t: t
    module.d = lambda t, u: t
    amp.register_half_function(module, "a")
    amp.register_bfloat16_function(module, "b")
    amp.register_float_function(module, "c")
    amp.register_promote_function(module, "d")
    assert module.a(x()).dtype == F32
    start()
    assert module.a(x()).dtype == F16 and module.b(x()).dtype == BF16 and module.c(x(dtype=F16)).dtype == F32
    assert module.d(x(dtype=F16), x()).dtype == F32


@pytest.mark.parametrize("kind", ["half", "bfloat16", "float", "promote"])
def test_registering_what_is_not_there(kind):
    with pytest.raises(ValueError, match="no function nothing in torch"):
        getattr(amp, f"register_{kind}_function")(torch, "nothing")


def test_user_cast_preferred():
    """Without it a registered function is wrapped twice, and amp's own cast comes first."""
    seen = []
    for preferred in (None, True):
        runs.forget()
        amp.register_float_function(F, "linear")
        start(user_cast_preferred=preferred)
        seen.append(F.linear(x(), x()).dtype)
    assert seen[1] == F32


def test_disable_casts():
    with amp.disable_casts():  # before amp.initialize
        pass
    start()
    with amp.disable_casts():
        with amp.disable_casts():
            assert F.linear(x(), x()).dtype == F32
        assert F.linear(x(), x()).dtype == F32
    with pytest.raises(KeyError), amp.disable_casts():
        raise KeyError
    assert F.linear(x(), x()).dtype == F16


def test_casts_come_back_after_threads_that_overlap():
    """Each optimizer's step() disables casts: that of another thread may begin within it and end after it."""
    start()
    first, second = amp.disable_casts(), amp.disable_casts()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert F.linear(x(), x()).dtype == F32
    second.__exit__(None, None, None)
    assert F.linear(x(), x()).dtype == F16
