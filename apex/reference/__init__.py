"""Reference implementations: every op in plain PyTorch, for any device and dtype that PyTorch runs.

`apex/reference/<op>.py` holds a function named like the op whose parameters are those of its schema in
csrc/ops.schemas. It is the oracle's near twin (tests compare with float64) and what runs where no kernel does.
"""
