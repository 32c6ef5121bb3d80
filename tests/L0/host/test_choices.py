"""The choice of a variant, registration, the executor's place in it, and texts of misuse."""

import ctypes
import threading

import pytest

from .apex_library import (
    ARGUMENT,
    CPU,
    CPU_VARIANT,
    CUDA,
    EXECUTOR,
    HIP,
    KERNEL,
    OK,
    REFERENCE,
    UNKNOWN,
    Apex,
    Kernel,
)


@pytest.fixture
def apex(library):
    """The library with no resolver and no executor."""
    apex = Apex(library)
    apex.set_resolver(None)
    yield apex
    apex.set_resolver(None)
    apex.set_executor(None)


def test_without_a_resolver(apex):
    """What was registered, else the CPU variant on a CPU, else the reference."""
    assert apex.resolve(CPU, 0, "plain") == CPU_VARIANT
    assert apex.resolve(CPU, -1, "plain") == CPU_VARIANT  # torch's index of its one CPU
    assert apex.resolve(CUDA, 0, "plain") == REFERENCE
    assert apex.register(CUDA, 3, "plain", b"image") == OK
    assert [apex.resolve(platform, 3, "plain") for platform in (CUDA, HIP)] == [KERNEL, REFERENCE]
    assert apex.resolve(CUDA, 2, "plain") == REFERENCE


def test_resolver_is_asked_once_for_each_place_and_unit(apex):
    """Platform, device and unit are the key; forgetting asks again; so does another resolver."""
    asked = []

    def resolver(platform, device, unit):
        asked.append((platform, device, unit.decode()))
        return KERNEL if device == 0 else REFERENCE

    apex.set_resolver(resolver)
    for _ in range(3):
        assert apex.resolve(CUDA, 0, "a") == KERNEL
        assert apex.resolve(CUDA, 1, "a") == REFERENCE
        assert apex.resolve(HIP, 0, "a") == KERNEL
        assert apex.resolve(CUDA, 0, "b") == KERNEL
        assert apex.resolve(CUDA, 127, "b") == REFERENCE
    assert asked == [(CUDA, 0, "a"), (CUDA, 1, "a"), (HIP, 0, "a"), (CUDA, 0, "b"), (CUDA, 127, "b")]
    apex.c.apex_forget_choices()
    assert apex.resolve(CUDA, 0, "a") == KERNEL
    assert asked[5:] == [(CUDA, 0, "a")]
    apex.set_resolver(lambda *place: CPU_VARIANT)
    assert apex.resolve(CUDA, 0, "a") == CPU_VARIANT


def test_a_resolver_that_gives_no_answer_is_asked_again(apex):
    """A Python callback that raises answers 0: unknown, with a text, and not kept."""
    answers = [0, 7, -1, KERNEL]
    apex.set_resolver(lambda *place: answers.pop(0))
    for _ in range(3):
        assert apex.resolve(CUDA, 0, "a") == UNKNOWN
        assert "no variant of a on cuda:0" in apex.last_error and "raised" in apex.last_error
    assert apex.resolve(CUDA, 0, "a") == KERNEL


def test_an_answer_to_an_older_question_is_not_kept(apex):
    """Choices forgotten while the resolver was thinking."""
    asked = []

    def resolver(*place):
        asked.append(place)
        if len(asked) == 1:
            apex.c.apex_forget_choices()
        return KERNEL

    apex.set_resolver(resolver)
    assert [apex.resolve(CUDA, 0, "a") for _ in range(3)] == [KERNEL] * 3
    assert len(asked) == 2


def test_resolver_may_resolve_and_register(apex):
    """No lock is held while it runs; another thread may resolve and register meanwhile."""

    def resolver(platform, device, unit):
        if unit == b"outer":
            worker = threading.Thread(
                target=lambda: (apex.resolve(CUDA, 0, "inner"), apex.resolve(CUDA, 1, "outer"))
            )
            if device == 0:
                worker.start()
                worker.join(30)
                assert not worker.is_alive()
            apex.register(platform, device, "outer", b"image")
        return KERNEL

    apex.set_resolver(resolver)
    assert apex.resolve(CUDA, 0, "outer") == KERNEL


