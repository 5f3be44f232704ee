import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from envbuild.attest import ci_job_renderer
from envbuild.cli import output_files
from envbuild.cli.command_options import json_option, profile_argument
from envbuild.cli.console import emit, listener
from envbuild.cli.export_documents import CiJob, ExportedFile
from envbuild.cli.multi_profile_loop import for_each
from envbuild.cli.output_files import output_option
from envbuild.evidence import profile_proofs_and_image_states
from envbuild.image import container_definition_export
from envbuild.lock import lock_file, project_and_conda_export, requirements_export
from envbuild.lock.lock_file import Lock
from envbuild.profile import model as profile_model
from envbuild.profile.loaded_profile import LoadedProfile
from envbuild.registry.oci_types import Reference
from envbuild.resolve import plan_resolver, profile_reader_and_overrides
from envbuild.testrun import exported_check_script, selftest_job
from envbuild.util import settings
from envbuild.util.errors import UsageError
from envbuild.util.yaml_and_project_paths import display

Content = Callable[[LoadedProfile, Lock], str]
"""Returns the text of a profile's exported file."""


@click.group("export", short_help="Write requirements, constraints, a CI job, ... for other tools.")
def command() -> None:
    """Write files for other tools: for machines without envbuild, for CI systems and for editors.

    Package managers and containers use these files without envbuild. Comments in each file list the pins that take
    effect, and those that the tool cannot enforce.

    Example: envbuild export requirements h20
    Example: envbuild export ci github h20
    """


def _lock_command(name: str, short_help: str, file_name: str) -> Callable[[Content], Content]:
    """Return a decorator that adds a subcommand of `export`. The command writes one file for each profile, with the
    text that the decorated function returns. The docstring of this function is the command's help.

    `file_name`: the default name of the file, with {} for the profile's name.
    """

    def add(content: Content) -> Content:
        @command.command(name, short_help=short_help, help=content.__doc__)
        @profile_argument("names", nargs=-1, required=True)
        @output_option(file_name.format("NAME"))
        @json_option
        def write(names: tuple[str, ...], file: Path | None, as_json: bool) -> None:
            _write_for_locks(names, file, file_name, content, as_json)

        return content

    return add


@_lock_command("requirements", "Write the locked versions with their hashes.", "requirements-{}.txt")
def _requirements(loaded: LoadedProfile, locked: Lock) -> str:
    """Write the locked versions with their hashes, to install them with pip or uv without a container.

    Example: envbuild export requirements h20
    Example: pip install --no-deps --require-hashes -r requirements-h20.txt
    """
    return requirements_export.requirements(locked, loaded.name)


@_lock_command("constraints", "Write only the locked versions.", "constraints-{}.txt")
def _constraints(loaded: LoadedProfile, locked: Lock) -> str:
    """Write the locked versions as constraints, to keep them while other packages are installed.

    pip refuses a constraint that contradicts what torch requires, so overrides are left out. Comments in the file
    contain the commands that keep the overridden versions.

    Example: envbuild export constraints h20
    Example: pip install -c constraints-h20.txt transformers
    """
    return requirements_export.constraints(locked, loaded.name)


@_lock_command("uv", "Write a pyproject.toml for uv.", "uv-{}.toml")
def _uv(loaded: LoadedProfile, locked: Lock) -> str:
    """Write the locked versions as a project of uv, with overrides of what torch requires.

    Example: envbuild export uv h20 -o h20/pyproject.toml
    Example: uv sync --project h20
    """
    return project_and_conda_export.uv_project(locked, loaded.name)


@_lock_command("poetry", "Write a pyproject.toml for Poetry.", "poetry-{}.toml")
def _poetry(loaded: LoadedProfile, locked: Lock) -> str:
    """Write the locked versions as a project of Poetry.

    Poetry cannot override what torch requires, so overrides are left out. A comment in the file contains the command
    that installs the overridden versions.

    Example: envbuild export poetry h20 -o h20/pyproject.toml
    Example: poetry install --project h20
    """
    return project_and_conda_export.poetry_project(locked, loaded.name)


