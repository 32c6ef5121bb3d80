"""Loss scalers: one launch unscales all gradients of a dtype and notes an overflow on the device.

The scale itself may live on the device as well. As long as it does, nothing here waits for the device:
`update_scale_on_device` leaves the decision to optimizers that read `found_inf` there, and only who asks for
the number (`loss_scale`, `amp.state_dict`) pays for the answer.
"""

import torch

from apex import _lists
from apex._sharding import is_sharded, local, reduce_over_ranks, shard_groups
from apex.amp._amp_state import _amp_state, maybe_print
from apex.amp._errors import warn

# Where a dynamic scale ends if no min_loss_scale is given: below it, float16 holds no gradient of 1.
SMALLEST_SCALE = 2.0**-24
# What float32 holds together with one over it.
_LOWEST, _HIGHEST = 2.0**-126, 2.0**127


def scale_check_overflow_python(model_grad, master_grad, scale, check_overflow=False):
    """master_grad = model_grad * scale, in plain torch; True, and nothing done, if model_grad overflowed."""
    dense = model_grad.to_dense() if model_grad.is_sparse else model_grad
    if check_overflow and not torch.isfinite(dense).all():
        return True
    with torch.no_grad():
        if master_grad is model_grad:
            master_grad.mul_(scale)
        else:
            master_grad.copy_(dense.to(master_grad.dtype) * scale)
    return False


def axpby_check_overflow_python(model_grad, stashed_grad, master_grad, a, b, check_overflow=False):
    """master_grad = a * model_grad + b * stashed_grad, in plain torch; True if model_grad overflowed."""
    dense = model_grad.to_dense() if model_grad.is_sparse else model_grad
    if check_overflow and not torch.isfinite(dense).all():
        return True
    with torch.no_grad():
        master_grad.copy_(a * dense.to(master_grad.dtype) + b * stashed_grad)
    return False


