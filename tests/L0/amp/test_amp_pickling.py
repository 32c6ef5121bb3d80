"""Models that hold functions of torch are saved, copied and sent to processes while amp patches these functions."""

from __future__ import annotations

import copy
import io
import multiprocessing
import pickle
import subprocess
import sys
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
import torch.nn.functional as F

from apex import amp
from apex.amp import amp as patching

NAMES = [
    "torch.nn.functional.softmax",
    "torch.nn.functional.gelu",
    "torch.nn.functional.cross_entropy",
    "torch.nn.functional.linear",
    "torch.nn.functional.mse_loss",
    "torch.nn.functional.layer_norm",
    "torch.nn.functional.conv2d",
    "torch.matmul",
    "torch.softmax",
    "torch.einsum",
    "torch.cat",
    "torch.Tensor.matmul",
    "torch.Tensor.pow",
]


def current(name):
    found = torch
    for part in name.split(".")[1:]:
        found = getattr(found, part)
    return found


ORIGINALS = {name: current(name) for name in NAMES}


class Holder(torch.nn.Module):
    def __init__(self, functions):
        super().__init__()
        self.layer = torch.nn.Linear(3, 3, device="cpu", dtype=torch.float32)
        self.functions = functions

    def forward(self, x):
        return self.functions["torch.nn.functional.softmax"](self.layer(x), dim=-1)


def held():
    return {name: current(name) for name in NAMES}


@pytest.fixture(params=["O1", "O4"])
def models(request):
    """(a model that took its functions before amp.initialize, one that took them after), patched meanwhile."""
    early = Holder(held())
    optimizer = torch.optim.SGD(early.parameters(), lr=0.1)
    early, _ = amp.initialize(early, optimizer, opt_level=request.param, verbosity=0)
    assert F.softmax is not ORIGINALS["torch.nn.functional.softmax"]
    return early, Holder(held())


def saved(value, **options):
    file = io.BytesIO()
    torch.save(value, file, **options)
    return file.getvalue()


WAYS = {
    "torch.save": saved,
    "torch.save, the older format": lambda value: saved(value, _use_new_zipfile_serialization=False),
    "multiprocessing": lambda value: bytes(ForkingPickler.dumps(value)),
}


def loaded(way, data):
    return (
        pickle.loads(data) if way == "multiprocessing" else torch.load(io.BytesIO(data), weights_only=False)
    )


@pytest.mark.parametrize("way", WAYS)
def test_what_is_loaded_without_amp_is_torchs_own(models, way):
    data = [WAYS[way](model.functions) for model in models]
    patching.unpatch()
    for one in data:
        assert loaded(way, one) == ORIGINALS


@pytest.mark.parametrize("way", WAYS)
def test_what_is_loaded_under_amp_is_patched(models, way):
    for model in models:
        again = loaded(way, WAYS[way](model))
        assert again.functions["torch.nn.functional.gelu"] in (F.gelu, ORIGINALS["torch.nn.functional.gelu"])
        assert again.functions["torch.nn.functional.softmax"] is F.softmax


def test_wrappers_in_place_are_pickled_by_name(models):
    data = pickle.dumps(models[1].functions)
    assert b"apex" not in data and b"resolve_name" not in data
    patching.unpatch()
    assert pickle.loads(data) == ORIGINALS


@pytest.mark.parametrize("way", WAYS)
def test_wrappers_of_an_earlier_initialize(models, way):
    patching.init()
    assert models[1].functions["torch.nn.functional.gelu"] is not F.gelu
    data = WAYS[way](models[1].functions)
    patching.unpatch()
    after = WAYS[way](models[1].functions)
    assert loaded(way, data) == ORIGINALS == loaded(way, after)


def test_deepcopy_keeps_the_functions(models):
    for model in models:
        assert copy.deepcopy(model).functions == model.functions


def test_without_apex(models, tmp_path):
    """A process that has neither apex nor amp loads what was saved."""
    torch.save([model.functions for model in models], tmp_path / "functions.pt")
    code = (
        "import sys, torch; sys.modules['apex'] = None\n"
        f"found = torch.load({str(tmp_path / 'functions.pt')!r}, weights_only=False)\n"
        "for functions in found:\n"
        "    for name, function in functions.items():\n"
        "        assert eval(name) == function, name\n"
        "print('done')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "done\n", done.stderr


def compare(model, x, queue):
    with torch.no_grad():
        queue.put(float((model(x) - F.softmax(model.layer(x), dim=-1)).abs().max()))


def test_a_spawned_process_takes_the_models(models):
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    x = torch.ones(2, 3, device="cpu", dtype=torch.float32)
    for model in models:
        process = context.Process(target=compare, args=(Holder({**model.functions}), x, queue))
        process.start()
        assert queue.get(timeout=60) == 0.0
        process.join(60)


def test_a_pickle_module_of_the_user_is_taken(models):
    class Counting(pickle.Pickler):
        made = 0

        def __init__(self, *arguments, **keywords):
            Counting.made += 1
            super().__init__(*arguments, **keywords)

    own = type(pickle)("own")
    own.Pickler, own.__dict__["dump"] = Counting, pickle.dump
    saved({"a": 1}, pickle_module=own)
    assert Counting.made == 1


def test_other_functions_and_lambdas_are_as_ever(models):
    assert loaded("torch.save", saved(compare)) is compare
    with pytest.raises((pickle.PicklingError, AttributeError)):
        saved(lambda: 0)
