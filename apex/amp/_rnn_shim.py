"""What torch.nn.modules.rnn gets in the place of torch._VF: functions of a C module cannot be patched one by one."""

import types

import torch

RNN_NAMES = ["rnn_relu", "rnn_tanh", "gru", "lstm"]


class VariableFunctionsShim(types.ModuleType):
    """Has what torch._VF has; the functions of recurrent networks are attributes of its own. A module: TorchScript
    takes those alone."""

    def __init__(self):
        super().__init__(torch._VF.__name__)
        for name in RNN_NAMES:
            for function in (name, name + "_cell"):
                if hasattr(torch._VF, function):
                    setattr(self, function, getattr(torch._VF, function))

    def __getattr__(self, name):
        return getattr(torch._VF, name)
