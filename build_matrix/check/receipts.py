"""Receipts: what a run of tests saw, one JSON file a run, and which of them count. Runs of this checkout leave theirs
in build/receipts/; what is to be kept, and what other machines saw, lies in build_matrix/receipts/.

{"format": 1, "tier": "L0", "cell": "sm_90", "card": "NVIDIA H200", "driver": "13.0", "torch": "2.13.0+cu130",
 "python": "cp311", "apex": "1.10.0+cu130", "source": {"compiled": "<sha256>", "python": "<sha256>"},
 "wheel": {"name": "apex_cuda-….whl", "sha256": "…"} or null, "pack": "<sha256 of the code objects>" or null,
 "served": {"sm_90": 28}, "narrowed": "", "tests": {"L0.test_rope": {"passed": 8, "failed": 0, "skipped": 2}},
 "not_run": {"no GPU": 2}, "junit": ["<sha256>"], "finished": "2026-01-31T12:00:00+00:00", "digest": "<sha256>"}

A receipt is of one wheel, or of one state of the sources, and counts for nothing else. Its digest tells that it was
cut or changed; who wrote it only a key tells (signing.py). Standard library alone: GPU machines run it too.
"""

from __future__ import annotations

import datetime
import hmac
import json
import logging
import re
from collections.abc import Collection, Iterable
from pathlib import Path

from build_matrix import REPOSITORY
from build_matrix.check import junit
from build_matrix.errors import NothingRan, ReceiptError
from build_matrix.spec import identity, matrix
from build_matrix.store import digest, files, foreign
from build_matrix.wheels import signing

FORMAT = 1
FOLDER = REPOSITORY / "build_matrix/receipts"
LOCAL = REPOSITORY / "build/receipts"
EMULATED, L0, L1 = "emulated", "L0", "L1"
TIERS = (EMULATED, L0, L1)  # the best last
LADDER = (L1, L0, "loaded", EMULATED, "built", "linked")  # first words of grades
NO_CODE = "reference, run by no card"  # of a wheel that is Python alone
CPU = "cpu"  # the cell of the CPU; the others are archs
KEY = signing.RECEIPT_KEY
FIELDS = {
    "format": int, "tier": str, "cell": str, "card": str, "driver": str, "torch": str, "python": str,
    "apex": str, "source": dict, "wheel": (dict, type(None)), "pack": (str, type(None)), "served": dict,
    "narrowed": str, "tests": dict, "not_run": dict, "junit": list, "finished": str, "digest": str,
}  # fmt: skip
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]*")
NAMES = {
    "cell": NAME, "torch": re.compile(r"\d+\.\d+[A-Za-z0-9_.+-]*"), "python": re.compile(r"cp3\d{1,2}"),
    "platform": NAME,
}  # fmt: skip
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00")  # as text a later one is greater
LONGEST = 200  # letters of a file's name: systems have 255, some of which its temporary name takes
A_DAY = datetime.timedelta(days=1)  # clocks differ
log = logging.getLogger(__name__)


# ---- writing -----------------------------------------------------------------------------------------------


def make(
    tier: str,
    cell: str,
    probe: dict,
    outcomes: Iterable[Path],
    source: identity.Source,
    wheel: Path | None = None,
    pack: str | None = None,
    narrowed: str = "",
) -> dict:
    """The receipt of a run whose JUnit files are `outcomes`; of the emulated tier, of the tests that name the arch.

    `probe`: what `python -m apex --json` said where it ran. Raises ReceiptError for a JUnit file that is cut,
    NothingRan where nothing ran.
    """
    ran = list(outcomes)
    cases = _cases(tier, cell, ran)
    if not any(case.outcome != junit.SKIPPED for case in cases):
        why = "; ".join(junit.reasons(cases)) or "none was chosen"
        raise NothingRan(f"{tier}({cell})", f"no test ran, so nothing is written down: {why}")
    machine = probe["machine"]
    device = next((d for d in machine["devices"] if cell in (d["arch"], d["platform"])), {})
    choices = [c for c in probe["choices"] if c["arch"] == cell or c["device"].startswith(f"{cell}:")]
    taken = [choice["taken"] or "nothing" for choice in choices]
    receipt = {
        "format": FORMAT,
        "tier": tier,
        "cell": cell,
        "card": device.get("name", "") if tier != EMULATED else "emulator",
        "driver": machine.get("cuda_driver") or machine.get("hip_runtime") or "",
        "torch": machine["torch"]["version"],
        "python": _tag(machine["python"]),
        "platform": machine.get("system", matrix.NATIVE),
        "apex": probe["apex"],
        "source": source.as_json(),
        "wheel": {"name": wheel.name, "sha256": digest.of_file(wheel)} if wheel else None,
        "pack": pack,
        "served": {variant: taken.count(variant) for variant in sorted(set(taken))},
        "narrowed": narrowed,
        "tests": junit.counts(cases),
        "not_run": junit.reasons(cases),
        "junit": [digest.of_file(path) for path in ran],
        "finished": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }
    return sealed(receipt)


