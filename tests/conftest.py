"""Counts what did not run: every skip says why, and the end of a run says how many tests each reason took."""

import collections
import locale

import pytest


@pytest.fixture(autouse=True)
def kept_locale():
    """What a test, or a library in it, makes of the process's locale is not the next one's: pip's main sets it."""
    before = locale.setlocale(locale.LC_ALL)
    yield
    locale.setlocale(locale.LC_ALL, before)


def pytest_terminal_summary(terminalreporter):
    reasons = collections.Counter()
    for report in terminalreporter.stats.get("skipped", ()):
        reasons[report.longrepr[2].removeprefix("Skipped: ")] += 1
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count} not run: {reason}")
