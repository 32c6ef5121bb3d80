"""The catalogue of errors."""

import pickle
import re

import pytest

from apex._loader import errors, library

from .described import ROOT

HEADER = (ROOT / "csrc" / "host" / "apex.h").read_text()


def test_statuses_are_the_header_s():
    found = {
        int(number): name for name, number in re.findall(r"APEX_(ERROR_\w+|OK|USE_REFERENCE) = (\d+)", HEADER)
    }
    assert found[errors.OK] == "OK" and found[errors.USE_REFERENCE] == "USE_REFERENCE"
    assert {number for number, name in found.items() if name.startswith("ERROR")} == set(errors.BY_STATUS)
    assert {found[number] for number, kind in errors.BY_STATUS.items() if issubclass(kind, ValueError)} == {
        "ERROR_ARGUMENT",
        "ERROR_VALUE",
    }
    assert [found[n] for n, kind in errors.BY_STATUS.items() if issubclass(kind, IndexError)] == [
        "ERROR_INDEX"
    ]


def test_variants_and_platforms_are_the_header_s():
    variants = dict(re.findall(r"APEX_VARIANT_(\w+) = (\d+)", HEADER))
    mine = {
        "UNKNOWN": library.UNKNOWN,
        "KERNEL": library.KERNEL,
        "CPU": library.CPU,
        "REFERENCE": library.REFERENCE,
    }
    assert {name: int(number) for name, number in variants.items()} == mine
    platforms = re.search(r"APEX_CPU = 0, APEX_CUDA = 1, APEX_HIP = 2", HEADER)
    assert platforms and library.PLATFORMS == ("cpu", "cuda", "hip")


def test_fields_are_rendered_last_and_survive_pickling():
    error = errors.BindingMismatchError("no", wanted="a", found="b", available=["c", "d"], remedy="e")
    error.remedy = "f"
    assert str(error).splitlines() == [
        "no", "  wanted:    a", "  found:     b", "  available: c, d", "  remedy:    f",
    ]  # fmt: skip
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error) and again.fields() == error.fields()


def test_the_caller_s_errors_are_python_s_own_too():
    assert issubclass(errors.ArgumentError, ValueError) and issubclass(errors.ArgumentTypeError, TypeError)
    assert issubclass(errors.ArgumentError, errors.ApexError) and issubclass(errors.ApexError, RuntimeError)
    assert issubclass(errors.HostMemoryError, MemoryError)


@pytest.mark.parametrize("status", [*errors.BY_STATUS, 99])
def test_every_status_becomes_an_error_with_its_text(status):
    assert "the text" in str(errors.from_status(status, "the text"))
