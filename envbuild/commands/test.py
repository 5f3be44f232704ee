from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from envbuild.commands import output
from envbuild.commands.console import Console, emit, gpus_option, json_option, on_options, profile_argument
from envbuild.errors import CheckFailed, NotProved, UsageError
from envbuild.plan import probes

if TYPE_CHECKING:
    from envbuild.making import Made


@click.command("test", short_help="Run the self-test in an image and report.")
@profile_argument("name", required=False)
@click.option("--image", "reference", metavar="REF", help="Another image of the engine, by tag or digest.")
@click.option(
    "--python", metavar="PATH", help="An interpreter or environment of this machine instead; needs no engine."
)
@click.option("--level", type=click.Choice(probes.LEVELS), help="The probes of this level, whatever the profile says.")
@click.option("--probe", "asked", multiple=True, metavar="NAME", help="Only this probe; may be repeated.")
@click.option("--list", "listing", is_flag=True, help="List the probes; needs no engine.")
@click.option(
    "--junit",
    "report",
    metavar="FILE",
    type=output.FILE,
    help="JUnit XML, for CI; -: to stdout, instead of the results.",
)
@click.option("-v", "--verbose", is_flag=True, help="What the profile's own script printed, also where it passed.")
@gpus_option
@on_options
@click.option(
    "--fingerprint", "print_file", metavar="FILE", type=output.FILE,
    help="Record numbers too, for `envbuild compare`.",
)  # fmt: skip
@json_option
def command(
    name: str | None,
    reference: str | None,
    python: str | None,
    level: str | None,
    asked: tuple[str, ...],
    listing: bool,
    report: Path | None,
    verbose: bool,
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

    Example: envbuild test cpu --image myproject:latest
    """
    if listing:
        _list(as_json)
        return
    if name is None:
        raise UsageError("name a profile", hint="envbuild test cpu, or: envbuild test --list")
    probes.check(asked)
    if reference and python:
        raise UsageError("--image and --python name two things to test: give one of them")
    if python and (on not in (None, "local") or given or resume or dry_run or gpu or nodes > 1):
        raise UsageError("--python tests on this machine; --on, --gpu and --nodes an image on others")
    if dry_run and (report or print_file):
        raise UsageError("--dry-run runs nothing: no --junit and no --fingerprint comes of it")
    output.prepare(report, print_file, as_json=as_json)
    taken = as_json or output.STDOUT in (report, print_file)  # stdout, by one document
    from envbuild import pipeline  # not for --help
    from envbuild.making import On
    from envbuild.proof import job

    console = Console(results=not taken, verbose=verbose)
    wanted = job.Asked(level, asked, gpus, fingerprint=print_file is not None)
    where = On(on, given or {}, resume, gpu, nodes)
    if dry_run:
        script = pipeline.script(name, reference, console, where, wanted, brief=not as_json)
        emit({"script": script}) if as_json else click.echo(script, nl=False)
        return
    if python:
        made = pipeline.test_environment(name, python, console, wanted)
    else:
        made = pipeline.test(name, reference, console, wanted, where)
    if report:
        output.write(report, _junit(made))
    if not taken and made.run:
        console.results(made.run.results)
    try:
        if print_file:
            _keep(made, print_file)
        pipeline.require_passed(made)
    except (CheckFailed, NotProved) as error:
        error.partial = document(made)
        raise
    if as_json:
        emit(document(made))


def _list(as_json: bool) -> None:
    rows = probes.known().values()
    if as_json:
        keys = ("name", "level", "needs", "does")
        emit({"probes": [{key: getattr(row, key) for key in keys} for row in rows]})
        return
    for row in rows:
        click.echo(f"{row.name:<20} {row.level:<9} {'GPU' if row.needs == 'cuda' else 'any':<4} {row.does}")


def _keep(made: Made, file: Path) -> None:
    """Also of a run that failed: the operation that is wrong is the one to compare."""
    from envbuild.proof import fingerprint, job

    run = made.run
    if run and (run.fingerprint or job.FINGERPRINT in run.by_status("passed")):
        output.write(file, fingerprint.text_of(run))


def _junit(made: Made) -> str:
    from envbuild.proof import job, junit

    assert made.run is not None
    known = {"image": made.image and made.image.id, "lock": made.lock and made.lock.id, "selftest": job.selftest_id()}
    return junit.render(made.name, made.run, {key: value for key, value in known.items() if value})


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
    }
    return {**subject, **made.run.summary(), "probes": [dict(result) for result in made.run.results]}
