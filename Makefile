# clean forgets every output and the store of work units; provisioned toolchains (.toolchains) stay.
.PHONY: clean
clean:
	rm -rf build dist .whl .whl.lock ..whl-*.partial *.egg-info .nox .pytest_cache .hypothesis .ruff_cache
	rm -rf out examples/*/out examples/*/*/out
	find . -path ./.toolchains -prune -o -name __pycache__ -type d -print | xargs rm -rf

# AMD's rotary kernels, for USE_ROCM_AITER_ROPE_BACKEND=1 on ROCm: the commit that public apex names.
PYTHON ?= python3
AITER ?= git+https://github.com/ROCm/aiter@56824f8f221584862216bea0ac738c232f538e4c
.PHONY: aiter
aiter:
	$(PYTHON) -m pip install --force-reinstall --no-build-isolation --no-deps "$(AITER)"
