"""Wheels are signed by a user's key, and what is not as it was signed is named."""

import base64
import json
import shutil
import subprocess
import sys

import pytest
from click.testing import CliRunner

pytest.importorskip("securesystemslib")
pytest.importorskip("cryptography")

from build_matrix import REPOSITORY
from build_matrix.__main__ import main
from build_matrix.errors import BuildError, GateError, SignatureError
from build_matrix.farm.steps import Done
from build_matrix.serve import publish
from build_matrix.store import Store
from build_matrix.wheels import provenance, signing, wheel

FACTS = {
    "version": "1.10.0",
    "local": "cpu",
    "accelerator": "cpu",
    "archs": [],
    "torch": [],
    "headers": {},
    "toolchains": [],
    "host_compiler": None,
    "source_sha256": "c" * 64,
}


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    """name -> (private, public), as openssl would write them."""
    from cryptography.hazmat.primitives import serialization as pem
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

    folder, found = tmp_path_factory.mktemp("keys"), {}
    for name, key in {
        "ours": ed25519.Ed25519PrivateKey.generate(),
        "theirs": ed25519.Ed25519PrivateKey.generate(),
        "ecdsa": ec.generate_private_key(ec.SECP256R1()),
        "rsa": rsa.generate_private_key(65537, 2048),
    }.items():
        private, public = folder / f"{name}.pem", folder / f"{name}.pub"
        no_password = pem.NoEncryption()
        private.write_bytes(key.private_bytes(pem.Encoding.PEM, pem.PrivateFormat.PKCS8, no_password))
        form = pem.PublicFormat.SubjectPublicKeyInfo
        public.write_bytes(key.public_key().public_bytes(pem.Encoding.PEM, form))
        found[name] = private, public
    return found


@pytest.fixture
def built(tmp_path):
    """A small wheel with its statement."""
    path = tmp_path / "store/apex_cpu-1.10.0+cpu-cp311-cp311-manylinux_2_27_x86_64.whl"
    path.parent.mkdir()
    files = {"apex/build.json": json.dumps(FACTS).encode(), "apex/lib/bindings.json": b"[]"}
    wheel.write(path, "apex-cpu", "1.10.0+cpu", "cp311-cp311-manylinux_2_27_x86_64", files)
    provenance.write(path, FACTS, "cp311")
    return path


@pytest.fixture
def signed(built, keys):
    signing.Signer(keys["ours"][0]).sign(built)
    return built


@pytest.mark.parametrize("name", ["ours", "ecdsa", "rsa"])
def test_a_signature_is_checked_with_the_public_key(built, keys, name):
    private, public = keys[name]
    path = signing.Signer(private).sign(built)
    envelope = json.loads(path.read_text())
    assert (
        path.name == f"{built.name}.dsse.json" and envelope["payloadType"] == "application/vnd.in-toto+json"
    )
    assert base64.b64decode(envelope["payload"]) == built.with_name(f"{built.name}.intoto.json").read_bytes()
    assert signing.signers(built) == [signing.verify(built, public)]


def test_a_wheel_that_is_not_signed_is_named(built, keys):
    assert signing.signers(built) == []
    with pytest.raises(
        SignatureError, match=r"whl: it is not signed: no .*\.whl\.dsse\.json lies beside it"
    ) as fault:
        signing.verify(built, keys["ours"][1])
    assert fault.value.exit_code == 13


def test_another_key_is_named(signed, keys):
    with pytest.raises(
        SignatureError, match=r"it is signed by \w{12}, not by the key of .*theirs.pub \(\w{12}\)"
    ):
        signing.verify(signed, keys["theirs"][1])


def test_a_changed_wheel_is_named(signed, keys):
    signed.write_bytes(signed.read_bytes() + b"\0")
    with pytest.raises(
        SignatureError, match=r"its sha256 is \w{12}; what was signed is apex_cpu.* with sha256"
    ):
        signing.verify(signed, keys["ours"][1])
    with pytest.raises(GateError, match="intoto.json states"):  # nor is it signed anew as if it were the same
        signing.Signer(keys["ours"][0]).sign(signed)


def test_a_wheel_by_another_name_is_named(signed, keys, tmp_path):
    """What pip installs is decided by the name: a signature of one is none of the other."""
    other = signed.with_name(signed.name.replace("1.10.0", "1.11.0"))
    for suffix in ("", provenance.SUFFIX, signing.SUFFIX):
        shutil.copyfile(f"{signed}{suffix}", f"{other}{suffix}")
    with pytest.raises(SignatureError, match="what was signed is apex_cpu-1.10.0"):
        signing.verify(other, keys["ours"][1])


def change_payload(envelope):
    envelope["payload"] = base64.b64encode(base64.b64decode(envelope["payload"]) + b" ").decode()


def change_kind(envelope):
    envelope["payloadType"] = "text/plain"


def change_signature(envelope):
    data = base64.b64decode(envelope["signatures"][0]["sig"])
    envelope["signatures"][0]["sig"] = base64.b64encode(bytes([data[0] ^ 1]) + data[1:]).decode()


