"""RNNCell, which keeps weights and state of one layer, and networks of such layers."""

import math

import torch
from torch import nn

from apex import _symbolic as symbolic


def is_iterable(maybe_iterable):
    """Whether it is a list or a tuple."""
    return isinstance(maybe_iterable, (list, tuple))


def flatten_list(tens_list):
    """Tensors of one shape as one tensor with a dimension more; a tensor as it is."""
    return torch.stack(tuple(tens_list)) if is_iterable(tens_list) else tens_list


class RNNCell(nn.Module):
    """One layer: the weights of a cell, and the hidden state that a sequence has reached.

    Args:
        gate_multiplier: gates of the cell (4 for LSTMs, 3 for GRUs, 1 for Elman networks).
        input_size, hidden_size: features.
        cell: function as in apex.RNN.cells.
        n_hidden_states: hidden states of the cell; one is handed to it as a tensor, several as a list.
        bias: have biases.
        output_size: if not hidden_size, the first hidden state is projected to it by a matrix w_ho.

    Attributes:
        hidden: list of n_hidden_states tensors (batch, output_size), (batch, hidden_size), ..., or of None.
    """

    def __init__(
        self,
        gate_multiplier,
        input_size,
        hidden_size,
        cell,
        n_hidden_states=2,
        bias=False,
        output_size=None,
    ):
        super().__init__()
        self.gate_multiplier = gate_multiplier
        self.input_size = input_size
        self.hidden_size = hidden_size
        self.cell = cell
        self.bias = bias
        self.output_size = hidden_size if output_size is None else output_size
        self.gate_size = gate_multiplier * hidden_size
        self.n_hidden_states = n_hidden_states

        self.w_ih = nn.Parameter(torch.empty(self.gate_size, self.input_size))
        self.w_hh = nn.Parameter(torch.empty(self.gate_size, self.output_size))
        if self.output_size != self.hidden_size:
            self.w_ho = nn.Parameter(torch.empty(self.output_size, self.hidden_size))
        self.b_ih = self.b_hh = None
        if bias:
            self.b_ih = nn.Parameter(torch.empty(self.gate_size))
            self.b_hh = nn.Parameter(torch.empty(self.gate_size))
        self.hidden = [None] * n_hidden_states
        self.reset_parameters()

    def __getstate__(self):
        """Without hidden states: they may belong to a graph, which cannot be copied."""
        return {**vars(self), "hidden": [None] * self.n_hidden_states}

    def new_like(self, new_input_size=None):
        """A new cell like this one, for inputs of another size if one is given."""
        size = self.input_size if new_input_size is None else new_input_size
        return type(self)(
            self.gate_multiplier,
            size,
            self.hidden_size,
            self.cell,
            self.n_hidden_states,
            self.bias,
            self.output_size,
        )

    def weights(self):
        """Weights that the cell's function is given, but for the biases."""
        return (self.w_ih, self.w_hh)

    @torch.no_grad()
    def reset_parameters(self, gain=1):
        """Draws all weights from the uniform distribution within gain / sqrt(hidden_size)."""
        bound = gain / math.sqrt(self.hidden_size)
        for param in self.parameters():
            param.uniform_(-bound, bound)

    def init_hidden(self, bsz):
        """Zeros for hidden states that are not there, or are for another batch size or device than now.

        Those of a pass in inference mode go on as copies that autograd can use.
        """
        for i, state in enumerate(self.hidden):
            if state is None or state.size(0) != bsz or state.device != self.w_ih.device:
                size = self.output_size if i == 0 else self.hidden_size
                self.hidden[i] = self.w_ih.new_zeros(bsz, size, requires_grad=False)
            elif not torch.compiler.is_compiling() and state.is_inference() and torch.is_grad_enabled():
                self.hidden[i] = state.clone()

    def _apply(self, fn, recurse=True):
        """Weights of another dtype begin a new sequence."""
        before = self.w_ih.dtype
        super()._apply(fn, recurse)
        if self.w_ih.dtype != before:
            self.hidden = [None] * self.n_hidden_states
        return self

    def reset_hidden(self, bsz):
        """Begins a new sequence."""
        self.hidden = [None] * self.n_hidden_states
        self.init_hidden(bsz)

    def init_inference(self, bsz):
        """Begins a new sequence."""
        self.reset_hidden(bsz)

    def detach_hidden(self):
        """Cuts the hidden states from the graph that computed them. RuntimeError if there are none."""
        if any(state is None for state in self.hidden):
            raise RuntimeError("there is no hidden state to detach: run the layer, or init_hidden(batch)")
        self.hidden = [state.detach() for state in self.hidden]

    def forward(self, input):
        """One step. input: (batch, input_size); returns the hidden states as a tuple."""
        self.init_hidden(input.size(0))
        hidden = self.hidden[0] if self.n_hidden_states == 1 else self.hidden
        hidden = self.cell(input, hidden, *self.weights(), b_ih=self.b_ih, b_hh=self.b_hh)
        self.hidden = [hidden] if self.n_hidden_states == 1 else list(hidden)
        if self.output_size != self.hidden_size:
            self.hidden[0] = nn.functional.linear(self.hidden[0], self.w_ho)
        return tuple(self.hidden)


