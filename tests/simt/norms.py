"""Launches of the norms' kernels and what they must give: what test_layer_norm and test_rms_norm share."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from simt.element_types import DTYPES, ROUNDING, decode, encode
from simt.structs import make

TYPE = {"f32": 0, "f16": 1, "bf16": 2, "f64": 3}
EPS = 0.1  # some weights lie below it, some between it and eight times it
SUM_COLUMNS = 32  # norm_sum_columns
FEW_COLUMNS = 8  # norm_few_columns
# NORM_FORWARD_TEAMS and NORM_BACKWARD_TEAMS: hidden -> vectors a thread, teams, stages.
FORWARD_TEAMS = {1024: (1, 8, 5), 2048: (2, 8, 5), 4096: (2, 4, 5), 8192: (2, 2, 5), 12288: (3, 2, 3)}
BACKWARD_TEAMS = {1024: (1, 4, 6), 2048: (2, 4, 6), 4096: (2, 2, 6), 8192: (2, 1, 6)}


@dataclass(frozen=True)
class Case:
    """One shape, its dtypes, and the kernel that takes it.

    kernel: the name's end. warps: of a block, or else its threads. stages: rows in shared memory at once.
    """

    kernel: str
    rows: int
    hidden: int
    input: str = "bf16"
    output: str = "bf16"
    weight: str = "bf16"
    warp_rows: int = 0
    warps: int = 2
    threads: int = 0
    grid: int = 2
    stages: int = 2
    affine: bool = True
    residual: bool = False
    from_output: bool = False

    @property
    def long(self) -> bool:
        return self.kernel.startswith("long")

    @property
    def few(self) -> bool:
        return self.kernel.startswith("few")

    @property
    def held(self) -> bool:
        return self.kernel.startswith("held")

    @property
    def teams(self) -> bool:
        return self.kernel == "teams"

    @property
    def elements(self) -> int:
        """Of a row, a thread, in registers."""
        return int(self.kernel[-1]) * (8 if self.kernel[0] in "bf" and self.kernel[1] != "3" else 4)

    @property
    def math(self) -> np.dtype:
        return DTYPES["f64" if self.input == "f64" else "f32"]

    def __str__(self) -> str:
        ends = [
            f"{self.kernel}-{self.rows}x{self.hidden}-{self.input}-{self.output}-{self.weight}",
            *(name for name in ("warp_rows", "residual", "from_output") if getattr(self, name)),
        ]
        return "-".join(ends)


# float16 where a kernel uses few registers alone: in 16-bit instructions of gfx950 the emulator takes v128 and above
# for the upper halves of v0 and above, which is so on RDNA.
CASES = [
    Case("bf16x2", 5, 72, warp_rows=1, stages=1),
    Case("bf16x3", 7, 768, warp_rows=1, weight="f32", stages=3),
    Case("f16x2", 5, 1000, input="f16", output="f16", weight="f32", warps=4, stages=3),
    Case("anyx4", 3, 260, input="f32", output="bf16", weight="f32", warps=4, residual=True),
    Case("f32x4", 9, 36, input="f32", output="f32", weight="f32", warp_rows=1, stages=3, residual=True),
    Case("f32x8", 3, 516, input="f32", output="f32", weight="f32", from_output=True, stages=1),
    Case("bf16x2", 4, 64, warp_rows=1, from_output=True, weight="f32"),
    Case("bf16x4", 3, 144, warps=1, from_output=True),
    Case("bf16x4", 3, 136, affine=False, warps=1),
    # A row is as long as its block has registers: mean and squares of one exchange, of few warps and of many.
    Case("bf16x2", 7, 1024, threads=64, grid=1),
    Case("f32x4", 5, 2048, input="f32", output="f32", weight="f32", threads=128),
    Case("bf16x2", 3, 8192, threads=512, grid=1),
    Case("bf16x3", 3, 1544, residual=True, warps=4, grid=3),
    Case("anyx8", 3, 132, output="f32", warp_rows=1, from_output=True),
    # Few rows. Less than a turn of a block's rows and more; threads without a row, and columns past the end.
    Case("few_bf16", 5, 72, warps=2),
    Case("few_bf16", 150, 512, weight="f32", threads=64),
    Case("few_f16", 37, 1032, input="f16", output="f16", threads=192),
    Case("few_f32", 70, 36, input="f32", output="f32", weight="f32", warps=1),
    Case("few_any", 9, 260, input="f32", output="bf16", weight="bf16", warps=4),
    Case("few_any", 9, 2048, output="f32", threads=512, affine=False),
    Case("long8", 3, 272, output="f16", residual=True, from_output=False, warps=1),
    Case("long1", 5, 67, input="f16", output="f32", weight="bf16", from_output=True),
    Case("long_f64", 3, 67, input="f64", output="f64", weight="f64"),
]


def values(case: Case) -> dict[str, np.ndarray]:
    """The tensors of a case, float64, exactly as its dtypes hold them."""
    rng = np.random.default_rng(case.hidden)

    def rounded(x, name):
        return decode(encode(x, name), name)

    shape = (case.rows, case.hidden)
    found = {
        "input": rounded(rng.standard_normal(shape) + 0.5, case.input),
        "grad": rounded(rng.standard_normal(shape), case.output),
        "grad_sum": rounded(rng.standard_normal(shape), case.input),
        "weight": rng.uniform(0.3, 1.5, case.hidden),
        "bias": rounded(rng.standard_normal(case.hidden), case.weight),
    }
    found["weight"][:2] = EPS / 2, -0.7
    found["weight"] = rounded(found["weight"], case.weight)
    found["residual"] = rounded(rng.standard_normal(shape), case.input)
    if not case.affine:
        found["weight"], found["bias"] = np.ones(case.hidden), np.zeros(case.hidden)
    return found


def oracle(v: dict[str, np.ndarray], case: Case, centered: bool) -> dict[str, np.ndarray]:
    """Everything that forward and backward give, in float64.

    From an output, the backward divides by the weight, or by eps where that is larger.
    """
    x = decode(encode(v["input"] + v["residual"], case.input), case.input) if case.residual else v["input"]
    mean = x.mean(1, keepdims=True) if centered else np.zeros((case.rows, 1))
    rstd = 1 / np.sqrt(((x - mean) ** 2).mean(1, keepdims=True) + EPS)
    normal = (x - mean) * rstd
    output = normal * v["weight"] + (v["bias"] if centered else 0)
    if case.from_output:
        normal = normal * np.abs(v["weight"]) / np.maximum(np.abs(v["weight"]), EPS)
    g = v["grad"] * v["weight"]
    along = (g * normal).mean(1, keepdims=True)
    grad = (g - (g.mean(1, keepdims=True) if centered else 0) - normal * along) * rstd
    return {
        "sum": x,
        "mean": mean[:, 0],
        "rstd": rstd[:, 0],
        "output": output,
        "grad_input": grad + (v["grad_sum"] if case.residual else 0),
        "grad_weight": (v["grad"] * normal).sum(0),
        "grad_bias": v["grad"].sum(0),
    }


def near(found: np.ndarray, name: str, expected: np.ndarray, arithmetic: float = 64.0) -> None:
    """Within one rounding to the dtype and some roundings of the arithmetic."""
    work = ROUNDING["f64" if name == "f64" else "f32"]
    scale = np.abs(expected).max(initial=1.0)
    tolerance = 1.01 * ROUNDING[name]
    np.testing.assert_allclose(
        decode(found, name), expected, rtol=tolerance + 4 * work, atol=arithmetic * work * scale
    )


class Tensors:
    """The case's tensors on a device."""

    def __init__(self, device, case: Case, centered: bool):
        self.device, self.case, self.centered = device, case, centered
        self.values = values(case)
        self.expected = oracle(self.values, case, centered)

    def put(self, name: str, dtype: str):
        return self.device.put(encode(self.values[name], dtype))

    def empty(self, shape, dtype: str):
        return self.device.put(np.full(shape, encode(np.array(7.0), dtype)[()], DTYPES[dtype]))

    def weights(self) -> dict:
        if not self.case.affine:
            return {}
        weight = {"weight": self.put("weight", self.case.weight)}
        return weight | ({"bias": self.put("bias", self.case.weight)} if self.centered else {})

    def common(self) -> dict:
        c = self.case
        return dict(
            rows=c.rows, hidden=c.hidden, eps=EPS, input_type=TYPE[c.input], output_type=TYPE[c.output],
            weight_type=TYPE[c.weight], warp_rows=c.warp_rows, stages=c.stages,
        )  # fmt: skip

    @property
    def block(self) -> int:
        return self.case.threads or self.case.warps * self.device.warp_size

    def constant_bytes(self, count: int) -> int:
        """Shared memory for `count` tensors of a row's length, as floats."""
        team = self.device.warp_size if self.case.warp_rows else self.block
        return (
            0 if self.case.long or self.case.few or self.case.teams else count * team * self.case.elements * 4
        )

    def stage_bytes(self, tensors: int) -> int:
        """Shared memory for the rows on their way."""
        c = self.case
        return 0 if c.long or c.few else self.block * c.stages * tensors * int(c.kernel[-1]) * 16


