class MultiTensorApply:
    """``applier(amp_C.multi_tensor_scale, noop_flag, [inputs, outputs], 0.5)``.

    chunk_size is handed to the function, as in public apex; the functions cut tensors into chunks of their own.
    Always available: an op without a kernel here runs on its reference.
    """

    available = True
    warned = False

    def __init__(self, chunk_size):
        self.chunk_size = chunk_size

    def check_avail(self):
        """Does nothing: kept for callers of public apex."""

    def __call__(self, op, noop_flag_buffer, tensor_lists, *args):
        return op(self.chunk_size, noop_flag_buffer, tensor_lists, *args)
