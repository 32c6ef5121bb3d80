"""apex.contrib.gpu_direct_storage: what a tensor's bytes are in a file, and what is refused."""

import os
import warnings

import pytest
import torch
from torch.cuda import gds

from apex._legacy import _apex_gpu_direct_storage as raw
from apex.contrib.gpu_direct_storage import GDSFile


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "tensor.bin")


def numbers(*shape, dtype=torch.float32, device="cpu"):
    return torch.arange(torch.Size(shape).numel(), dtype=torch.int64, device=device).to(dtype).reshape(shape)


def write(path, tensor, mode="w"):
    with GDSFile(path, mode) as file:
        (file.save_data if mode == "w" else file.save_data_no_gds)(tensor)


def read(path, tensor, mode="r"):
    with GDSFile(path, mode) as file:
        (file.load_data if mode == "r" else file.load_data_no_gds)(tensor)
    return tensor


@pytest.mark.parametrize("modes", [("w", "r"), ("wn", "rn"), ("w", "rn"), ("wn", "r")], ids="-".join)
@pytest.mark.parametrize(
    "tensor",
    [
        numbers(5),
        numbers(3, 7, dtype=torch.float64),
        numbers(16, dtype=torch.bfloat16),
        numbers(2, dtype=torch.complex64),
        numbers(9) > 3,
        numbers(),
        numbers(0, 4),
        numbers(10)[3:7],
    ],
    ids=lambda t: f"{t.dtype}-{list(t.shape)}-{t.storage_offset()}",
)
def test_a_tensor_comes_back(path, tensor, modes):
    write(path, tensor, modes[0])
    assert os.path.getsize(path) == tensor.nbytes
    with open(path, "rb") as file:
        assert file.read() == tensor.numpy(force=True).tobytes() if tensor.dtype != torch.bfloat16 else True
    around = torch.zeros(tensor.numel() + 2, dtype=tensor.dtype, device="cpu")
    read(path, around[1:-1].view(tensor.shape), modes[1])
    assert torch.equal(around[1:-1].view(tensor.shape), tensor) and not around[0] and not around[-1]


def test_large_tensors_pass_in_parts(path, monkeypatch):
    monkeypatch.setattr(raw, "_AT_ONCE", 7)
    tensor = numbers(100)
    write(path, tensor)
    assert torch.equal(read(path, torch.empty_like(tensor)), tensor)


def test_a_parameter_is_filled_in_its_place(path):
    write(path, numbers(4))
    parameter = torch.nn.Parameter(torch.zeros(4, dtype=torch.float32, device="cpu"))
    assert torch.equal(read(path, parameter).detach(), numbers(4)) and parameter.requires_grad


def test_a_copy_on_write_tensor_is_filled_alone(path):
    write(path, numbers(4))
    other = torch.zeros(4, dtype=torch.float32, device="cpu")
    lazy = torch._lazy_clone(other)
    assert torch.equal(read(path, lazy), numbers(4)) and not other.any()


def test_a_file_keeps_what_lies_behind_the_tensor(path):
    write(path, numbers(8))
    write(path, numbers(2) + 5)
    assert read(path, torch.empty(8, dtype=torch.float32, device="cpu")).tolist() == [5, 6, 2, 3, 4, 5, 6, 7]


def test_a_file_is_opened_again_and_closed_twice(path):
    file = raw._GDSFile()
    with pytest.raises(RuntimeError, match="not open"):
        file.save_data(numbers(2))
    file.open(path, "w")
    with pytest.raises(RuntimeError, match="already open"):
        file.open(path, "w")
    file.save_data(numbers(2))
    file.close()
    file.close()
    file.open(path, "w")
    file.close()
    before = len(os.listdir("/proc/self/fd"))
    file.open(path, "r")
    del file
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    "tensor,error,words",
    [
        (numbers(3, 4).T, ValueError, "contiguous"),
        (torch._neg_view(numbers(3)), ValueError, "contiguous"),
        (torch.empty(3, dtype=torch.float32, device="meta"), ValueError, "meta"),
        (numbers(3).to_sparse(), TypeError, "sparse"),
    ],
    ids=["transposed", "negative", "meta", "sparse"],
)
def test_tensors_whose_memory_is_not_their_values_are_refused(path, tensor, error, words):
    write(path, numbers(12))
    with pytest.raises(error, match=words):
        write(path, tensor)
    with pytest.raises(error, match=words):
        read(path, tensor)