@_lock_command("conda", "Write an environment.yml for conda.", "environment-{}.yml")
def _conda(loaded: LoadedProfile, locked: Lock) -> str:
    """Write an environment for conda or mamba: Python from conda, the locked wheels with their hashes by pip.

    Example: envbuild export conda h20
    Example: PIP_NO_DEPS=1 conda env create -f environment-h20.yml
    """
    return project_and_conda_export.conda_environment(locked, loaded.name)


@_lock_command("dockerfile", "Write a Dockerfile that needs no envbuild.", "Dockerfile-{}")
def _dockerfile(loaded: LoadedProfile, locked: Lock) -> str:
    """Write a Dockerfile that installs the locked packages, with an empty build context. Needs BuildKit.

    It is the file that `envbuild lock` writes. The base image is a tag in it, unless the profile names a base image,
    and no self-test runs: the image is unverified. If a mirror lacks a locked version of a Debian package: docker build
    --build-arg DEBIAN_VERSIONS=newest.

    Example: envbuild export dockerfile h20
    Example: docker build -t h20 - < Dockerfile-h20
    """
    return container_definition_export.standalone_dockerfile(locked, loaded.name)


@_lock_command("apptainer", "Write a definition file for Apptainer.", "apptainer-{}.def")
def _apptainer(loaded: LoadedProfile, locked: Lock) -> str:
    """Write a definition file for Apptainer that installs the locked wheels with pip.

    Example: envbuild export apptainer h20
    Example: apptainer build h20.sif apptainer-h20.def
    """
    return container_definition_export.apptainer_definition(locked, loaded.profile, loaded.name)


@_lock_command("devcontainer", "Write a devcontainer.json for editors.", "devcontainer-{}.json")
def _devcontainer(loaded: LoadedProfile, locked: Lock) -> str:
    """Write a devcontainer.json that builds the Dockerfile which `export dockerfile` wrote into the same folder.

    Example: envbuild export devcontainer h20 -o .devcontainer/devcontainer.json
    Example: envbuild export dockerfile h20 -o .devcontainer/Dockerfile-h20
    """
    return container_definition_export.devcontainer(locked, loaded.profile, loaded.name)


@_lock_command("check", "Write a script that checks an environment, on every rank.", "check-{}.py")
def _check(loaded: LoadedProfile, locked: Lock) -> str:
    """Write one Python file that checks an environment against a profile's lock, on every rank before training.

    The file needs Python 3.9 or newer, and torch. It checks versions, loaded libraries and the GPU, and runs the probes
    of level quick. If a check fails, it prints the fix and exits with 5. With --no-probes it compares only versions,
    library files, driver and GPU model, without torch and in under two seconds.

    Example: envbuild export check h20
    Example: python check-h20.py --no-probes
    Example: torchrun --nproc-per-node 8 check-h20.py
    """
    return exported_check_script.render(loaded, locked)


@command.command("selftest", short_help="Write the self-test as one zip.")
@output_option("selftest.zip")
@json_option
def selftest_command(file: Path | None, as_json: bool) -> None:
    """Write the self-test as one zip, which any Python (3.9 or newer) that has torch can run.

    Example: envbuild export selftest
    Example: python selftest.zip --level quick
    """
    output_files.prepare(file, text=False)
    document = _write(file or Path("selftest.zip"), selftest_job.selftest_zip(), as_json)
    if as_json:
        emit(document)


@command.command("ci", short_help="Write a CI job that verifies an image, then uses it.")
@click.argument("system", type=click.Choice(ci_job_renderer.SYSTEMS))
@profile_argument("name")
@click.option("--image", metavar="REGISTRY/NAME", help="Where the image was pushed; default: registry.example/NAME.")
@click.option(
    "--install",
    metavar="SOURCE",
    help="How the job installs envbuild: from a commit (git+https://HOST/PATH@COMMIT) or a wheel with #sha256=HEX; "
    "default: ci_install in config.yaml.",
)
@output_option("stdout")
@json_option
def ci_command(
    system: str, name: str, image: str | None, install: str | None, file: Path | None, as_json: bool
) -> None:
    """Write a job for a CI system. The job verifies a profile's image by policy.yaml, then runs in that image, which it
    names by digest.

    Writes nothing unless the job installs envbuild from a fixed commit or a wheel with a hash.

    Example: envbuild export ci gitlab h20 --image registry.example/h20 -o .gitlab-ci.yml
    """
    output_files.prepare(file, as_json=as_json)
    loaded = profile_reader_and_overrides.load(name)
    reference = Reference.parse(image or f"registry.example/{loaded.name}")
    if reference.tag or reference.digest:
        raise UsageError(f"{image} has a tag or a digest", hint=f"name the repository: {reference.repository}")
    pinned = install or settings.setting("ci_install")
    text = ci_job_renderer.render(
        system,
        loaded.name,
        reference.repository,
        profile_proofs_and_image_states.models_to_prove(loaded.profile),
        pinned,
    )
    if file or not as_json:
        output_files.write(file or output_files.STDOUT, text)
    if as_json:
        emit(CiJob(loaded.name, system, reference.repository, None if file is None else display(file), text))


