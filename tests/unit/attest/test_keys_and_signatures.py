from __future__ import annotations

import base64
import copy
import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from envbuild.attest import keys_and_signatures
from envbuild.attest.keys_and_signatures import Signer
from envbuild.util import settings, user_folders
from envbuild.util.errors import FileError, UsageError
from envbuild.util.untrusted_input_errors import Refusal
from unit.support import envbuild

SECRET = "correct horse battery staple"
STATEMENT = {"_type": "https://in-toto.io/Statement/v1", "subject": [], "predicate": {"result": "PASSED"}}
PAYLOAD = json.dumps(STATEMENT).encode()


@pytest.fixture
def signer(monkeypatch: pytest.MonkeyPatch) -> Signer:
    return new_signer(monkeypatch)


def new_signer(monkeypatch: pytest.MonkeyPatch) -> Signer:
    monkeypatch.setenv("ENVBUILD_KEY_PASSPHRASE", SECRET)
    return keys_and_signatures.private(keys_and_signatures.generate(SECRET)[0], "key")


def refused(envelope: dict[str, Any], *signers: Signer) -> str:
    with pytest.raises(Refusal) as caught:
        keys_and_signatures.signed_statement(envelope, [signer.public for signer in signers])
    return caught.value.reason.id


# envelopes


def test_a_signed_statement_is_opened(signer: Signer) -> None:
    envelope = keys_and_signatures.seal(PAYLOAD, signer)
    assert envelope["payloadType"] == "application/vnd.in-toto+json"
    assert keys_and_signatures.signed_statement(json.loads(json.dumps(envelope)), [signer.public]) == STATEMENT


def test_key_ids_are_only_hints(signer: Signer) -> None:
    envelope: Any = keys_and_signatures.seal(PAYLOAD, signer)
    envelope["signatures"][0]["keyid"] = ""
    assert keys_and_signatures.signed_statement(envelope, [signer.public]) == STATEMENT


def test_another_keys_signature_is_refused(signer: Signer, monkeypatch: pytest.MonkeyPatch) -> None:
    other = new_signer(monkeypatch)
    assert refused(keys_and_signatures.seal(PAYLOAD, other), signer) == "signature"
    assert (
        keys_and_signatures.signed_statement(keys_and_signatures.seal(PAYLOAD, other), [signer.public, other.public])
        == STATEMENT
    )


def test_an_envelope_without_a_signature_is_unsigned(signer: Signer) -> None:
    assert refused(keys_and_signatures.seal(PAYLOAD, None), signer) == "unsigned"


def test_without_a_key_nothing_is_believed(signer: Signer) -> None:
    assert refused(keys_and_signatures.seal(PAYLOAD, signer)) == "no-key"


def test_one_changed_byte_anywhere_is_refused(signer: Signer) -> None:
    whole: Any = keys_and_signatures.seal(PAYLOAD, signer)
    for at in range(len(PAYLOAD)):
        changed = bytearray(PAYLOAD)
        changed[at] ^= 1
        assert refused({**whole, "payload": base64.b64encode(changed).decode()}, signer) == "signature"
    signed = base64.b64decode(whole["signatures"][0]["sig"])
    for at in range(len(signed)):
        envelope = copy.deepcopy(whole)
        spoilt = signed[:at] + bytes([signed[at] ^ 1]) + signed[at + 1 :]
        envelope["signatures"][0]["sig"] = base64.b64encode(spoilt).decode()
        assert refused(envelope, signer) == "signature"


@pytest.mark.parametrize(
    "change",
    [
        {"payload": "*"}, {"payload": None}, {"payloadType": "text/plain"}, {"signatures": None}, {"signatures": [1]},
        {"signatures": [{"sig": "*"}]}, {"signatures": {"a": 1}},
    ],
)  # fmt: skip
def test_an_invalid_envelope_is_malformed(signer: Signer, change: dict[str, Any]) -> None:
    assert refused({**keys_and_signatures.seal(PAYLOAD, signer), **change}, signer) == "malformed"


# keys


@pytest.mark.parametrize("which", [0, 1])
def test_a_key_that_cannot_be_written_whole_leaves_neither_file(
    project: Path, monkeypatch: pytest.MonkeyPatch, which: int
) -> None:
    """Otherwise the next keygen would find an empty file of that name, and refuse."""
    monkeypatch.setenv("ENVBUILD_KEY_PASSPHRASE", "x")
    calls = iter(range(9))

    def fsync(handle: int) -> None:
        if next(calls) == which:
            raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(os, "fsync", fsync)
    assert envbuild("keygen", "-o", "team").code == 6
    assert not list(project.glob("team.*"))
    assert envbuild("keygen", "-o", "team").code == 0


