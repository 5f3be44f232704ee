import re
from pathlib import Path

import click
from packaging.version import InvalidVersion, Version

from envbuild.cli.command_options import json_option, profile_argument
from envbuild.cli.console import Console, emit
from envbuild.facts import probe_catalogue_reader
from envbuild.pipeline.bisection_search_and_result import Bisection, Hunt
from envbuild.util.errors import CheckFailed, UsageError
from envbuild.util.json_output_types import plain


def _release(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    try:
        return str(Version(value)) if value else None
    except InvalidVersion:
        raise click.BadParameter(
            f"{value!r} is not a version; write a release, as in {parameter.opts[0]} 12.4.5.8"
        ) from None


_EXAMPLE = "envbuild bisect h20 --pin cublas --probe gemm.crash --from 12.1.3.1 --to 12.6.4.1"


@click.command("bisect", short_help="Find the package version that fixes or causes a failure.")
@profile_argument("name")
@click.option("--pin", metavar="NAME", help="Required. The pin to vary: cublas, torch, a package of the profile, ...")
@click.option("--probe", metavar="NAME", help="The probe of the self-test that decides.")
@click.option(
    "--script", type=click.Path(path_type=Path), metavar="FILE",
    help="The Python script that decides: a version passes if the script exits with 0.",
)  # fmt: skip
@click.option(
    "--from",
    "oldest",
    callback=_release,
    metavar="VERSION",
    help="The oldest version to try, such as 12.4.5.8; default: all.",
)
@click.option(
    "--to", "newest", callback=_release, metavar="VERSION", help="The newest version to try, such as 12.6.4.1."
)
@click.option("--keep", is_flag=True, help="Keep the tested images.")
@json_option
def command(
    name: str,
    pin: str | None,
    probe: str | None,
    script: Path | None,
    oldest: str | None,
    newest: str | None,
    keep: bool,
    as_json: bool,
) -> None:
    """Find the first version of a package that passes or fails a test, by building and testing images.

    Tests the oldest and the newest version, then halves the range between them: if the oldest fails, it looks for the
    first that passes, otherwise for the first that fails. Assumes that the result changes once. --probe or --script is
    the test. Changes no file and moves no tag. Exit 5 if no version passes;
    if all pass, the result says so.
    Example: envbuild bisect h20 --pin cublas --probe gemm.crash
    """
    if not pin:
        raise UsageError("--pin is missing: name the package or library whose version varies", hint=_EXAMPLE)
    given, operator, version = re.fullmatch(r"([^=<>~!\s]*)\s*([=<>~!]*)(.*)", pin, re.DOTALL).groups()  # type: ignore[union-attr]
    if operator:
        bounds = f"--from {version.strip(' =<>~!,') or '12.4.5.8'}"
        raise UsageError(f"--pin takes a name without a version: {pin}", hint=f"--pin {given} {bounds}")
    if probe and script:
        raise UsageError("--probe and --script exclude each other: give one of --probe and --script")
    if oldest and newest and Version(oldest) > Version(newest):
        raise UsageError(f"--from is newer than --to: {oldest}, {newest}", hint=f"--from {newest} --to {oldest}")
    if probe is None and script is None:
        raise UsageError("no test given: use --probe NAME or --script FILE", hint=_EXAMPLE)
    probe_catalogue_reader.refuse_unknown([probe] if probe else [])
    from envbuild.pipeline import version_bisection  # not for --help

    hunt = Hunt(pin, probe or str(script), script, oldest, newest, keep)
    done = version_bisection.bisect(name, hunt, Console())
    answer = done.document()
    if answer.passing_version is None:
        error = CheckFailed(summary_sentence(done))
        error.partial = plain(answer)
        raise error
    if as_json:
        emit(answer)
    else:
        click.echo(summary_sentence(done))


def summary_sentence(done: Bisection) -> str:
    """Return the result as a sentence."""
    found, name = done.found, done.distribution
    if found is None:
        return f"no image could be made with any of {len(done.versions)} versions of {name}: {done.tries[-1].reason}"
    low, high = done.versions[found.low], done.versions[found.high]
    if not found.changes:
        both = f"{low} and {high}" if low != high else low
        if found.low_passes:
            return f"{name} {low}, the oldest, already passes, and so does the newest ({both}): no change found"
        return f"no version of {name} is known to pass: the oldest and the newest fail ({both})"
    word, other = ("passes", "fails") if found.high_passes else ("fails", "passes")
    between = done.versions[found.low + 1 : found.high]
    gap = f"; {', '.join(between)} between them could not be tried" if between else ""
    return f"{name} {high} is the first that {word}; {low} before it {other}{gap}"
