"""No op's code grows past its budget on any arch, and no wheel past its own."""

import json

import pytest

from build_matrix import REPOSITORY
from build_matrix.errors import GateError
from build_matrix.parts import ledger
from build_matrix.spec import matrix
from build_matrix.spec.registry import device_units
from build_matrix.store import Store
from build_matrix.wheels import wheel

AXES = matrix.load()
LEDGER = REPOSITORY / "build/tree/apex/coverage.json"
FACTS = {"distribution": "apex-cuda", "version": "1.10.0", "local": "cu130", "source_sha256": "0" * 64}
FACTS |= {"host_compiler": None, "toolchains": [], "torch": [], "headers": {}}
FACTS |= {"accelerator": "cuda", "archs": ["sm_90"]}


def coverage(op, size, arch="sm_90"):
    entry = {"bytes": size, "sha256": "", "kernels": {f"{op}_f32": {"registers": 9, "spill_bytes": 0}}}
    return ledger.ledger("1.10.0", {arch: {"units": {op: entry}}}, [arch], {op: "s"})


def test_an_op_over_its_budget_is_named_with_its_arch():
    allowed = AXES.unit_budget("focal_loss", "sm_90")
    assert allowed == AXES.unit_bytes["cubin"]
    assert ledger.over_budget(coverage("focal_loss", allowed), AXES) == []
    assert ledger.over_budget(coverage("focal_loss", allowed + 1), AXES) == [
        f"focal_loss for sm_90: {allowed + 1} bytes are over its budget of {allowed} (matrix.toml)"
    ]
    assert AXES.unit_budget("focal_loss", "gfx942") == AXES.unit_bytes["hsaco"]


def test_budgets_of_their_own_are_larger_and_of_ops_that_exist():
    units = {path.stem for path in device_units()}
    for budget in AXES.unit_budgets:
        assert budget["op"] in units and budget["reason"]
        kinds = set(budget) & set(AXES.unit_bytes)
        assert kinds and all(budget[kind] > AXES.unit_bytes[kind] for kind in kinds), budget


@pytest.mark.skipif(not LEDGER.is_file(), reason="no build/tree: run python -m build_matrix tree")
def test_what_is_built_here_is_within_its_budget():
    found = json.loads(LEDGER.read_text())
    assert all("bytes" in unit for unit in found["units"].values()), "run: python -m build_matrix tree"
    assert ledger.over_budget(found, AXES) == []


@pytest.fixture
def unit(tmp_path, monkeypatch):
    """The work unit of a wheel whose ledger holds one op of that size."""
    from build_matrix.toolchains import pythons
    from build_matrix.wheels import audit

    monkeypatch.setattr(audit, "platform_tag", lambda path: "manylinux_2_28_x86_64")

    def unit(size):
        (tmp_path / "apex").mkdir(exist_ok=True)
        (tmp_path / "apex/coverage.json").write_text(json.dumps(coverage("rope", size)))
        return wheel.unit(tmp_path, FACTS, pythons.find(pythons.own_tag()))

    return unit


def test_a_wheel_with_an_op_over_its_budget_is_not_made(unit, tmp_path):
    with pytest.raises(
        GateError, match="apex-cuda cp3.*\n  rope for sm_90: 9000000 bytes are over its budget"
    ):
        Store(tmp_path / "store").build(unit(9_000_000))


def test_a_wheel_over_its_own_budget_is_not_made(unit, tmp_path, monkeypatch):
    monkeypatch.setitem(AXES.__dict__, "wheel_bytes", 1000)
    with pytest.raises(GateError, match=r"\.whl .*\n  \d+ bytes are over the budget of 1000"):
        Store(tmp_path / "store").build(unit(10))