def teams_launch(case: Case, shapes: dict, constant_bytes: int, tensors: int) -> tuple[str, int, int]:
    """The end of the kernel's name, the threads of its block and its shared memory."""
    vectors, teams, stages = shapes[case.hidden]
    shared = case.hidden * (constant_bytes + 2 * tensors * teams * stages)
    return f"teams_{case.input}_{case.hidden}", case.hidden // (8 * vectors) * teams, shared


def check_forward(device, op: str, case: Case) -> None:
    t = Tensors(device, case, op == "layer_norm")
    shape, statistic = (case.rows, case.hidden), "f64" if case.math == np.float64 else "f32"
    output = t.empty(shape, case.output)
    mean, rstd = t.empty(case.rows, statistic), t.empty(case.rows, statistic)
    total = t.empty(shape, case.input)
    more = {"residual": t.put("residual", case.input), "sum": total} if case.residual else {}
    if t.centered:
        more["mean"] = mean
    constants = 2 if t.centered else 1
    arguments = make(
        "NormForward", "norm_arguments.h", input=t.put("input", case.input), output=output, rstd=rstd,
        constant_bytes=t.constant_bytes(constants), **t.weights(), **more, **t.common(),
    )  # fmt: skip
    if case.teams:
        kernel, block, shared = teams_launch(case, FORWARD_TEAMS, constant_bytes=4, tensors=1)
    else:
        kernel, block = case.kernel, t.block
        shared = t.constant_bytes(constants) + t.stage_bytes(2 if case.residual else 1)
    device.launch(
        f"{op}_forward_{kernel}", case.rows if case.few else case.grid, block, [arguments], shared=shared
    )
    near(output.numpy(), case.output, t.expected["output"])
    near(rstd.numpy(), statistic, t.expected["rstd"])
    if t.centered:
        near(mean.numpy(), statistic, t.expected["mean"])
    if case.residual:
        np.testing.assert_array_equal(decode(total.numpy(), case.input), t.expected["sum"])