class _Layers(nn.Module):
    """What networks of cells share: each call is passed on to all parts in `rnns`."""

    def reset_parameters(self):
        for rnn in self.rnns:
            rnn.reset_parameters()

    def init_hidden(self, bsz):
        for rnn in self.rnns:
            rnn.init_hidden(bsz)

    def detach_hidden(self):
        for rnn in self.rnns:
            rnn.detach_hidden()

    def reset_hidden(self, bsz):
        for rnn in self.rnns:
            rnn.reset_hidden(bsz)

    def init_inference(self, bsz):
        for rnn in self.rnns:
            rnn.init_inference(bsz)


class stackedRNN(_Layers):
    """Layers of cells, each of which reads the outputs of the one before.

    Args:
        inputRNN: an RNNCell, like which the others are made; or a list of num_layers of them, else ValueError.
        num_layers: how many.
        dropout: probability, on the outputs of all layers but the last, while training.
        batch_first: input and output are (batch, time, features), and not (time, batch, features).
    """

    def __init__(self, inputRNN, num_layers=1, dropout=0, batch_first=False):
        super().__init__()
        self.dropout = dropout
        self.batch_first = batch_first
        if isinstance(inputRNN, RNNCell):
            others = (inputRNN.new_like(inputRNN.output_size) for _ in range(num_layers - 1))
            self.rnns = nn.ModuleList([inputRNN, *others])
        elif is_iterable(inputRNN):
            if len(inputRNN) != num_layers:
                raise ValueError(f"{len(inputRNN)} cells were given for num_layers={num_layers}")
            self.rnns = nn.ModuleList(inputRNN)
        else:
            raise TypeError(f"inputRNN is an RNNCell or a list of them, not {type(inputRNN).__name__}")
        self.nLayers = len(self.rnns)

    def forward(self, input, collect_hidden=False, reverse=False):
        """A sequence, from where the last one ended.

        Args:
            input: (time, batch, input_size).
            collect_hidden: return the hidden states after every step.
            reverse: go through time backwards.

        Returns:
            (output, hidden): output is (time, batch, output_size), in the order of time, whatever `reverse`. hidden
                is a list with, for each hidden state of the cell, a tensor (layer, batch, features) as it is after
                the last step; with collect_hidden, a list of such tensors, in the order of time.
        """
        node = symbolic.leaf(self, input, collect_hidden, reverse)
        if node is not None:
            return node
        steps = list(input.unbind(1 if self.batch_first else 0))
        if reverse:
            steps.reverse()
        states = []  # of each layer: of each step: the hidden states
        for number, rnn in enumerate(self.rnns):
            states.append([rnn(x) for x in steps])
            steps = [hidden[0] for hidden in states[-1]]
            if self.dropout and number + 1 < self.nLayers:
                steps = [nn.functional.dropout(x, self.dropout, self.training) for x in steps]
        if reverse:
            steps.reverse()
        output = torch.stack(steps, 1 if self.batch_first else 0)
        kept = range(len(steps)) if collect_hidden else [len(steps) - 1]
        hidden = [
            [torch.stack([layer[step][state] for layer in states]) for step in kept]
            for state in range(self.rnns[0].n_hidden_states)
        ]
        if not collect_hidden:
            return output, [steps[0] for steps in hidden]
        if reverse:
            hidden = [steps[::-1] for steps in hidden]
        return output, hidden


class bidirectionalRNN(_Layers):
    """Two stackedRNN, of which one goes through time backwards. For arguments see stackedRNN."""

    def __init__(self, inputRNN, num_layers=1, dropout=0, batch_first=False):
        super().__init__()
        self.dropout = dropout
        self.fwd = stackedRNN(inputRNN, num_layers, dropout, batch_first)
        self.bckwrd = stackedRNN(inputRNN.new_like(), num_layers, dropout, batch_first)
        self.rnns = nn.ModuleList([self.fwd, self.bckwrd])

    def forward(self, input, collect_hidden=False):
        """As stackedRNN's; the features of both directions stand behind each other, in hidden states too."""
        node = symbolic.leaf(self, input, collect_hidden)
        if node is not None:
            return node
        output, hidden = self.fwd(input, collect_hidden)
        back, back_hidden = self.bckwrd(input, collect_hidden, reverse=True)
        pairs = zip(hidden, back_hidden, strict=True)
        if collect_hidden:
            joined = tuple([torch.cat(step, -1) for step in zip(*pair, strict=True)] for pair in pairs)
        else:
            joined = tuple(torch.cat(pair, -1) for pair in pairs)
        return torch.cat([output, back], -1), joined
