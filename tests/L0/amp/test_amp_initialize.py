"""amp.initialize: levels, overrides, positional orders, forms of its arguments, and what misuse raises."""

from __future__ import annotations

import copy
import pickle
import warnings

import amp_runs as runs
import pytest
import torch
from torch import nn

from apex import amp
from apex.amp.frontend import Properties, opt_levels
from apex.optimizers import FusedAdam


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def options():
    return amp._amp_state.opt_properties.options


# ---- levels and overrides --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "level, cast, patch, keep, masters, scale",
    [
        ("O0", torch.float32, None, None, False, 1.0),
        ("O1", None, torch.float16, None, None, "dynamic"),
        ("O2", torch.float16, None, True, True, "dynamic"),
        ("O3", torch.float16, None, False, False, 1.0),
        ("O4", None, torch.bfloat16, None, None, 1.0),
        ("O5", torch.bfloat16, None, True, True, 1.0),
    ],
)
def test_levels(level, cast, patch, keep, masters, scale):
    model = runs.network()
    runs.initialize(model, sgd(model), opt_level=level)
    found = options()
    assert found["cast_model_type"] == cast and found["patch_torch_functions_type"] == patch
    assert found["patch_torch_functions"] is (patch is not None)
    assert (found["keep_batchnorm_fp32"], found["master_weights"], found["loss_scale"]) == (
        keep,
        masters,
        scale,
    )
    weight, norm = model[0].weight, model[1]
    assert weight.dtype == (cast or torch.float32)
    assert norm.weight.dtype == norm.running_mean.dtype == (cast if keep is False else torch.float32)
    assert model(runs.batch()[0]).dtype == (torch.float32 if cast else patch)


@pytest.mark.parametrize("name", opt_levels)
def test_level_classes_explain_themselves(name):
    level = opt_levels[name]
    assert level.brief.startswith(name) and level.more
    assert level(Properties()).opt_level == name


@pytest.mark.parametrize("keep", [True, False, "True", "False"])
def test_keep_batchnorm_fp32(keep):
    model = runs.network()
    runs.initialize(model, sgd(model), opt_level="O2", keep_batchnorm_fp32=keep)
    assert model[1].weight.dtype == (torch.float32 if keep in (True, "True") else torch.float16)


@pytest.mark.parametrize("scale, found", [(128, 128.0), ("128.0", 128.0), ("dynamic", 2.0**16)])
@pytest.mark.parametrize("level", runs.LEVELS)
def test_loss_scale(level, scale, found):
    model = runs.network()
    runs.initialize(model, sgd(model), opt_level=level, loss_scale=scale)
    assert runs.scaler().loss_scale() == found and runs.scaler().dynamic == (scale == "dynamic")


def test_other_overrides():
    model = runs.network()
    _, optimizer = runs.initialize(
        model,
        sgd(model),
        opt_level="O3",
        cast_model_type=torch.bfloat16,
        master_weights=True,
        cast_model_outputs=torch.float64,
        num_losses=3,
        loss_scale="dynamic",
        min_loss_scale=8.0,
        max_loss_scale=64.0,
    )
    assert model[0].weight.dtype == torch.bfloat16
    assert {p.dtype for p in amp.master_params(optimizer)} == {torch.float32}
    assert model(runs.batch()[0]).dtype == torch.float64
    assert [s.loss_scale() for s in amp._amp_state.loss_scalers] == [64.0] * 3


def test_cast_model_outputs_alone():
    model = runs.network()
    runs.initialize(model, sgd(model), opt_level="O1", cast_model_outputs=torch.float32)
    assert model(runs.batch()[0]).dtype == torch.float32


def test_scale_parameters():
    model = runs.plain()
    _, optimizer = runs.initialize(
        model,
        FusedAdam(model.parameters()),
        opt_level="O1",
        dynamic_init_scale=16.0,
        scale_growth_factor=4.0,
        scale_backoff_factor=0.25,
        scale_window=2,
    )
    assert runs.scaler().loss_scale() == 16.0
    runs.train(model, optimizer, 2)
    assert runs.scaler().loss_scale() == 64.0
    runs.overflow(model, optimizer)
    assert runs.scaler().loss_scale() == 16.0