def test_keygen_writes_an_encrypted_key_that_signs(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENVBUILD_KEY_PASSPHRASE", SECRET)
    done = envbuild("keygen", "-o", "team", "--json")
    assert done.code == 0, done.stderr
    assert set(done.document) == {"private_key", "public_key", "fingerprint"}
    private = Path("team.key")
    assert b"ENCRYPTED PRIVATE KEY" in private.read_bytes()
    assert stat.S_IMODE(private.stat().st_mode) == 0o600
    monkeypatch.setenv("ENVBUILD_SIGNING_KEY", str(private))
    signer = keys_and_signatures.configured_signer()
    assert signer is not None
    assert signer.public == keys_and_signatures.trusted(Path("team.pub"))
    assert signer.public.fingerprint == done.document["fingerprint"]
    assert SECRET not in done.stdout + done.stderr
    again = envbuild("keygen", "-o", "team")
    assert (again.code, "exists already" in again.stderr) == (2, True)


def test_keygen_shows_the_path_as_it_was_typed_and_what_to_do_next(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENVBUILD_KEY_PASSPHRASE", SECRET)
    done = envbuild("keygen", "-o", "./team")
    assert (done.code, done.stdout) == (0, "./team.key ./team.pub\n")
    assert "ENVBUILD_SIGNING_KEY=./team.key" in done.stderr
    assert "envbuild verify REF --key ./team.pub" in done.stderr
    assert "error: ./team.key exists already" in envbuild("keygen", "-o", "./team").stderr
    assert envbuild("keygen", "-o", "./other", "--json").document["private_key"] == "./other.key"


@pytest.mark.parametrize("name", ["", "keys/", ".."])
def test_keygen_refuses_the_name_of_a_folder(project: Path, name: str) -> None:
    done = envbuild("keygen", "-o", name)
    assert (done.code, "is not the name of a file" in done.stderr) == (2, True)


def test_an_empty_passphrase_is_refused(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENVBUILD_KEY_PASSPHRASE", "")
    assert envbuild("keygen").code == 2
    assert [file.name for file in project.iterdir()] == ["profiles"]


@pytest.mark.parametrize(
    ("secret", "message"),
    [("\u00fc" * 512, "the passphrase is longer than 1023 bytes"), ("a\udcff", "the passphrase is not valid UTF-8")],
    ids=["long", "invalid"],
)
def test_a_passphrase_that_cannot_encrypt_a_key_is_refused(
    project: Path, monkeypatch: pytest.MonkeyPatch, secret: str, message: str
) -> None:
    monkeypatch.setenv("ENVBUILD_KEY_PASSPHRASE", secret)
    done = envbuild("keygen", "-o", "new/team")
    assert (done.code, f"error: {message}" in done.stderr) == (2, True), done.stderr
    assert [file.name for file in project.iterdir()] == ["profiles"]
    monkeypatch.setenv("ENVBUILD_KEY_PASSPHRASE", "x" * 1023)
    assert envbuild("keygen", "-o", "new/team").code == 0


def test_the_key_comes_from_the_environment_or_the_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert keys_and_signatures.configured_signer() is None
    private, public = keys_and_signatures.generate(SECRET)
    (tmp_path / "a.key").write_bytes(private)
    (tmp_path / "a.pub").write_bytes(public)
    (tmp_path / "secret").write_text(f"{SECRET}\n", encoding="utf-8")
    monkeypatch.setenv("ENVBUILD_KEY_PASSPHRASE_FILE", str(tmp_path / "secret"))
    monkeypatch.setenv("ENVBUILD_SIGNING_KEY", private.decode())
    signer = keys_and_signatures.configured_signer()
    assert signer is not None
    monkeypatch.delenv("ENVBUILD_SIGNING_KEY")
    user_folders.config_file().parent.mkdir(parents=True)
    text = f"signing_key: {tmp_path}/a.key\npublic_key: {tmp_path}/a.pub\n"
    user_folders.config_file().write_text(text, encoding="utf-8")
    settings.settings_document.cache_clear()
    assert keys_and_signatures.configured_signer() == signer
    assert keys_and_signatures.trusted() == signer.public


def test_the_error_for_a_wrong_passphrase_reveals_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    private, _ = keys_and_signatures.generate(SECRET)
    monkeypatch.setenv("ENVBUILD_KEY_PASSPHRASE", "hunter2")
    with pytest.raises(FileError) as caught:
        keys_and_signatures.private(private, "team.key")
    shown = f"{caught.value.message} {caught.value.hint}"
    assert "hunter2" not in shown
    assert "team.key cannot be opened" in shown


def test_without_passphrase_and_terminal_it_says_where_to_put_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", open(os.devnull))  # noqa: SIM115, PTH123
    with pytest.raises(UsageError, match="no terminal"):
        keys_and_signatures.private(keys_and_signatures.generate(SECRET)[0], "key")


def test_other_kinds_of_keys_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

    for key in (ec.generate_private_key(ec.SECP384R1()), ed25519.Ed25519PrivateKey.generate()):
        pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        with pytest.raises(FileError, match="not an ECDSA P-256 key"):
            keys_and_signatures.private(pem, "key")
        pem = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        with pytest.raises(FileError, match="not an ECDSA P-256 key"):
            keys_and_signatures.public(pem, "key")
    for text in (b"", b"junk", b"-----BEGIN ENCRYPTED SIGSTORE PRIVATE KEY-----\n"):
        with pytest.raises(FileError):
            keys_and_signatures.private(text, "key")
        with pytest.raises(FileError, match="not a public key"):
            keys_and_signatures.public(text, "key")
    with pytest.raises(FileError, match="cannot be read"):
        keys_and_signatures.trusted(Path("nowhere.pub"))


@pytest.mark.parametrize("name", ["ENVBUILD_SIGNING_KEY", "ENVBUILD_KEY_PASSPHRASE_FILE"])
def test_a_secret_in_the_variable_of_a_file_is_not_shown(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a key in base64, or the passphrase itself."""
    private, _ = keys_and_signatures.generate(SECRET)
    monkeypatch.setenv("ENVBUILD_SIGNING_KEY", private.decode())
    for value in (base64.b64encode(private).decode(), SECRET, f"~{SECRET}", f"{SECRET}/x"):
        monkeypatch.setenv(name, value)
        with pytest.raises(FileError, match=f"that {name} names cannot be read") as caught:
            keys_and_signatures.configured_signer()
        assert SECRET not in f"{caught.value}{caught.value.hint}" and value[:20] not in str(caught.value)


def test_a_secret_in_the_setting_of_a_file_is_not_shown() -> None:
    user_folders.config_file().parent.mkdir(parents=True)
    private, _ = keys_and_signatures.generate(SECRET)
    for value in (private.decode(), base64.b64encode(private).decode()):
        user_folders.config_file().write_text(f"signing_key: {json.dumps(value)}\n", encoding="utf-8")
        settings.settings_document.cache_clear()
        with pytest.raises(FileError, match=r"that signing_key in config\.yaml names cannot be read") as caught:
            keys_and_signatures.configured_signer()
        assert value[:20] not in f"{caught.value}{caught.value.hint}"


@pytest.mark.parametrize("path", ["~nobody-is-called-that/team.pub", "team\0.pub", "nosuch.pub"])
def test_a_path_that_names_no_file_is_a_usage_error(path: str) -> None:
    with pytest.raises(FileError, match="cannot be read"):
        keys_and_signatures.trusted(Path(path))


def test_a_path_of_the_users_folder_is_followed(signer: Signer) -> None:
    Path.home().joinpath("team.pub").write_bytes(signer.public.pem)
    found = keys_and_signatures.trusted(Path("~/team.pub"))
    assert found == signer.public


def test_children_get_the_passphrase_that_was_asked_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert keys_and_signatures.for_children() == {}
    calls: list[str] = []
    private, _ = keys_and_signatures.generate(SECRET)
    monkeypatch.setenv("ENVBUILD_SIGNING_KEY", private.decode())

    def ask(prompt: str) -> str:
        calls.append(prompt)
        return SECRET

    with monkeypatch.context() as here:
        here.setattr(keys_and_signatures, "passphrase", ask)
        given = keys_and_signatures.for_children()
    assert (list(given.values()), len(calls)) == ([SECRET], 1)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    keys_and_signatures.take_passphrase()  # at the start, so that no child process inherits it until it signs
    assert SECRET not in os.environ.values()
    assert keys_and_signatures.configured_signer()
    with pytest.raises(UsageError, match="no terminal"):  # one time
        keys_and_signatures.configured_signer()
    monkeypatch.setattr(keys_and_signatures, "passphrase", lambda prompt: "wrong")
    with pytest.raises(FileError, match="cannot be opened"):
        keys_and_signatures.for_children()
