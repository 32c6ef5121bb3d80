"""What does not depend on the framework: recipes."""

from apex.transformer_engine.common import recipe

__all__ = ["recipe"]