def test_verbosity(capsys):
    model = runs.plain()
    amp.initialize(model, sgd(model), opt_level="O1", loss_scale=4.0, verbosity=2)
    model(runs.batch()[0])
    printed = capsys.readouterr().out
    assert "O1" in printed and "loss_scale                 : 4.0  (overridden)" in printed
    assert "float32 -> float16 (linear)" in printed
    runs.forget()
    model = runs.plain()
    runs.initialize(model, sgd(model), opt_level="O1")
    assert capsys.readouterr().out == ""


def test_disabled():
    model, before = runs.plain(), runs.values(runs.plain())
    optimizer = sgd(model)
    assert amp.initialize(model, optimizer, enabled=False, opt_level="O2") == (model, optimizer)
    assert amp.initialize(model, enabled=False) is model
    loss = runs.loss_of(model)
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        assert scaled_loss is loss
        scaled_loss.backward()
    with amp.disable_casts():
        optimizer.step()
    assert model[0].weight.dtype == torch.float32 and not runs.equal(runs.values(model), before)
    assert list(amp.master_params(optimizer)) == list(model.parameters())
    assert amp.state_dict() == {}
    with pytest.warns(amp.AmpWarning, match="disabled"):
        amp.load_state_dict({"loss_scaler0": {"loss_scale": 1.0, "unskipped": 0}})


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_disabled_after_it_was_enabled(level):
    """The second model runs as without amp, also where the first one's functions were patched."""
    first = runs.plain()
    runs.initialize(first, sgd(first), opt_level=level)
    model = runs.plain()
    optimizer = sgd(model)
    with pytest.warns(amp.AmpWarning, match="patches are taken back"):
        amp.initialize(model, optimizer, enabled=False)
    loss = runs.loss_of(model)
    assert (
        model(torch.ones(2, 6, dtype=torch.float32, device="cpu")).dtype == torch.float32
        and loss.dtype == torch.float32
    )
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        assert scaled_loss is loss
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        amp.initialize(runs.plain(), enabled=False)  # nothing is taken back now


# ---- positional order ------------------------------------------------------------------------------------


def positional(*arguments):
    model = runs.network()
    amp.initialize(model, sgd(model), True, "O2", None, None, *arguments)
    return options()


def test_rocm_order():
    with warnings.catch_warnings():
        warnings.simplefilter("error", amp.AmpWarning)
        found = positional(None, None, None, 4.0, None, 2, 0, None, 2.0**10)
    assert found["loss_scale"] == 4.0 and len(amp._amp_state.loss_scalers) == 2


@pytest.mark.parametrize("keep", [True, False, "False"])
def test_nvidia_order(keep):
    with pytest.warns(amp.AmpWarning, match="keep_batchnorm_fp32"):
        found = positional(keep, True, 4.0, None, 2, 0, None, 2.0**10)
    assert found["keep_batchnorm_fp32"] is (keep is True) and found["master_weights"] is True
    assert found["loss_scale"] == 4.0 and len(amp._amp_state.loss_scalers) == 2


@pytest.mark.parametrize(
    "rest", [(None, 4.0), (True, "4.0"), (None, None, torch.float32, 2, 0), (None, None, None, 2, 0)], ids=str
)
def test_nvidia_order_with_none(rest):
    with pytest.warns(amp.AmpWarning, match="NVIDIA's order"):
        found = positional(None, *rest)
    assert found["loss_scale"] in (4.0, "dynamic") and found["keep_batchnorm_fp32"] is True


def test_an_order_that_nothing_tells():
    with pytest.warns(
        amp.AmpWarning, match="eighth positional argument, False, is taken as keep_batchnorm_fp32"
    ):
        assert positional(None, False)["keep_batchnorm_fp32"] is False


def test_additions_are_keywords():
    with pytest.raises(TypeError):
        positional(None, None, None, None, None, 1, 0, None, 2.0**24, 2.0**16)


