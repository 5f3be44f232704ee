from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from envbuild.audit import collected_environment, environment_audit
from envbuild.audit.collected_environment import Holdings
from envbuild.audit.environment_audit import NO_TORCH, NOTHING, Audit, Expected
from envbuild.cli.command_options import json_option, judged_gpus_option
from envbuild.cli.console import Console, emit, table
from envbuild.facts.gpu_fact_types import Gpu
from envbuild.image.image_naming import LOCK_LABEL
from envbuild.lock import lock_file, wheel_file_hashes_and_contents
from envbuild.profile import profile_and_lock_name_lookup
from envbuild.resolve import profile_reader_and_overrides
from envbuild.util.errors import EnvbuildError, FileError, UsageError, some
from envbuild.util.json_output_types import plain

if TYPE_CHECKING:  # auditing an environment must not import the engine's client
    from envbuild.image.docker_engine import Image


@click.command("audit", short_help="List what an image or environment contains and what is wrong.")
@click.argument("image", required=False)
@click.option("--python", "python", metavar="PATH", help="Audit this interpreter, or the environment in this folder.")
@click.option("--here", is_flag=True, help="Audit the shell's active environment, else that of python3 on PATH.")
@click.option("--profile", "name", metavar="NAME", help="Judge for this profile's GPUs, and compare with its lock.")
@judged_gpus_option
@json_option
def command(
    image: str | None, python: str | None, here: bool, name: str | None, gpus: tuple[Gpu, ...], as_json: bool
) -> None:
    """Show which CUDA libraries, torch and distributions are installed and loaded, and what is wrong with them.

    Evidence is not checked: use status, or verify for an image in a registry. Needs no GPU; --here and --python need no
    Docker. Without --profile and --gpu, an environment is judged for the GPUs of this machine, and an image for the
    profile it was built from. Exit 5: there is a defect or a refusal. A refusal is a known fault that rules out an
    installed version, or (in an image or with --profile) a file that runs code when Python starts or torch is imported,
    unless it is accepted. Exit 3: torch is not installed; the libraries and distributions are still listed. --here
    skips envbuild's own environment if that has no torch, and takes the next python3 on PATH.
    Example: envbuild audit --here --gpu h100
    """
    given = [name for name, there in (("IMAGE", image), ("--python", python), ("--here", here)) if there]
    if not given:
        raise UsageError("nothing to audit: give IMAGE, --python PATH or --here", hint="envbuild audit --here")
    if len(given) > 1:
        raise UsageError(f"more than one target: {' and '.join(given)}", hint=_ONE)
    if name and gpus:
        raise UsageError("--profile has GPUs already: give one of --profile and --gpu")
    wanted = _expected(name) if name else environment_audit.of_gpus(gpus, image=bool(image)) if gpus else None
    found = image or python or nearest_python()
    Console().say(f"reading libraries, packages and files of {found}; this can take a minute")
    done = _image(found, wanted) if image is not None else _environment(found, wanted)
    empty = done.held.torch is None and not done.failed
    if as_json and not done.failed and not empty:
        emit(done.document())
    elif not as_json:
        _show(done)
    done.require()
    if empty:
        other = "another image: envbuild audit IMAGE" if image else "another environment: envbuild audit --python PATH"
        error = FileError(f"{done.target}: {NOTHING}", hint=f"name {other}")
        error.partial = plain(done.document())
        raise error


_ONE = "give one of: IMAGE, --here (the environment of this shell), --python PATH (another environment)"


def _image(reference: str, wanted: Expected | None) -> Audit:
    from envbuild.audit import image_collector
    from envbuild.image.docker_engine import Engine

    engine = Engine()
    image = engine.get(reference)
    if wanted and wanted.lock:
        wanted = replace(wanted, claimed=image.labels.get(LOCK_LABEL) == wanted.lock.id)
    wanted = wanted or contents_by_label(image) or Expected()
    held = image_collector.collect_from_image(engine, image, reference, wheel_contents(wanted))
    return environment_audit.assess(reference, held, wanted)


def _environment(python: str, wanted: Expected | None) -> Audit:
    found, held = collect_from_environment(python, wanted)
    return environment_audit.assess(
        str(found), held, replace(wanted, image=False) if wanted else environment_audit.of_machine(held)
    )


