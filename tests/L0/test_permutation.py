"""apex.contrib.sparsity.permutation_lib: a permuted model computes what it did, and its weights keep more of their
magnitude when they are pruned; what cannot be reordered stays."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from lists import F32, F64
from torch import nn

from apex.contrib.sparsity import create_mask
from apex.contrib.sparsity.permutation_lib import (
    Permutation,
    convert_fx_node_name,
    node_name_matches,
    replicate_sequence,
)
from apex.fused_dense import FusedDense
from apex.normalization import FusedLayerNorm, FusedRMSNorm
from tests.torch_defaults import float32_on_cpu


def conv(inputs, outputs, kernel=3, groups=1):
    return nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, groups=groups)


class Resnet(nn.Module):
    """Residuals with and without a projection, batch norm, a depthwise convolution, squeeze and excitation."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(conv(16, 32), nn.BatchNorm2d(32), nn.ReLU())
        self.one = nn.Sequential(
            conv(32, 16, 1), nn.BatchNorm2d(16), nn.ReLU(), conv(16, 32), nn.BatchNorm2d(32)
        )
        self.two = nn.Sequential(conv(32, 32), nn.PReLU(32), conv(32, 32, groups=32), conv(32, 64, 1))
        self.projection = conv(32, 64, 1)
        self.squeeze, self.excite = nn.Linear(64, 16), nn.Linear(16, 64)
        self.pool, self.head = nn.AdaptiveAvgPool2d(1), nn.Linear(64, 8)

    def forward(self, x):
        x = self.stem(x)
        x = F.relu(self.one(x) + x)
        x = self.two(x) + self.projection(x)
        scale = torch.sigmoid(self.excite(F.relu(self.squeeze(x.mean((2, 3))))))
        x = x * scale.view(x.size(0), x.size(1), 1, 1)
        return self.head(torch.flatten(self.pool(x), 1))


class Bert(nn.Module):
    """Tied embeddings with positions, attention, apex's norms and dense layers, residuals: pre- and post-norm."""

    def __init__(self):
        super().__init__()
        self.words, self.positions = (
            nn.Embedding(40, 32),
            nn.Parameter(torch.randn(6, 32, dtype=F32, device="cpu")),
        )
        self.first, self.attention = FusedLayerNorm(32), nn.MultiheadAttention(32, 4, batch_first=True)
        self.norm, self.query, self.key = FusedRMSNorm(32), nn.Linear(32, 32), nn.Linear(32, 32)
        self.up, self.down, self.last = FusedDense(32, 64), nn.Linear(64, 32), nn.LayerNorm(32)
        self.out = nn.Linear(32, 40)
        self.out.weight = self.words.weight

    def forward(self, tokens):
        x = self.first(self.words(tokens) + self.positions)
        x = x + self.attention(x, x, x)[0]
        y = self.norm(x)
        y = self.query(y) * torch.softmax(self.key(y), -1)
        y = y.transpose(1, 2).transpose(1, 2)
        return self.out(self.last(self.down(F.gelu(self.up(x))) + x)), y


class Concat(nn.Module):
    def __init__(self, axis=1):
        super().__init__()
        self.axis, width = axis, 40 if axis == 1 else 16
        self.a, self.b = conv(16, 16), conv(16, 24 if axis == 1 else 16)
        self.norm, self.out = nn.BatchNorm2d(width), conv(width, 8, 1)

    def forward(self, x):
        return self.out(F.max_pool2d(self.norm(torch.cat([self.a(x), self.b(x)], self.axis)), 2))


class Grouped(nn.Module):
    """Siblings with different numbers of groups: channels stay within the smallest group."""

    def __init__(self):
        super().__init__()
        self.stem, self.full, self.two, self.four = (
            conv(16, 64),
            conv(64, 16),
            conv(64, 16, groups=2),
            conv(64, 16, groups=4),
        )

    def forward(self, x):
        x = self.stem(x)
        return self.full(x) + self.two(x) + self.four(x)