# ---- forms -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("many_models", [False, True])
@pytest.mark.parametrize("many_optimizers", [False, True, None])
def test_returns_the_form_that_was_given(many_models, many_optimizers):
    models = [runs.plain(0), runs.plain(1)]
    optimizers = None if many_optimizers is None else [sgd(models[0]), sgd(models[1])]
    given_models = models if many_models else models[0]
    given = optimizers if many_optimizers in (True, None) else optimizers[0]
    if many_optimizers and not many_models:
        given = optimizers[:1]
    returned = runs.initialize(given_models, given, opt_level="O2")
    if many_optimizers is None:
        assert returned == given_models
    else:
        assert returned == (given_models, given)


def test_inputs_and_outputs_keep_their_containers():
    import collections

    Pair = collections.namedtuple("Pair", "left right")

    class Output(collections.OrderedDict):  # as of transformers
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.tag = "kept"

    class Batch:
        def __init__(self, t):
            self.t = t

        def to(self, dtype):
            return Batch(self.t.to(dtype))

    class Model(nn.Linear):
        def forward(self, pair, *, table, batch, module, indices, text):
            assert pair.left.dtype == table["x"][0].dtype == batch.t.dtype == torch.float16
            assert module.weight.dtype == torch.float32 and indices.dtype == torch.int64 and text == "text"
            return Output(pair=pair, value=[super().forward(pair.left)], indices=indices)

    model = Model(3, 3, dtype=torch.float32, device="cpu")
    runs.initialize(model, opt_level="O2")
    x = torch.randn(2, 3, dtype=torch.float32, device="cpu")
    output = model(
        Pair(x, None),
        table={"x": (x,)},
        batch=Batch(x),
        module=nn.Linear(2, 2, dtype=torch.float32, device="cpu"),
        indices=torch.arange(3, device="cpu", dtype=torch.int64),
        text="text",
    )
    assert type(output) is Output and output.tag == "kept" and type(output["pair"]) is Pair
    assert output["value"][0].dtype == output["pair"].left.dtype == torch.float32
    assert output["indices"].dtype == torch.int64


def test_a_copy_of_the_model_runs_its_own_weights():
    """Averaged weights (EMA) are kept in copies of a model that went through amp."""
    model = runs.plain()
    _, optimizer = runs.initialize(model, sgd(model), opt_level="O2")
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    before = model(runs.batch()[0])
    runs.train(model, optimizer, 2)
    for other in copies:
        assert torch.equal(other(runs.batch()[0]), before) and not torch.equal(model(runs.batch()[0]), before)
        assert other.state_dict()["0.weight"].dtype == torch.float32


# ---- misuse ----------------------------------------------------------------------------------------------


def test_unknown_level():
    with pytest.raises(RuntimeError, match="the letter O"):
        runs.initialize(runs.plain(), opt_level="02")
    assert not hasattr(amp._amp_state, "opt_properties")


@pytest.mark.parametrize(
    "level, option",
    [
        ("O1", dict(cast_model_type=torch.float16)),
        ("O2", dict(patch_torch_functions=True)),
        ("O2", dict(patch_torch_functions_type=torch.float16)),
        ("O1", dict(patch_torch_functions_type=torch.bfloat16)),
        ("O4", dict(patch_torch_functions_type=torch.float16)),
        ("O4", dict(keep_batchnorm_fp32=True)),
        ("O1", dict(master_weights=True)),
        ("O2", dict(user_cast_preferred=True)),
    ],
    ids=str,
)
def test_options_that_do_not_go_together(level, option):
    model = runs.plain()
    with pytest.raises(RuntimeError, match="remedy"):
        runs.initialize(model, sgd(model), opt_level=level, **option)
    amp._amp_state.hard_override = True
    with pytest.warns(amp.AmpWarning):
        runs.initialize(model, sgd(model), opt_level=level, **option)


