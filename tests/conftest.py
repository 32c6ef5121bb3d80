"""Counts what did not run: every skip says why, and the end of a run says how many tests each reason took."""

import collections


def pytest_terminal_summary(terminalreporter):
    reasons = collections.Counter()
    for report in terminalreporter.stats.get("skipped", ()):
        reasons[report.longrepr[2].removeprefix("Skipped: ")] += 1
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count} not run: {reason}")
