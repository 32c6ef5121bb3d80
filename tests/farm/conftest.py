"""Farm tests use a store of their own; the toolchains are those of this machine."""

import json
import os

import pytest

from build_matrix.errors import PinError, ToolchainMissing
from build_matrix.store import Store
from build_matrix.toolchains import by_arch


@pytest.fixture(scope="session")
def store(tmp_path_factory):
    return Store(tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="session")
def wheel_of_tree(tmp_path_factory):
    """A folder with the wheel of the checkout's build/tree and its statement of provenance; tests leave it as it is."""
    pytest.importorskip("auditwheel")
    from build_matrix.parts import tree
    from build_matrix.toolchains import pythons
    from build_matrix.wheels import wheel

    facts = json.loads((tree.DEFAULT / "apex/build.json").read_text())
    unit = wheel.unit(tree.DEFAULT, facts, pythons.find(pythons.own_tag()))
    result = Store(tmp_path_factory.mktemp("store")).build(unit)
    target = tmp_path_factory.mktemp("dist")
    wheel.publish(result.folder, target)
    return target


@pytest.fixture
def objects_of_checkout():
    """The host library's objects that lie in the checkout's own store, as this compiler makes them."""
    from build_matrix import REPOSITORY
    from build_matrix.parts import host_library
    from build_matrix.toolchains import host_compiler

    store, compiler = Store(REPOSITORY / "build/store"), host_compiler.find()
    folders = {
        source: store.folder(host_library.object_unit(source, compiler)) for source in host_library.sources()
    }
    return {source: folder for source, folder in folders.items() if (folder / "unit.json").is_file()}


@pytest.fixture(autouse=True)
def own_store(tmp_path_factory, monkeypatch):
    """Digests of compilers are remembered beside the store; the checkout's is left alone."""
    monkeypatch.setenv("APEX_STORE", str(tmp_path_factory.getbasetemp() / "digests"))


@pytest.fixture
def toolchain_of():
    """arch -> its toolchain; skips, saying what to run, where it is not here."""

    def find(arch):
        try:
            return by_arch.toolchain_for(arch)
        except (ToolchainMissing, PinError) as error:
            pytest.skip(str(error))

    return find


@pytest.fixture(scope="module")
def s3():
    """s3://farm of a real server on loopback; its address and credentials are in the environment."""
    server_module = pytest.importorskip("moto.server")
    s3fs = pytest.importorskip("s3fs")
    import boto3

    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    names = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    before = dict(os.environ)
    os.environ.update(names)
    s3fs.S3FileSystem.clear_instance_cache()  # those of an earlier server's address
    boto3.client("s3").create_bucket(Bucket="farm")
    yield "s3://farm"
    server.stop()
    os.environ.clear()
    os.environ.update(before)
