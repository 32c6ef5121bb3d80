"""Which functions O1 and O4 patch, as data.

Each module names the namespace it speaks of (MODULE) and lists names in it:
FP16_FUNCS and BFLOAT16_FUNCS run in half precision, FP32_FUNCS in float32, CASTS in the widest dtype among
their arguments, SEQUENCE_CASTS in the widest of a list, and BANNED_FUNCS refuse half precision.
"""
