import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import click

from envbuild.attest import keys_and_signatures
from envbuild.cli import output_files
from envbuild.cli.command_options import json_option
from envbuild.cli.console import emit
from envbuild.util.errors import UsageError


@dataclass(frozen=True)
class KeyPair:
    """The document of `keygen`: two files, and the fingerprint of the public key."""

    private_key: str
    public_key: str
    fingerprint: str


@click.command("keygen", short_help="Create a key pair to sign evidence with.")
@click.option(
    "-o",
    "--output",
    "name",
    default="envbuild",
    metavar="NAME",
    help="Writes NAME.key and NAME.pub; default: envbuild.",
)
@json_option
def command(name: str, as_json: bool) -> None:
    """Create an ECDSA P-256 key pair: the private NAME.key, encrypted with a passphrase, and the public NAME.pub.

    The passphrase comes from ENVBUILD_KEY_PASSPHRASE, else from the file ENVBUILD_KEY_PASSPHRASE_FILE, else from the
    terminal. To sign with the key, name it in ~/.config/envbuild/config.yaml: signing_key: PATH.
    Example: envbuild keygen -o team
    """
    if not name or name.endswith("/") or Path(name).name in ("", ".."):
        raise UsageError(f"{name!r} is not the name of a file", hint=f"add a name: {Path(name or '.') / 'team'}")
    typed = (f"{name}.key", f"{name}.pub")  # messages show the path as the user wrote it
    private, public = map(Path, typed)
    for shown in typed:
        if Path(shown).exists():
            hint = f"choose another name, such as -o {name}2: an existing key is never replaced"
            raise UsageError(f"{shown} exists already", hint=hint)
    pems = keys_and_signatures.generate(keys_and_signatures.passphrase("passphrase for the new key: ", confirm=True))
    output_files.prepare(Path(name), text=False)
    _write({private: (pems[0], 0o600), public: (pems[1], 0o644)})
    fingerprint = keys_and_signatures.public(pems[1], str(public)).fingerprint
    if as_json:
        emit(KeyPair(*typed, fingerprint))
    else:
        click.echo(" ".join(typed))
        key = shlex.quote(typed[0])
        click.echo(f"to sign:   export {keys_and_signatures.KEY}={key}; or in {_SETTINGS}: signing_key: PATH", err=True)
        click.echo(f"to verify: give others {typed[1]}; envbuild verify REF --key {shlex.quote(typed[1])}", err=True)


_SETTINGS = "~/.config/envbuild/config.yaml"


def _write(files: Mapping[Path, tuple[bytes, int]]) -> None:
    """Write all files with their permissions, or none. An existing file is never replaced. Raises OSError."""
    made: list[Path] = []
    try:
        for file, (raw, mode) in files.items():
            with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as stream:
                made.append(file)
                stream.write(raw)
                stream.flush()
                os.fsync(stream.fileno())
    except BaseException:
        for file in made:
            file.unlink()
        raise