@command.command("oci", short_help="Write the image as an OCI image layout, without an engine.")
@profile_argument("name")
@click.argument("target", metavar="FOLDER|FILE.tar", type=click.Path(path_type=Path))
@json_option
def oci_command(name: str, target: Path, as_json: bool) -> None:
    """Write the image of a profile's lock as an OCI image layout: a folder, or one file that ends with .tar.

    Writes the layers from the locked files. Needs no engine, and does not run the self-test: the image is
    unverified. The same lock gives the same image. If the layout exists already, its layers are kept.

    Example: envbuild export oci cpu images
    Example: skopeo copy oci:images:cpu docker://registry.example/cpu:1
    """
    from envbuild.pipeline import oci_export_workflow  # not for --help

    output_files.prepare(target, text=False)
    done = oci_export_workflow.export_image(name, target, listener())
    if as_json:
        emit(done)
    else:
        click.echo(f"{display(target)} {done.digest}")


@command.command("schema", short_help="Write the JSON Schema of profiles, or of a command's --json.")
@click.option(
    "--document", "document", metavar="COMMAND",
    help="Write the schema of the document that COMMAND prints with --json. COMMAND: make, "
    '"export check", --version, ...',
)  # fmt: skip
@output_option("stdout")
@json_option
def schema_command(document: str | None, file: Path | None, as_json: bool) -> None:
    """Write the JSON Schema of profiles, or of a command's JSON document. With the schema, an editor completes and
    checks profiles.

    Example: envbuild export schema -o profiles/profile.schema.json
    Example: envbuild export schema --document make
    """
    output_files.prepare(file, as_json=as_json)
    schema = _document_schema(document) if document else profile_model.schema()
    if file:
        output_files.write(file, json.dumps(schema, indent=2) + "\n")
    if as_json or not file:
        emit(schema)


def _document_schema(name: str) -> Mapping[str, Any]:
    from envbuild.cli import document_schemas  # imports the code of every command

    if name not in document_schemas.DOCUMENTS:
        known = ", ".join(document_schemas.DOCUMENTS)
        raise UsageError(f"--document: {name!r} is not a command with a document", hint=f"one of {known}")
    return document_schemas.document_schema(name)


def _write_for_locks(names: tuple[str, ...], file: Path | None, default: str, content: Content, as_json: bool) -> None:
    """Write one file for each profile. `default`: the name of a file, with {} for the profile's name; used if `file` is
    None."""
    if file and len(names) > 1:
        raise UsageError("-o names one file, but several profiles are given", hint="leave out -o")
    output_files.prepare(file, as_json=as_json)

    def write(name: str) -> ExportedFile:
        loaded, locked = _locked(name)
        target = file or Path(default.format(loaded.name))
        return _write(target, content(loaded, locked).encode(), as_json, loaded.name, locked.id)

    for_each(names, write, as_json)


def _locked(name: str) -> tuple[LoadedProfile, Lock]:
    loaded = profile_reader_and_overrides.load(name)
    return loaded, lock_file.current_lock(loaded, plan_resolver.resolve(loaded))


def _write(
    file: Path, content: bytes, as_json: bool, name: str | None = None, lock_id: str | None = None
) -> ExportedFile:
    """Write a file, and return the document about it. Print its name, unless `as_json` or it is stdout."""
    output_files.write(file, content)
    if not as_json and file != output_files.STDOUT:
        click.echo(display(file))
    digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
    return ExportedFile(name, lock_id, selftest_job.selftest_id(), display(file), digest)
