"""The portable binding: libapex's C interface called from Python, for every torch that no compiled binding fits.

There is no C++ ABI of torch in it, so it serves releases, nightlies and vendors' builds that were made after this
wheel. Kernels, packs and the choice of a variant are the same as under a compiled binding, and so are results.

interface   structs and functions, as the library itself describes them
tensors     when a tensor's bytes are its values; places, dtypes, statuses
functional  pairs of ops: entry in eager mode, autograd
norms, softmax, ...   what an op checks, and how its arguments become the C struct
plan, list_op, multi_tensor, optimizer_plan    ops over lists of tensors, the plans that optimizers keep
module      the object that stands for the compiled module `_C`, and the dispatcher's kernels
"""
