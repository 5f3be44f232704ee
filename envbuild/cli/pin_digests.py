from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import click

from envbuild.attest import image_digest_pinning
from envbuild.cli.command_options import json_option
from envbuild.cli.console import emit
from envbuild.registry.oci_types import Reference
from envbuild.registry.registry_client import Repository
from envbuild.util.atomic_files import write_atomically
from envbuild.util.errors import Fault, FileError, NetworkError, OutOfDate, UsageError
from envbuild.util.json_output_types import plain


@dataclass(frozen=True)
class PinnedDigest:
    """A reference to an image in a file. `state`: outdated if the reference had no digest or a different one. `before`:
    the digest that the reference had, or null. `digest`: the digest that the tag names now."""

    file: str
    line: int
    reference: str
    state: Literal["current", "outdated"]
    before: str | None
    digest: str


@dataclass(frozen=True)
class PinnedDigests:
    """The document of `pin-digests`."""

    pins: tuple[PinnedDigest, ...]


@click.command("pin-digests", short_help="Write digests of verified images into Dockerfiles and CI files.")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path, dir_okay=False), metavar="FILE...")
@click.option("--check", is_flag=True, help="Only check: exit 8 if a digest is missing or out of date.")
@json_option
def command(files: tuple[Path, ...], check: bool, as_json: bool) -> None:
    """Add the current digest to every REGISTRY/NAME:verified in files. The files then use the same image even after the
    tag has moved.

    Only asks the registry for the digest; `envbuild verify` checks whether the image can be trusted.
    Example: envbuild pin-digests Dockerfile .gitlab-ci.yml
    """
    done = [(file, *image_digest_pinning.pinned(_text(file), _digest)) for file in files]
    if not any(found for _, _, found in done):
        raise UsageError(
            "no file names an image as REGISTRY/NAME:verified", hint="as in FROM registry.example/h20:verified"
        )
    rows = tuple(
        PinnedDigest(str(file), pin.line, pin.image, "current" if pin.current else "outdated", pin.before, pin.after)
        for file, _, found in done
        for pin in found
    )
    stale = [
        Fault(f"{pin.image} is {pin.after}", str(file), pin.line)
        for file, _, found in done
        for pin in found
        if not pin.current
    ]
    if check and stale:
        error = OutOfDate("digests are missing or out of date", hint="run: envbuild pin-digests FILE...", faults=stale)
        error.partial = plain(PinnedDigests(rows))
        raise error
    for file, text, found in done:
        if not check and not all(pin.current for pin in found):
            mode = file.stat().st_mode
            write_atomically(file, text)
            file.chmod(mode)
    if as_json:
        emit(PinnedDigests(rows))
        return
    for fault in stale:
        click.echo(str(fault))


def _text(file: Path) -> str:
    try:
        return file.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(f"{file} cannot be read: {getattr(error, 'strerror', None) or 'not UTF-8'}") from None


@cache
def _digest(image: str) -> str:
    reference = Reference.parse(image)
    found = Repository(reference).manifest(reference.target)
    if found is None:
        raise NetworkError(f"image not found: {image}", hint="envbuild push NAME REGISTRY/NAME publishes it")
    return found.digest
