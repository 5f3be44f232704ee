import hashlib
from pathlib import Path

import click

from envbuild.cli import output_files
from envbuild.cli.console import emit, json_option, profile_argument
from envbuild.lock import lock_file, requirements_export
from envbuild.lock.lock_file import Lock
from envbuild.profile.loaded_profile import Source
from envbuild.resolve import plan_resolver, profile_reader_and_overrides
from envbuild.testrun import exported_check_script, selftest_job
from envbuild.util.yaml_document import display


@click.group("export", short_help="Files for machines that have no envbuild.")
def command() -> None:
    """Write what works where envbuild is not installed.

    Example: envbuild export check h20
    """


@command.command("check")
@profile_argument("name")
@click.option("-o", "file", type=output_files.FILE, metavar="FILE", help="-: stdout. Default: check-NAME.py.")
@json_option
def check_command(name: str, file: Path | None, as_json: bool) -> None:
    """Write one Python file that checks an environment against a profile's lock, on every rank before training.

    It needs Python 3.9 and torch: versions, loaded libraries, GPU and the quick probes; exit 5 with the remedy.
    Example: envbuild export check h20 && torchrun --nproc-per-node 8 check-h20.py
    """
    source, locked = _locked(name)
    text = exported_check_script.render(source, locked)
    _write(file or Path(f"check-{source.name}.py"), text.encode(), as_json, source.name, locked.id)


@command.command("selftest")
@click.option("-o", "file", type=output_files.FILE, metavar="FILE", help="Default: selftest.zip.")
@json_option
def selftest_command(file: Path | None, as_json: bool) -> None:
    """Write the self-test as one zip, which any Python (3.9 or newer) that has torch can run.

    Example: envbuild export selftest && python selftest.zip --level quick
    """
    output_files.prepare(file, text=False)
    _write(file or Path("selftest.zip"), selftest_job.selftest_zip(), as_json)


@command.command("requirements")
@profile_argument("name")
@click.option("-o", "file", type=output_files.FILE, metavar="FILE", help="-: stdout. Default: requirements-NAME.txt.")
@json_option
def requirements_command(name: str, file: Path | None, as_json: bool) -> None:
    """Write the locked versions with their hashes, to install them with pip or uv where there is no container.

    Example: envbuild export requirements h20 && pip install --no-deps --require-hashes -r requirements-h20.txt
    """
    source, locked = _locked(name)
    text = requirements_export.requirements(locked, source.name)
    _write(file or Path(f"requirements-{source.name}.txt"), text.encode(), as_json, source.name, locked.id)


@command.command("constraints")
@profile_argument("name")
@click.option("-o", "file", type=output_files.FILE, metavar="FILE", help="-: stdout. Default: constraints-NAME.txt.")
@json_option
def constraints_command(name: str, file: Path | None, as_json: bool) -> None:
    """Write the locked versions, to hold them while other packages are installed.

    Example: envbuild export constraints h20 && pip install -c constraints-h20.txt transformers
    """
    source, locked = _locked(name)
    text = requirements_export.constraints(locked, source.name)
    _write(file or Path(f"constraints-{source.name}.txt"), text.encode(), as_json, source.name, locked.id)


def _locked(name: str) -> tuple[Source, Lock]:
    source = profile_reader_and_overrides.load(name)
    return source, lock_file.current(lock_file.read(source.known_lock), plan_resolver.resolve(source), source.lock_file)


def _write(file: Path, content: bytes, as_json: bool, name: str | None = None, lock_id: str | None = None) -> None:
    output_files.prepare(file, as_json=as_json)
    output_files.write(file, content)
    if as_json:
        digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
        emit(
            {
                "profile": name,
                "lock": lock_id,
                "selftest": selftest_job.selftest_id(),
                "file": display(file),
                "digest": digest,
            }
        )
    elif file != output_files.STDOUT:
        click.echo(display(file))
