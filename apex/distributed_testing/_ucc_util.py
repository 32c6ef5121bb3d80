"""Whether this torch speaks UCC."""

from apex.transformer._ucc_util import HAS_UCC

__all__ = ["HAS_UCC"]
