"""Plots of the newest recorded run of each benchmark: GPU time of every implementation, for light and dark pages."""

from __future__ import annotations

from pathlib import Path

from build_matrix.site import speed

PLACE = "<!-- begin: speed -->"  # of docs/speed.md: the plots stand before the tables
# On the page's ground: text and lines, then the bars of apex and of others, which differ in lightness too.
COLOURS = {
    "light": ("#1f2328", "#0b62c4", ("#8c959f", "#b6bdc5", "#d0d7de", "#e3e8ed")),
    "dark": ("#e6edf3", "#58a6ff", ("#8b949e", "#6e7681", "#545d68", "#444c56")),
}
HEIGHT = 0.24  # inches a bar
CASES = 4  # of each benchmark: the first ones, which are the usual sizes


def write(folder: Path) -> None:
    """Writes two SVG files a benchmark."""
    import matplotlib

    matplotlib.use("svg")
    folder.mkdir(parents=True, exist_ok=True)
    for run in speed.runs():
        for theme in COLOURS:
            _draw(run, theme, folder / name(run, theme))


def name(run: speed.Run, theme: str) -> str:
    """Of a plot's file."""
    return f"{run.benchmark}-{theme}.svg"


def markdown(folder: str) -> str:
    """The section that shows them."""
    text = f"## Plots\n\nGPU time of the first {CASES} cases of each benchmark, shorter is better; the tables below "
    text += "have all of them.\n\n"
    for run in speed.runs():
        about = f"{run.benchmark}: " + "; ".join(_words(case, rows) for case, rows in _cases(run))
        for theme in COLOURS:
            text += f"```{{image}} {folder}/{name(run, theme)}\n:alt: {about}\n:class: only-{theme}\n```\n\n"
    return text


def _words(case: str, rows: list[dict]) -> str:
    return f"{case}: " + ", ".join(f"{row['implementation']} {row['graph'] * 1e6:.0f} µs" for row in rows)


def _cases(run: speed.Run) -> list[tuple[str, list[dict]]]:
    """The first cases that were measured in a graph, each with its rows."""
    found = [(case, [row for row in rows.values() if row["graph"]]) for case, rows in run.cases.items()]
    return [(case, rows) for case, rows in found if rows][:CASES]


def _draw(run: speed.Run, theme: str, path: Path) -> None:
    import matplotlib.pyplot as plt

    text, ours, others = COLOURS[theme]
    cases = _cases(run)
    bars = sum(len(rows) + 1 for _, rows in cases)
    with plt.rc_context({"svg.hashsalt": "apex", "font.size": 9, "text.color": text, "svg.fonttype": "none"}):
        figure, axes = plt.subplots(figsize=(7.5, HEIGHT * bars + 0.7), layout="constrained")
        place, longest = 0, max(row["graph"] for _, rows in cases for row in rows) * 1e6
        for case, rows in cases:
            axes.text(0, -place, case, va="center", weight="bold")
            for n, row in enumerate(rows, 1):
                mine, time = row["implementation"].startswith(speed.OURS), row["graph"] * 1e6
                axes.barh(-place - n, time, color=ours if mine else others[(n - 1) % len(others)], height=0.8)
                axes.text(
                    time + longest * 0.01, -place - n, f"{row['implementation']}, {time:.0f} µs", va="center"
                )
            place += len(rows) + 1
        axes.set(
            xlim=(0, longest * 1.35),
            ylim=(-place + 0.4, 0.6),
            yticks=[],
            title=f"{run.benchmark}: {run.heading}",
        )
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.spines["bottom"].set_color(text)
        axes.tick_params(colors=text)
        axes.set_xlabel("µs on the GPU", color=text)
        figure.savefig(path, transparent=True, metadata={"Date": None})
        plt.close(figure)
