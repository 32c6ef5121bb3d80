"""FP8 training of Transformer Engine's modules on a GPU, forward and backward together, beside bfloat16 by torch.

usage: python benchmarks/transformer_engine.py [--only linear] [--without-compile] [--seconds 60]

--only: linear, layer, update, host. Operands are random, implementations take turns in random order, each case is
timed rested (80 ms of rest before each run) and sustained (none): medians of GPU time in a CUDA graph. "ratio" is the
time of the first row, bfloat16 by torch, over the row's. Of FP8 rows, weights are cast in every step, as in the first
micro-batch.
Then the new scales of 300 modules under delayed scaling, histories of 1,024 steps. Last, the host's time for one eager
forward and backward of a small te.Linear beside torch's and its casts.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from dense import REST, captured, gpu_times, host_time, step_of, wall_time

import apex.transformer_engine.pytorch as te
from apex.transformer_engine.common import recipe

LINEARS = [(8192, 4096, 16384), (4096, 4096, 4096)]
LAYER = {"hidden": 4096, "heads": 32, "batch": 8, "length": 2048}
RECIPES = {"delayed": recipe.DelayedScaling, "current": recipe.Float8CurrentScaling}


def in_fp8(module, made):
    def run(x):
        with te.fp8_autocast(enabled=True, fp8_recipe=made):
            return module(x)

    return run


def steps_of(module, plain, x, options, fp8=True):
    """{implementation: step}: `plain` is what torch does with the module's own parameters."""
    g = torch.randn_like(plain(x))
    leaves = list(module.parameters())
    found = {"torch bf16": plain}
    if not options.without_compile:
        found["torch.compile bf16"] = torch.compile(plain)
    found["te bf16"] = module
    for name, make in RECIPES.items():
        found[f"te FP8 {name}"] = in_fp8(module, make())
    return {name: step_of(function, leaves, x, g) for name, function in found.items()}


def linear(rows, inputs, outputs):
    module = te.Linear(inputs, outputs, params_dtype=torch.bfloat16, device="cuda")
    x = torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    return module, lambda x: F.linear(x, module.weight, module.bias), x


def layer(hidden, heads, batch, length):
    """A causal TransformerLayer without dropout, and torch's own steps of the same parameters."""
    module = te.TransformerLayer(
        hidden, 4 * hidden, heads, hidden_dropout=0.0, attention_dropout=0.0, params_dtype=torch.bfloat16,
        self_attn_mask_type="causal", fuse_qkv_params=True, device="cuda",
    )  # fmt: skip
    named = dict(module.named_parameters())

    def of(end):
        (found,) = [tensor for name, tensor in named.items() if name.endswith(end)]
        return found

    def norm(x, before):
        return F.layer_norm(x, (hidden,), of(f"{before}.layer_norm_weight"), of(f"{before}.layer_norm_bias"))

    def plain(x):
        wide = F.linear(norm(x, "layernorm_qkv"), of("layernorm_qkv.weight"), of("layernorm_qkv.bias"))
        q, k, v = wide.view(length, batch, heads, 3, hidden // heads).permute(3, 1, 2, 0, 4).unbind()
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).permute(2, 0, 1, 3)
        x = x + F.linear(attended.reshape(length, batch, hidden), of("proj.weight"), of("proj.bias"))
        wide = F.linear(norm(x, "layernorm_mlp"), of("fc1_weight"), of("fc1_bias"))
        return x + F.linear(F.gelu(wide, approximate="tanh"), of("fc2_weight"), of("fc2_bias"))

    x = torch.randn(length, batch, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    with torch.no_grad():
        difference = (module(x) - plain(x)).abs().max().item()
    print(f"largest difference of te in bf16 and torch: {difference:.3f}", flush=True)
    return module, plain, x


def report(case, steps):
    replays, refused = {}, {}
    for name, step in steps.items():
        try:
            replays[name] = captured(step)
        except Exception as error:  # a peer that refuses is a result too
            torch.cuda.synchronize()
            refused[name] = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:100]}"
    gpu_times(replays, 0)
    rested, sustained = gpu_times(replays, REST), gpu_times(replays, 0)
    for name, step in steps.items():
        if name in refused:
            print(f"| {case} | {name} | {refused[name]} |", flush=True)
            continue
        first, hot = (times["torch bf16"] / times[name] for times in (rested, sustained))
        figures = (
            f"{rested[name]:.0f} | {first:.2f} | {sustained[name]:.0f} | {hot:.2f} | {wall_time(step):.0f}"
        )
        print(f"| {case} | {name} | {figures} |", flush=True)


def report_update(modules=300, steps=1024):
    """Of histories that lie together, as layers' do, and of such that lie apart."""
    from apex import _fp8
    from apex.transformer_engine.pytorch import _history

    sizes = [3, 2] * modules
    maxima = torch.full((sum(sizes),), 448.0, dtype=torch.float32, device="cuda")
    together = [_history.zeros(steps, size, torch.device("cuda"))[0] for size in sizes]
    apart = [torch.zeros(size, steps, dtype=torch.float32, device="cuda").t() for size in sizes]
    old, olds = torch.ones_like(maxima).split(sizes), [maxima.new_ones(size) for size in sizes]
    rows = {
        "together": captured(lambda: _fp8.multi_update_scales(together, old, maxima)),
        "apart": captured(lambda: _fp8.multi_update_scales(apart, olds, maxima)),
    }
    gpu_times(rows, 0)
    rested, sustained = gpu_times(rows, REST), gpu_times(rows, 0)
    for name in rows:
        print(
            f"| scales of {modules} modules | {name} | {rested[name]:.1f} | | {sustained[name]:.1f} | | |",
            flush=True,
        )


def report_host_times():
    """Of a small Linear: te's in FP8, torch's, and the casts that FP8 needs, each as one call of apex's."""
    from apex import _fp8

    module, plain, x = linear(64, 64, 64)
    g = torch.randn(64, 64, device="cuda", dtype=torch.bfloat16)
    leaves, scale, amax = (
        list(module.parameters()),
        torch.ones(1, device="cuda"),
        torch.zeros(1, device="cuda"),
    )
    e4m3, e5m2 = _fp8.formats("cuda")

    def casts():
        for tensor, form, bias in (
            (x.detach(), e4m3, False),
            (module.weight.detach(), e4m3, False),
            (g, e5m2, True),
        ):
            _fp8.quantize_transpose(tensor, scale, form, amax, bias)

    print("\n| host time of forward and backward | us |\n|---|---|")
    rows = {"torch Linear": step_of(plain, leaves, x, g), "casts": casts}
    rows |= {
        f"te FP8 {name}": step_of(in_fp8(module, make()), leaves, x, g) for name, make in RECIPES.items()
    }
    for name, step in rows.items():
        host_time(step)
        print(f"| {name} | {host_time(step):.1f} |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="")
    parser.add_argument("--without-compile", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    print("| case | implementation | rested us | ratio | sustained us | ratio | eager wall us |")
    print("|---|---|---|---|---|---|---|")
    for sizes in LINEARS if options.only in "linear" else []:
        report(f"linear {'x'.join(map(str, sizes))}", steps_of(*linear(*sizes), options))
    if options.only in "layer":
        report("layer " + " ".join(f"{k} {v}" for k, v in LAYER.items()), steps_of(*layer(**LAYER), options))
    if options.only in "update":
        report_update()
    if options.only in "host":
        report_host_times()


if __name__ == "__main__":
    main()
