"""Functions of cells: cell(input, hidden, w_ih, w_hh, b_ih=None, b_hh=None) -> the next hidden state.

input: (batch, input_size). hidden: a tensor (batch, output_size), or for LSTMs (that, (batch, hidden_size)).
w_ih: (gates * hidden_size, input_size); w_hh: (gates * hidden_size, output_size); gates in torch's order.
"""

import torch
from torch.nn import functional
from torch.nn.modules import rnn

from apex.RNN.RNNBackend import RNNCell

# torch's cells are asked for where amp patches them.


def LSTMCell(input, hidden, w_ih, w_hh, b_ih=None, b_hh=None):
    """torch.nn.LSTMCell's function. The output may have been projected to another size than the cell state."""
    if hidden[0].size(1) == hidden[1].size(1):
        return rnn._VF.lstm_cell(input, tuple(hidden), w_ih, w_hh, b_ih, b_hh)
    gates = functional.linear(input, w_ih, b_ih) + functional.linear(hidden[0], w_hh, b_hh)
    return _lstm(gates, hidden[1])


def GRUCell(input, hidden, w_ih, w_hh, b_ih=None, b_hh=None):
    """torch.nn.GRUCell's function."""
    return rnn._VF.gru_cell(input, hidden, w_ih, w_hh, b_ih, b_hh)


def RNNReLUCell(input, hidden, w_ih, w_hh, b_ih=None, b_hh=None):
    """relu(w_ih input + b_ih + w_hh hidden + b_hh)."""
    return torch.relu(functional.linear(input, w_ih, b_ih) + functional.linear(hidden, w_hh, b_hh))


def RNNTanhCell(input, hidden, w_ih, w_hh, b_ih=None, b_hh=None):
    """tanh(w_ih input + b_ih + w_hh hidden + b_hh)."""
    return torch.tanh(functional.linear(input, w_ih, b_ih) + functional.linear(hidden, w_hh, b_hh))


def mLSTMCell(input, hidden, w_ih, w_hh, w_mih, w_mhh, b_ih=None, b_hh=None):
    """An LSTM cell that has m = (w_mih input) * (w_mhh h) in the place of h.

    w_mih: (output_size, input_size); w_mhh: (output_size, output_size).
    Source: Krause, Lu, Murray, Renals, "Multiplicative LSTM for sequence modelling", arXiv:1609.07959.
    """
    m = functional.linear(input, w_mih) * functional.linear(hidden[0], w_mhh)
    return LSTMCell(input, (m, hidden[1]), w_ih, w_hh, b_ih, b_hh)


def _lstm(gates, cell_state):
    inward, forget, new, outward = gates.chunk(4, 1)
    cell_state = torch.sigmoid(forget) * cell_state + torch.sigmoid(inward) * torch.tanh(new)
    return torch.sigmoid(outward) * torch.tanh(cell_state), cell_state


class mLSTMRNNCell(RNNCell):
    """RNNCell of mLSTMCell."""

    def __init__(self, input_size, hidden_size, bias=False, output_size=None):
        super().__init__(4, input_size, hidden_size, mLSTMCell, 2, bias, output_size)
        self.w_mih = torch.nn.Parameter(torch.empty(self.output_size, self.input_size))
        self.w_mhh = torch.nn.Parameter(torch.empty(self.output_size, self.output_size))
        self.reset_parameters()

    def weights(self):
        return (*super().weights(), self.w_mih, self.w_mhh)

    def new_like(self, new_input_size=None):
        """A new cell like this one, for inputs of another size if one is given."""
        size = self.input_size if new_input_size is None else new_input_size
        return type(self)(size, self.hidden_size, self.bias, self.output_size)
