"""The table of a release as every wheel carries it (apex/release.json, read by apex/_loader/release.py): what the
matrix and the pins of this checkout say. Standard library alone."""

from __future__ import annotations

from build_matrix.parts import loads
from build_matrix.spec import identity, matrix, pins

FORMAT = 1
FILE = "release.json"


def table() -> dict[str, object]:
    """What release.json holds. Asks no receipt and no machine: the same checkout gives the same bytes."""
    axes = matrix.load()
    ruled_out = [
        {"torch": torch, "python": tag, "reason": reason}
        for torch in axes.torch
        for tag in (*axes.python, *axes.optional_python)
        if (reason := axes.why_not(torch, tag))
    ]
    toolchains = dict.fromkeys(rule.toolchains[0] for rule in axes.packs)
    return {
        "format": FORMAT,
        "version": identity.version(),
        "index": axes.index,
        "accelerators": [
            {"name": a.name, "label": a.label, "roots": list(a.roots), "pure": a.pure}
            for a in axes.accelerators
        ],
        "platforms": [
            {
                "name": p.name,
                "accelerators": list(p.accelerators),
                "reason": p.reason,
                "portable": p.windows,
            }
            for p in axes.platforms
        ],
        "python": list(axes.python),
        "optional_python": list(axes.optional_python),
        "torch": [_torch(release) for release in axes.torch],
        "ruled_out": ruled_out,
        "packs": [_pack(rule) for rule in axes.packs],
        "npu": [{**vars(row), "python": list(row.python)} for row in axes.npu],
        "pins": {name: pin.sha for name in toolchains if (pin := pins.toolchain(name))},
    }


def _torch(release: str) -> dict[str, object]:
    pin = pins.torch(release)
    pythons = matrix.load().python_for(release)
    return {"release": release, "git_version": pin.sha if pin else None, "python": pythons}


def _pack(rule: matrix.PackRule) -> dict[str, object]:
    name = rule.toolchains[0]
    compiler, _, series = name.rpartition("-")
    pin = pins.toolchain(name)
    row = {"arch": rule.arch.name, "kind": rule.arch.kind, "toolchain": name}
    row["compiler"] = [compiler, pin.sha if pin else series]
    if rule.arch.vendor == "rocm":
        row["code_object"] = rule.arch.code_object
    return row


def grades() -> list[dict[str, str]]:
    """How far the binding of each torch and Python was tried, by the loads that are kept with these sources."""
    axes = matrix.load()
    return [
        {"torch": matrix.minor(torch), "python": tag, "grade": _grade(torch, tag)}
        for torch in axes.torch
        for tag in axes.python_for(torch)
    ]


def _grade(torch: str, tag: str) -> str:
    known = None
    if loads.path(torch, tag).is_file():
        from build_matrix.parts import bindings  # reads every source of the bindings

        known = loads.grade(torch, tag, bindings.source_identity())
    return known or loads.NEVER
