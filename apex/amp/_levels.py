"""The levels: which options each sets."""

from __future__ import annotations

import torch


class _Level:
    """Sets the options of one level: `O1()(Properties())`."""

    brief = more = ""
    options: dict = {}

    def __call__(self, properties):
        properties._update_options_dict(
            {
                "enabled": True,
                "opt_level": type(self).__name__,
                "patch_torch_functions": False,
                "patch_torch_functions_type": None,
                "keep_batchnorm_fp32": None,
                **self.options,
            }
        )
        return properties


class O0(_Level):
    brief = "O0: float32."
    more = "Weights and inputs are cast to float32; nothing else changes. The baseline."
    options = {"cast_model_type": torch.float32, "master_weights": False, "loss_scale": 1.0}


class O1(_Level):
    brief = "O1: float16 around functions."
    more = (
        "Weights stay float32. torch's functions are patched: products and convolutions cast to float16,\n"
        "exponentials, sums, norms and losses to float32. The level to begin with."
    )
    options = {
        "cast_model_type": None,
        "patch_torch_functions": True,
        "patch_torch_functions_type": torch.float16,
        "master_weights": None,
        "loss_scale": "dynamic",
    }


class O2(_Level):
    brief = "O2: float16 model, float32 master weights."
    more = (
        "The model is cast to float16, but for batch norms and losses; so are inputs; outputs are float32\n"
        "again. The optimizer updates float32 masters, of which the model's weights are the roundings."
    )
    options = {
        "cast_model_type": torch.float16,
        "keep_batchnorm_fp32": True,
        "master_weights": True,
        "loss_scale": "dynamic",
    }


class O3(_Level):
    brief = "O3: float16."
    more = "The whole model is cast to float16, without master weights. How fast it could be."
    options = {
        "cast_model_type": torch.float16,
        "keep_batchnorm_fp32": False,
        "master_weights": False,
        "loss_scale": 1.0,
    }


class O4(_Level):
    brief = "O4: bfloat16 around functions."
    more = "O1 with bfloat16, which has the range of float32 and needs no loss scale."
    options = {**O1.options, "patch_torch_functions_type": torch.bfloat16, "loss_scale": 1.0}


class O5(_Level):
    brief = "O5: bfloat16 model, float32 master weights."
    more = "O2 with bfloat16, which has the range of float32 and needs no loss scale."
    options = {**O2.options, "cast_model_type": torch.bfloat16, "loss_scale": 1.0}


opt_levels = {level.__name__: level() for level in (O0, O1, O2, O3, O4, O5)}
