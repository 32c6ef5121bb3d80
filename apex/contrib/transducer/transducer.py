"""TransducerJoint and TransducerLoss, with public apex's names and signatures."""

from __future__ import annotations

from typing import Any

import torch

from apex import _symbolic as symbolic
from apex._functional import call
from apex._random import new_seed
from apex.contrib.transducer._mask import mask_of

_joint = torch.ops.apex.transducer_joint_forward.default
_loss = torch.ops.apex.transducer_loss_forward.default


class TransducerJointFunc:
    """The joint with the arguments that TransducerJoint gives it.

    Has the face of an autograd.Function, `apply` and `forward`; the op behind is differentiable by itself, and
    torch.compile traces it.
    """

    @staticmethod
    def apply(
        f,
        g,
        f_len,
        g_len,
        pack_output,
        relu,
        dropout,
        batch_offset,
        packed_batch,
        opt,
        fwd_tile_size,
        dropout_prob,
        mask_probe,
    ):
        """The output; with a list as mask_probe, and relu or dropout, the mask is appended to it."""
        probability = float(dropout_prob) if dropout else 0.0
        output, bits = call(
            "transducer_joint",
            _joint,
            2,
            (
                f,
                g,
                f_len,
                g_len,
                batch_offset if pack_output else None,
                int(packed_batch) if pack_output else 0,
                relu,
                probability,
                new_seed(f.device) if probability else None,
            ),
        )
        if mask_probe is not None and (relu or dropout):
            mask_probe.append(mask_of(output.detach(), bits, relu))
        return output

    @staticmethod
    def forward(
        ctx,
        f,
        g,
        f_len,
        g_len,
        pack_output,
        relu,
        dropout,
        batch_offset,
        packed_batch,
        opt,
        fwd_tile_size,
        dropout_prob,
        mask_probe,
    ):
        return TransducerJointFunc.apply(
            f,
            g,
            f_len,
            g_len,
            pack_output,
            relu,
            dropout,
            batch_offset,
            packed_batch,
            opt,
            fwd_tile_size,
            dropout_prob,
            mask_probe,
        )


class TransducerJoint(torch.nn.Module):
    """The joint of a transducer: f[b, t] + g[b, u] for the frames t and labels u that each item b has.

    From "Sequence Transduction with Recurrent Neural Networks" (Graves, 2012), where a network over the sum gives
    the logits of TransducerLoss. One pass writes the output; the backward reads its gradient once, sums it both
    ways in a fixed order (the same input gives the same bits), and finds ReLU's mask again from f and g.

    Args:
        pack_output: leave out the rows that no item has.
        relu: ReLU of the sum.
        dropout: dropout of the output, in training. Random numbers are Philox's, keyed from torch's generator of f's
            device; one bit an element is kept for the backward.
        opt: 0 or 1, as in public apex, where relu and dropout need 1; there is one implementation here.
        fwd_tile_size: accepted; the kernels choose their tiles.
        dropout_prob: from 0 to 1; what is dropped is the nearest multiple of 1 / 65536: nothing below half of that, and
            everything above 1 less half of that.
        probe_mask: append each forward's mask, uint8 of the output's shape, to the list `mask_probe`.

    Raises:
        NotImplementedError: relu or dropout with opt=0, as in public apex.
        ValueError: opt or dropout_prob out of range.
    """

    def __init__(
        self,
        pack_output: bool = False,
        relu: bool = False,
        dropout: float = False,
        opt: int = 1,
        fwd_tile_size: int = 4,
        dropout_prob: float = 0,
        probe_mask: bool = False,
    ) -> None:
        super().__init__()
        masked = relu or dropout
        if opt not in (0, 1):
            raise ValueError(f"TransducerJoint: opt is 0 or 1, not {opt}")
        if masked and opt != 1:
            raise NotImplementedError("TransducerJoint: relu and dropout need opt=1")
        if not 0 <= dropout_prob <= 1:
            raise ValueError(f"TransducerJoint: dropout_prob must be between 0 and 1, not {dropout_prob}")
        self.pack_output = pack_output
        self.relu = relu
        self.dropout = dropout
        self.dropout_prob = dropout_prob
        self.opt = opt
        self.fwd_tile_size = fwd_tile_size
        self.mask_probe: list | None = [] if masked and probe_mask else None

    def forward(
        self,
        f: torch.Tensor,
        g: torch.Tensor,
        f_len: torch.Tensor,
        g_len: torch.Tensor,
        batch_offset: torch.Tensor | None = None,
        packed_batch: int = 0,
    ) -> Any:
        """The joint.

        Args:
            f: [batch, frames, hidden], the encoder's output: float16, bfloat16, float32 or float64, any strides.
            g: [batch, labels, hidden], the predictor's output, of f's dtype (under autocast the wider one counts).
            f_len: [batch], int32 or int64: frames of each item.
            g_len: [batch]: rows of g that each item has, one more than it has labels.
            batch_offset: [batch], the running sum of f_len * g_len; needed with pack_output, else ignored.
            packed_batch: rows of the packed output, batch_offset[-1] or more; likewise. A number: a tensor on a GPU
                is fetched, and makes the host wait.

        Returns:
            [batch, frames, labels, hidden], or packed [packed_batch, hidden]. Rows that no item has are -1, and get
            no gradient.

        Raises:
            TypeError, ValueError: dtypes, shapes or devices that do not fit; on a CPU also lengths and offsets that
                do not. On a GPU, where looking would make the host wait, an item whose lengths or offsets do not
                fit is nan, its gradients too, and no memory outside is touched.
        """
        node = symbolic.leaf(self, f, g, f_len, g_len, batch_offset, packed_batch)
        if node is not None:
            return node
        if self.pack_output and (batch_offset is None or packed_batch == 0):
            raise ValueError("TransducerJoint: pack_output needs batch_offset and packed_batch")
        return TransducerJointFunc.apply(
            f,
            g,
            f_len,
            g_len,
            self.pack_output,
            self.relu,
            self.dropout and self.training,
            batch_offset,
            packed_batch,
            self.opt,
            self.fwd_tile_size,
            self.dropout_prob,
            self.mask_probe,
        )


