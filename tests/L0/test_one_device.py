"""Tensors of an op that lie on two devices: refused before any kernel reads another device's memory."""

import pytest
import torch
from op_samples import SAMPLES, Values

from apex._loader import registry
from apex._loader.op_model import REQUIRED


def arguments(name, device):
    """A sample's arguments, by the schema's names."""
    op = registry.schemas()[name]
    given = {a.name: a.default for a in op.arguments if a.default is not REQUIRED}
    return given | SAMPLES[name][0](Values(device))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name", sorted(n for n, op in registry.schemas().items() if n in SAMPLES and not op.lists)
)
def test_a_tensor_on_the_host_beside_tensors_on_the_card(name):
    given = arguments(name, "cuda")
    tensors = [key for key, value in given.items() if isinstance(value, torch.Tensor)]
    for key in tensors if len(tensors) > 1 else ():
        with pytest.raises(ValueError, match="is on cpu but|is on cuda:0 but"):
            getattr(torch.ops.apex, name)(**given | {key: given[key].cpu()})
