"""What the joint and the loss compute, by PyTorch's own ops: for tests, with public apex's signatures."""

from __future__ import annotations

import torch


def transducer_joint_reference(
    f, g, h_grad, f_len, g_len, pack_output, relu, dropout, dropout_prob=0, mask=None
):
    """(output, gradient of f, gradient of g) of the joint; f and g are leaves that require gradients.

    f: [batch, frames, hidden]; g: [batch, labels, hidden]; h_grad: of the whole output, [batch, frames, labels,
    hidden], zeros where no item is. mask: what dropout kept, of the output's shape. With pack_output the output is
    the items' rows one behind another, else -1 where no item is.
    """
    if dropout and mask is None:
        raise NotImplementedError("transducer_joint_reference: dropout needs the mask")
    output = f[:, :, None] + g[:, None]
    if relu:
        output = torch.relu(output)
    if dropout:
        output = output * mask * (1 / (1 - dropout_prob))
    output.backward(h_grad)
    frames, labels = (torch.arange(x.shape[1], dtype=torch.int64, device=x.device) for x in (f, g))
    inside = (frames < f_len[:, None])[:, :, None] & (labels < g_len[:, None])[:, None]
    with torch.no_grad():
        output = output[inside] if pack_output else output.masked_fill(~inside[..., None], -1)
    return output, f.grad, g.grad


def transducer_loss_reference(x, label, f_len, y_len, blank_idx, loss_grad):
    """(alpha, beta, gradient of x, loss) of the loss; x, [batch, frames, labels + 1, classes], is a leaf.

    The lattice is added up node by node, and autograd goes back through it. alpha, beta: float32 of float16, else of
    x's dtype; 0 where no item is. loss: of x's dtype.
    """
    dtype = torch.float32 if x.dtype == torch.float16 else x.dtype
    log_p = torch.log_softmax(x, -1).to(dtype)
    alpha, beta = (torch.zeros(x.shape[:3], dtype=dtype, device=x.device) for _ in range(2))
    losses = []
    for b in range(len(x)):
        last_t, last_u = int(f_len[b]) - 1, int(y_len[b])

        def blank(t, u, p=log_p[b]):
            return p[t, u, blank_idx]

        def emit(t, u, p=log_p[b], labels=label[b]):
            return p[t, u, int(labels[u])]

        to, onward = {(0, 0): log_p.new_zeros(())}, {(last_t, last_u): blank(last_t, last_u)}
        for t in range(last_t + 1):
            for u in range(last_u + 1):
                ways = [to[t - 1, u] + blank(t - 1, u)] if t else []
                ways += [to[t, u - 1] + emit(t, u - 1)] if u else []
                if ways:
                    to[t, u] = torch.stack(ways).logsumexp(0)
                alpha[b, t, u] = to[t, u].detach()
        for t in reversed(range(last_t + 1)):
            for u in reversed(range(last_u + 1)):
                ways = [onward[t + 1, u] + blank(t, u)] if t < last_t else []
                ways += [onward[t, u + 1] + emit(t, u)] if u < last_u else []
                if ways:
                    onward[t, u] = torch.stack(ways).logsumexp(0)
                beta[b, t, u] = onward[t, u].detach()
        losses.append(-onward[0, 0])
    loss = torch.stack(losses)
    loss.backward(loss_grad.to(dtype))
    return alpha, beta, x.grad, loss.detach().to(x.dtype)
