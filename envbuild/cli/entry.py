"""The entry point of the command line. A command is imported only when it is called. The errors of all commands are
reported here."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib
import inspect
import json
import os
import select
import signal
import sys
from collections.abc import Mapping
from types import FrameType
from typing import Any, TextIO

import click

from envbuild.util import interruption_at_process_start
from envbuild.util.errors import (
    EnvbuildError,
    HungUp,
    Interrupted,
    SettingsError,
    UsageError,
    near,
    printable,
)

# The short help is repeated here, so that `--help` imports no command. A test compares it with each command's own.
COMMANDS: Mapping[str, Mapping[str, str]] = {
    "Make an image": {
        "make": "Make a verified image of a profile or GPU: lock, build, self-test.",
        "init": "Write a new profile: for a GPU, or from an image or environment.",
        "lock": "Pin every file by version and hash; --check compares.",
        "build": "Build the image only, without a self-test.",
        "install": "Make a virtual environment from a profile's lock.",
        "test": "Test an image or environment, here or on a cluster.",
        "prune": "Remove old images and caches.",
    },
    "Look at profiles and images": {
        "status": "Show which images are verified, and why the others are not.",
        "show": "Show every pinned version and its reason; --html: a report.",
        "diff": "Compare two profiles, locks, images, or fingerprints of GPUs.",
        "advisories": "List the known faults of GPU software, with their fixes.",
    },
    "Find and fix what is wrong": {
        "explain": "Find the cause of a crash in its log.",
        "fix": "Show or run the commands that fix an environment.",
        "run": "Run a program with fixed libraries, and change nothing.",
        "doctor": "Check this machine and its GPUs, or compare a cluster's nodes.",
        "audit": "List what an image or environment contains and what is wrong.",
        "bisect": "Find the package version that fixes or causes a failure.",
    },
    "Share and use images": {
        "push": "Push a verified image and its evidence to a registry.",
        "verify": "Check an image in a registry by its signed evidence.",
        "save": "Save a verified image to a file, for a site without internet.",
        "load": "Check a saved image, then load it into the engine.",
        "pin-digests": "Write digests of verified images into Dockerfiles and CI files.",
        "export": "Write requirements, constraints, a CI job, ... for other tools.",
        "docs": "Write locked versions into your own documents.",
        "keygen": "Create a key pair to sign evidence with.",
    },
}

# Command names of the previous release -> the names that replaced them. The old names work for one more release.
OLD_NAMES: Mapping[str, str] = {
    "bundle export": "save",
    "bundle import": "load",
    "ci": "export ci",
    "compare": "diff",
    "facts advisories": "advisories",
    "new": "init",
    "pin": "pin-digests",
    "prove": "test --record",
    "render": "lock",
    "report": "show",
    "schema": "export schema",
}
_OLD_OPTIONS: Mapping[str, Mapping[str, str]] = {"report": {"-o": "--html"}}


class _Lazy(click.Group):
    def list_commands(self, context: click.Context) -> list[str]:
        return [name for group in COMMANDS.values() for name in group]

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in self.list_commands(context):
            return None
        command = importlib.import_module(f"envbuild.cli.{name.replace('-', '_')}").command
        assert isinstance(command, click.Command)
        _complete(command)
        return command

    def resolve_command(
        self, context: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(context, _with_new_name(args, quiet=context.resilient_parsing))
        except click.UsageError as error:
            moved = [f"`{old}` is now `{new}`" for old, new in OLD_NAMES.items() if old.split()[0] == args[0]]
            meant = ", ".join(moved) or near(args[0], self.list_commands(context))
            message = f"{error.message.rstrip('.')} ({meant})" if meant else error.message
            raise click.UsageError(message, context) from None

    def invoke(self, context: click.Context) -> Any:
        """Run the command. A reader such as `head` may close stdout early: the command does not fail. If the reader of
        stderr closes stderr, the command stops."""
        try:
            return super().invoke(context)
        except BrokenPipeError:
            if _reader_left(sys.stderr) or not _reader_left(sys.stdout):
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for output at exit
            return None

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        for title, group in COMMANDS.items():
            with formatter.section(title):
                formatter.write_dl(list(group.items()))


def _with_new_name(args: list[str], *, quiet: bool) -> list[str]:
    """Replace an old name of a command, and its old options. Print the new name on stderr, unless `quiet`."""
    old = next((old for words in (2, 1) if (old := " ".join(args[:words])) in OLD_NAMES), None)
    if old is None:
        return args
    options = _OLD_OPTIONS.get(old, {})
    new = " ".join([OLD_NAMES[old], *options.values()])
    if not quiet:
        click.echo(f"note: `envbuild {old}` is now `envbuild {new}`", err=True)
    words = [new_word for word in args[len(old.split()) :] for new_word in _with_new_option(word, options)]
    if options and not {"-h", "--help", *options.values()} & set(words):
        raise click.UsageError(f"`envbuild {old}` needs {' '.join(options)}")
    return [*OLD_NAMES[old].split(), *words]


def _with_new_option(word: str, options: Mapping[str, str]) -> list[str]:
    """Return a word of the command line, with an old short option replaced. The option's value may be part of the word,
    and is then returned as a second word."""
    old = next((old for old in options if word.startswith(old)), None)
    return [word] if old is None else [options[old], *filter(None, [word[len(old) :]])]


def _reader_left(stream: TextIO) -> bool:
    """Whether the other end of a pipe is closed."""
    poll = select.poll()
    poll.register(stream.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _show_log(context: click.Context, parameter: click.Parameter, value: int) -> None:
    if value:
        from envbuild.cli.console import VERBOSITY  # not for --help
        from envbuild.util import debug_log

        context.meta[VERBOSITY] = value
        debug_log.log_to_stderr(value)


def _show_version(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    if not value or context.resilient_parsing:
        return
    if "--json" in sys.argv[1:]:
        from envbuild.doctor import envbuild_versions  # not for --help

        print(json.dumps(dataclasses.asdict(envbuild_versions.document()), indent=2))
    else:
        from importlib import metadata

        print(f"envbuild, version {metadata.version('envbuild')}")
    context.exit()


def _keep_log() -> None:
    if "ENVBUILD_LOG" in os.environ:
        from envbuild.util import debug_log  # not for --help

        debug_log.log_to_file()


def _log_options() -> list[click.Parameter]:
    return [
        click.Option(
            ["-v", "--verbose"], count=True, expose_value=False, is_eager=True, callback=_show_log,
            help="Show processes, requests, files and steps on stderr; -vv also shows the output of the processes.",
        ),
        click.Option(["--debug"], is_flag=True, expose_value=False, help="Print the traceback of an error."),
    ]  # fmt: skip


def _complete(command: click.Command) -> None:
    """For a command and all its subcommands: add the log options, so that they can be given after the other options,
    and move the examples in the help to a list at its end."""
    if not any("--debug" in parameter.opts for parameter in command.params):  # not if it was done already
        command.params += _log_options()
        command.help = _with_list_of_examples(command.help or "")
    for below in getattr(command, "commands", {}).values():
        _complete(below)


def _with_list_of_examples(text: str) -> str:
    """Move the lines "Example: ..." of a command's help to a list at its end, one line each."""
    lines = inspect.cleandoc(text).splitlines()
    examples = [line.removeprefix(_EXAMPLE) for line in lines if line.startswith(_EXAMPLE)]
    rest = "\n".join(line for line in lines if not line.startswith(_EXAMPLE)).rstrip()
    keeps_lines = "\b"  # a paragraph that begins with this is not wrapped
    return "\n".join([rest, "", keeps_lines, "Examples:", *(f"  {line}" for line in examples)]) if examples else text