def _cases(tier: str, cell: str, ran: list[Path]) -> list[junit.Case]:
    try:
        cases = junit.whole(junit.read(path) for path in ran)
    except ValueError as error:
        raise ReceiptError(f"{tier}({cell})", str(error)) from None
    return [case for case in cases if tier != EMULATED or _of(cell, case)]


def _of(arch: str, case: junit.Case) -> bool:
    """Whether a test's parameters name the arch."""
    return arch in re.split(r"[\[\]-]", case.name)


def _tag(python: str) -> str:
    """cp311 of cp311 or 3.11.7."""
    major, minor = re.fullmatch(r"(?:cp)?(\d)\.?(\d+).*", python).groups()
    return f"cp{major}{minor}"


def sealed(receipt: dict) -> dict:
    """With its digest, and signed where APEX_RECEIPT_KEY names a key."""
    receipt = {k: v for k, v in receipt.items() if k not in ("digest", "signature")}
    receipt["digest"] = digest.of_values(receipt)
    if (key := signing.secret()) is not None:
        receipt["signature"] = signing.mac(receipt["digest"], key)
    return receipt


def totals(receipt: dict) -> dict[str, int]:
    """{"passed": 812, "failed": 0, "skipped": 3}"""
    return {o: sum(module[o] for module in receipt["tests"].values()) for o in junit.OUTCOMES}


def words(receipt: dict) -> str:
    """L0(sm_90) on NVIDIA H200, torch 2.13.0+cu130, cp311: 812 passed, 0 failed, 3 skipped"""
    counts = ", ".join(f"{count} {outcome}" for outcome, count in totals(receipt).items())
    where = receipt["card"] or "CPU"
    return f"{receipt['tier']}({receipt['cell']}) on {where}, torch {receipt['torch']}, {receipt['python']}: {counts}"


def platform_of(receipt: dict) -> str:
    """Where it was made; receipts did not say it as long as there was one platform."""
    return receipt.get("platform", matrix.NATIVE)


def name(receipt: dict) -> str:
    """Its file: one for each tier, cell, card, torch, Python and platform."""
    card = re.sub(r"[^a-z0-9]+", "-", receipt["card"].lower()).strip("-")
    minor = matrix.minor(receipt["torch"])
    part = "part" if receipt["narrowed"] else ""
    platform = "" if platform_of(receipt) == matrix.NATIVE else platform_of(receipt)
    parts = (receipt["tier"], receipt["cell"], card, f"torch{minor}", receipt["python"], platform, part)
    return "-".join(filter(None, parts)) + ".json"


