"""Farm tests use a store of their own; the toolchains are those of this machine."""

import pytest

from build_matrix.errors import PinError, ToolchainMissing
from build_matrix.store import Store


@pytest.fixture(scope="session")
def store(tmp_path_factory):
    return Store(tmp_path_factory.mktemp("store"))


@pytest.fixture(autouse=True)
def own_store(tmp_path_factory, monkeypatch):
    """Digests of compilers are remembered beside the store; the checkout's is left alone."""
    monkeypatch.setenv("APEX_STORE", str(tmp_path_factory.getbasetemp() / "digests"))


@pytest.fixture
def toolchain_of():
    """arch -> its toolchain; skips, saying what to run, where it is not here."""
    from build_matrix import packs

    def find(arch):
        try:
            return packs.toolchain_for(arch)
        except (ToolchainMissing, PinError) as error:
            pytest.skip(str(error))

    return find
