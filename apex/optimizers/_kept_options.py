"""Copies and pickles of an optimizer that step as it does."""


class KeptOptions:
    """Mixin, before torch.optim.Optimizer, which keeps groups and states alone: options are attributes."""

    _saved_options: tuple[str, ...] = ()  # names that begin with _ and are kept, too

    def __getstate__(self):
        # What is callable is no option: a scheduler's wrapper of step(), which belongs to this object.
        options = {
            name: value
            for name, value in vars(self).items()
            if name in self._saved_options or not (name.startswith("_") or callable(value))
        }
        return {**options, **super().__getstate__()}