@pytest.mark.parametrize("change", [change_payload, change_kind, change_signature])
def test_a_changed_envelope_is_named(signed, keys, change):
    path = signed.with_name(f"{signed.name}.dsse.json")
    envelope = json.loads(path.read_text())
    change(envelope)
    path.write_text(json.dumps(envelope))
    with pytest.raises(SignatureError, match="dsse.json: it was changed after it was signed"):
        signing.verify(signed, keys["ours"][1])


def test_a_signature_of_something_else_is_named(built, keys):
    """By the right key, but of no statement."""
    dsse, _ = signing._library()
    envelope = dsse.Envelope(built.with_name(f"{built.name}.intoto.json").read_bytes(), "text/plain", {})
    envelope.sign(signing.Signer(keys["ours"][0])._signer)
    built.with_name(f"{built.name}.dsse.json").write_text(json.dumps(envelope.to_dict()))
    with pytest.raises(SignatureError, match="what was signed is text/plain, not application/vnd.in-toto"):
        signing.verify(built, keys["ours"][1])


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        "[]",
        "[" * 200_000,
        '{"payload": "x',
        '{"payload": "!", "payloadType": "x", "signatures": [{"keyid": "x"}]}',
        '{"payload": "!", "payloadType": "x", "signatures": ["x"]}',
        '{"payload": 1, "payloadType": 2, "signatures": 3}',
    ],
)
def test_a_cut_envelope_is_named(signed, keys, text):
    signed.with_name(f"{signed.name}.dsse.json").write_text(text)
    for read in (lambda: signing.verify(signed, keys["ours"][1]), lambda: signing.signers(signed)):
        with pytest.raises(SignatureError, match="dsse.json: it is cut, or no DSSE envelope"):
            read()


def test_another_statement_beside_is_named(signed, keys):
    statement = signed.with_name(f"{signed.name}.intoto.json")
    statement.write_text(statement.read_text().replace("urn:apex", "urn:other"))
    with pytest.raises(SignatureError, match="intoto.json: it is not the statement that was signed"):
        signing.verify(signed, keys["ours"][1])
    statement.unlink()
    with pytest.raises(SignatureError, match="there is nothing to sign"):
        signing.Signer(keys["ours"][0]).sign(signed)


def test_what_is_no_key_is_named(signed, keys, tmp_path):
    (tmp_path / "text").write_text("text")
    for make in (lambda key: signing.Signer(key), lambda key: signing.verify(signed, key)):
        with pytest.raises(BuildError, match="text is no p.* key in PEM"):
            make(tmp_path / "text")
        with pytest.raises(BuildError, match="--key names .*none, which cannot be read"):
            make(tmp_path / "none")
    with pytest.raises(BuildError, match="is no public key in PEM"):  # it must not be given away
        signing.verify(signed, keys["ours"][0])


def test_the_farm_signs_what_it_publishes(built, keys, tmp_path, monkeypatch):
    store, done = Store(tmp_path), Done("wheel", "apex-cpu cp311", "key", 0.0, 0, False)
    monkeypatch.setattr(Store, "output", lambda self, kind, key: built.parent)
    monkeypatch.setenv("APEX_SIGNING_KEY", str(keys["ours"][0]))
    (path,) = publish.publish([done], store, tmp_path / "dist", tmp_path / "index", signing.asked()).wheels
    assert signing.verify(path, keys["ours"][1])
    # Published again without a key, the signature of the older file does not stay.
    (path,) = publish.publish([done], store, tmp_path / "dist", tmp_path / "index").wheels
    assert signing.signers(path) == []


def test_a_wheel_that_comes_out_of_a_container_is_signed_too(built, keys, monkeypatch):
    from build_matrix.containers import engine, wheels

    monkeypatch.setattr(engine, "find", lambda name: "podman")
    monkeypatch.setattr(wheels, "build", lambda *cell, **container: [built])
    monkeypatch.setenv("APEX_SIGNING_KEY", str(keys["ours"][0]))
    done = CliRunner().invoke(main, ["wheel", "cpu", "--container"], catch_exceptions=False)
    assert done.exit_code == 0 and done.output.endswith(f"{built}\n"), done.output
    assert signing.verify(built, keys["ours"][1])


def test_the_commands_that_sign_and_check(built, keys, monkeypatch):
    monkeypatch.delenv("APEX_TRUSTED_KEY", raising=False)

    def run(*arguments):
        return CliRunner().invoke(main, [str(argument) for argument in arguments])

    assert "openssl genpkey" in run("sign", built).output
    assert run("sign", built, "--key", keys["ours"][0]).output.endswith(".dsse.json\n")
    about = json.loads(run("explain", built, "--json").output)
    (keyid,) = about["signed"]
    assert about["signed"] == {keyid: False}  # nobody said which key to trust
    about = json.loads(run("explain", built, "--json", "--key", keys["ours"][1]).output)
    assert about["signed"] == {keyid: True}
    monkeypatch.setenv("APEX_TRUSTED_KEY", str(keys["theirs"][1]))
    for command in ("explain", "verify"):
        assert isinstance(run(command, built).exception, SignatureError)
    command = [sys.executable, "-m", "build_matrix", "verify", str(built), "--key", str(keys["theirs"][1])]
    done = subprocess.run(command, cwd=REPOSITORY, text=True, capture_output=True)
    assert done.returncode == 13 and "not by the key of" in done.stderr and "Traceback" not in done.stderr
