"""LSTM, GRU, ReLU, Tanh and mLSTM networks.

    rnn = apex.RNN.LSTM(10, 20, num_layers=2)
    output, (h, c) = rnn(torch.randn(5, 3, 10))         # output: (5, 3, 20); h, c: (2, 3, 20)

Each call goes on from the hidden state of the one before: `rnn.reset_hidden(batch)` begins anew,
`rnn.detach_hidden()` cuts the graph between two backward passes.

Args:
    input_size, hidden_size, num_layers: as for torch.nn.LSTM.
    bias: have biases.
    batch_first: input and output are (batch, time, features), and not (time, batch, features).
    dropout: probability, between layers, while training.
    bidirectional: a second stack of layers runs backwards in time; its features come behind the first's. (The
        stacks meet only at the end; torch's meet after each layer.)
    output_size: if not hidden_size, h is projected to it after every step.
"""

from __future__ import annotations

from apex.RNN.cells import GRUCell, LSTMCell, RNNReLUCell, RNNTanhCell, mLSTMRNNCell
from apex.RNN.RNNBackend import RNNCell, bidirectionalRNN, stackedRNN


def toRNNBackend(
    inputRNN: RNNCell,
    num_layers: int,
    bidirectional: bool = False,
    dropout: float = 0,
    batch_first: bool = False,
) -> stackedRNN | bidirectionalRNN:
    """num_layers of cells like inputRNN, as a stackedRNN or a bidirectionalRNN."""
    kind = bidirectionalRNN if bidirectional else stackedRNN
    return kind(inputRNN, num_layers, dropout=dropout, batch_first=batch_first)


def LSTM(
    input_size: int,
    hidden_size: int,
    num_layers: int,
    bias: bool = True,
    batch_first: bool = False,
    dropout: float = 0,
    bidirectional: bool = False,
    output_size: int | None = None,
) -> stackedRNN | bidirectionalRNN:
    """Long short-term memory: torch.nn.LSTM's cell; hidden states h and c."""
    cell = RNNCell(4, input_size, hidden_size, LSTMCell, 2, bias, output_size)
    return toRNNBackend(cell, num_layers, bidirectional, dropout, batch_first)


def GRU(
    input_size: int,
    hidden_size: int,
    num_layers: int,
    bias: bool = True,
    batch_first: bool = False,
    dropout: float = 0,
    bidirectional: bool = False,
    output_size: int | None = None,
) -> stackedRNN | bidirectionalRNN:
    """Gated recurrent units: torch.nn.GRU's cell. output_size: hidden_size or None, else ValueError."""
    if output_size not in (None, hidden_size):
        raise ValueError("a GRU mixes its output with its hidden state: output_size must be hidden_size")
    cell = RNNCell(3, input_size, hidden_size, GRUCell, 1, bias, output_size)
    return toRNNBackend(cell, num_layers, bidirectional, dropout, batch_first)


def ReLU(
    input_size: int,
    hidden_size: int,
    num_layers: int,
    bias: bool = True,
    batch_first: bool = False,
    dropout: float = 0,
    bidirectional: bool = False,
    output_size: int | None = None,
) -> stackedRNN | bidirectionalRNN:
    """Elman network: torch.nn.RNN with nonlinearity="relu"."""
    cell = RNNCell(1, input_size, hidden_size, RNNReLUCell, 1, bias, output_size)
    return toRNNBackend(cell, num_layers, bidirectional, dropout, batch_first)


def Tanh(
    input_size: int,
    hidden_size: int,
    num_layers: int,
    bias: bool = True,
    batch_first: bool = False,
    dropout: float = 0,
    bidirectional: bool = False,
    output_size: int | None = None,
) -> stackedRNN | bidirectionalRNN:
    """Elman network: torch.nn.RNN with nonlinearity="tanh"."""
    cell = RNNCell(1, input_size, hidden_size, RNNTanhCell, 1, bias, output_size)
    return toRNNBackend(cell, num_layers, bidirectional, dropout, batch_first)


def mLSTM(
    input_size: int,
    hidden_size: int,
    num_layers: int,
    bias: bool = True,
    batch_first: bool = False,
    dropout: float = 0,
    bidirectional: bool = False,
    output_size: int | None = None,
) -> stackedRNN | bidirectionalRNN:
    """Multiplicative LSTM (see mLSTMCell); hidden states h and c."""
    cell = mLSTMRNNCell(input_size, hidden_size, bias=bias, output_size=output_size)
    return toRNNBackend(cell, num_layers, bidirectional, dropout, batch_first)
