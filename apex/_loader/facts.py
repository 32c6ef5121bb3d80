"""What the doctor looks at, and a wrong state that it names (problems.py)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from apex._loader import fit as fitting
from apex._loader import offers
from apex._loader.choose import Choice
from apex._loader.distributions import Installation
from apex._loader.machine import Machine

NOTE, DEGRADED, BROKEN = "note", "degraded", "broken"


@dataclass(frozen=True)
class Problem:
    """A wrong state. A note changes nothing; degraded: slower code runs; broken: something cannot run."""

    severity: str
    name: str
    text: str
    remedy: str = ""


@dataclass(frozen=True)
class Facts:
    """What the checks look at.

    choices:  the Choice of every unit on every device
    fit:      the fitting.Fit of the bindings, or None without torch
    load_error: what loading the binding raised, as text, or None
    unserved: ops that have no form in the portable binding, where that serves
    mapped:   stem -> paths of that vendor library in this process
    products: platform -> which BLAS multiplies there, in words
    threads:  how many threads of torch work on CPU tensors, in words; None without torch
    assumed:  the machine is described, not this one
    damage:   data files of the installation that cannot be read, each with why
    offer:    what the release has for this machine, or None where this installation does not know its release
    """

    machine: Machine
    choices: tuple[Choice, ...] = ()
    fit: fitting.Fit | None = None
    load_error: str | None = None
    unserved: tuple[str, ...] = ()
    installation: Installation | None = None
    mapped: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    cache_writable: bool = True
    cache_refused: str = ""  #: why the cache's folder is not trusted
    products: Mapping[str, str] = field(default_factory=dict)
    threads: str | None = None
    assumed: bool = False
    offer: offers.Offer | None = None
    damage: tuple[str, ...] = ()
