"""Keys and values of the tokens that were generated before."""

from __future__ import annotations

import torch


class InferenceParams:
    """The cache of a generation, one for all layers: pass it to every forward, and move the offset on behind each.

    Args:
        max_batch_size, max_sequence_length: of what it holds.

    Attributes:
        sequence_len_offset: how many tokens of each sequence are in it: the caller adds the tokens of a step.
        batch_size_offset: where in the batch the next calls write.
        key_value_memory_dict: layer_number -> (keys, values), [sequence, batch, heads, d].
    """

    def __init__(self, max_batch_size: int, max_sequence_length: int) -> None:
        self.max_batch_size, self.max_sequence_length = max_batch_size, max_sequence_length
        self.sequence_len_offset = self.batch_size_offset = 0
        self.key_value_memory_dict: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def swap_key_value_dict(self, batch_indices: torch.Tensor) -> None:
        """Takes other sequences of the batch, as beam search does. Raises ValueError for an empty cache."""
        if not self.key_value_memory_dict:
            raise ValueError("there are no keys and values yet: run a forward pass first")
        for layer, pair in self.key_value_memory_dict.items():
            keys, values = (tensor[:, batch_indices] for tensor in pair)
            self.key_value_memory_dict[layer] = keys, values

    def extend(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes keys and values [s, b, heads, d], and gives those of all tokens so far.

        Raises ValueError where they do not fit into the cache.
        """
        begin, first = self.sequence_len_offset, self.batch_size_offset
        end, last = begin + key.shape[0], first + key.shape[1]
        if end > self.max_sequence_length or last > self.max_batch_size:
            raise ValueError(
                f"the cache holds {self.max_sequence_length} tokens of {self.max_batch_size} sequences, and is "
                f"asked for {end} of {last}"
            )
        if layer not in self.key_value_memory_dict:
            shape = self.max_sequence_length, self.max_batch_size
            self.key_value_memory_dict[layer] = tuple(
                t.new_zeros((*shape, *t.shape[2:])) for t in (key, value)
            )  # type: ignore[assignment]
        found = []
        for memory, new in zip(self.key_value_memory_dict[layer], (key, value), strict=True):
            memory[begin:end, first:last] = new.detach()
            found.append(memory[:end, first:last])
        return found[0], found[1]
