"""Public apex's tuned settings of its Triton kernels, for each number of ranks: none, as kernels here need none."""

_auto_tuned_config_ampere: dict[int, dict] = {ranks: {} for ranks in (0, 1, 2, 4, 8)}
