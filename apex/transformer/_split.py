"""How ranks are split over the dimensions of a model: the groups as lists of ranks, without any process."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Split:
    """Tensor parallel ranks are neighbours, data parallel ones come next, pipeline stages lie farthest apart.

    Each method gives all groups of a kind, a list of lists of global ranks. Every rank is in exactly one group of the
    first five kinds; of the embeddings' kinds there is one group for each pipeline, which holds some of its ranks.

    Args:
        world: number of ranks.
        tensor: ranks that share each layer.
        pipeline: stages that share the layers.
        virtual: parts of the model that each stage holds; None: one, and no interleaving.
        split_rank: the first stage of the decoder, in models with encoder and decoder; None: there is no such stage.

    Raises:
        RuntimeError: sizes that no split has.
    """

    world: int
    tensor: int = 1
    pipeline: int = 1
    virtual: int | None = None
    split_rank: int | None = None

    def __post_init__(self):
        for name in ("tensor", "pipeline", "virtual"):
            size = getattr(self, name)
            if not (_is_count(size) or (name == "virtual" and size is None)):
                raise RuntimeError(f"{name} parallel size {size!r}: a positive integer is required")
        if self.world % (self.tensor * self.pipeline):
            raise RuntimeError(
                f"{self.world} ranks cannot be split: the world size must be divisible by tensor x pipeline parallel "
                f"size, {self.tensor} x {self.pipeline}"
            )
        if self.virtual is not None and self.pipeline == 1:
            raise RuntimeError(
                f"virtual pipeline size {self.virtual} without a pipeline: interleaved schedules need a pipeline "
                "parallel size of 2 or more"
            )
        split = self.split_rank
        if split is not None and not (_is_integer(split) and 0 <= split < self.pipeline):
            raise RuntimeError(
                f"split rank {split!r} is no stage of a pipeline of size {self.pipeline}: it must be an integer from 0 "
                f"to {self.pipeline - 1}"
            )

    @property
    def data(self):
        """Data parallel size."""
        return self.world // (self.tensor * self.pipeline)

    def tensor_groups(self):
        return [list(range(first, first + self.tensor)) for first in range(0, self.world, self.tensor)]

    def pipeline_groups(self):
        stage = self.world // self.pipeline
        return [list(range(first, self.world, stage)) for first in range(stage)]

    def data_groups(self):
        stage = self.world // self.pipeline
        return [
            list(range(first + shard, first + stage, self.tensor))
            for first in range(0, self.world, stage)
            for shard in range(self.tensor)
        ]

    def model_groups(self):
        """All ranks that hold one copy of the model together."""
        return [list(ranks) for ranks in zip(*self.data_groups(), strict=True)]

    def amax_groups(self):
        """All ranks of one stage: those over which the scales of fp8 tensors are agreed on."""
        stage = self.world // self.pipeline
        return [list(range(first, first + stage)) for first in range(0, self.world, stage)]

    def embedding_groups(self):
        """The stages that hold the word embeddings: first, last, and the decoder's first."""
        return [_stages(ranks, 0, self.split_rank, -1) for ranks in self.pipeline_groups()]

    def position_embedding_groups(self):
        """The stages that hold position embeddings: the encoder's first and the decoder's first."""
        return [_stages(ranks, 0, self.split_rank) for ranks in self.pipeline_groups()]

    def encoder_relative_position_embedding_groups(self):
        """The encoder's stages; a list without ranks where there are none. Without a split, the first stage."""
        end = 1 if self.split_rank is None or self.pipeline == 1 else self.split_rank
        return [ranks[:end] for ranks in self.pipeline_groups()]

    def decoder_relative_position_embedding_groups(self):
        """The decoder's stages. Without a split, the first stage."""
        if self.split_rank is None:
            return [ranks[:1] for ranks in self.pipeline_groups()]
        return [ranks[self.split_rank :] for ranks in self.pipeline_groups()]


def _is_integer(value):
    return isinstance(value, int) and not isinstance(value, bool)


def _is_count(value):
    return _is_integer(value) and value > 0


def _stages(ranks, *stages):
    """Those stages' ranks, each once, in the pipeline's order. None is no stage."""
    return sorted({ranks[stage] for stage in stages if stage is not None})