_EXAMPLE = "Example: "


# This is true for every command: a file gets its final name only when it is complete, and the next run finds finished
# steps.
_INTERRUPTED = "interrupted: no file is half-written, and finished steps are kept; run the same command again"


@click.group(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version", is_flag=True, expose_value=False, is_eager=True, callback=_show_version,
    help="Show the version and exit; with --json, also what a bug report needs.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, hidden=True)
def cli(as_json: bool) -> None:
    """Make container images for GPUs, prove each on its GPU, and find out why a run fails.

    \b
    Exit codes: 0 done; 2 usage; 3 bad profile, lock or input file;
    4 not proved here; 5 a check failed; 6 engine, disk, build or scheduler;
    7 index, mirror or registry; 8 out of date; 130 interrupted.
    """
    if as_json:
        raise click.UsageError("put --json after the command: envbuild show h20 --json")


_complete(cli)


def main() -> None:
    """Run the command line, and exit with its exit code."""
    # Objects from start-up stay in use: with the default threshold, searching them for garbage takes 10% of the time.
    gc.set_threshold(100_000, 50, 50)
    signal.signal(signal.SIGTERM, _interrupted)
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:  # a background job ignores SIGINT
        signal.signal(signal.SIGINT, _interrupted)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:  # sent when the terminal is closed; nohup ignores it
        signal.signal(signal.SIGHUP, _hung_up)
    wants_json = "--json" in sys.argv[1:]
    try:
        _keep_log()
        done = cli.main(standalone_mode=False)
        code = done if type(done) is int else 0  # the exit code that a command passed to click
    except click.exceptions.Exit as exited:
        code = exited.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        print(error.format_message(), file=sys.stderr)
        code = UsageError.code
    except click.ClickException as error:
        code = _report(UsageError(error.format_message(), hint=_usage_hint(error)), wants_json)
    except (KeyboardInterrupt, click.Abort):
        code = _report(Interrupted(_INTERRUPTED), wants_json)
    except SettingsError as error:
        from envbuild.doctor import site_settings_validation  # not for --help

        site_settings_validation.complete(error)
        code = _report(error, wants_json)
    except EnvbuildError as error:
        code = _report(error, wants_json)
    except OSError as error:
        from envbuild.util import disk_space  # not for --help

        code = _report(disk_space.system_fault(error), wants_json)
    gc.freeze()  # the system frees the memory of the process; a search for garbage at its end takes 4% of `show`
    sys.exit(code)


def _interrupted(number: int, frame: FrameType | None) -> None:
    interruption_at_process_start.interrupt(KeyboardInterrupt)


def _hung_up(number: int, frame: FrameType | None) -> None:
    interruption_at_process_start.interrupt(HungUp)


def _usage_hint(error: click.ClickException) -> str | None:
    if isinstance(error, click.NoSuchOption) and error.option_name in ("--line", "--driver"):
        return "--line and --driver are options of make; other commands name the profile of the line, such as h20-cu12"
    context = getattr(error, "ctx", None)
    return f"see: {context.command_path} --help" if context else None


def _report(error: EnvbuildError, wants_json: bool) -> int:
    if "--debug" in sys.argv[1:]:
        from envbuild.util import debug_log

        with contextlib.suppress(OSError):
            print(debug_log.traceback_text(), file=sys.stderr)
    if wants_json:
        document: dict[str, Any] = {**error.partial, "error": error.document()}
        with contextlib.suppress(OSError):  # if stdout cannot be written, report the error below
            print(json.dumps(document, indent=2), flush=True)
            return error.code
    with contextlib.suppress(OSError):  # if stderr cannot be written either, only the exit code reports the error
        print(printable("\n".join(error.lines())), file=sys.stderr)
    return error.code
