"""Loggers of apex.transformer."""

from __future__ import annotations

import logging
import os


def get_transformer_logger(name: str) -> logging.Logger:
    """The logger of the package that the module `name` lies in: "apex.transformer" of "apex.transformer.utils"."""
    return logging.getLogger(os.path.splitext(name)[0])


class RankInfoFormatter(logging.Formatter):
    """Gives each record `rank_info`, parallel_state.get_rank_info(), for formats that name it."""

    def format(self, record: logging.LogRecord) -> str:
        from apex.transformer.parallel_state import get_rank_info

        record.rank_info = get_rank_info()
        return super().format(record)


def set_logging_level(verbosity: int | str) -> None:
    """Sets the level of all loggers of apex, as logging.Logger.setLevel takes it."""
    logging.getLogger("apex").setLevel(verbosity)
