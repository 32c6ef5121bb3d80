"""GPT and BERT whose layers are split over ranks, their arguments, and base classes of tests on several ranks.

What public tests and scripts import from apex.transformer.testing; each part is a module of its own: `arguments`,
`commons`, `distributed_test_base`, `global_vars`, `standalone_bert`, `standalone_gpt`, `standalone_transformer_lm`.
"""
