"""Signatures: DSSE envelopes signed with ECDSA P-256. A private key and its passphrase are never printed. Variables
and the setting `signing_key` should name files, but may contain a key or a passphrase by mistake. So their values are
not printed if no such file can be read.

The cryptography libraries are imported only when something is signed or checked, because most commands do neither.
"""

from __future__ import annotations

import base64
import getpass
import hashlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel

from envbuild.util import settings, strict_and_canonical_json
from envbuild.util.errors import FileError, UsageError
from envbuild.util.untrusted_input_errors import Malformed, Refusal

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
    from securesystemslib.signer import CryptoSigner, SSlibKey

NO_KEY = "no public key given, so the signer cannot be checked (--key, keys in the policy, or the setting public_key)"
PAYLOAD_TYPE = "application/vnd.in-toto+json"
KEY = "ENVBUILD_SIGNING_KEY"
PASSPHRASE, PASSPHRASE_FILE = "ENVBUILD_KEY_PASSPHRASE", "ENVBUILD_KEY_PASSPHRASE_FILE"
_TYPED = "ENVBUILD_KEY_PASSPHRASE_TYPED"  # passed to a child envbuild, which removes it when it starts
_taken: list[str] = []  # the passphrase that take_passphrase found, until it is used


Envelope = Mapping[str, object]
"""A DSSE envelope as parsed JSON, which anybody may have written. Unknown JSON fields stay in it when it is published
again."""


class _Payload(BaseModel):
    payloadType: str
    payload: str


class _Signature(BaseModel):
    sig: str


class _Signatures(BaseModel):
    signatures: list[_Signature]


@dataclass(frozen=True)
class PublicKey:
    """A public key. `pem`: the key in PEM format; `fingerprint`: the sha256 of `pem`, hex."""

    pem: bytes
    key: SSlibKey = field(compare=False, repr=False)

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(self.pem).hexdigest()


@dataclass(frozen=True)
class Signer:
    public: PublicKey
    signer: CryptoSigner = field(compare=False, repr=False)


_LONGEST_PASSPHRASE = 1023  # bytes; the limit of OpenSSL


def generate(passphrase: str) -> tuple[bytes, bytes]:
    """Generate a key pair: the private key as PKCS #8, encrypted with the passphrase, and the public key; both PEM.

    Raises UsageError for a passphrase with which a key cannot be encrypted.
    """
    try:
        secret = passphrase.encode()
    except UnicodeEncodeError:  # an environment variable may contain any byte
        raise UsageError("the passphrase is not valid UTF-8", hint="choose another passphrase") from None
    if not secret:
        raise UsageError("the passphrase is empty", hint="a private key is always stored encrypted")
    if len(secret) > _LONGEST_PASSPHRASE:
        text = f"the passphrase is longer than {_LONGEST_PASSPHRASE} bytes"
        raise UsageError(text, hint="choose a shorter passphrase")
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, PrivateFormat

    private = ec.generate_private_key(ec.SECP256R1())
    hidden = BestAvailableEncryption(secret)
    return private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, hidden), _pem(private.public_key())


def configured_signer() -> Signer | None:
    """Return the key to sign with: ENVBUILD_SIGNING_KEY (a file, or the PEM text itself), else the setting
    `signing_key`.

    Returns None if neither is set: evidence is then unsigned. Raises FileError if the key cannot be used, UsageError if
    its passphrase is not available.
    """
    found = _configured()
    return private(*found) if found else None


def for_children() -> dict[str, str]:
    """Return the environment variables with which a child process without a terminal can use the signing key once.

    They contain the key's passphrase, for which the user is prompted here if necessary. Raises FileError if the key
    cannot be used, UsageError if its passphrase is not available.
    """
    found = _configured()
    if found is None:
        return {}
    if b"ENCRYPTED" not in found[0]:
        private(*found)
        return {}
    secret = passphrase(_PROMPT)
    private(*found, secret)
    return {_TYPED: secret}


def take_passphrase() -> None:
    """Move the passphrase that `for_children` returned from the environment to memory, until it is used. Processes that
    start later do not inherit it."""
    if _TYPED in os.environ:
        _taken[:] = [os.environ.pop(_TYPED)]


def _configured() -> tuple[bytes, str] | None:
    named = os.environ.get(KEY)
    if named and "-----BEGIN" in named:
        return named.encode(), KEY
    source = KEY if named else "signing_key in config.yaml"
    named = named or settings.setting("signing_key")
    return (_read(Path(named), "signing key", f"that {source} names"), named) if named else None


def trusted(file: Path | None = None) -> PublicKey | None:
    """Return the public key in `file`, or if that is None, in the file that the setting `public_key` names. Returns
    None if neither is set."""
    named = file or settings.setting("public_key")
    return public(_read(Path(named), "public key"), str(named)) if named else None


def _read(file: Path, what: str, which: str = "") -> bytes:
    """Read at most 64 KiB of a file; ~ is the user's home directory. Raises FileError. `what`, `which`: what messages
    call the file; the default of `which` is its path."""
    hint, named = _KEY_FILES.get(what), f"the {what} {which or file}"
    try:
        with file.expanduser().open("rb") as stream:
            return stream.read(1 << 16)
    except OSError as error:
        raise FileError(f"{named} cannot be read: {error.strerror}", hint=hint) from None
    except (ValueError, RuntimeError) as error:  # a NUL in the path; ~ of a user who does not exist
        raise FileError(f"{named} cannot be read: {error}", hint=hint) from None


_KEY_FILES = {
    "public key": "name the signer's public key: --key team.pub, or keys in the policy",
    "signing key": f"name a private key that `envbuild keygen` wrote: {KEY}=team.key, or signing_key in config.yaml",
}


