import hashlib
from pathlib import Path

import click

from envbuild.commands.console import emit, json_option, profile_argument
from envbuild.plan import lock, resolve, sources
from envbuild.plan.document import display
from envbuild.plan.store import write_atomically
from envbuild.proof import check, job


@click.group("export", short_help="Files for machines that have no envbuild.")
def command() -> None:
    """Write what works where envbuild is not installed.

    Example: envbuild export check h20
    """


@command.command("check")
@profile_argument("name")
@click.option(
    "-o", "output", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Default: check-NAME.py."
)
@json_option
def check_command(name: str, output: Path | None, as_json: bool) -> None:
    """Write one Python file that checks an environment against a profile's lock, on every rank before training.

    It needs Python 3.9 and torch: versions, loaded libraries, GPU and the quick probes; exit 5 with the remedy.
    Example: envbuild export check h20 && torchrun --nproc-per-node 8 check-h20.py
    """
    source = sources.load(name)
    locked = lock.current(lock.read(source.known_lock), resolve.resolve(source), source.lock_file)
    _write(
        output or Path(f"check-{source.name}.py"),
        check.render(source, locked).encode(),
        as_json,
        source.name,
        locked.id,
    )


@command.command("selftest")
@click.option(
    "-o", "output", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Default: selftest.zip."
)
@json_option
def selftest_command(output: Path | None, as_json: bool) -> None:
    """Write the self-test as one zip, which any Python (3.9 or newer) that has torch can run.

    Example: envbuild export selftest && python selftest.zip --level quick
    """
    _write(output or Path("selftest.zip"), job.selftest_zip(), as_json)


def _write(file: Path, content: bytes, as_json: bool, name: str | None = None, lock_id: str | None = None) -> None:
    write_atomically(file, content)
    if as_json:
        digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
        emit({"profile": name, "lock": lock_id, "selftest": job.selftest_id(), "file": display(file), "digest": digest})
    else:
        click.echo(display(file))