NAN, INF = float("nan"), float("inf")
WRONG = {
    "loss_scale": ["large", 0, -1.0, INF, "nan", [1]],
    "keep_batchnorm_fp32": ["yes"],
    "master_weights": ["False", "True"],
    "patch_torch_functions": ["False"],
    "combine_grad": ["False"],
    "combine_ddp": ["no"],
    "check_combined_tensors": ["False"],
    "user_cast_preferred": ["False"],
    "num_losses": [0, 1.5],
    "cast_model_type": ["half", torch.int32],
    "cast_model_outputs": ["half", torch.int32],
    "dynamic_init_scale": [0, -1, INF, "x", None],
    "min_loss_scale": [-1, 2.0**30, NAN],
    "max_loss_scale": [0, "x", NAN],
    "scale_growth_factor": [0.5, INF, None],
    "scale_backoff_factor": [0, 1.0, NAN],
    "scale_window": [0, 1.5, INF, None],
    "verbosity": [None, "loud"],
    "enabled": ["O2"],
}


@pytest.mark.parametrize("name, value", [(name, value) for name in WRONG for value in WRONG[name]], ids=str)
def test_values_of_options(name, value):
    """They are refused before anything changes."""
    model = runs.plain()
    optimizer = sgd(model)
    with pytest.raises(ValueError, match=name):
        amp.initialize(model, optimizer, **{"opt_level": "O2", "verbosity": 0, name: value})
    model, optimizer = runs.initialize(model, optimizer, opt_level="O2")
    runs.train(model, optimizer, 1)


def test_a_scale_without_ceiling():
    model = runs.plain()
    options = dict(max_loss_scale=None, dynamic_init_scale=2.0**30, scale_window=1)
    model, optimizer = runs.initialize(
        model, FusedAdam(model.parameters()), opt_level="O4", loss_scale="dynamic", **options
    )
    runs.train(model, optimizer, 2)
    assert runs.scaler().loss_scale() == 2.0**32


@pytest.mark.parametrize("level", ["O0", "O2", "O3", "O5"])
def test_torchscript_is_not_cast(level):
    """It takes no hooks of state dicts. Refused before anything changes; O1 leaves models alone."""
    model = torch.nn.Sequential(
        torch.jit.script(torch.nn.Linear(6, 3, dtype=torch.float32, device="cpu")),
        torch.nn.Linear(3, 3, dtype=torch.float32, device="cpu"),
    )
    with pytest.raises(RuntimeError, match=r"(?s)cannot cast TorchScript: 0.*opt_level=\"O1\""):
        runs.initialize(model, sgd(model), opt_level=level)
    assert all(p.dtype == torch.float32 for p in model.parameters())
    model, optimizer = runs.initialize(model, sgd(model), opt_level="O1")
    runs.backward(model(torch.ones(2, 6, dtype=torch.float32, device="cpu")).float().sum(), optimizer)
    optimizer.step()


def test_a_level_in_the_place_of_enabled():
    model = runs.plain()
    with pytest.raises(ValueError, match='opt_level="O2"'):
        amp.initialize(model, sgd(model), "O2")


@pytest.mark.parametrize("level", runs.LEVELS)
def test_integer_parameters(level):
    """They get no gradient, so that an optimizer holds them in vain, and amp does not mind."""
    model = runs.plain()
    model.register_parameter(
        "table", nn.Parameter(torch.arange(3, device="cpu", dtype=torch.int64), requires_grad=False)
    )
    model, optimizer = runs.initialize(model, sgd(model), opt_level=level)
    runs.train(model, optimizer, 2)
    assert torch.equal(model.table, torch.arange(3, device="cpu", dtype=torch.int64))


@pytest.mark.parametrize("level", runs.LEVELS)
def test_complex_parameters(level):
    model = runs.plain()
    model.register_parameter("waves", nn.Parameter(torch.ones(3, dtype=torch.complex64, device="cpu")))
    with pytest.raises(TypeError, match="complex64(.|\n)*remedy"):
        runs.initialize(model, sgd(model), opt_level=level)
    assert model[0].weight.dtype == torch.float32
    model, optimizer = runs.initialize(model, sgd(model[:3]), opt_level=level)
    runs.train(model, optimizer, 1)


