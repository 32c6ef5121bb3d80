"""What the sources of the CPU variants must have so that their loops get a level's instructions.

A lambda that is not inlined into the function of a level is compiled for the baseline, as is all that it calls. A copy
whose length is known at run time only becomes a string instruction there, whose start takes longer than a tile.
"""

import re

import pytest

from build_matrix import REPOSITORY

HOST = REPOSITORY / "csrc" / "host"
CHOOSES_THE_LEVEL = "multi_tensor_cpu.h"  # its lambda is what calls the function of a level
LAMBDA = re.compile(r"(?<!operator)\[[&=]?\](?:\((?:[^()]|\([^()]*\))*\))?\s*(\w*)\s*(?:->[^{]*)?\{")
COPY = re.compile(r"\b(?:mem(?:cpy|set|move))\(([^;]*)\);")


def sources():
    """Files whose code runs at a level."""
    inlined = [
        p for p in HOST.glob("*.*") if p.suffix in (".cpp", ".h") and "APEX_INLINE" in p.read_text("utf-8")
    ]
    return sorted(p.name for p in inlined if p.name != CHOOSES_THE_LEVEL)


def lambdas_left_out(text):
    return [match.group() for match in LAMBDA.finditer(text) if match.group(1) != "APEX_INLINE_LAMBDA"]


def copies_of_any_length(text):
    """Copies whose length is neither a number nor the size of something."""
    return [found for found in COPY.findall(text) if not re.search(r",\s*(?:\d+|sizeof\b.*)$", found)]


@pytest.mark.parametrize("name", sources())
def test_loops_get_the_instructions_of_their_level(name):
    text = (HOST / name).read_text(encoding="utf-8")
    assert not lambdas_left_out(text), "between parameters and body: APEX_INLINE_LAMBDA"
    assert not copies_of_any_length(text), "copy_bytes and clear_bytes (multi_tensor_tiles.h) move any length"


def test_what_is_looked_for_is_found():
    assert len(sources()) > 20
    assert lambdas_left_out("sum(n, [&](int64_t j) { return x[j]; });")
    assert lambdas_left_out("run([&](int64_t) -> const Op& { return op; });")
    assert not lambdas_left_out("sum(n, [&](int64_t j) APEX_INLINE_LAMBDA { return x[j]; });")
    assert copies_of_any_length("std::memcpy(to, from, size_t(n) * sizeof(float));")
    assert not copies_of_any_length("std::memcpy(&eight, flags + j, 8); std::memset(sums, 0, sizeof sums);")