class Shared(nn.Module):
    """A layer that is called twice."""

    def __init__(self):
        super().__init__()
        self.a, self.twice, self.out = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 8)

    def forward(self, x):
        return self.out(F.silu(self.twice(F.silu(self.twice(self.a(x))))))


class Sequences(nn.Module):
    """View to another number of dimensions and back, channels that move to the end, layer norm over all of an image."""

    def __init__(self):
        super().__init__()
        self.stem, self.line, self.norm = conv(16, 32), nn.Conv1d(32, 32, 1), nn.LayerNorm([32, 6, 6])
        self.dense, self.rest = nn.Linear(32, 24), nn.Linear(24, 8)

    def forward(self, x):
        x = self.stem(x)
        shape = x.shape
        y = self.line(x.view(shape[0], shape[1], shape[2] * shape[3])).view(shape)
        return self.rest(self.dense(self.norm(y + x).permute(0, 2, 3, 1)))


def image():
    return torch.randn(2, 16, 6, 6, dtype=F64, device="cpu")


def tokens():
    return torch.randint(40, (2, 6), dtype=torch.int64, device="cpu")


def random(*shape):
    return torch.randn(*shape, dtype=F64, device="cpu")


def made(model, seed=0):
    """The model in float64, with weights whose columns differ much, and running statistics that are not 0 and 1."""
    with float32_on_cpu():
        torch.manual_seed(seed)
        module = model().double().eval()
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if tensor.is_floating_point():
                factor = torch.rand(
                    tensor.shape[-1] if tensor.dim() < 2 else tensor.shape[1], dtype=F64, device="cpu"
                )
                shape = [-1] if tensor.dim() < 2 else [1, -1] + [1] * (tensor.dim() - 2)
                tensor.detach().mul_(1 + 9 * factor.view(shape).square()).add_(
                    0.1 if "running" in name else 0
                )
    return module


def prepare(module, **keywords):
    sparse, everything = [], []
    for name, layer in module.named_modules():
        for short, p in layer.named_parameters(recurse=False):
            everything.append((name, layer, short, p))
            pruned = (
                short in ("weight", "in_proj_weight") and p.dim() > 1 and not isinstance(layer, nn.Embedding)
            )
            if pruned and p.shape[0] % 8 == 0 and p.shape[1] % 8 == 0:
                sparse.append((name, layer, short, p, torch.ones_like(p, dtype=torch.bool), None))
    Permutation.set_permutation_params_from_asp(module, sparse, everything, **keywords)
    return sparse


def kept(sparse):
    return sum((p * create_mask(p)).abs().sum().item() for *_, p, _, _ in sparse)