def collect_from_environment(python: str, wanted: Expected | None = None) -> tuple[Path, Holdings]:
    """Return the interpreter for `python` (the path of an interpreter or of an environment), and the contents of its
    environment."""
    from envbuild.runners import host_runner

    found, job = host_runner.find_interpreter(python), environment_audit.collector_job("", "", wheel_contents(wanted))
    return found, collected_environment.read(host_runner.run_on_host(found, job), job.nonce, str(found))


def wheel_contents(wanted: Expected | None) -> dict[str, dict[str, str]]:
    """Return the sha256 of the files in each locked wheel, as collector_job takes them; empty without a lock."""
    return wheel_file_hashes_and_contents.wheel_hashes(wanted.lock) if wanted and wanted.lock else {}


def nearest_python() -> str:
    """Return the active environment's interpreter, else the first on PATH. envbuild's own interpreter is used only if
    it has torch."""
    own = None if importlib.util.find_spec("torch") else Path(sys.prefix, "bin").resolve()
    found = next((python for python in _interpreters() if python.parent.resolve() != own), None)
    if found is None:
        text = "nothing to audit: VIRTUAL_ENV, CONDA_PREFIX and PATH lead only to envbuild's own Python"
        raise FileError(text, hint="name an environment: envbuild audit --python PATH")
    return str(found)


def _interpreters() -> Iterator[Path]:
    named = filter(None, map(os.environ.get, ("VIRTUAL_ENV", "CONDA_PREFIX")))
    folders, searched = [Path(folder, "bin") for folder in named], list(map(Path, os.get_exec_path()))
    if all(folder in searched for folder in folders):  # the one that was activated last comes first on PATH
        folders.sort(key=searched.index)
    yield from (folder / "python" for folder in folders if (folder / "python").exists())
    for name in ("python3", "python"):
        yield from (Path(found) for folder in os.get_exec_path() if (found := shutil.which(name, path=folder)))


def _expected(name: str) -> Expected:
    loaded = profile_reader_and_overrides.load(name)
    return environment_audit.expected_contents(loaded, lock_file.read(loaded.known_lock))


def contents_by_label(image: Image) -> Expected | None:
    """Return what to compare an image with: the profile whose lock the image's label names. None if no known profile
    has that lock."""
    label = image.labels.get(LOCK_LABEL)
    for name in profile_and_lock_name_lookup.profile_names() if label else ():
        try:
            loaded = profile_reader_and_overrides.load(name)
            locked = lock_file.read(loaded.known_lock)
        except EnvbuildError:
            continue  # an error in a different profile
        if locked and locked.id == label:
            return environment_audit.expected_contents(loaded, locked, claimed=True)
    return None


def _show(done: Audit) -> None:
    held, torch = done.held, done.held.torch
    judged_for = done.wanted.profile or ", ".join(gpu.id for gpu in done.wanted.gpus)
    judged = f"; judged for {judged_for}" if judged_for else ""
    click.echo(f"{done.target}: Python {held.python.version}, {_torch_line(done)}{judged}")
    rows = [(c.library, c.version or "?", "loaded" if c.loaded else "", c.path) for c in held.libraries]
    for line in table(rows):
        click.echo(f"  {line}")
    if not rows:
        click.echo("  no CUDA libraries")
    if torch is None:
        click.echo(f"  {some(len(held.installed), 'distribution')}{':' if held.installed else ''}")
        for line in table(sorted(held.installed.items())):
            click.echo(f"    {line}")
    for line in table(_extensions(done)):
        click.echo(f"  {line}")
    for finding in done.findings:
        click.echo(f"{finding.severity:<7} {finding.id}: {finding.message}")
        if finding.remedy:
            click.echo(f"        fix: {finding.remedy}")
    click.echo(done.summary)


def _extensions(done: Audit) -> list[tuple[str, ...]]:
    """Return the files that were compiled against torch or for a GPU: (distribution, module or file, architectures)."""
    return [
        (name, version, file.module or file.path, " ".join(file.architectures or ("host code",)))
        for (name, version), files in done.held.extended.items()
        for file in files
        if file.there
    ]


def _torch_line(done: Audit) -> str:
    torch = done.held.torch
    if torch is None:
        return NO_TORCH
    version = torch.version or done.held.installed.get("torch", "of unknown version")
    built = f"CUDA {torch.cuda}" if torch.cuda else f"ROCm {torch.hip}" if torch.hip else "no CUDA"
    return f"torch {version} ({built if torch.imported else 'not imported'})"
