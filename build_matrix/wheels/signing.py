"""Signatures, by keys of the user: of receipts, by a secret that machines share (HMAC-SHA256, RFC 2104, standard
library alone), and of wheels, by a private key that others can check with the public one.

What is signed of a wheel is its statement of provenance, which holds the wheel's digest: a DSSE envelope, as in-toto
has it, in WHEEL.dsse.json beside the wheel. Keys are PEM, of Ed25519, ECDSA or RSA; `openssl genpkey
-algorithm ed25519` makes one.
"""

from __future__ import annotations

import hmac
import json
import os
from pathlib import Path

from build_matrix.errors import BuildError, SignatureError
from build_matrix.store import digest, files, foreign
from build_matrix.wheels import provenance

RECEIPT_KEY = "APEX_RECEIPT_KEY"  # a file whose contents sign receipts
SIGNING_KEY = "APEX_SIGNING_KEY"  # a private key that signs wheels
TRUSTED_KEY = "APEX_TRUSTED_KEY"  # a public key by which wheels must be signed
SUFFIX = ".dsse.json"
PAYLOAD = "application/vnd.in-toto+json"


# ---- receipts ----------------------------------------------------------------------------------------------


def mac(text: str, key: bytes) -> str:
    """HMAC-SHA256, in hex."""
    return hmac.new(key, text.encode(), "sha256").hexdigest()


def secret() -> bytes | None:
    """What APEX_RECEIPT_KEY names, or None where it is not set. Raises BuildError for a file that holds no secret:
    anybody signs by that."""
    path = os.environ.get(RECEIPT_KEY)
    if not path:
        return None
    if found := _read(Path(path), RECEIPT_KEY).strip():
        return found
    raise BuildError(f"{RECEIPT_KEY} names {path}, a file that is empty: put the secret there, or unset it")


def _read(path: Path, asked: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise BuildError(f"{asked} names {path}, which cannot be read: {error.strerror}") from None


# ---- wheels ------------------------------------------------------------------------------------------------


def _library():
    """securesystemslib, which brings cryptography; only who signs or checks wheels needs it."""
    try:
        from securesystemslib import dsse, signer
    except ImportError:
        raise BuildError(
            "signatures of wheels want securesystemslib: pip install 'securesystemslib[crypto]'"
        ) from None
    return dsse, signer


class Signer:
    """A private key, read. Raises BuildError for a file that holds none, before anything is built."""

    def __init__(self, path: Path, asked: str = "--key"):
        _, signer = _library()
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        data = _read(path, asked)
        try:
            self._signer = signer.CryptoSigner(load_pem_private_key(data, password=None))
        except (ValueError, TypeError) as error:
            raise BuildError(f"{path} is no private key in PEM, without a password: {error}") from None

    def sign(self, wheel: Path) -> Path:
        """Writes the envelope beside the wheel. Raises SignatureError where no statement of provenance lies there, and
        GateError where it is of another file."""
        if not provenance.check(wheel):
            raise SignatureError(
                wheel.name, f"there is nothing to sign: no {wheel.name}{provenance.SUFFIX} lies beside"
            )
        dsse, _ = _library()
        envelope = dsse.Envelope(_statement(wheel).read_bytes(), PAYLOAD, {})
        envelope.sign(self._signer)
        path = _beside(wheel)
        files.write(path, json.dumps(envelope.to_dict(), indent=1) + "\n")
        return path


def asked() -> Signer | None:
    """The signer that APEX_SIGNING_KEY names, or None where it is not set."""
    path = os.environ.get(SIGNING_KEY)
    return Signer(Path(path), SIGNING_KEY) if path else None


def trusted(path: Path | None) -> Path | None:
    """The public key that was named, else what APEX_TRUSTED_KEY names."""
    named = os.environ.get(TRUSTED_KEY)
    return path or (Path(named) if named else None)


def _beside(wheel: Path) -> Path:
    return wheel.with_name(wheel.name + SUFFIX)


def _statement(wheel: Path) -> Path:
    return wheel.with_name(wheel.name + provenance.SUFFIX)


def _envelope(wheel: Path) -> dict:
    path, fault = _beside(wheel), "it is cut, or no DSSE envelope"
    try:
        found = foreign.read(path)
        if _is_envelope(found):
            return found
    except FileNotFoundError:
        raise SignatureError(wheel.name, f"it is not signed: no {path.name} lies beside it") from None
    except (OSError, ValueError) as error:
        fault += f": {error}"
    raise SignatureError(path.name, fault)


def _is_envelope(found: object) -> bool:
    if not isinstance(found, dict) or not isinstance(signatures := found.get("signatures"), list):
        return False
    texts = [found.get("payload"), found.get("payloadType")]
    texts += [s.get(name) if isinstance(s, dict) else None for s in signatures for name in ("keyid", "sig")]
    return all(isinstance(text, str) for text in texts)


def signers(wheel: Path) -> list[str]:
    """The ids of the keys that a wheel says it is signed by, unchecked; empty where no signature lies beside."""
    return [s["keyid"] for s in _envelope(wheel)["signatures"]] if _beside(wheel).is_file() else []


def verify(wheel: Path, key: Path) -> str:
    """That the wheel, as it is, and the statement beside it were signed by the private key of the public one in `key`:
    the key's id. Raises SignatureError that says what is not so, BuildError for a file that is no public key."""
    dsse, signer = _library()
    from cryptography.hazmat.primitives.serialization import load_pem_public_key
    from securesystemslib.exceptions import VerificationError

    try:
        public = signer.SSlibKey.from_crypto(load_pem_public_key(_read(key, "--key")))
    except ValueError as error:
        raise BuildError(f"{key} is no public key in PEM: {error}") from None
    found = _envelope(wheel)
    try:
        envelope = dsse.Envelope.from_dict(found)
    except (ValueError, KeyError, TypeError) as error:
        raise SignatureError(_beside(wheel).name, f"it is cut, or no DSSE envelope: {error}") from None
    if public.keyid not in envelope.signatures:
        others = ", ".join(keyid[:12] for keyid in envelope.signatures) or "no key"
        raise SignatureError(
            wheel.name, f"it is signed by {others}, not by the key of {key} ({public.keyid[:12]})"
        )
    try:
        envelope.verify([public], 1)
    except VerificationError:
        raise SignatureError(_beside(wheel).name, "it was changed after it was signed") from None
    _check_payload(wheel, envelope)
    return public.keyid


def _check_payload(wheel: Path, envelope) -> None:
    """That what was signed is of this wheel."""
    if envelope.payload_type != PAYLOAD:
        raise SignatureError(
            _beside(wheel).name, f"what was signed is {envelope.payload_type}, not {PAYLOAD}"
        )
    try:
        (subject,) = foreign.value(envelope.payload)["subject"]
        name, sha256 = str(subject["name"]), str(subject["digest"]["sha256"])
    except (ValueError, LookupError, TypeError):
        raise SignatureError(
            _beside(wheel).name, "what was signed is cut, or no statement of provenance"
        ) from None
    have = digest.of_file(wheel)
    if (name, sha256) != (wheel.name, have):
        stated = f"{name} with sha256 {sha256[:12]}"
        raise SignatureError(wheel.name, f"its sha256 is {have[:12]}; what was signed is {stated}")
    if _statement(wheel).is_file() and _statement(wheel).read_bytes() != envelope.payload:
        raise SignatureError(_statement(wheel).name, "it is not the statement that was signed")