def write(receipt: dict, path: Path) -> Path:
    """Writes it. Returns `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write(path, json.dumps(receipt, indent=1) + "\n")
    return path


# ---- reading -----------------------------------------------------------------------------------------------


def read(path: Path) -> dict:
    """A receipt that is whole and as it was written. Raises ReceiptError that says what it is instead."""
    try:
        receipt = foreign.read(path)
    except OSError as error:
        raise ReceiptError(path.name, f"it cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ReceiptError(path.name, f"it is cut, or no JSON: {error}") from None
    if fault := _fault(receipt) or _signature_fault(receipt):
        raise ReceiptError(path.name, fault)
    return receipt


def _fault(receipt) -> str | None:
    if not isinstance(receipt, dict) or receipt.get("format") != FORMAT:
        return f"it is no receipt of format {FORMAT}"
    wrong = [key for key, kind in FIELDS.items() if not isinstance(receipt.get(key, ...), kind)]
    if wrong:
        return f"it is cut, or no receipt: {wrong[0]} is missing, or not what it should be"
    stated = receipt["digest"]
    content = {k: v for k, v in receipt.items() if k not in ("digest", "signature")}
    if stated != (have := digest.of_values(content)):
        return f"it was changed after it was written: its digest is {have[:12]}, it states {stated[:12]!r}"
    if receipt["tier"] not in TIERS:
        return f"its tier is {receipt['tier']!r}; there are {', '.join(TIERS)}"
    return _text_fault(receipt) or (
        None if _sound(receipt) else "its counts contradict each other: somebody wrote them by hand"
    )


def _text_fault(receipt: dict) -> str | None:
    """What of its texts cannot be a name, a time, or a line on a screen."""
    named = {key: receipt.get(key, matrix.NATIVE) for key in NAMES}
    for key, value in named.items():
        if not isinstance(value, str) or not NAMES[key].fullmatch(value):
            return f"its {key} is no name of one: {value!r}"  # files are called by it
    if _ended(receipt) is None:
        return f"it ended at {receipt['finished']!r}, which is no time as receipts have it"
    wheel = receipt["wheel"]
    if wheel is not None and not all(isinstance(wheel.get(key), str) for key in ("name", "sha256")):
        return "its wheel is not what it should be: a name and a sha256"
    if not all(isinstance(sha, str) for sha in receipt["junit"]):
        return "its junit is not what it should be: digests of files"
    steps = receipt.get("steps", {})
    shown = {key: receipt[key] for key in ("card", "driver", "apex", "narrowed")}
    shown |= {
        "served": [*receipt["served"]],
        "source": [*receipt["source"].values()],
        "wheel": wheel and wheel["name"],
    }
    shown |= {"steps": list(steps) if isinstance(steps, dict) else []}
    for key, value in shown.items():
        texts = value if isinstance(value, list) else [value or ""]
        if strange := [text for text in texts if not isinstance(text, str) or not text.isprintable()]:
            return f"its {key} is no line of text: {strange[0]!r}"
    if len(file := name(receipt)) > LONGEST:
        return f"its cell and card are too long for the name of a file, which would have {len(file)} letters"
    return None


def _ended(receipt: dict) -> datetime.datetime | None:
    """When the run ended; None where it does not say so as `make` does."""
    try:
        return (
            datetime.datetime.fromisoformat(receipt["finished"])
            if TIME.fullmatch(receipt["finished"])
            else None
        )
    except ValueError:
        return None


def _to_come(receipt: dict) -> bool:
    """Whether it is of a run that is still to come: nothing true would ever be later."""
    return _ended(receipt) > datetime.datetime.now(datetime.timezone.utc) + A_DAY


def _sound(receipt: dict) -> bool:
    """Whether what it says of tests and steps can be what a run left."""
    try:
        numbers = [module[o] for module in receipt["tests"].values() for o in junit.OUTCOMES]
        numbers += receipt["not_run"].values()
        passed = [step["passed"] for step in receipt.get("steps", {}).values()]
    except (AttributeError, KeyError, TypeError):
        return False
    counted = all(type(number) is int and number >= 0 for number in [*numbers, *receipt["served"].values()])
    if not counted or not all(isinstance(outcome, bool) for outcome in passed):
        return False
    return sum(receipt["not_run"].values()) == totals(receipt)["skipped"]


def _signature_fault(receipt: dict) -> str | None:
    key = signing.secret()
    if key is None:
        return None
    if "signature" not in receipt:
        return f"it is not signed, and {KEY} asks for signatures"
    # As bytes: text that is not ASCII cannot be compared so.
    if not hmac.compare_digest(
        str(receipt["signature"]).encode(), signing.mac(receipt["digest"], key).encode()
    ):
        return f"its signature is not of the key that {KEY} names"
    return None


def _junit_fault(receipt: dict, folder: Path) -> str | None:
    """Compares the counts with the JUnit files, where all of them lie beside the receipt."""
    found = {digest.of_file(path): path for path in folder.glob("*.xml") if path.is_file()}
    if not set(receipt["junit"]) <= set(found):
        return None
    cases = _cases(receipt["tier"], receipt["cell"], [found[sha] for sha in receipt["junit"]])
    return (
        None
        if junit.counts(cases) == receipt["tests"]
        else "its counts are not those of the JUnit file beside it"
    )


def load(*folders: Path) -> list[dict]:
    """Every sound receipt of the folders (default: FOLDER and LOCAL), by file name; others are named and left out."""
    found = []
    for folder in folders or (FOLDER, LOCAL):
        for path in sorted(folder.glob("*.json")):
            try:
                found.append(read(path))
            except ReceiptError as error:
                log.warning("this receipt does not count: %s", error)
    return found


# ---- counting ----------------------------------------------------------------------------------------------


def why_not(receipt: dict, source: identity.Source, wheels: Collection[str] = ()) -> str | None:
    """Why a receipt counts for nothing where `source` is what is there, or wheels with these digests; None when it
    counts."""
    seen = totals(receipt)
    if seen["failed"]:
        return f"{seen['failed']} tests failed"
    if broken := [n for n, step in receipt.get("steps", {}).items() if not step["passed"]]:
        return f"{', '.join(broken)} failed"
    if not seen["passed"]:
        return "no test passed"
    if receipt["narrowed"]:
        return f"it is of a part of the tests: {receipt['narrowed']}"
    if receipt["tier"] != EMULATED and set(receipt["served"]) != {receipt["cell"]}:
        served = ", ".join(receipt["served"]) or "nothing"
        return f"{receipt['cell']} did not serve every op: {served} did"
    if receipt["wheel"] and receipt["wheel"]["sha256"] in wheels:
        return None
    stated = receipt["source"]
    if stated.get("compiled") != source.compiled:
        return f"it is of other sources ({str(stated.get('compiled'))[:12]}, not {source.compiled[:12]})"
    # The emulator runs machine code and nothing of apex/.
    if receipt["tier"] != EMULATED and stated.get("python") != source.python:
        return f"it is of other Python files ({str(stated.get('python'))[:12]}, not {source.python[:12]})"
    return None


def grade(
    cell: str, torch: str, python: str, known: list[dict], base: str, platform: str = matrix.NATIVE
) -> str:
    """The best that is known of an arch (or the CPU) with a torch minor and a Python: `L0 on NVIDIA H200`, `emulated`,
    or `base`, which needs no receipt. `known` are receipts that count. What the emulator ran is the same code on every
    platform."""
    mine = [
        r for r in known
        if r["cell"] == cell
        and (
            r["tier"] == EMULATED
            or (r["torch"].startswith(f"{torch}.") and r["python"] == python and platform_of(r) == platform)
        )
    ]  # fmt: skip
    if not mine:
        return base
    tier = max((r["tier"] for r in mine), key=TIERS.index)
    cards = dict.fromkeys(r["card"] or "CPU" for r in mine if r["tier"] == tier)
    return tier if tier == EMULATED else f"{tier} on {', '.join(cards)}"


def best(grades: dict[str, str]) -> str:
    """Of the grades by Python, the best; with the Pythons that have it where others do not: `L0 on CPU (cp311)`."""
    found = max(grades.values(), key=_rank)
    having = [python for python, text in grades.items() if text == found]
    return found if len(having) == len(grades) else f"{found} ({', '.join(having)})"


def _rank(text: str) -> int:
    first = text.split()[0].rstrip(",")
    return len(LADDER) - LADDER.index(first) if first in LADDER else 0


def counting(
    source: identity.Source, wheels: Collection[str] = (), folders: Collection[Path] = ()
) -> list[dict]:
    """The receipts that count for `source` or for one of `wheels` (digests)."""
    return [r for r in load(*folders) if why_not(r, source, wheels) is None]


# ---- merging -----------------------------------------------------------------------------------------------


def merge(came: Iterable[Path], folder: Path = FOLDER) -> tuple[list[dict], list[ReceiptError]]:
    """Takes sound receipts of other machines into `folder`: (those that were taken, why others were not). Counts are
    compared with the JUnit files where these lie beside. Of two for one cell and card the one of the later run stays;
    one that is there already is named."""
    taken, refused = [], []
    for path in came:
        try:
            receipt = read(path)
            if fault := _junit_fault(receipt, path.parent):
                raise ReceiptError(path.name, fault)
            if _to_come(receipt):
                raise ReceiptError(path.name, f"it ended at {receipt['finished']}, which is still to come")
            target = folder / name(receipt)
            there = _there(target)
            if there and there["digest"] == receipt["digest"]:
                raise ReceiptError(path.name, f"it is a duplicate: {target.name} holds it already")
            if there and there["finished"] >= receipt["finished"]:
                raise ReceiptError(path.name, f"{target.name} is of a later run ({there['finished']})")
        except ReceiptError as error:
            refused.append(error)
            continue
        write(receipt, target)
        taken.append(receipt)
    return taken, refused


def _there(path: Path) -> dict | None:
    """The receipt that would be replaced; a damaged one is none, nor one of a run that is still to come."""
    try:
        found = read(path) if path.is_file() else None
    except ReceiptError:
        return None
    return None if found is None or _to_come(found) else found