class LossScaler:
    """The loss scale of one loss, static or dynamic.

    A dynamic scale is multiplied by the backoff factor when a gradient overflowed (not below min_loss_scale)
    and by the growth factor after scale_window updates in a row without (not above max_loss_scale). It is never 0:
    where overflows bring it to its floor it stays, an AmpWarning says so once, and it grows again from there.

    Args:
        loss_scale: a number, or "dynamic".
        init_scale: where a dynamic scale starts, but not above max_loss_scale.
        scale_factor: growth factor, and one over the backoff factor.
        scale_window: updates without overflow before the scale grows.
        min_loss_scale: floor; None or 0: 2**-24, or where the scale starts if that is lower.
        max_loss_scale: ceiling.
        scale_growth_factor, scale_backoff_factor: in the place of scale_factor.
    """

    warned_no_fused_kernel = False
    warned_unscaling_non_fp32_grad = False
    has_fused_kernel = True  # an op without a kernel here runs on its reference

    def __init__(
        self,
        loss_scale,
        init_scale=2.0**16,
        scale_factor=2.0,
        scale_window=2000,
        min_loss_scale=None,
        max_loss_scale=2.0**24,
        *,
        scale_growth_factor=None,
        scale_backoff_factor=None,
    ):
        self.dynamic = loss_scale == "dynamic"
        self._host_scale = min(max_loss_scale, init_scale) if self.dynamic else float(loss_scale)
        self._host_unskipped = 0
        self._max_loss_scale = min(max_loss_scale, _HIGHEST)
        self._min_loss_scale = min_loss_scale
        self._floor = max(min_loss_scale or min(SMALLEST_SCALE, self._host_scale, max_loss_scale), _LOWEST)
        self._at_floor = False  # and it was said
        self._growth = scale_growth_factor or scale_factor
        self._backoff = scale_backoff_factor or 1.0 / scale_factor
        self._scale_seq_len = scale_window
        self._has_overflow = False
        self._flags = {}  # device -> int32 tensor of one element: 1 after an overflow there
        self._groups = set()  # process groups over which gradients seen were sharded
        self._on_device = (
            None  # (scale, unskipped): float32 and int32 tensors of one element; None: on the host
        )
        self._inverses = {}  # device -> 1 / scale, while the scale is on the device
        self._taken = (
            None  # ids of gradients that another optimizer of this pass took; None: there is but one
        )
        self._updates = 0  # how often the scale may have changed
        self._shown = None  # pinned copy of the scale, to tell of overflows that the host did not wait for
        self._shown_scale = 0.0

    # ---- the scale ---------------------------------------------------------------------------------------

    def loss_scale(self):
        """The scale as a float. Waits for the device if the last update was decided there."""
        self._to_host()
        return self._host_scale

    @property
    def _loss_scale(self):
        return self.loss_scale()

    @_loss_scale.setter
    def _loss_scale(self, value):
        self._to_host()
        self._updates += 1
        self._host_scale = float(value)
        if not self._min_loss_scale:
            self._floor = max(min(self._floor, self._host_scale), _LOWEST)
        self._shown = None  # a smaller value that was set is no overflow

    @property
    def _unskipped(self):
        self._to_host()
        return self._host_unskipped

    @_unskipped.setter
    def _unskipped(self, value):
        self._to_host()
        self._host_unskipped = int(value)

    def scaled(self, loss):
        """loss in float32, times the scale, wherever that is known."""
        loss = loss.float()
        if self._on_device is None:
            return loss * self._host_scale
        return loss * self._on_device[0].to(loss.device).reshape(())

    def present(self):
        """(how often the scale may have changed, the scale: a float, or a float32 tensor without dimensions)."""
        if self._on_device is None:
            return self._updates, self._host_scale
        return self._updates, self._on_device[0].reshape(()).clone()

    def ratio_to(self, earlier):
        """The scale over what it was when `present` gave `earlier`: a float, or a tensor where the device knows it."""
        updates, scale = self.present()
        return 1.0 if updates == earlier[0] else scale / earlier[1]

    def _to_host(self):
        if self._on_device is not None:
            scale, unskipped = self._on_device
            before = self._host_scale
            self._host_scale, self._host_unskipped = scale.item(), unskipped.item()
            self._on_device, self._inverses = None, {}
            self._watch_floor(self._host_scale, self._host_scale < before)

    def _to_device(self, device):
        if self._on_device is None:
            scale = torch.full((1,), self._host_scale, dtype=torch.float32, device=device)
            self._on_device = scale, torch.full((1,), self._host_unskipped, dtype=torch.int32, device=device)
        return self._on_device

    def _inverse_on(self, device):
        if device not in self._inverses:
            self._inverses[device] = self._on_device[0].to(device).reciprocal()
        return self._inverses[device]

    # ---- overflow flags ----------------------------------------------------------------------------------

    def _flag_on(self, device):
        if device not in self._flags:
            self._flags[device] = torch.zeros(1, dtype=torch.int32, device=device)
        return self._flags[device]

    @property
    def _overflow_buf(self):
        """The flag of the first device that was seen; code that unscales by itself puts its own here."""
        if not self._flags:
            self._flag_on(
                torch.device("cuda", torch.cuda.current_device()) if _gpu() else torch.device("cpu")
            )
        return next(iter(self._flags.values()))

    @_overflow_buf.setter
    def _overflow_buf(self, flag):
        self._flags = {flag.device: flag}

    def clear_overflow_state(self):
        self._has_overflow = False
        for flag in self._flags.values():
            flag.zero_()

    # ---- unscaling ---------------------------------------------------------------------------------------

    def unscale(
        self, model_grads, master_grads, unused_scale=None, models_are_masters=False, scale_override=None
    ):
        """master_grads[i] = model_grads[i] / scale; notes inf and nan.

        Lists of tensors of one size for each index, float16, bfloat16, float32 or float64; the same tensor
        may stand in both. unused_scale is public apex's. scale_override: a float in the place of the scale.
        """
        if self._has_overflow:
            return
        static = scale_override if scale_override is not None else None if self.dynamic else self._host_scale
        if static == 1.0 and models_are_masters and not self.dynamic:
            return
        for device, (grads, masters) in self._by_device(model_grads, master_grads).items():
            scale, scale_tensor = self._factor(device, scale_override)
            _op("multi_tensor_scale", self._flag_on(device), [grads, masters], scale, scale_tensor)

    def unscales_all(self, gradients, device):
        """Lets `gradients` (_C.AmpGradients), all on `device`, unscale themselves by what `unscale` would do.

        False, and nothing is done, if they cannot, or if other optimizers share this pass.
        """
        if self._has_overflow or self._taken is not None:
            return False
        scale, scale_tensor = self._factor(device, None)
        scaled = self.dynamic or self._host_scale != 1.0
        return gradients.unscale(self._flag_on(device), scale, scale_tensor, scaled)

    def unscale_with_stashed(self, model_grads, stashed_master_grads, master_grads, scale_override=None):
        """master_grads[i] = model_grads[i] / scale + stashed_master_grads[i]; notes inf, nan in the first.

        scale_override: (scale of the gradients, scale of the stashed ones, scale of the result), floats.
        """
        if self._has_overflow:
            return
        grads_scale, stashed_scale, out_scale = scale_override or (None, 1.0, 1.0)
        override = None if grads_scale is None else grads_scale / out_scale
        b = out_scale / stashed_scale
        columns = (model_grads, stashed_master_grads, master_grads)
        for device, (grads, stashed, masters) in self._by_device(*columns).items():
            a, a_tensor = self._factor(device, override)
            _op("multi_tensor_axpby", self._flag_on(device), [grads, stashed, masters], a, b, 0, a_tensor)

    def unscale_python(self, model_grads, master_grads, scale):
        """`unscale` in plain torch; waits for the device at each gradient."""
        for model, master in zip(model_grads, master_grads, strict=True):
            if model is not None and not (self._has_overflow and self.dynamic):
                overflow = scale_check_overflow_python(model, master, 1.0 / scale, self.dynamic)
                self._has_overflow = self._has_overflow or overflow

    def unscale_with_stashed_python(self, model_grads, stashed_master_grads, master_grads, a, b):
        """`unscale_with_stashed` in plain torch, as a * model + b * stashed."""
        for row in zip(model_grads, stashed_master_grads, master_grads, strict=True):
            if row[0] is not None and not (self._has_overflow and self.dynamic):
                overflow = axpby_check_overflow_python(*row, a, b, self.dynamic)
                self._has_overflow = self._has_overflow or overflow

    def _factor(self, device, override):
        """1 / scale as (float, None), or (unused, tensor) where only the device knows it."""
        if override is not None:
            return 1.0 / override, None
        if self._on_device is None:
            return 1.0 / self._host_scale, None
        return 1.0, self._inverse_on(device)

    def _by_device(self, *columns):
        """device -> columns of tensors as kernels take them: shards for DTensors, values for sparse ones."""
        found = {}
        for row in zip(*columns, strict=True):
            first = row[0]
            if first is None:
                continue
            if is_sharded(first):
                self._groups.update(shard_groups(first))
                row = tuple(map(local, row))
                first = row[0]
            if first.layout != torch.strided:
                row = _dense(row)
            lists = found.get(first.device)
            if lists is None:
                lists = found[first.device] = tuple([] for _ in columns)
            for column, tensor in zip(lists, row, strict=True):
                column.append(tensor)
        return found

    def _take(self, grad):
        """Whether this gradient is still to be unscaled: optimizers of one pass may share parameters."""
        if self._taken is None:
            return True
        fresh = id(grad) not in self._taken
        self._taken.add(id(grad))
        return fresh

    # ---- updates -----------------------------------------------------------------------------------------

    def update_scale(self):
        """Adapts the scale to what was noted and returns whether the step is to be skipped.

        Waits for the device if the scale is dynamic.
        """
        if self.dynamic and not self._has_overflow:
            self._has_overflow = self._any_flag()
        self._to_host()
        self._updates += 1
        should_skip = self._has_overflow and self.dynamic
        if should_skip:
            self._host_scale = max(self._floor, self._host_scale * self._backoff)
            self._host_unskipped = 0
        else:
            self._host_unskipped += 1
        if self.dynamic and self._host_unskipped == self._scale_seq_len:
            self._host_scale = min(self._max_loss_scale, self._host_scale * self._growth)
            self._host_unskipped = 0
        self._watch_floor(self._host_scale, should_skip)
        return should_skip

    def _watch_floor(self, scale, lowered):
        """Warns once when overflows have brought the scale as low as it goes, and again only after it grew."""
        if scale > self._floor:
            self._at_floor = False
        elif lowered and not self._at_floor:
            self._at_floor = True
            warn(
                f"gradients overflowed until the loss scale is {scale}, its floor; steps are skipped until they are "
                "finite\n  remedy:    look for inf and nan in the loss itself (torch.autograd.detect_anomaly()); "
                "amp.initialize(..., min_loss_scale=...) moves the floor"
            )

    def _any_flag(self):
        if self._groups:
            return bool(self._found_inf().item())
        return any(flag.item() for flag in self._flags.values())

    def update_scale_on_device(self):
        """`update_scale` without waiting: the answer is a float32 tensor of one element, not 0 for "skip"."""
        found = self._found_inf()
        self._updates += 1
        scale, unskipped = self._to_device(found.device)
        torch._amp_update_scale_(scale, unskipped, found, self._growth, self._backoff, self._scale_seq_len)
        if self._min_loss_scale:  # the user's counts on overflows only, as in public apex
            scale.copy_(torch.where(found != 0, scale.clamp(min=self._floor), scale))
        scale.clamp_(None if self._min_loss_scale else self._floor, self._max_loss_scale)
        self._inverses = {}
        return found

    def _found_inf(self):
        """All flags as one: float32, on the first device, the same on every rank that holds a shard."""
        flags = list(self._flags.values()) or [self._overflow_buf]
        found = flags[0].to(torch.float32)
        for flag in flags[1:]:
            found = torch.maximum(found, flag.to(found.device, torch.float32))
        for group in self._groups:
            reduce_over_ranks(found, group, "flags of overflow", torch.distributed.ReduceOp.MAX)
        return found

    def tell_of_overflow(self, loss_id):
        """Prints that a step is skipped on the device, as soon as the host sees the smaller scale.

        Nothing waits: on an accelerator the scale is copied behind the work that is queued, and looked at the
        next time.
        """
        if _amp_state.verbosity <= 0 or self._on_device is None:
            return
        scale = self._on_device[0]
        if self._shown is None:
            self._shown = torch.full(
                (1,), self._host_scale, dtype=torch.float32, device="cpu", pin_memory=scale.is_cuda
            )
            self._shown_scale = self._host_scale
        if not scale.is_cuda:
            self._shown.copy_(scale)
        now = self._shown.item()  # of the host's own memory
        if now < self._shown_scale:
            maybe_print(skipping(loss_id, now))
        self._watch_floor(now, now < self._shown_scale)
        self._shown_scale = now
        if scale.is_cuda:
            self._shown.copy_(scale, non_blocking=True)


def skipping(loss_id, scale):
    return f"Gradient overflow: step skipped, loss scaler {loss_id} reduces its loss scale to {scale}"


def _gpu():
    return torch.cuda.is_available()


def _dense(row):
    """A row of gradients whose first is sparse: its values in place, or dense beside other tensors."""
    if all(t is row[0] for t in row):
        values = row[0]._values() if row[0].is_sparse else row[0].values()
        return (values,) * len(row)
    return tuple(t.to_dense() if t.layout != torch.strided else t for t in row)


def _op(name, flag, lists, *arguments):
    _lists.call(name, lists, flag, *arguments)