def public(pem: bytes, name: str) -> PublicKey:
    """Load a public key. Raises FileError unless `pem` is an ECDSA P-256 public key."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        key = load_pem_public_key(pem)
    except (ValueError, UnsupportedAlgorithm):
        raise FileError(f"{name} is not a public key in PEM format", hint="envbuild keygen writes one (.pub)") from None
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise FileError(f"{name} is not an ECDSA P-256 key", hint="envbuild keygen makes one")
    return _public(key)


def _public(key: EllipticCurvePublicKey) -> PublicKey:
    from securesystemslib.signer import SSlibKey

    return PublicKey(_pem(key), SSlibKey.from_crypto(key))


def _pem(key: EllipticCurvePublicKey) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


_PROMPT = "passphrase of the signing key: "


def private(pem: bytes, name: str, secret: str | None = None) -> Signer:
    """Load a private key. `secret`: its passphrase. If `secret` is None and the key is encrypted, `passphrase()`
    provides it.

    Raises FileError unless `pem` is an ECDSA P-256 private key and the passphrase decrypts it, UsageError if the
    passphrase is not available.
    """
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_pem_private_key
    from securesystemslib.signer import CryptoSigner

    if pem.startswith(b"-----BEGIN ") and b"SIGSTORE PRIVATE KEY" in pem:
        raise FileError(f"{name} is a key in cosign's own format, not PKCS #8", hint="envbuild keygen makes one")
    if secret is None and b"ENCRYPTED" in pem:
        secret = passphrase(_PROMPT)
    try:
        key = load_pem_private_key(pem, secret.encode() if secret is not None else None)
    except (ValueError, TypeError, UnsupportedAlgorithm):  # their messages may contain parts of the key
        raise FileError(
            f"{name} cannot be opened: not a private key in PKCS #8 format, or a wrong passphrase",
            hint=f"the passphrase comes from {PASSPHRASE}, {PASSPHRASE_FILE}, or a terminal",
        ) from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP256R1):
        raise FileError(f"{name} is not an ECDSA P-256 key", hint="envbuild keygen makes one")
    return Signer(_public(key.public_key()), CryptoSigner(key))


def passphrase(prompt: str, confirm: bool = False) -> str:
    """Return the passphrase from the environment, a file, or a terminal, in this order. Raises UsageError if none of
    these provides it.

    `confirm`: the user must type it twice at a terminal.
    """
    take_passphrase()
    if _taken:
        return _taken.pop()
    if PASSPHRASE in os.environ:
        return os.environ[PASSPHRASE]
    if os.environ.get(PASSPHRASE_FILE):
        content = _read(Path(os.environ[PASSPHRASE_FILE]), "passphrase file", f"that {PASSPHRASE_FILE} names")
        return content.decode(errors="replace").rstrip("\r\n")
    if sys.stdin.isatty():
        typed = getpass.getpass(prompt)
        if confirm and getpass.getpass("once more: ") != typed:
            raise UsageError("the two passphrases differ")
        return typed
    raise UsageError(
        "the signing key needs a passphrase, and no terminal is available to ask for it",
        hint=f"set {PASSPHRASE_FILE}, or {PASSPHRASE}",
    )


def seal(payload: bytes, signer: Signer | None) -> dict[str, object]:
    """Return the DSSE envelope of a statement; without a signer it has no signature."""
    if signer is None:
        return {"payload": base64.b64encode(payload).decode(), "payloadType": PAYLOAD_TYPE, "signatures": []}
    from securesystemslib import dsse

    envelope = dsse.Envelope(payload, PAYLOAD_TYPE, {})
    envelope.sign(signer.signer)
    return dict(envelope.to_dict())


def envelope_payload(envelope: Envelope) -> bytes:
    """Return the payload of an envelope, without checking its signatures. Raises Malformed."""
    try:
        found = _Payload.model_validate(envelope)
        if found.payloadType != PAYLOAD_TYPE:
            raise Malformed("the envelope holds no in-toto statement")
        return base64.b64decode(found.payload, validate=True)
    except ValueError:
        raise Malformed("the envelope is not DSSE") from None


def envelope_signatures(envelope: Envelope) -> list[bytes]:
    """Return the signatures of an envelope, without checking them. Raises Malformed."""
    try:
        found = _Signatures.model_validate(envelope).signatures
        return [base64.b64decode(item.sig, validate=True) for item in found]
    except ValueError:
        raise Malformed("the envelope's signatures are not in DSSE format") from None


def signed_statement(envelope: Envelope, keys: Sequence[PublicKey]) -> dict[str, object]:
    """Return the statement in an envelope after checking that one of `keys` signed it. Only the first 16 signatures are
    tried. Raises Refusal.

    The key ids in the envelope are ignored: they are only hints, and sigstore bundles leave them empty.
    """
    from securesystemslib import dsse
    from securesystemslib.exceptions import UnverifiedSignatureError, VerificationError
    from securesystemslib.signer import Signature

    content, found = envelope_payload(envelope), envelope_signatures(envelope)
    if not found:
        raise Refusal("unsigned", "the evidence is not signed")
    signed = dsse.Envelope(content, PAYLOAD_TYPE, {}).pae()
    for key in keys:
        for signature in found[:16]:
            try:
                key.key.verify_signature(Signature(key.key.keyid, signature.hex()), signed)
            except (UnverifiedSignatureError, VerificationError):
                continue
            return strict_and_canonical_json.parse(content, "the statement")
    if not keys:
        raise Refusal("no-key", NO_KEY)
    raise Refusal("signature", "this evidence was not signed with a trusted key, or was changed afterwards")
