from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from envbuild.cli import output_files
from envbuild.cli.command_options import (
    CommandWithClusterOptions,
    gpus_option,
    json_option,
    on_options,
    profile_argument,
)
from envbuild.cli.console import VERBOSITY, Console, emit
from envbuild.cli.multi_profile_loop import for_each
from envbuild.facts import probe_catalogue_reader
from envbuild.util.errors import CheckFailed, NotProved, UsageError
from envbuild.util.json_output_types import plain

if TYPE_CHECKING:
    from envbuild.pipeline.environment_proof import EnvironmentProofDocument
    from envbuild.pipeline.model import MakeDocument, MakeResult, RunnerOptions
    from envbuild.testrun.json_test_report import TestDocument
    from envbuild.testrun.selftest_job import RunRequest


@dataclass(frozen=True)
class CatalogueRow:
    """A probe of the self-test. `needs`: cuda: a GPU; cpu: any device; script: a script of the profile."""

    name: str
    level: str
    needs: str
    description: str


@dataclass(frozen=True)
class ProbeList:
    """The document of `test --list`."""

    probes: tuple[CatalogueRow, ...]


@dataclass(frozen=True)
class ScriptDocument:
    """The document of `test --dry-run`. `script`: the script or the objects that would be submitted to a cluster."""

    profile: str
    script: str


_RANDOM = "random"


def _seed(context: click.Context, parameter: click.Parameter, value: str | None) -> int | str | None:
    if value is None or value == _RANDOM:
        return value
    if not value.isdecimal() or int(value) < 1:
        raise click.BadParameter(f"{value!r} is neither a whole number above zero nor {_RANDOM}")
    return int(value)


def _two_kinds_of_files(context: click.Context, parameter: click.Parameter, value: str | None) -> None:
    if value is not None:
        raise UsageError(
            "-o is ambiguous: this command writes two kinds of files", hint=f"--junit {value} or --fingerprint {value}"
        )


