"""Counts what did not run: every skip says why, and the end of a run says how many tests each reason took."""

import collections
import locale

import pytest

OWN_LOCALE = locale.setlocale(locale.LC_ALL)


def _take_own_locale(item):
    """Fixtures and tests begin with the locale that the process began with, whatever others, or libraries in them, made
    of that: pip's main sets it."""
    locale.setlocale(locale.LC_ALL, OWN_LOCALE)


pytest_runtest_setup = pytest.hookimpl(tryfirst=True)(_take_own_locale)
pytest_runtest_call = pytest.hookimpl(tryfirst=True)(_take_own_locale)


def pytest_terminal_summary(terminalreporter):
    reasons = collections.Counter()
    for report in terminalreporter.stats.get("skipped", ()):
        reasons[report.longrepr[2].removeprefix("Skipped: ")] += 1
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count} not run: {reason}")
