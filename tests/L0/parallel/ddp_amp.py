"""Cases of test_distributed.py: DistributedDataParallel with amp."""

from __future__ import annotations

import contextlib
import io

import torch
import torch.distributed as dist
from ddp_common import (
    close,
    gathered,
    loss_of,
    mine,
    network,
    raises,
    rows,
    same_on_all_ranks,
)

from apex import amp
from apex.amp._amp_state import _amp_state
from apex.optimizers import FusedAdam
from apex.parallel import DistributedDataParallel as DDP
from apex.parallel.LARC import LARC


def _forget_amp():
    amp.amp.unpatch()
    vars(_amp_state).clear()
    _amp_state.__init__()


def _amp(mesh, level, optimizer=lambda params: FusedAdam(params, lr=0.01), **options):
    """Like one process with the whole batch; an overflow on one rank is skipped on all."""
    whole = network()
    with contextlib.redirect_stdout(io.StringIO()):
        module = network()
        ranks_model, ranks_optimizer = amp.initialize(
            module,
            optimizer(module.parameters()),
            opt_level=level,
            verbosity=0,
            dynamic_init_scale=2.0**10,  # the sum of four float16 gradients stays finite
        )
        ddp = DDP(ranks_model, 20, **options)
        oracle = optimizer(whole.parameters())
        for step in range(4):
            ranks_optimizer.zero_grad()
            with amp.scale_loss(loss_of(ddp(mine(rows(step)))), ranks_optimizer) as scaled:
                scaled.backward()
            ranks_optimizer.step()
        same_on_all_ranks(list(ddp.parameters()))
        same_on_all_ranks(list(amp.master_params(ranks_optimizer)))
        with amp.disable_casts():
            for step in range(4):
                oracle.zero_grad()
                loss_of(whole(rows(step))).backward()
                oracle.step()
        tolerance = {"O0": 1e-5, "O1": 5e-3, "O2": 5e-3, "O3": 2e-2, "O4": 4e-2, "O5": 4e-2}[level]
        close([p.float() for p in ddp.parameters()], whole.parameters(), tolerance)

        before = [p.detach().clone() for p in ddp.parameters()]
        if _amp_state.loss_scalers[0].dynamic:
            ranks_optimizer.zero_grad()
            bad = float("inf") if dist.get_rank() == 1 else 1.0
            with amp.scale_loss(loss_of(ddp(mine(rows()))) * bad, ranks_optimizer) as scaled:
                scaled.backward()
            ranks_optimizer.step()
            close(ddp.parameters(), before, 0)
            assert set(gathered(_amp_state.loss_scalers[0].loss_scale())) == {2.0**9}
    _forget_amp()


def _amp_all(mesh):
    for level in ("O0", "O1", "O2", "O3", "O4", "O5"):
        _amp(mesh, level)
    _amp(mesh, "O2", delay_allreduce=True)
    _amp(mesh, "O2", allreduce_always_fp32=True, retain_allreduce_buffers=True)
    _amp(mesh, "O2", lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9))
    _amp(mesh, "O1", lambda params: LARC(torch.optim.SGD(params, lr=0.05, momentum=0.9)))


def _broadcast(module):
    for p in module.parameters():
        dist.broadcast(p.data, 0)
    return module


def _unequal_weights(mesh):
    """Ranks that start from weights of their own go on from rank 0's, masters included."""
    wrappers = {"apex": DDP, "torch": torch.nn.parallel.DistributedDataParallel, "by hand": _broadcast}
    optimizers = (lambda params: FusedAdam(params, lr=0.01), lambda params: torch.optim.SGD(params, lr=0.05))
    for name, wrap in wrappers.items():
        for level, make in zip(("O2", "O5"), optimizers, strict=True):
            module = network(seed=dist.get_rank())
            weights = gathered([p.detach().clone() for p in module.parameters()])[0]
            model, optimizer = amp.initialize(
                module, make(module.parameters()), opt_level=level, verbosity=0, loss_scale=128.0
            )
            model = wrap(model)
            masters = list(amp.master_params(optimizer))
            if name == "apex":
                close(masters, weights, 0)
            for step in range(2):
                optimizer.zero_grad()
                with amp.scale_loss(loss_of(model(mine(rows(step)))), optimizer) as scaled:
                    scaled.backward()
                if name == "by hand":
                    for master in masters:
                        dist.all_reduce(master.grad)
                optimizer.step()
                same_on_all_ranks([*model.parameters(), *masters])
            largest = max(float((m.detach() - w).abs().max()) for m, w in zip(masters, weights, strict=True))
            assert largest < 0.2, f"{name} at {level}: {largest} from where rank 0 began"
            _forget_amp()


def _amp_after_ddp(mesh):
    ddp = DDP(network())
    with raises(RuntimeError, "DistributedDataParallel", "amp.initialize(model, optimizer"):
        amp.initialize(ddp, FusedAdam(ddp.parameters()), opt_level="O1", verbosity=0)
    _forget_amp()


CASES = {
    "amp": _amp_all,
    "amp_after_ddp": _amp_after_ddp,
    "unequal_weights": _unequal_weights,
}
