from dataclasses import dataclass
from pathlib import Path

import click

from envbuild.cli.command_options import json_option
from envbuild.cli.console import emit
from envbuild.facts import gpu_name_lookup
from envbuild.profile import profile_and_lock_name_lookup, starter_profile
from envbuild.resolve import profile_reader_and_overrides
from envbuild.util import package_data
from envbuild.util.atomic_files import write_within
from envbuild.util.errors import ProfileError, UsageError
from envbuild.util.yaml_and_project_paths import display


@dataclass(frozen=True)
class NewProfile:
    """The document of `init`."""

    profile: str
    file: str


@click.command("init", short_help="Write a new profile: for a GPU, or from an image or environment.")
@click.argument("name")
@click.option("--from", "parent", metavar="PROFILE", help="The profile that the new one extends.")
@click.option(
    "--from-image", "image", metavar="IMAGE", help="Write a profile from the contents of an image of the engine."
)
@click.option(
    "--from-env", "python", metavar="PATH",
    help="Write a profile from the contents of an environment of this machine; PATH is its folder or its interpreter. "
    "Needs no engine.",
)  # fmt: skip
@json_option
def command(name: str, parent: str | None, image: str | None, python: str | None, as_json: bool) -> None:
    """Write profiles/NAME.yaml, a commented profile. It extends another profile, or lists the contents of an image or
    an environment. Without an option, NAME is a GPU that has no profile yet, or the name of a line of that GPU.

    An existing file is never replaced.

    Example: envbuild init rtx5080-laptop
    Example: envbuild init rtx3090-cu12
    Example: envbuild init myproject --from h20
    Example: envbuild init myproject --from-env .venv
    Example: envbuild init myproject --from-image colleague:tag
    """
    given = [one for one in (parent, image, python) if one is not None]
    if len(given) > 1:
        raise UsageError(f"give one of {_SOURCES}", hint=_AS_IN)
    if not given:
        _written(write_for_gpu(_gpu(name)), as_json)
        return
    if not profile_and_lock_name_lookup.NAME.fullmatch(name):
        raise UsageError(f"{name!r} cannot be used in an image name: use lower case letters, digits and dashes")
    file = Path.cwd() / "profiles" / f"{name}.yaml"
    if file.exists():
        raise UsageError(f"{display(file)} exists already", hint="choose another name, or edit the file")
    if image is not None:
        text = _from_image(name, image)
    elif python is not None:
        text = _from_environment(name, python)
    else:
        text = starter_profile.starter_profile(name, profile_reader_and_overrides.load(str(parent)))
    if (package_data.PROFILES / f"{name}.yaml").is_file():
        click.echo(f"note: here, {display(file)} takes precedence over the shipped profile {name}", err=True)
    write_within(Path.cwd(), file, text)
    _written(file, as_json)


_SOURCES = "--from PROFILE, --from-image IMAGE or --from-env PATH"
_AS_IN = "envbuild init myproject --from h20"


def write_for_gpu(name: str) -> Path:
    """Write a profile for a known GPU that has none, or for one of its CUDA lines, and return the file."""
    file = Path.cwd() / "profiles" / f"{name}.yaml"
    write_within(Path.cwd(), file, starter_profile.for_gpu(name))
    return file


def _written(file: Path, as_json: bool) -> None:
    if as_json:
        emit(NewProfile(file.stem, display(file)))
    else:
        click.echo(f"{display(file)}; next: envbuild show {file.stem}")


def _gpu(name: str) -> str:
    """Return the name of the profile for the GPU, or the line of a GPU, that `name` means, if it has no profile. Raises
    an error with the reason if there is such a profile, or if `name` is not a GPU."""
    try:
        there = profile_and_lock_name_lookup.meant(name)
    except profile_and_lock_name_lookup.UnwrittenProfile as missing:
        return missing.name
    except ProfileError:
        if gpu_name_lookup.candidates(name):  # several GPUs, or one that envbuild does not support
            raise
        near = gpu_name_lookup.suggestion(name, ())
        raise UsageError(f"give one of {_SOURCES}, or the name of a GPU", hint=near or _AS_IN) from None
    raise UsageError(
        f"the profile {there.name} exists already", hint=f"to extend it: envbuild init myproject --from {there.name}"
    )


def _from_image(name: str, reference: str) -> str:
    """Draft a profile from an image. The engine's client is imported only here."""
    from envbuild.audit import image_collector, profile_draft
    from envbuild.image.docker_engine import Engine

    engine = Engine()
    held = image_collector.collect_from_image(engine, engine.get(reference), reference)
    return profile_draft.draft_profile(name, reference, held)


def _from_environment(name: str, python: str) -> str:
    """Draft a profile from an environment. The audit is imported only here."""
    from envbuild.audit import profile_draft
    from envbuild.cli import audit

    found, held = audit.collect_from_environment(python)
    return profile_draft.draft_profile(name, str(found), held, "environment")