def test_many_units_and_threads(apex):
    """Eight threads meet the same new units at once; every answer is right."""
    apex.set_resolver(lambda platform, device, unit: int(unit.decode().rsplit("_", 1)[1]) % 3 + 1)
    wrong = []

    def work():
        for number in range(300):
            if apex.resolve(CUDA, 0, f"many_{number}") != number % 3 + 1:
                wrong.append(number)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_misuse_is_a_status_with_a_text(apex):
    """Places and arguments that do not exist."""
    for platform, device in ((3, 0), (-1, 0), (CUDA, -1), (CUDA, 128), (HIP, 1 << 30)):
        assert apex.resolve(platform, device, "unit") == UNKNOWN
        assert "no such place" in apex.last_error
        assert apex.register(platform, device, "unit", b"image") == ARGUMENT
        assert apex.launch(platform, device, "unit/unit_f32") == ARGUMENT
        assert apex.is_capturing(platform, device) == -ARGUMENT
        assert apex.device_info(platform, device)[0] == ARGUMENT
        assert str(device) in apex.last_error
    assert apex.resolve(CUDA, 0, "") == UNKNOWN
    assert apex.c.apex_resolve(CUDA, 0, None) == UNKNOWN
    assert apex.register(CPU, 0, "unit", b"image") == ARGUMENT
    assert apex.register(CUDA, 0, "unit", b"") == ARGUMENT
    assert apex.register(CUDA, 0, "", b"image") == ARGUMENT
    assert apex.c.apex_register_code_object(CUDA, 0, b"unit", None, 5) == ARGUMENT
    assert apex.device_info(CPU, 0)[0] == ARGUMENT
    assert apex.launch(CUDA, 0, Kernel(None, b"name", 0)) == ARGUMENT
    assert apex.c.apex_get_device_info(CUDA, 0, None) == ARGUMENT
    assert apex.c.apex_is_capturing(None) == -ARGUMENT
    assert apex.is_capturing(CPU, 0) == 0


def test_last_error_is_of_the_thread(apex):
    """Another thread's failure does not change this one's text; a long text is cut, not overrun."""
    apex.register(CUDA, -1, "unit", b"image")
    mine = apex.last_error
    theirs = []
    worker = threading.Thread(target=lambda: (theirs.append(apex.last_error), apex.resolve(CUDA, 0, "")))
    worker.start()
    worker.join()
    assert theirs == [""] and apex.last_error == mine
    apex.set_resolver(lambda *place: 0)
    assert apex.resolve(CUDA, 0, "x" * 5000) == UNKNOWN
    assert len(apex.last_error) == 1023


def test_the_table_says_when_it_is_full(library, fresh_table):
    """1024 units fit; one more is an answer, not a crash."""
    apex = fresh_table
    apex.set_resolver(lambda *place: KERNEL)
    answers = [apex.resolve(CUDA, 0, f"unit_{number}") for number in range(1026)]
    assert answers == [KERNEL] * 1024 + [UNKNOWN] * 2
    assert "full" in apex.last_error
    assert apex.resolve(CUDA, 0, "unit_1023") == KERNEL
    assert apex.register(CUDA, 0, "unit_1025", b"image") != OK
    apex.set_resolver(None)


@pytest.fixture
def fresh_table(library, tmp_path):
    """A second copy of the library, with a table of its own."""
    copy = tmp_path / "libapex.so"
    copy.write_bytes(library.read_bytes())
    return Apex(copy)


def test_executor(apex):
    """With one, units resolve to KERNEL on a CPU and launches go to it, with everything they were given."""
    calls = []
    fault = ctypes.create_string_buffer(b"16 threads at barrier line 30")

    def executor(kernel, gx, gy, gz, bx, by, bz, shared, order, parameters):
        value = ctypes.cast(parameters[0], ctypes.POINTER(ctypes.c_int32))[0]
        calls.append((kernel, gx, gy, gz, bx, by, bz, shared, order, value))
        return ctypes.addressof(fault) if kernel.endswith(b"bad") else None

    assert apex.launch(CPU, 0, "unit/unit_f32", parameters=[5]) == ARGUMENT
    assert "no SIMT executor is set" in apex.last_error
    assert apex.resolve(CPU, 0, "unit") == CPU_VARIANT
    apex.set_executor(executor, 3)
    assert apex.resolve(CPU, -1, "unit") == KERNEL
    assert (
        apex.launch(CPU, -1, "unit/unit_f32", grid=(2, 3, 4), block=(64, 2, 1), shared=99, parameters=[5])
        == OK
    )
    assert calls == [(b"unit_f32", 2, 3, 4, 64, 2, 1, 99, 3, 5)]
    assert apex.launch(CPU, 0, "unit/unit_bad", parameters=[5]) == EXECUTOR
    assert apex.last_error == "unit_bad on the SIMT executor: 16 threads at barrier line 30"
    assert apex.launch(CPU, 0, "unit/unit_bad", grid=(0, 1, 1), parameters=[5]) == OK
    assert len(calls) == 2
    apex.set_executor(None)
    assert apex.resolve(CPU, 0, "unit") == CPU_VARIANT
