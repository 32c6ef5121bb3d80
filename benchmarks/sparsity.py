"""ASP's search for orders of channels, on a GPU or a CPU: the op that it is made of, and whole searches.

usage: python benchmarks/sparsity.py [--rows 2048] [--columns 512 1024 2048] [--attempts 100] [--device cpu]

The op's floor on a GPU is its arithmetic: 155 maxima and 190 additions of floats for each row of a group.
"""

from __future__ import annotations

import argparse
import time

import torch

from apex.contrib.sparsity.permutation_search_kernels import (
    _magnitudes,
    accelerated_search_for_good_permutation,
    sum_after_2_to_4,
)


def seconds(call, device, runs=5):
    """The median of some runs after one."""
    times = []
    for _ in range(runs + 1):
        begin = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begin)
    return sorted(times[1:])[runs // 2]


def all_pairs(count, device):
    """int32 [pairs, 8]: the columns of every two stripes."""
    each = torch.arange(count // 4, dtype=torch.int32, device=device)
    pairs = torch.combinations(each, 2)
    return (4 * pairs[..., None] + torch.arange(4, dtype=torch.int32, device=device)).flatten(1)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--columns", type=int, nargs="+", default=[512, 1024, 2048])
    parser.add_argument("--attempts", type=int, default=100)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    device = torch.device(options.device)
    for count in options.columns:
        generator = torch.Generator("cpu").manual_seed(0)
        weight = torch.randn(options.rows, count, dtype=torch.float32, device="cpu", generator=generator).to(
            device
        )
        columns, groups = _magnitudes.columns_of(weight), all_pairs(count, device)
        taken = seconds(lambda: _magnitudes.kept_magnitudes(columns, groups), device, 3)  # noqa: B023
        operations = len(groups) * options.rows * 345
        print(
            f"{options.rows}x{count}: {len(groups)} pairs {taken * 1e3:.2f} ms, {operations / taken / 1e12:.2f} T/s"
        )
        begin = time.perf_counter()
        order = accelerated_search_for_good_permutation(weight, {"escape_attempts": options.attempts})
        taken = time.perf_counter() - begin
        before, after = sum_after_2_to_4(weight), sum_after_2_to_4(weight[:, order])
        print(f"{options.rows}x{count}: search {taken:.2f} s, keeps {before:.6g} -> {after:.6g}")


if __name__ == "__main__":
    main()
