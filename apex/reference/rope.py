"""Rotary positional embedding, in plain PyTorch.

Elements k and k + r/2 of a head are a pair that is turned by the angles of its place:
out[k] = in[k] cos[k] - in[k + r/2] sin[k], out[k + r/2] = in[k + r/2] cos[k + r/2] + in[k] sin[k + r/2].
Elements past r are copied.
"""

from apex.reference._rope import Pair, check, turn

PAIRS = (Pair(),)


def rope_forward(input, cos, sin=None, cos_w=None, sin_w=None, cu_seqlens=None, transpose_output=False):
    """The input with its heads turned, in its dtype; sums in float32 (float64 for float64).

    input: [places, batch, heads, dim]; with cu_seqlens [places, heads, dim], sequences one after the other; with
    cos_w [batch, height, width, heads, dim]. cos, sin: [places, 1, 1, r], r even and at most dim; without sin, cos
    holds the angles in radians; with cu_seqlens as many places as the longest sequence. Of images [1, n, 1, dim/2],
    cos and sin for the first half of a head by height, cos_w and sin_w for the second by width. Any floating dtype.
    cu_seqlens: int32 [sequences + 1], from 0, never falling. Places past its end are copied. Where it makes no
    sense, or a sequence is longer than cos, a CPU tensor raises ValueError; elsewhere the turned elements are nan.
    transpose_output: the memory of the output is [batch, places, heads, dim]. Raises ValueError and TypeError.
    """
    check(input, cos, sin, cos_w, sin_w, cu_seqlens)
    return turn(input, cos, sin, cos_w, sin_w, cu_seqlens, transpose_output, back=False)


def rope_backward(input, cos, sin=None, cos_w=None, sin_w=None, cu_seqlens=None, transpose_output=False):
    """The gradient of rope_forward's input, from `input`, that of its output. Arguments as there."""
    check(input, cos, sin, cos_w, sin_w, cu_seqlens)
    return turn(input, cos, sin, cos_w, sin_w, cu_seqlens, transpose_output, back=True)
