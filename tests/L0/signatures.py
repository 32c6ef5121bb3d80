"""Signatures as public apex has them: names and defaults; type hints are no part of them."""

import inspect


def signature(function):
    """As text, without hints."""
    found = inspect.signature(function)
    parameters = [p.replace(annotation=p.empty) for p in found.parameters.values()]
    return str(found.replace(parameters=parameters, return_annotation=found.empty))
