"""Counts what did not run: every skip says why, and the end of a run says how many tests each reason took. Tests that
-m or -k left out are counted, too, and named in the JUnit file, from where receipts take them."""

import collections
import gc
import json
import locale
import os

import pytest
import rings
import torch_defaults
from _pytest.junitxml import xml_key
from rings import pytest_fixture_setup, pytest_runtest_protocol  # noqa: F401

# JAX takes three quarters of a GPU's memory when it starts, and with it the tests of other processes.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

OWN_LOCALE = locale.setlocale(locale.LC_ALL)


def _take_own_locale(item):
    """Fixtures and tests begin with the locale that the process began with, whatever others, or libraries in them, made
    of that: pip's main sets it."""
    locale.setlocale(locale.LC_ALL, OWN_LOCALE)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    _take_own_locale(item)
    rings.skip_without_gpus(item)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item):
    """Garbage of earlier tests, CUDA graphs among it, is not collected while a test on a card may capture one."""
    _take_own_locale(item)
    if item.get_closest_marker("gpu"):
        gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_configure(config):
    config.pluginmanager.register(torch_defaults)


# ---- what was left out --------------------------------------------------------------------------------------

DESELECTED = (
    "deselected"  # a property of JUnit files: {reason: [node ids]}, as build_matrix/check/junit.py reads it
)
_left_out = collections.defaultdict(list)


def pytest_addoption(parser):
    group = parser.getgroup("rings")
    group.addoption("--ring", metavar="PLAN", help="run what the plan says, see tests/rings.py")
    group.addoption("--cpu-level", type=int, default=4, metavar="N", help="the highest x86-64 level here")
    group.addoption("--cpu-seconds", metavar="FILE", help="write what every file of tests took")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Who needs two GPUs needs a GPU. And what the ring leaves out goes."""
    for item in items:
        if item.get_closest_marker("two_gpus") and not item.get_closest_marker("gpu"):
            item.add_marker("gpu")
    yield
    if path := config.getoption("--ring"):
        with open(path, encoding="utf-8") as file:
            items[:], left = rings.choose(items, json.load(file))
        for reason, out in left.items():
            _left_out[reason] += [item.nodeid for item in out]


def pytest_deselected(items):
    for item in items:
        _left_out[_why_left_out(item.config)].append(item.nodeid)


def _why_left_out(config) -> str:
    options = [
        (f"-{letter}", config.getoption(name)) for letter, name in (("m", "markexpr"), ("k", "keyword"))
    ]
    chosen = " and ".join(f"{option} '{text}'" for option, text in options if text)
    return f"left out by {chosen}" if chosen else "left out: nothing asked for it"


@pytest.hookimpl(optionalhook=True)  # of xdist
def pytest_testnodedown(node, error):
    """Every worker of xdist collects all tests and leaves out the same: the first to end tells."""
    output = getattr(node, "workeroutput", {})
    if not _left_out:
        _left_out.update(output.get(DESELECTED, {}))
    rings.add(output.get(rings.SECONDS, {}))


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session):
    config = session.config
    if hasattr(config, "workeroutput"):
        config.workeroutput[DESELECTED] = dict(_left_out)
        config.workeroutput[rings.SECONDS] = dict(rings._spent)
        return
    if _left_out and (xml := config.stash.get(xml_key, None)):
        xml.add_global_property(DESELECTED, json.dumps(_left_out))
    if path := config.getoption("--cpu-seconds"):
        rings.write(path)


def pytest_terminal_summary(terminalreporter):
    reasons = collections.Counter({reason: len(ids) for reason, ids in _left_out.items()})
    for report in terminalreporter.stats.get("skipped", ()):
        reasons[report.longrepr[2].removeprefix("Skipped: ")] += 1
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count} not run: {reason}")
