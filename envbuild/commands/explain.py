from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from envbuild.commands.console import emit, json_option
from envbuild.errors import UsageError, printable

if TYPE_CHECKING:
    from envbuild.insight.explain import Explanation, Match
    from envbuild.insight.logs import Line, Log

WIDTH = 200
_SECRET = re.compile(
    r"(?i)((?:[\w-]{0,40}(?:token|passw(?:or)?d|passphrase|secret|api_?key|credential)[\w-]{0,20})['\"]?\s{0,3}[=:]\s{0,3}['\"]?"
    r"|--[\w-]{0,40}(?:token|password|passphrase|secret|key)\s{1,3}|\b(?:bearer|basic) )[^\s'\",;]+"
    r"|(://)[^/\s@]{1,256}(?=@)"
    r"|\b(?:hf_|gh[opsu]_|github_pat_|glpat-|xox[bp]-|sk-|nvapi-)[\w-]{16,}|\bAKIA[A-Z0-9]{16}\b"
)


@click.command("explain", short_help="The cause of a crash, from its log.")
@click.argument("file", metavar="FILE")
@json_option
def command(file: str, as_json: bool) -> None:
    """Say what a log shows: the cause with its lines, how sure that is, the cure, and the command that proves it.

    Any mix of a traceback, the output of torchrun, NCCL, the kernel (Xid) and collect_env; - reads standard input.
    Needs neither Docker nor a GPU. The exit code is 0 whether the cause is known or not.

    Example: envbuild explain train.log
    """
    from envbuild.insight import explain

    log = _read(file)
    found = explain.explain(log)
    name = _profile(found)
    if as_json:
        document = dict(explain.document(found, name))
        for match in document["matches"]:
            match["lines"] = [{**line, "text": shown(line["text"])} for line in match["lines"]]
        emit(document)
        return
    for line in _lines(log, found, name):
        click.echo(printable(line))


def _read(file: str) -> Log:
    from envbuild.insight import logs

    if file == "-":
        return logs.read(sys.stdin.buffer)
    try:
        with open(file, "rb") as stream:  # noqa: PTH123 - the same for a file and for what is no file, as /dev/fd/63
            return logs.read(stream)
    except OSError as error:
        raise UsageError(
            f"{file} cannot be read: {error.strerror}", hint="name a log, or - for standard input"
        ) from error


def _profile(found: Explanation) -> str:
    """The profile of the card in the log, where one has its name."""
    from envbuild.plan import sources

    known = sources.names()
    return next((gpu.id for gpu in found.read.situation.gpus if gpu.id in known), "NAME")


def _lines(log: Log, found: Explanation, name: str) -> Iterator[str]:
    yield from _heard(log, found)
    for match in found.matches:
        yield ""
        yield from _told(match, name)
    if found.unknown:
        yield "not known: nothing in this log is the sign of a cause that envbuild knows"
    if found.read.first:
        first = found.read.first
        rank = f"rank {first.rank}" if first.rank is not None else "one"
        yield ""
        yield f"first to fail: {rank}" + (f", exit {first.exit}" if first.exit is not None else "") + _at(first.line)
    for ruled in found.ruled_out:
        yield f"not {ruled.advisory.id}, as line {ruled.line.number} may look like: the versions or cards are others"
    if found.advice:
        yield ""
        yield "before the next run:"
        yield from (f"  - {text}" for text in found.advice)


def _heard(log: Log, found: Explanation) -> Iterator[str]:
    """What was read, in a line: so that a wrong guess about the machine is seen."""
    from envbuild.plan.advisories import UNLISTED

    said = found.read.situation
    libraries = [f"{name} {said.libraries[name]}" for name in ("cublas", "cudnn", "nccl") if name in said.libraries]
    parts = [
        ", ".join(
            f"compute capability {gpu.compute_capability}" if gpu.id == UNLISTED else gpu.id for gpu in said.gpus
        ),
        f"torch {said.torch}" if said.torch else "",
        *libraries,
        f"driver {said.driver}" if said.driver else "",
        f"{said.gpu_count} GPUs" if said.gpu_count else "",
    ]
    yield f"lines: {len(log.lines)}; said of the machine: {', '.join(filter(None, parts)) or 'nothing'}"
    if log.skipped:
        yield f"the log is large: {log.skipped} lines in its middle were not read"


def _told(match: Match, name: str) -> Iterator[str]:
    from envbuild.insight import explain

    told = match.advisory.severity if match.advisory else "cause"
    yield f"{told} {match.id}: {match.title}"
    yield f"  confidence {match.confidence:.2f}" + {
        "holds": ": the versions and cards in the log are the advisory's",
        "fits": ": what the log says of versions and cards fits",
    }.get(match.standing, "")
    yield from (f"  {line.number:>6}: {shown(line.text)}" for line in match.lines)
    yield f"  cure: {explain.of_profile(match.remedy, name)}"
    for key, value in explain.change(match.change).items():
        parts = ", ".join(f"{what}: {which}" for what, which in value.items()) if isinstance(value, dict) else value
        yield f"  profile: {key}: {parts}"
    if match.prove:
        yield f"  prove: {explain.of_profile(match.prove, name)}"


def _at(line: Line) -> str:
    return f" (line {line.number}: {shown(line.text)})"


def shown(text: str) -> str:
    """A line of a log as it may be repeated: short, and without what looks like a secret."""
    hidden = _SECRET.sub(lambda match: f"{match[1] or match[2] or ''}***", text.strip())
    return hidden if len(hidden) <= WIDTH else hidden[: WIDTH - 3] + "..."