class TransducerLossFunc:
    """The loss with the arguments that TransducerLoss gives it.

    Has the face of an autograd.Function, `apply` and `forward`; the op behind is differentiable by itself, and
    torch.compile traces it.
    """

    @staticmethod
    def apply(
        x,
        label,
        f_len,
        y_len,
        batch_offset,
        max_f_len,
        blank_idx,
        fuse_softmax_backward,
        debug_list,
        opt,
        packed_input,
    ):
        """The losses; alpha and beta are appended to a debug_list that is empty."""
        if not fuse_softmax_backward:
            x = torch.nn.functional.log_softmax(x, dim=-1)
        offset, frames = (batch_offset, int(max_f_len)) if packed_input else (None, 0)
        loss, alpha, beta = call(
            "transducer_loss",
            _loss,
            3,
            (x, label, f_len, y_len, blank_idx, offset, frames, not fuse_softmax_backward, False),
        )
        if debug_list == []:
            debug_list += [alpha.sum(-1), beta.sum(-1)]  # of whole numbers and rests
        return loss

    @staticmethod
    def forward(
        ctx,
        x,
        label,
        f_len,
        y_len,
        batch_offset,
        max_f_len,
        blank_idx,
        fuse_softmax_backward,
        debug_list,
        opt,
        packed_input,
    ):
        return TransducerLossFunc.apply(
            x,
            label,
            f_len,
            y_len,
            batch_offset,
            max_f_len,
            blank_idx,
            fuse_softmax_backward,
            debug_list,
            opt,
            packed_input,
        )


class TransducerLoss(torch.nn.Module):
    """The transducer (RNN-T) loss: -log of the probability of the labels over all ways to spread them over the frames.

    From "Sequence Transduction with Recurrent Neural Networks" (Graves, 2012). The softmax is part of it: one pass over
    the logits forward, one more backward, in float32 (float64 for float64) whatever they are, and no tensor of their
    size is kept but themselves. The same input gives the same bits.

    Args:
        fuse_softmax_backward: False: log_softmax is a step of its own, of x's dtype, which autograd goes through.
        opt: 0 or 1, as in public apex; there is one implementation here.
        packed_input: x holds the items' own rows, one item behind another.

    Raises:
        ValueError: another opt.
    """

    def __init__(self, fuse_softmax_backward: bool = True, opt: int = 1, packed_input: bool = False) -> None:
        super().__init__()
        if opt not in (-1, 0, 1):
            raise ValueError(f"TransducerLoss: opt is 0 or 1, not {opt}")
        self.fuse_softmax_backward = fuse_softmax_backward
        self.opt = opt
        self.packed_input = packed_input

    def forward(
        self,
        x: torch.Tensor,
        label: torch.Tensor,
        f_len: torch.Tensor,
        y_len: torch.Tensor,
        blank_idx: int,
        batch_offset: torch.Tensor | None = None,
        max_f_len: int | None = None,
        debug_list: list | None = None,
    ) -> torch.Tensor:
        """The losses, one for each item.

        Args:
            x: [batch, frames, labels + 1, classes] logits, or packed [rows, classes]: float16, bfloat16, float32 or
                float64, of any strides.
            label: [batch, labels], int32 or int64.
            f_len: [batch], int32 or int64: frames of each item, at least 1.
            y_len: [batch]: labels of each item, from 0.
            blank_idx: the class that stands for no label.
            batch_offset: [batch], the running sum of f_len * (y_len + 1); needed with packed_input, else ignored.
            max_f_len: the largest f_len or more; likewise. A number: a tensor on a GPU makes the host wait.
            debug_list: an empty list gets alpha and beta, [batch, frames, labels + 1]: log p of all ways to a node,
                and from it to the end.

        Returns:
            [batch] losses of x's dtype; float32 under autocast.

        Raises:
            TypeError, ValueError: dtypes, shapes or devices that do not fit. ValueError, IndexError: on a CPU also
                lengths, offsets and labels that do not. On a GPU, where looking would make the host wait, such an
                item's loss and gradient are nan, and no memory outside is touched.
        """
        node = symbolic.leaf(self, x, label, f_len, y_len, blank_idx, batch_offset, max_f_len, debug_list)
        if node is not None:
            return node
        if self.packed_input and (batch_offset is None or max_f_len is None):
            raise ValueError("TransducerLoss: packed_input needs batch_offset and max_f_len")
        return TransducerLossFunc.apply(
            x,
            label,
            f_len,
            y_len,
            batch_offset,
            max_f_len,
            blank_idx,
            self.fuse_softmax_backward,
            debug_list,
            self.opt,
            self.packed_input,
        )
