"""Philox4x32-10 in PyTorch's integers: the same words as csrc/device/philox.h."""

import torch

_WORD = 0xFFFFFFFF


def _high_and_low(factor, x):
    """The two words of a product of words; int64 wraps, which keeps its 64 bits."""
    product = factor * x
    return (product >> 32) & _WORD, product & _WORD


def words(key, counter):
    """Four tensors of random words (int64, below 2^32) like `counter`.

    key: one int64 tensor. counter: int64.
    """
    low, high = key & _WORD, (key >> 32) & _WORD
    c = [counter & _WORD, (counter >> 32) & _WORD, torch.zeros_like(counter), torch.zeros_like(counter)]
    for _ in range(10):
        (a_high, a), (b_high, b) = _high_and_low(0xD2511F53, c[0]), _high_and_low(0xCD9E8D57, c[2])
        c = [b_high ^ c[1] ^ low, b, a_high ^ c[3] ^ high, a]
        low, high = (low + 0x9E3779B9) & _WORD, (high + 0xBB67AE85) & _WORD
    return c


def keep_eight(key, counter, keep):
    """[..., 8] bool like `counter`: which of each counter's eight elements are kept, keep / 65536 of all."""
    halves = [w >> shift & 0xFFFF for w in words(key, counter) for shift in (0, 16)]
    return torch.stack(halves, -1) < keep


def keep_eight_finely(key, counter, keep):
    """The same, keep / 2^32 of all: keep / 65536 is rounded at random, by the numbers themselves."""
    w = words(key, counter)
    rounds = (w[0] ^ w[1] ^ w[2] ^ w[3]) & 0xFFFF
    below = (keep >> 16) + (rounds < (keep & 0xFFFF)).long()
    return torch.stack([x >> shift & 0xFFFF for x in w for shift in (0, 16)], -1) < below.unsqueeze(-1)
