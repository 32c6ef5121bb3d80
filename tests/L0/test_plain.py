"""apex._plain: which tensors' memory holds their values, what is made of the others, what is refused."""

from __future__ import annotations

import pytest
import torch

from apex._loader import bindings
from apex._plain import is_plain, plain


def ramp(dtype=torch.float32):
    return torch.arange(1.0, 7.0, dtype=torch.float32, device="cpu").reshape(2, 3).to(dtype)


def freed():
    tensor = ramp()
    tensor.untyped_storage().resize_(0)
    return tensor


def shrunk():
    tensor = ramp()
    tensor.untyped_storage().resize_(20)
    return tensor


def inference():
    with torch.inference_mode():
        return ramp()


def fake():
    with torch._subclasses.FakeTensorMode():
        return ramp()


PLAIN = {
    "contiguous": ramp,
    "parameter": lambda: torch.nn.Parameter(ramp()),
    "transposed": lambda: ramp().t(),
    "expanded": lambda: ramp()[:1].expand(4, 3),
    "every second": lambda: ramp()[:, ::2],
    "empty": lambda: ramp()[:0],
    "complex": lambda: ramp(torch.complex64),
    "integers": lambda: ramp(torch.int32),
    "copy-on-write": lambda: torch._lazy_clone(ramp()),
    "inference": inference,
    "subclass": lambda: ramp().as_subclass(type("Subclass", (torch.Tensor,), {})),
}
RESOLVED = {
    "negative": lambda: torch._neg_view(ramp()),
    "conjugate": lambda: (ramp(torch.complex64) * 1j).conj(),
    "imaginary part of a conjugate": lambda: (ramp(torch.complex64) * 1j).conj().imag,
    "zero": lambda: torch._efficientzerotensor((2, 3)),
    "negative leaf": lambda: torch._neg_view(ramp()).requires_grad_(),
}
REFUSED = {
    "sparse": (lambda: ramp().to_sparse(), TypeError, "gradient 3 is sparse"),
    "meta": (lambda: ramp().to("meta"), ValueError, "gradient 3 is on the meta device"),
    "fake": (fake, TypeError, "gradient 3 is a wrapper .*FakeTensor"),
    "functional": (lambda: torch._to_functional_tensor(ramp()), TypeError, "gradient 3 is a wrapper"),
    "freed": (freed, ValueError, "gradient 3 has no memory: it was freed"),
    "shrunk": (shrunk, ValueError, "gradient 3 has no memory: it was freed"),
    "freed negative": (lambda: torch._neg_view(freed()), ValueError, "gradient 3 has no memory"),
}


@pytest.mark.parametrize("kind", [*PLAIN, *RESOLVED, *REFUSED])
def test_the_bindings_say_the_same(kind):
    native = bindings.load().module
    if native is None:
        pytest.skip("no binding fits this torch")
    tensor = REFUSED[kind][0]() if kind in REFUSED else (PLAIN | RESOLVED)[kind]()
    assert native.is_plain(tensor) == is_plain(tensor) == (kind in PLAIN)


@pytest.mark.parametrize("kind", PLAIN)
def test_a_plain_tensor_is_itself(kind):
    tensor = PLAIN[kind]()
    assert is_plain(tensor)
    assert plain(tensor) is tensor


@pytest.mark.parametrize("kind", RESOLVED)
def test_what_the_bytes_do_not_say_is_resolved(kind):
    tensor = RESOLVED[kind]()
    assert not is_plain(tensor)
    found = plain(tensor)
    assert is_plain(found) and found is not tensor and not found.requires_grad
    torch.testing.assert_close(found, tensor.detach().clone(), rtol=0, atol=0)


@pytest.mark.parametrize("kind", REFUSED)
def test_what_has_no_bytes_here_is_refused(kind):
    make, error, text = REFUSED[kind]
    tensor = make()
    assert not is_plain(tensor)
    with pytest.raises(error, match=text):
        plain(tensor, "gradient 3")


def test_tensors_of_transforms_are_no_plain_tensors():
    seen = []
    torch.func.grad(lambda x: (seen.append(is_plain(x)), x.sum())[1])(ramp())
    torch.vmap(lambda x: (seen.append(is_plain(x)), x)[1])(ramp())
    assert seen == [False, False]


def test_nothing_is_given_memory_of_its_own_by_being_looked_at():
    base = ramp()
    tensor = torch._lazy_clone(base)
    assert plain(tensor) is tensor
    assert torch._C._is_cow_tensor(tensor) and torch._C._is_cow_tensor(base)
