# clean forgets every output and the store of work units; provisioned toolchains (.toolchains) stay.
.PHONY: clean
clean:
	rm -rf build dist .whl *.egg-info .nox .pytest_cache .hypothesis
	find . -path ./.toolchains -prune -o -name __pycache__ -type d -print | xargs rm -rf
