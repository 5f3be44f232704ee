from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from envbuild.cli.command_options import (
    accept_old_option,
    builder_option,
    gpus_option,
    json_option,
    pin_option,
    profile_argument,
    requirements_option,
    torch_index_option,
)
from envbuild.cli.console import Console, emit, listener, table
from envbuild.cli.multi_profile_loop import for_each
from envbuild.util import settings
from envbuild.util.errors import EnvbuildError, Fault, NotProved, SomeFailed, UsageError, printable
from envbuild.util.yaml_and_project_paths import display

if TYPE_CHECKING:
    from envbuild.pipeline.model import Options
    from envbuild.pipeline.multi_profile_make import BatchOptions, BatchOutcome
    from envbuild.pipeline.progress_events import Event


def _in_form(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """Check that an option's value has the form of the setting with the same name."""
    form, message = settings.FORMS[str(parameter.name)]
    if value is not None and not form.fullmatch(value):
        raise click.BadParameter(f"{value!r} {message}")
    return value


@click.command("make", short_help="Make a verified image of a profile or GPU: lock, build, self-test.")
@profile_argument("names", nargs=-1)
@click.option(
    "--all", "every", is_flag=True, help="Make all profiles of the working folder; if it has none, all known profiles."
)
@click.option("--locked", is_flag=True, help="Refuse a missing or stale lock instead of writing a new one (exit 8).")
@requirements_option
@pin_option
@click.option(
    "--write",
    is_flag=True,
    help="With --pin: also write the lock and Dockerfile with this pin. The profile is never changed.",
)
@click.option("--no-cache", is_flag=True, help="Make every layer again, even if it is cached.")
@builder_option
@click.option("--allow-unproved", is_flag=True, help="Build also an image that no GPU here can prove, and exit 0.")
@click.option(
    "--line",
    metavar="LINE",
    callback=_in_form,
    help="If a GPU has profiles for several CUDA versions: current (the newest), auto (by the driver), or a name such "
    "as cu12.",
)
@click.option(
    "--driver",
    metavar="VERSION",
    callback=_in_form,
    help="Choose the CUDA version for this driver: the oldest on the machines that will run the image.",
)
@click.option(
    "--dry-run", is_flag=True, help="Only show what would be fetched and built, and whether this machine can prove it."
)
@gpus_option
@accept_old_option
@torch_index_option
@json_option
def command(
    names: tuple[str, ...],
    every: bool,
    requirements: Path | None,
    locked: bool,
    pins: dict[str, str],
    write: bool,
    no_cache: bool,
    builder: str | None,
    allow_unproved: bool,
    line: str | None,
    driver: str | None,
    dry_run: bool,
    gpus: tuple[str, ...],
    accept_old: tuple[str, ...],
    as_json: bool,
) -> None:
    """Make a verified image from a profile: lock, Dockerfile, build, self-test, evidence, tag.

    NAME is the name of a profile or a GPU, or a path to a YAML file. If a GPU has no profile yet, one is written first.
    Before anything is fetched, make shows what it needs, and whether this machine can prove the image. If this machine
    cannot, make stops with exit code 4, unless --allow-unproved is given or the user agrees at a terminal. --dry-run
    stops after showing this.
    Several profiles are built one after the other; meanwhile the self-tests of the images already built run, as
    processors and memory allow.
    On GPUs, one self-test runs at a time; with --gpus, several run side by side on different GPUs of that list. If a
    profile fails, the others continue. If several fail, the exit code is the one that comes first in this list: 130, 5,
    6, 7, 3, 8, 2, 4.

    Example: envbuild make cpu
    Example: envbuild make h20 a100
    """
    if every == bool(names):
        text = "--all and the names of profiles exclude each other" if every else "no profile is named"
        raise UsageError(text, hint="envbuild show lists the profiles")
    if (every or len(names) > 1) and (pins or write):
        raise UsageError("--pin and --write are for one profile")
    if every and (line or driver):
        raise UsageError("--line and --driver are for profiles that are named, not for --all")
    from envbuild.pipeline.model import Options  # not for --help
    from envbuild.testrun.selftest_job import RunRequest

    options = Options(
        locked, no_cache, pins, write, requirements, RunRequest(gpus=gpus), builder=builder,
        unproved=allow_unproved, accept_old=accept_old,
    )  # fmt: skip
    wanted = _LineOptions(line, driver, locked)
    if dry_run:
        _preview(names or _own_names(), wanted, options, as_json)
        return
    if every or len(names) > 1:
        from envbuild.pipeline.multi_profile_make import BatchOptions

        batch = BatchOptions(
            locked, no_cache, allow_unproved, requirements, builder, gpus, accept_old, line, driver, every
        )
        if not locked:
            _write_lines(names, wanted)
        _several(names or _own_names(), batch, as_json)
        return
    name, options = _with_line(names[0], wanted, options)
    _one(name if locked else _with_profile(name), options, as_json)


@dataclass(frozen=True)
class _LineOptions:
    line: str | None
    driver: str | None
    locked: bool


def _own_names() -> tuple[str, ...]:
    from envbuild.profile import profile_and_lock_name_lookup  # not for --help

    return tuple(profile_and_lock_name_lookup.own_names())


def _with_line(name: str, wanted: _LineOptions, options: Options) -> tuple[str, Options]:
    """Return the name of the profile to build, and the options with the reason for this choice. A GPU may have several
    profiles, called lines, for different CUDA versions. In a child process of `make A B`, the parent has made the
    choice."""
    from envbuild.pipeline import cuda_line_selection_for_machine  # not for --help
    from envbuild.util import process_locks

    if process_locks.PARALLEL in os.environ:
        return name, options
    choice = cuda_line_selection_for_machine.line_or_name(
        name, line=wanted.line, driver=wanted.driver, locked=wanted.locked
    )
    return choice.line.profile, replace(options, line_reason=choice.reason)


_STOPS = "make would stop here, with exit code 4; with --allow-unproved it builds the image without a proof"


def _preview(names: tuple[str, ...], wanted: _LineOptions, options: Options, as_json: bool) -> None:
    from envbuild.pipeline import make_build_and_test, preflight_report  # not for --help

    shown = listener()

    def one(name: str) -> object:
        name, changed = _with_line(name, wanted, options)
        found = make_build_and_test.preview_make(name, changed, shown)
        if not as_json:
            stops = found.proof == "impossible" and not options.unproved
            lines = [*preflight_report.preflight_lines(found), *([_STOPS] if stops else [])]
            click.echo("\n".join([f"{found.profile}:", *(f"  {text}" for text in lines)]))
        return found

    for_each(names, one, as_json)


def _write_lines(names: Sequence[str], wanted: _LineOptions) -> None:
    """For each name, write the profile of the line to build, if it belongs to a GPU without a shipped profile and does
    not exist. An error in the choice of a line is not reported here, because the choice is repeated later."""
    from envbuild.pipeline.model import Options  # not for --help

    for name in names:
        with contextlib.suppress(EnvbuildError):
            _with_profile(_with_line(name, wanted, Options())[0])


def _with_profile(name: str) -> str:
    """Return the name of the profile that `name` means. For a GPU without a profile, or without one for the line that
    `name` selects, write one first. An invalid name is returned unchanged: its error is reported when its profile is
    read."""
    from envbuild.profile import profile_and_lock_name_lookup  # not for --help

    try:
        profile_and_lock_name_lookup.meant(name)
    except profile_and_lock_name_lookup.UnwrittenProfile as missing:
        from envbuild.cli import init

        file = init.write_for_gpu(missing.name)
        click.echo(f"note: no profile is shipped for {missing.name}; wrote {display(file)}", err=True)
        return missing.name
    except EnvbuildError:
        pass
    return name


def _one(name: str, options: Options, as_json: bool) -> None:
    from envbuild.pipeline import make_build_and_test  # not for --help

    def agree(question: str) -> bool:
        """Ask the user; without asking, return False if stdin or stderr is not a terminal, or with --json."""
        return not as_json and sys.stdin.isatty() and sys.stderr.isatty() and click.confirm(question, err=True)

    result = make_build_and_test.make(name, options, listener(), agree)
    for reason in result.reasons:
        click.echo(f"{result.name} is built, but not proved: {reason.detail}", err=True)
    if as_json:
        emit(result.document())
    elif result.image:
        is_proved = not result.reasons
        click.echo(f"{result.state if is_proved else 'built'} {result.image.id}")


def _several(names: tuple[str, ...], wanted: BatchOptions, as_json: bool) -> None:
    from envbuild.pipeline import multi_profile_make  # not for --help

    width = max(map(len, names))
    consoles: dict[str, Console] = {}

    def write(name: str, line: str) -> None:
        click.echo(f"{name:<{width}}{printable(line)}", err=True)

    def show(name: str, event: Event) -> None:
        consoles.setdefault(name, Console(write=partial(write, name)))(event)

    def done(outcome: BatchOutcome) -> None:
        for line in _reasons(outcome):
            write(outcome.name, f"  {line}")

    outcomes = multi_profile_make.make_profiles(names, wanted, show, done)
    code = multi_profile_make.worst_exit_code([outcome.code for outcome in outcomes])
    error = SomeFailed(_summary(outcomes), code) if code else None
    document = {
        "profiles": [
            {"profile": o.name, "state": o.state, **o.document, "seconds": round(o.seconds, 3)} for o in outcomes
        ]
    }
    if not as_json:
        rows = [_row(outcome) for outcome in outcomes]
        with (
            contextlib.suppress(BrokenPipeError) if error else contextlib.nullcontext()
        ):  # the exit code still shows it
            for line in table([("PROFILE", "STATE", "IMAGE", "SELF-TEST", "SECONDS", "EXIT", "WHY"), *rows]):
                click.echo(printable(line))
    elif not error:
        emit(document)
    if error:
        error.partial = document
        raise error


def _summary(outcomes: Sequence[BatchOutcome]) -> str:
    """Return a sentence with the profiles that failed, and those that were built but not proved."""
    unproved = [o.name for o in outcomes if o.code == NotProved.code and o.document.get("image")]
    failed = [o.name for o in outcomes if o.code and o.name not in unproved]
    parts = {"failed": failed, "built, but not proved": unproved}
    counted = [(f"{len(names)}", f"{what}: {', '.join(names)}") for what, names in parts.items() if names]
    (first, names), *others = counted
    return "; ".join([f"{first} of {len(outcomes)} profiles {names}", *map(" ".join, others)])


def _row(outcome: BatchOutcome) -> tuple[str, ...]:
    found, ran = outcome.document.get("image"), outcome.document.get("selftest")
    counts = ", ".join(f"{ran[kind]} {kind}" for kind in ("passed", "failed", "skipped") if ran[kind]) if ran else "-"
    return (
        outcome.name,
        outcome.state,
        found[:19] if found else "-",
        counts,
        f"{outcome.seconds:.1f}",
        str(outcome.code),
        _why(outcome),
    )


def _why(outcome: BatchOutcome) -> str:
    """Return the error and the first line of its hint; the complete error was printed on stderr when it occurred."""
    error = outcome.error
    if not error:
        return "-"
    faults = [str(Fault(**fault)) for fault in error["faults"]]
    more = [f"{len(faults) - 1} more: envbuild show {outcome.cli_words}"] if len(faults) > 1 else []
    hint = (error["hint"] or "").splitlines()[:1]
    return " ".join("; ".join([error["message"], *faults[:1], *more, *hint]).split())


def _reasons(outcome: BatchOutcome) -> list[str]:
    """Return an error as the command line prints it."""
    error = outcome.error
    if not error:
        return []
    faults = (str(Fault(**fault)) for fault in error["faults"])
    return [f"error: {error['message']}", *faults, *(error["hint"] or "").splitlines()]