@click.command(
    "test", cls=CommandWithClusterOptions,
    short_help="Test an image or environment, here or on a cluster.",
)  # fmt: skip
@profile_argument("names", nargs=-1)
@click.option("--record", is_flag=True, help="Write evidence, and move the tag `verified` if the self-test passes.")
@click.option("--image", "reference", metavar="REF", help="Test another image of the engine, by tag or digest.")
@click.option(
    "--python", metavar="PATH", help="Test an interpreter or environment of this machine instead; needs no engine."
)
@click.option(
    "--level",
    type=click.Choice(probe_catalogue_reader.LEVELS),
    help="Run the probes of this level instead of the profile's level.",
)
@click.option("--probe", "probes", multiple=True, metavar="NAME", help="Run only this probe; may be repeated.")
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
    help="Write JUnit XML, for CI; -: to stdout, instead of the results.",
)
@click.option("-o", "--output", hidden=True, expose_value=False, callback=_two_kinds_of_files)
@gpus_option
@on_options
@click.option(
    "--fingerprint", "print_file", metavar="FILE", type=output_files.FILE,
    help="Write a fingerprint: the numbers that `envbuild diff` compares.",
)  # fmt: skip
@json_option
def command(
    names: tuple[str, ...],
    record: bool,
    reference: str | None,
    python: str | None,
    level: str | None,
    probes: tuple[str, ...],
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
    """Run the self-test of an image or environment; --record also writes evidence.

    Tests the image of each profile, or with --python an environment of this machine. Only --record writes evidence,
    signed if signing_key is set in config.yaml, and moves the tag `verified`. --record needs an image that envbuild
    built from the profile's lock. With --python it needs an environment with the files of the lock, such as
    `envbuild install` makes. --record always runs the complete self-test that the profile defines. With -v, the output
    of the profile's own script is shown even if the script passed.

    Example: envbuild test cpu --image myproject:latest
    Example: envbuild test h20 --python .venv
    Example: envbuild test h20 --python .venv --record
    Example: envbuild test h20 --record --on slurm
    """
    if listing:
        _list(as_json)
        return
    if not names:
        raise UsageError("name a profile", hint="for example: envbuild test cpu; envbuild show lists the profiles")
    probe_catalogue_reader.refuse_unknown(probes)
    if reference and python:
        raise UsageError("--image and --python exclude each other")
    if python and (on not in (None, "local") or given or resume or dry_run or gpu or nodes > 1):
        raise UsageError(
            "--python tests here: leave out --on, --slurm, --kubernetes, --resume, --dry-run, --gpu and --nodes"
        )
    if dry_run and (report or print_file):
        raise UsageError("--dry-run runs nothing, and so cannot write --junit or --fingerprint")
    if resume and seed is not None:
        raise UsageError("--seed cannot be changed for a submitted job: leave out --seed with --resume")
    if record:
        changed = {
            "--level": level, "--probe": probes, "--seed": seed, "--junit": report,
            "--fingerprint": print_file,
        }  # fmt: skip
        _refuse(changed, "--record runs the complete self-test of the profile: leave out {}")
    if len(names) > 1:
        single = {"--image": reference, "--resume": resume, "--junit": report, "--fingerprint": print_file}
        _refuse(single, "{} is for one profile")
        if dry_run and not as_json:
            raise UsageError("--dry-run with several profiles needs --json")
    output_files.prepare(report, print_file, as_json=as_json)
    from envbuild.pipeline.model import RunnerOptions  # not for --help
    from envbuild.testrun import selftest_job

    where = RunnerOptions(on, given or {}, resume, gpu, nodes)
    if record:
        if python:
            for_each(names, lambda name: _record_environment(name, python, gpus, as_json), as_json)
        else:
            for_each(names, lambda name: _record(name, reference, gpus, where, dry_run, as_json), as_json)
        return
    taken = as_json or output_files.STDOUT in (report, print_file)  # stdout is used for a document
    if isinstance(seed, str):
        seed = selftest_job.drawn_seed()
        Console().say(f"seed {seed} was drawn; to repeat this run: {_repeating(seed)}")
    request = selftest_job.RunRequest(level, probes, gpus, fingerprint=print_file is not None, seed=seed)

    def test(name: str) -> TestDocument | ScriptDocument:
        """Run the self-test of a profile, and return the document. CheckFailed and NotProved contain the document
        too."""
        from envbuild.pipeline import make_build_and_test

        console = Console(results=not taken, verbose=VERBOSITY in click.get_current_context().meta)
        if dry_run:
            return _script(name, reference, where, request, as_json)
        if python:
            result = make_build_and_test.test_environment(name, python, console, request)
        else:
            result = make_build_and_test.test(name, reference, console, request, where)
        if report:
            output_files.write(report, _junit(result))
        if not taken and result.run:
            console.results(result.run.results)
        try:
            if print_file:
                _keep(result, print_file)
            make_build_and_test.require_passed(result)
        except (CheckFailed, NotProved) as error:
            error.partial = plain(document(result))
            raise
        return document(result)

    for_each(names, test, as_json)


def _refuse(options: Mapping[str, object], message: str) -> None:
    """Raise UsageError if any of these options were given. `message`: the text, with {} for their names."""
    given = [option for option, value in options.items() if value not in (None, ())]
    if given:
        raise UsageError(message.format(", ".join(given)))


def _record(
    name: str, reference: str | None, gpus: tuple[str, ...], where: RunnerOptions, dry_run: bool, as_json: bool
) -> MakeDocument | ScriptDocument:
    """Run the self-test of a profile's image, write evidence, and move the tag `verified`."""
    from envbuild.pipeline import make_build_and_test
    from envbuild.testrun.selftest_job import RunRequest

    if dry_run:
        return _script(name, reference, where, RunRequest(gpus=gpus), as_json)
    result = make_build_and_test.prove(name, reference, Console(), gpus, where)
    if result.image and not as_json:
        click.echo(f"{result.state} {result.image.id}")
    return result.document()


def _record_environment(name: str, python: str, gpus: tuple[str, ...], as_json: bool) -> EnvironmentProofDocument:
    """Run the self-test of a profile in an environment of this machine, and write evidence."""
    from envbuild.pipeline import environment_proof

    done = environment_proof.prove_environment(name, python, Console(), gpus).document()
    if not as_json:
        click.echo(f"{done.state} environment {done.subject}")
    return done


def _script(
    name: str, reference: str | None, where: RunnerOptions, request: RunRequest, as_json: bool
) -> ScriptDocument:
    """Return the script or the objects that would be submitted to a cluster."""
    from envbuild.pipeline import make_build_and_test

    text = make_build_and_test.cluster_script(name, reference, Console(), where, request, brief=not as_json)
    if not as_json:
        click.echo(text, nl=False)
    return ScriptDocument(name, text)


def _repeating(seed: int) -> str:
    """Return the command that repeats this run: this command line, with `seed` in place of `random`."""
    line = shlex.join(["envbuild", *sys.argv[1:]])
    return re.sub(rf"--seed[ =]{_RANDOM}\b", f"--seed {seed}", line)


def _list(as_json: bool) -> None:
    rows = probe_catalogue_reader.known_probes().values()
    if as_json:
        emit(ProbeList(tuple(CatalogueRow(row.name, row.level, row.needs, row.does) for row in rows)))
        return
    for row in rows:
        click.echo(f"{row.name:<20} {row.level:<9} {'GPU' if row.needs == 'cuda' else 'any':<4} {row.does}")


def _keep(result: MakeResult, file: Path) -> None:
    """Write the fingerprint, even if the run failed: users want to compare the operation that gave a wrong result."""
    from envbuild.testrun import fingerprint_reader, selftest_job

    run = result.run
    if run and (run.fingerprint or selftest_job.FINGERPRINT in run.by_status("passed")):
        output_files.write(file, fingerprint_reader.text_of(run))


def _junit(result: MakeResult) -> str:
    from envbuild.testrun import junit_writer, selftest_job

    assert result.run is not None
    known = {
        "image": result.image and result.image.id,
        "lock": result.lock and result.lock.id,
        "selftest": selftest_job.selftest_id(),
    }
    return junit_writer.render(result.name, result.run, {key: value for key, value in known.items() if value})


def document(result: MakeResult) -> TestDocument:
    from envbuild.testrun import json_test_report

    assert result.run is not None
    lock, image = result.lock.id if result.lock else None, result.image.id if result.image else None
    return json_test_report.document(result.name, result.run, lock, image, result.interpreter)