def check_backward(device, op: str, case: Case) -> None:
    t = Tensors(device, case, op == "layer_norm")
    statistic = "f64" if case.math == np.float64 else "f32"
    saved = encode(
        t.expected["output" if case.from_output else "sum"], case.output if case.from_output else case.input
    )
    grad = t.empty((case.rows, case.hidden), case.input)
    grad_weight, grad_bias = t.empty(case.hidden, case.weight), t.empty(case.hidden, case.weight)
    parts = 2 if case.long else case.grid
    partials = t.empty((2, parts, -(-case.hidden // 4) * 4), statistic)
    more = {"grad_sum": t.put("grad_sum", case.input)} if case.residual else {}
    if case.affine:
        more["grad_weight"] = grad_weight
        if t.centered:
            more["grad_bias"] = grad_bias
    if t.centered and not case.from_output:
        more["mean"] = device.put(t.expected["mean"].astype(case.math))
    wide = device.warp_size
    constants = 2 if t.centered and case.from_output else 1
    arguments = make(
        "NormBackward", "norm_arguments.h", grad_output=t.put("grad", case.output), saved=device.put(saved),
        rstd=device.put(t.expected["rstd"].astype(case.math)), grad_input=grad, partials=partials, parts=parts,
        from_output=case.from_output, constant_bytes=t.constant_bytes(constants), column_threads=wide,
        column_blocks=-(-case.hidden // wide), row_blocks=case.rows, **t.weights(), **more, **t.common(),
    )  # fmt: skip
    if case.teams:
        kernel, block, shared = teams_launch(case, BACKWARD_TEAMS, constant_bytes=4, tensors=2)
    else:
        rows = t.constant_bytes(constants) + t.stage_bytes(3 if case.residual else 2)
        sums = t.block * case.elements * 4 if case.warp_rows else 0
        of_output = "of_output_" if case.from_output and not case.long else ""
        kernel, block, shared = f"{of_output}{case.kernel}", t.block, max(rows, sums)
    grid = case.rows + -(-case.hidden // FEW_COLUMNS) * case.affine if case.few else case.grid
    device.launch(f"{op}_backward_{kernel}", grid, block, [arguments], shared=shared)
    kind = "_f64" if statistic == "f64" else ""
    if case.affine:
        if case.long:
            device.launch(f"{op}_columns{kind}", -(-case.hidden // wide) * parts, t.block, [arguments])
        if not case.few:
            device.launch(f"{op}_finish{kind}", -(-case.hidden // SUM_COLUMNS), 128, [arguments])
    # The output that was saved is rounded to its dtype, which shows in what is computed from it.
    loss = 40 * ROUNDING[case.output] / ROUNDING["f32"] if case.from_output and case.output != "f32" else 64.0
    near(grad.numpy(), case.input, t.expected["grad_input"], max(loss, 64.0))
    if case.affine:
        near(grad_weight.numpy(), case.weight, t.expected["grad_weight"], max(loss, 64.0))
    if case.affine and t.centered:
        near(grad_bias.numpy(), case.weight, t.expected["grad_bias"], 64.0)
