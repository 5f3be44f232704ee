from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from envbuild.cli import output_files
from envbuild.cli.console import VERBOSITY, Console, emit, gpus_option, json_option, on_options, profile_argument
from envbuild.facts import probe_catalogue_reader
from envbuild.util.errors import CheckFailed, NotProved, UsageError

if TYPE_CHECKING:
    from envbuild.pipeline.model import Made


_RANDOM = "random"


def _seed(context: click.Context, parameter: click.Parameter, value: str | None) -> int | str | None:
    if value is None or value == _RANDOM:
        return value
    if not value.isdecimal() or int(value) < 1:
        raise click.BadParameter(f"{value!r} is neither a whole number above zero nor {_RANDOM}")
    return int(value)


@click.command("test", short_help="Run the self-test in an image and report.")
@profile_argument("name", required=False)
@click.option("--image", "reference", metavar="REF", help="Another image of the engine, by tag or digest.")
@click.option(
    "--python", metavar="PATH", help="An interpreter or environment of this machine instead; needs no engine."
)
@click.option(
    "--level",
    type=click.Choice(probe_catalogue_reader.LEVELS),
    help="The probes of this level, whatever the profile says.",
)
@click.option("--probe", "asked", multiple=True, metavar="NAME", help="Only this probe; may be repeated.")
@click.option(
    "--seed", metavar=f"N|{_RANDOM}", callback=_seed,
    help=f"Sample the cases by this seed (default: 1); {_RANDOM} draws one and shows how to repeat the run.",
)  # fmt: skip
@click.option("--list", "listing", is_flag=True, help="List the probes; needs no engine.")
@click.option(
    "--junit",
    "report",
    metavar="FILE",
    type=output_files.FILE,
    help="JUnit XML, for CI; -: to stdout, instead of the results.",
)
@gpus_option
@on_options
@click.option(
    "--fingerprint", "print_file", metavar="FILE", type=output_files.FILE,
    help="Record numbers too, for `envbuild compare`.",
)  # fmt: skip
@json_option
def command(
    name: str | None,
    reference: str | None,
    python: str | None,
    level: str | None,
    asked: tuple[str, ...],
    seed: int | str | None,
    listing: bool,
    report: Path | None,
    gpus: tuple[str, ...],
    print_file: Path | None,
    on: str | None,
    resume: str | None,
    gpu: str | None,
    nodes: int,
    dry_run: bool,
    as_json: bool,
    given: dict[str, dict[str, str]] | None = None,
) -> None:
    """Run the self-test in the image of a profile and report; moves no tag, writes no evidence.

    With -v, what the profile's own script printed is shown also where it passed.

    Example: envbuild test cpu --image myproject:latest
    """
    if listing:
        _list(as_json)
        return
    if name is None:
        raise UsageError("name a profile", hint="envbuild test cpu, or: envbuild test --list")
    probe_catalogue_reader.refuse_unknown(asked)
    if reference and python:
        raise UsageError("--image and --python name two things to test: give one of them")
    if python and (on not in (None, "local") or given or resume or dry_run or gpu or nodes > 1):
        raise UsageError("--python tests on this machine; --on, --gpu and --nodes an image on others")
    if dry_run and (report or print_file):
        raise UsageError("--dry-run runs nothing: no --junit and no --fingerprint comes of it")
    if resume and seed is not None:
        raise UsageError("--resume waits for a run that has its seed already: leave out --seed")
    output_files.prepare(report, print_file, as_json=as_json)
    taken = as_json or output_files.STDOUT in (report, print_file)  # stdout, by one document
    from envbuild.pipeline import workflows  # not for --help
    from envbuild.pipeline.model import On
    from envbuild.testrun import selftest_job

    console = Console(results=not taken, verbose=VERBOSITY in click.get_current_context().meta)
    if isinstance(seed, str):
        seed = selftest_job.drawn_seed()
        console.say(f"seed {seed} was drawn; to repeat this run: {_repeating(seed)}")
    wanted = selftest_job.RunRequest(level, asked, gpus, fingerprint=print_file is not None, seed=seed)
    where = On(on, given or {}, resume, gpu, nodes)
    if dry_run:
        script = workflows.cluster_script(name, reference, console, where, wanted, brief=not as_json)
        emit({"script": script}) if as_json else click.echo(script, nl=False)
        return
    if python:
        made = workflows.test_environment(name, python, console, wanted)
    else:
        made = workflows.test(name, reference, console, wanted, where)
    if report:
        output_files.write(report, _junit(made))
    if not taken and made.run:
        console.results(made.run.results)
    try:
        if print_file:
            _keep(made, print_file)
        workflows.require_passed(made)
    except (CheckFailed, NotProved) as error:
        error.partial = document(made)
        raise
    if as_json:
        emit(document(made))


def _repeating(seed: int) -> str:
    """The present command line with a fixed seed."""
    line = shlex.join(["envbuild", *sys.argv[1:]])
    return re.sub(rf"--seed[ =]{_RANDOM}\b", f"--seed {seed}", line)


def _list(as_json: bool) -> None:
    rows = probe_catalogue_reader.known_probes().values()
    if as_json:
        keys = ("name", "level", "needs", "does")
        emit({"probes": [{key: getattr(row, key) for key in keys} for row in rows]})
        return
    for row in rows:
        click.echo(f"{row.name:<20} {row.level:<9} {'GPU' if row.needs == 'cuda' else 'any':<4} {row.does}")


def _keep(made: Made, file: Path) -> None:
    """Also of a run that failed: the operation that is wrong is the one to compare."""
    from envbuild.testrun import fingerprint_reader, selftest_job

    run = made.run
    if run and (run.fingerprint or selftest_job.FINGERPRINT in run.by_status("passed")):
        output_files.write(file, fingerprint_reader.text_of(run))


def _junit(made: Made) -> str:
    from envbuild.testrun import junit_writer, selftest_job

    assert made.run is not None
    known = {
        "image": made.image and made.image.id,
        "lock": made.lock and made.lock.id,
        "selftest": selftest_job.selftest_id(),
    }
    return junit_writer.render(made.name, made.run, {key: value for key, value in known.items() if value})


def document(made: Made) -> dict[str, Any]:
    """What was tested, the self-test's summary, and of every probe its figures, details and what its script printed."""
    assert made.run is not None
    told = made.run.subject
    subject = {
        "profile": made.name,
        "lock": made.lock.id if made.lock else None,
        "image": made.image.id if made.image else None,
        "interpreter": str(made.interpreter) if made.interpreter else None,
        **{key: told.get(key) for key in ("python", "torch", "device", "level")},
        "seed": made.run.start.get("seed"),
    }
    return {**subject, **made.run.summary(), "probes": [dict(result) for result in made.run.results]}