@pytest.mark.parametrize("given", [numbers(3).numpy(), None, [1.0]], ids=lambda given: type(given).__name__)
def test_what_is_no_tensor_is_refused(path, given):
    write(path, numbers(3))
    for call in (write, read):
        with pytest.raises(TypeError, match=f"takes a torch.Tensor, not {type(given).__name__}"):
            call(path, given)
    assert torch.equal(read(path, torch.empty(3, dtype=torch.float32, device="cpu")), numbers(3))


def test_a_short_file_is_refused_and_the_tensor_stays(path):
    write(path, numbers(3))
    tensor = torch.zeros(4, dtype=torch.float32, device="cpu")
    with pytest.raises(ValueError, match="has 12 bytes, the tensor 16"):
        read(path, tensor)
    assert not tensor.any()


@pytest.mark.parametrize("mode", ["r", "w", "rn", "wn"])
def test_a_function_of_another_mode_is_refused(path, mode):
    write(path, numbers(3))
    own = {"r": "load_data", "w": "save_data", "rn": "load_data_no_gds", "wn": "save_data_no_gds"}
    with GDSFile(path, mode) as file:
        for other in set(own) - {mode}:
            with pytest.raises(RuntimeError, match=f"opened in mode '{mode}'"):
                getattr(file, own[other])(numbers(3))


def test_bad_modes_and_paths_are_refused(path):
    with pytest.raises(ValueError, match="a mode is one of"), GDSFile(path, "a"):
        pass
    with pytest.raises(FileNotFoundError), GDSFile(path, "r"):
        pass
    assert not os.path.exists(path)


class DirectFile:
    """torch.cuda.gds.GdsFile's interface on memory of the CPU."""

    used = 0

    def __init__(self, filename, flags):
        self.descriptor = os.open(filename, flags)

    def load_storage(self, storage, offset=0):
        DirectFile.used += 1
        data = bytearray(os.pread(self.descriptor, storage.nbytes(), offset))
        storage.copy_(torch.frombuffer(data, dtype=torch.uint8).untyped_storage())

    def save_storage(self, storage, offset=0):
        DirectFile.used += 1
        data = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage).numpy().tobytes()
        os.pwrite(self.descriptor, data, offset)


def test_cufile_gets_the_tensor_s_part_of_its_storage(path, monkeypatch):
    """The route of a GPU, with a stand-in for cuFile: an offset in the storage, and nothing beside the tensor."""
    monkeypatch.setattr(gds, "GdsFile", DirectFile)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    file = raw._GDSFile(path, "w")
    assert isinstance(file._direct, DirectFile)
    file._direct.save_storage(raw._storage(numbers(10)[3:7]))
    file.close()
    around = torch.zeros(6, dtype=torch.float32, device="cpu")
    file = raw._GDSFile(path, "r")
    file._direct.load_storage(raw._storage(around[1:5]))
    assert around.tolist() == [0, 3, 4, 5, 6, 0] and DirectFile.used == 2


def test_without_cufile_the_host_serves_and_says_so(path, monkeypatch):
    def refuse(filename, flags):
        raise RuntimeError("torch._C._gds_register_handle is not supported on this platform")

    monkeypatch.setattr(gds, "GdsFile", refuse)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.warns(UserWarning, match="through the host's memory.*not supported"):
        write(path, numbers(4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        write(path, numbers(4), "wn")


def test_a_cpu_s_tensor_goes_through_the_host_unsaid(path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        write(path, numbers(4))
        assert torch.equal(read(path, torch.empty_like(numbers(4))), numbers(4))


@pytest.mark.gpu
def test_a_gpu_s_tensor_comes_back(path):
    tensor = numbers(1 << 20, device="cuda")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # without cuFile
        write(path, tensor)
        assert torch.equal(read(path, torch.zeros_like(tensor)), tensor)
    assert torch.equal(read(path, torch.zeros_like(tensor), "rn"), tensor)