@pytest.mark.parametrize("level", runs.LEVELS)
def test_a_float64_model(level):
    """Where it is cast, its norms and losses come to be float32 too, and masters are its weights, rounded once."""

    class WithLoss(nn.Module):
        def __init__(self):
            super().__init__()
            self.network = runs.network()
            self.criterion = nn.CrossEntropyLoss(weight=torch.ones(3, dtype=torch.float32, device="cpu"))

        def forward(self, x, y):
            return self.criterion(self.network(x), y)

    model = WithLoss().double()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.rand_like(p))
    weights = runs.values(model)
    model, optimizer = runs.initialize(model, sgd(model), opt_level=level)
    if level != "O3":
        full = torch.float64 if level in ("O1", "O4") else torch.float32
        assert runs.equal(runs.values(optimizer), [w.to(full) for w in weights])
        assert model.network[1].running_mean.dtype == model.criterion.weight.dtype == full
    x, y = runs.batch()
    for _ in range(2):
        optimizer.zero_grad()
        runs.backward(model(x.double(), y), optimizer)
        optimizer.step()
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("level", runs.LEVELS)
def test_export(level):
    model = runs.initialize(runs.network().eval(), opt_level=level)
    x = runs.batch()[0]
    exported = torch.export.export(model, (x,)).module()
    torch.testing.assert_close(exported(x), model(x))


@pytest.mark.parametrize("level", runs.LEVELS)
def test_parameters_without_shape(level):
    """They can have no master weights; every other level takes them."""

    def lazy():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.LazyLinear(8, dtype=torch.float32, device="cpu"),
            nn.Tanh(),
            nn.Linear(8, 3, dtype=torch.float32, device="cpu"),
        )

    model = lazy()
    if level in ("O2", "O5"):
        with pytest.raises(RuntimeError, match="no shape yet(.|\n)*run the model once"):
            runs.initialize(model, sgd(model), opt_level=level)
        model(runs.batch()[0])
    model, optimizer = runs.initialize(model, sgd(model), opt_level=level)
    losses = [runs.train(model, optimizer, 1)[0] for _ in range(5)]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("models", [(), (nn.Linear(1, 1, dtype=torch.float32, device="cpu"),), "model", None])
def test_models_of_a_wrong_type(models):
    with pytest.raises(TypeError, match="module"):
        runs.initialize(models, opt_level="O1")


def test_optimizers_of_a_wrong_type():
    model = runs.plain()
    with pytest.raises(TypeError, match="optimizer"):
        runs.initialize(model, (sgd(model),), opt_level="O1")


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("level", runs.LEVELS)
def test_a_model_that_is_half_already(level, half):
    model = runs.plain().to(half)
    with pytest.raises(RuntimeError, match="parameter 0.weight .*before amp.initialize"):
        runs.initialize(model, sgd(model), opt_level=level)
    buffers = nn.BatchNorm1d(3, dtype=torch.float32, device="cpu")
    buffers.running_mean = buffers.running_mean.to(half)
    with pytest.raises(RuntimeError, match="buffer running_mean"):
        runs.initialize(buffers, opt_level=level)
    amp._amp_state.allow_incoming_model_not_fp32 = True
    runs.initialize(model, sgd(model), opt_level=level)


