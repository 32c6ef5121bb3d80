"""Recurrent networks that are made of cells, which may be one's own; time comes first, and state is kept."""

from apex.RNN.models import GRU, LSTM, ReLU, Tanh, mLSTM

__all__ = ["GRU", "LSTM", "ReLU", "Tanh", "mLSTM"]
