"""transformer_engine_extensions, by the name that the public engine's module has since 1.8."""

from apex._legacy.transformer_engine_extensions import *  # noqa: F403