CASES = {
    "resnet": (Resnet, image, {"stem.0", "one.0", "one.3", "two.0", "two.2", "squeeze", "excite"}),
    "bert": (Bert, tokens, {"words", "attention.out_proj", "up", "down"}),
    "concat": (Concat, image, {"a", "b"}),
    "concat_of_batches": (lambda: Concat(0), image, {"a", "b"}),
    "grouped": (Grouped, image, {"stem"}),
    "shared": (Shared, lambda: random(3, 16), {"a", "twice"}),
    "sequences": (Sequences, image, {"stem", "line", "dense"}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_permuted_model_computes_the_same_and_keeps_more(name):
    model, inputs, reordered = CASES[name]
    module, x = made(model), inputs()
    wanted = module(x)
    sparse = prepare(module)
    before = kept(sparse)
    assert Permutation.permute_model(module)
    torch.testing.assert_close(module(x), wanted, rtol=1e-9, atol=1e-9)
    assert kept(sparse) > 1.002 * before
    in_c, in_k, missed = Permutation.get_permutation_stats()
    assert not missed and in_c and reordered <= {path.rpartition(".")[0] for path in in_k}


def test_channels_of_groups_stay_in_them():
    """Each group's quarter has an order of its own, and none leaves its quarter."""
    module = made(Grouped)
    prepare(module)
    graph, _ = Permutation.build_offline_permutation_graph(module)
    order = torch.tensor(
        Permutation.fetch_K_permutation_sequence_value("stem", graph), dtype=torch.int64, device="cpu"
    )
    quarters = order.view(4, 16)
    assert torch.equal(
        quarters // 16, torch.arange(4, dtype=torch.int64, device="cpu")[:, None].expand(4, 16)
    )
    assert len({tuple((quarter % 16).tolist()) for quarter in quarters}) == 4


class Blocked(nn.Module):
    def __init__(self, between, after=None):
        super().__init__()
        self.first, self.between, self.last = conv(16, 32), between, after or conv(32, 8, 1)

    def forward(self, x):
        x = self.first(x)
        return self.last(self.between(x) if isinstance(self.between, nn.Module) else self.between(x))


class Unknown(nn.Module):
    def forward(self, x):
        return x.flip(1)


BLOCKED = {
    "group_norm": lambda: nn.GroupNorm(4, 32),
    "local_response": lambda: nn.LocalResponseNorm(5),
    "unknown_op": Unknown,
    "transposed": lambda: nn.ConvTranspose2d(32, 32, 1),
    "split": lambda: lambda x: torch.cat(x.chunk(2, 1), 1),
    "unknown_operand": lambda: lambda x: x + torch.arange(32.0, dtype=F64, device="cpu").view(1, 32, 1, 1),
    "attribute_of_channels_elsewhere": lambda: lambda x: x.roll(1, 1),
    "shuffle": lambda: nn.PixelShuffle(1),
    "flat": lambda: nn.Flatten(),
}


@pytest.mark.parametrize("name", BLOCKED)
def test_what_mixes_channels_leaves_them(name):
    after = nn.Linear(32 * 36, 8, dtype=F32, device="cpu") if name == "flat" else None
    module, x = made(lambda: Blocked(BLOCKED[name](), after)), image()
    wanted = module(x)
    weight = module.first.weight.detach().clone()
    prepare(module)
    assert Permutation.permute_model(module)
    assert torch.equal(module.first.weight, weight) and torch.equal(module(x), wanted)
    assert Permutation.get_permutation_stats() == ([], [], [])


def test_a_parameter_of_two_uses_stays():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(16, 32), nn.Linear(32, 32)

        def forward(self, x):
            return self.b(self.a(x)) + self.b.weight.sum(0)

    module, x = made(Twice), random(3, 16)
    wanted, weight = module(x), module.b.weight.detach().clone()
    prepare(module)
    assert Permutation.permute_model(module)
    assert torch.equal(module.b.weight, weight) and torch.equal(module(x), wanted)


def test_sparse_weights_need_no_order():
    module = made(Shared)
    sparse = prepare(module)
    for *_, p, _, _ in sparse:
        p.detach().mul_(create_mask(p))
    before = [p.detach().clone() for *_, p, _, _ in sparse]
    assert Permutation.permute_model(module) and Permutation.get_permutation_stats() == ([], [], [])
    assert all(torch.equal(p, q) for (*_, p, _, _), q in zip(sparse, before, strict=True))


def test_a_model_that_cannot_be_traced_is_left_with_a_warning():
    class Branch(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 8)

        def forward(self, x):
            x = self.a(x)
            return self.b(x if x.sum() > 0 else -x)

    module = made(Branch)
    weight = module.a.weight.detach().clone()
    prepare(module)
    with pytest.warns(UserWarning, match="torch.fx cannot trace Branch: .*allow_permutation=False"):
        assert not Permutation.permute_model(module)
    with pytest.warns(UserWarning, match="cannot trace"):
        assert Permutation.print_raw_fx_graph(module) is None
    assert torch.equal(module.a.weight, weight)


def test_gradients_masters_and_states_go_with_their_parameter():
    module = made(Shared)
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
    module(random(4, 16)).sum().backward()
    optimizer.step()
    before = {
        n: (p.detach().clone(), p.grad.clone(), optimizer.state[p]["exp_avg"].clone())
        for n, p in module.named_parameters()
    }
    prepare(module, optimizer=optimizer)
    graph, _ = Permutation.build_offline_permutation_graph(module)
    Permutation.apply_offline_permutation(module, graph)
    for name, p in module.named_parameters():
        layer, _, short = name.partition(".")
        for now, then in zip((p.detach(), p.grad, optimizer.state[p]["exp_avg"]), before[name], strict=True):
            for dim, kind in ((0, "K"), (1, "C")):
                fetch = getattr(Permutation, f"fetch_{kind}_permutation_sequence_value")
                nodes = [n for n in graph if n != "unique_siblings" and graph[n].get("target") == layer]
                order = fetch(nodes[0], graph)
                if order and dim < then.dim():
                    then = then.index_select(dim, torch.tensor(order, dtype=torch.int64, device="cpu"))
            assert torch.equal(now, then), name


def test_the_graph_as_json(tmp_path):
    module = made(Resnet)
    prepare(module)
    Permutation.set_permutation_saving_params(True, True, str(tmp_path))
    try:
        assert Permutation.permute_model(module, True, str(tmp_path / "graph.json"))
    finally:
        Permutation.set_permutation_saving_params()
    graph = json.loads((tmp_path / "graph.json").read_text())
    assert graph["one.0"]["real_parents"] == ["one.3", "stem.0"] and graph["one.0"]["C_param"] == "32"
    assert graph["one.0"]["module_type"] == "torch.nn.modules.conv.Conv2d"
    assert graph["one.0"]["permutation_type"] == "KC" and graph["head"]["permutation_type"] == "C"
    assert graph["stem.1"]["real_children"] == ["one.0", "projection", "two.0"]
    assert graph["one.0"]["real_siblings"] == ["projection", "two.0"]
    assert Permutation.recursive_find_real_children("two.3", graph)[0] == ["head", "squeeze"]
    names = graph["unique_siblings"]["name"]
    orders = graph["unique_siblings"]["permutation_sequence"]
    assert sorted(orders[names.index(["one.0", "two.0", "projection"])]) == list(range(32))
    last = json.loads((tmp_path / "model_graph_apply_offline_permutation.json").read_text())
    assert (
        last["one.0"]["c_permuted"] == last["one.0"]["k_permuted"] == "True"
        and last["head"]["k_permuted"] == "False"
    )
    assert (tmp_path / "model_graph_find_real_parent.json").exists()


def test_one_node():
    module = made(Shared)
    prepare(module)
    weight = module.twice.weight.detach().clone()
    order = list(range(31, -1, -1))
    assert Permutation.apply_permutation_in_C_dim("twice", order, dryrun=True)
    assert torch.equal(module.twice.weight, weight)
    assert Permutation.apply_permutation_in_C_dim("twice", order)
    assert Permutation.apply_permutation_in_K_dim("twice", [1, 0])
    swapped = weight[replicate_sequence([1, 0], 16)][:, order]
    assert torch.equal(module.twice.weight, swapped)
    assert not Permutation.apply_permutation_in_C_dim("twice", list(range(5)))
    assert not Permutation.apply_permutation_in_K_dim("nowhere", [1, 0])
    assert not Permutation.apply_permutation_in_K_dim("twice", [])


def test_names():
    assert convert_fx_node_name("layer_1_conv") == "layer.1.conv"
    assert node_name_matches("layer.1.conv", "module.layer_1.Conv") and not node_name_matches("a.b", "a.c")


def test_the_raw_graph_is_printed(capsys):
    traced = Permutation.print_raw_fx_graph(made(Shared), generate_python_code=True)
    assert "twice" in capsys.readouterr().out and isinstance(traced, torch.fx.GraphModule)


def test_seeds_of_torch_stay():
    state = torch.random.get_rng_state()
    Permutation.set_identical_seed(3)
    Permutation.reset_seed()
    Permutation.set_identical_seed()
    assert torch.equal(state, torch.random.get_rng_state())
