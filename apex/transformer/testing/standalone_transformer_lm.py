"""Parts of standalone GPT and BERT models, under the name that public scripts import them from."""

from apex.transformer.pipeline_parallel.utils import param_is_not_shared
from apex.transformer.testing._attention import CoreAttention, ParallelAttention
from apex.transformer.testing._language_model import (
    Embedding,
    Pooler,
    TransformerLanguageModel,
    get_language_model,
    parallel_lm_logits,
    post_language_model_processing,
)
from apex.transformer.testing._modules import (
    MegatronModule,
    attention_mask_func,
    get_linear_layer,
    init_method_normal,
    module_size,
    scaled_init_method_normal,
)
from apex.transformer.testing._transformer import (
    NoopTransformerLayer,
    ParallelMLP,
    ParallelTransformer,
    ParallelTransformerLayer,
    bias_dropout_add,
    get_bias_dropout_add,
    get_num_layers,
)

__all__ = [
    "CoreAttention",
    "Embedding",
    "MegatronModule",
    "NoopTransformerLayer",
    "ParallelAttention",
    "ParallelMLP",
    "ParallelTransformer",
    "ParallelTransformerLayer",
    "Pooler",
    "TransformerLanguageModel",
    "attention_mask_func",
    "bias_dropout_add",
    "get_bias_dropout_add",
    "get_language_model",
    "get_linear_layer",
    "get_num_layers",
    "init_method_normal",
    "module_size",
    "parallel_lm_logits",
    "param_is_not_shared",
    "post_language_model_processing",
    "scaled_init_method_normal",
]