def test_a_model_that_is_wrapped_already():
    model = nn.DataParallel(runs.plain())
    with pytest.raises(
        RuntimeError, match=r"(?s)wrapped in .*DataParallel already.*amp.initialize.*; model = DataP"
    ):
        runs.initialize(model, sgd(model), opt_level="O1")

    class DistributedDataParallel(nn.Module):  # apex.parallel's
        pass

    with pytest.raises(RuntimeError, match="wrapped"):
        runs.initialize(DistributedDataParallel(), opt_level="O1")


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
def test_torchs_ddp(tmp_path):
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/ddp", rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(runs.plain())
        with pytest.raises(RuntimeError, match="wrapped"):
            runs.initialize(wrapped, sgd(wrapped), opt_level="O1")
        for level in ("O1", "O2"):
            runs.forget()
            model = runs.plain()
            model, optimizer = runs.initialize(model, sgd(model), opt_level=level)
            parallel = nn.parallel.DistributedDataParallel(model)
            alone = runs.plain()
            runs.train(parallel, optimizer, 3)
            trained = runs.values(model)
            runs.forget()
            alone, optimizer = runs.initialize(alone, sgd(alone), opt_level=level)
            runs.train(alone, optimizer, 3)
            assert runs.equal(trained, runs.values(alone))
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_twice(level):
    model = runs.plain()
    optimizer = sgd(model)
    runs.initialize(model, optimizer, opt_level=level)
    with pytest.raises(RuntimeError, match="a model went through amp.initialize before"):
        runs.initialize(model, sgd(model), opt_level=level)
    with pytest.raises(RuntimeError, match="an? optimizer went through amp.initialize before"):
        runs.initialize(runs.plain(), optimizer, opt_level=level)
    runs.train(model, optimizer, 1)  # a refused call changes nothing


def test_a_second_run_in_one_process():
    """Folds of a cross validation: allowed, with a warning, and as if it were the first."""
    losses = []
    for fold in range(2):
        model = runs.plain()
        optimizer = runs.OPTIMIZERS["FusedAdam"](model.parameters())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            runs.initialize(model, optimizer, opt_level="O1")
        assert any("called again" in str(w.message) for w in caught) == (fold == 1)
        losses.append(runs.train(model, optimizer, 3))
    assert losses[0] == losses[1]


@pytest.mark.parametrize("first, second", [("O2", "O0"), ("O0", "O2"), ("O5", "O1"), ("O3", "O4")])
def test_a_run_goes_on_after_another_began(first, second):
    """As in public apex's own test of checkpoints: the optimizers of both calls train by turns."""

    def start(level):
        model = runs.plain()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is called again
            return runs.initialize(model, sgd(model), opt_level=level, loss_scale=128.0)

    model, optimizer = start(first)
    undisturbed = runs.train(model, optimizer, 4)
    model, optimizer = start(first)
    losses = runs.train(model, optimizer, 2)
    amp._amp_state.handle._deactivate()  # harmless where nothing is patched
    runs.train(*start(second), 1)
    amp._amp_state.handle._deactivate()
    assert losses + runs.train(model, optimizer, 2, first=2) == undisturbed


def test_one_model_or_optimizer_twice_in_a_list():
    model = runs.plain()
    optimizer = sgd(model)
    with pytest.raises(RuntimeError, match="twice"):
        runs.initialize([model, model], optimizer, opt_level="O1")
    with pytest.raises(RuntimeError, match="twice"):
        runs.initialize(model, [optimizer, optimizer], opt_level="O1")


def test_master_weights_of_an_optimizer_and_of_amp():
    model = runs.plain()
    with pytest.raises(RuntimeError, match="master_weights=True"):
        runs.initialize(model, FusedAdam(model.parameters(), master_weights=True), opt_level="O2")
    runs.initialize(
        model, FusedAdam(model.parameters(), master_weights=True), opt_level="O2", master_weights=False
    )


def test_a_wrapped_optimizer():
    class FP16_Optimizer:
        pass

    with pytest.raises(RuntimeError, match="FP16_Optimizer"):
        runs.initialize(runs.plain(), FP16_Optimizer(), opt_level="O1")


def test_a_model_that_moved():
    model = runs.plain()
    _, optimizer = runs.initialize(model, sgd(model), opt_level="O2")
    stash = optimizer._amp_stash
    stash.all_fp16_params[0] = nn.Parameter(torch.ones(8, 6, dtype=torch.float16, device="meta"))
    with pytest.raises(RuntimeError, match=r"model.to\(device\); model, optimizer = amp.initialize"):
        runs.backward(torch.ones((), dtype=torch.float32, device="cpu"), optimizer)
