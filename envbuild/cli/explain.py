from __future__ import annotations

import re
import stat
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from envbuild.cli.console import emit, json_option
from envbuild.util.errors import FileError, printable, some

if TYPE_CHECKING:
    from envbuild.explain.cause_ranking import Explanation, SignatureMatch
    from envbuild.explain.log_reader_and_search import Line, Log

WIDTH = 200
MOST_FILES = 256
"""Of a folder: a node's ranks have two each."""
MOST_NAMED = 3
"""Names in a note about files that were skipped."""
MOST_RANKS = 16
_KINDS = {stat.S_IFIFO: "FIFO", stat.S_IFSOCK: "socket", stat.S_IFCHR: "device", stat.S_IFBLK: "device"}
_SECRET = re.compile(
    r"(?i)((?:[\w-]{0,40}(?:token|passw(?:or)?d|passphrase|secret|api_?key|credential)[\w-]{0,20})['\"]?\s{0,3}[=:]\s{0,3}['\"]?"
    r"|--[\w-]{0,40}(?:token|password|passphrase|secret|key)\s{1,3}|\b(?:bearer|basic) )[^\s'\",;]+"
    r"|(://)[^/\s@]{1,256}(?=@)"
    r"|\b(?:hf_|gh[opsu]_|github_pat_|glpat-|xox[bp]-|sk-|nvapi-)[\w-]{16,}|\bAKIA[A-Z0-9]{16}\b"
)


@click.command("explain", short_help="Find the cause of a crash in its log.")
@click.argument("files", metavar="FILE...", nargs=-1, required=True)
@json_option
def command(files: tuple[str, ...], as_json: bool) -> None:
    """Say what a log shows: the cause with its lines, how sure that is, the cure, and the command that proves it.

    Any mix of a traceback, the output of torchrun, NCCL, the kernel (Xid) and collect_env; - reads standard input.
    Several files, or a folder with all in it, are read as the logs of one run; what gzip packed is unpacked. Needs
    neither Docker nor a GPU. The exit code is 0 whether the cause is known or not.

    Example: envbuild explain train.log
    """
    from envbuild.explain import cause_ranking
    from envbuild.profile import profile_name_lookup

    log, notes = _read(files)
    found = cause_ranking.explain(log)
    profiles = profile_name_lookup.profile_names()
    if as_json:
        document = dict(cause_ranking.document(found, profiles))
        for match in (*document["matches"], *document["possible"]):
            match["lines"] = [{**line, "text": safe_line(line["text"])} for line in match["lines"]]
        if document["error"]:
            document["error"]["text"] = safe_line(document["error"]["text"])
        emit({**document, "notes": notes})
        return
    for line in (*notes, *(() if log.empty else _lines(log, found, profiles))):
        click.echo(printable(line))


def _read(names: Sequence[str]) -> tuple[Log, list[str]]:
    """All as one log, and what is to be said of files that were not read, or not to their end.

    Raises FileError for one that cannot be read, or that is named and is no text.
    """
    from envbuild.explain import log_reader_and_search

    notes: list[str] = []
    files = list(dict.fromkeys(file for name in names for file in _files(name, notes)))
    if not files:
        raise FileError("; ".join((f"no file found in {', '.join(names)}", *notes)), hint=_NAME_A_LOG)
    if len(files) > MOST_FILES:
        notes.append(f"only the first {MOST_FILES} of {len(files)} files are read")
    parts: dict[str, Log] = {}
    for file in files[:MOST_FILES]:
        part = _one(file, min(len(files), MOST_FILES))
        if part.foreign and file in names:
            raise FileError(f"{_called(file)} is no log: it is {part.foreign}", hint="name the text that the run wrote")
        if part.foreign:
            notes.append(f"{file} is left out: it is {part.foreign.partition(';')[0]}")
            continue
        notes += [f"{_called(file)}: {said}" for said in (part.note, part.cut) if said]
        parts[file] = part
    log = log_reader_and_search.join_logs(parts.values())
    if log.empty and not any(part.note for part in parts.values()):
        name = _called(files[0]) if len(files) == 1 else "each of these files"
        notes.append(
            f"{name} is empty: there is nothing to explain. Keep what a run says: COMMAND 2>&1 | tee train.log"
        )
    return log, notes


_NAME_A_LOG = "name a log, or - for standard input"


def _files(name: str, notes: list[str]) -> list[str]:
    """The regular files in a folder, however deep, except hidden ones; links to folders are not followed. Any other
    name is read, whatever it is."""
    if name == "-" or not Path(name).is_dir():
        return [name]
    found: list[Path] = []
    others: dict[str, list[str]] = {}
    unread: list[str] = []
    folders = [Path(name)]  # os.walk recurses in Python 3.11, and a folder may be deeper than that allows
    while folders:
        folder = folders.pop()
        try:
            entries = [entry for entry in folder.iterdir() if not entry.name.startswith(".")]
        except OSError as error:
            unread.append(f"{folder}: folder skipped: {error.strerror}")
            continue
        for path in entries:
            kind = _kind(path)
            if kind:
                others.setdefault(kind, []).append(str(path.relative_to(name)))
            elif path.is_dir():
                folders.append(path)
            else:
                found.append(path)
    notes += sorted(unread)
    for kind, paths in sorted(others.items()):
        listed = ", ".join(sorted(paths)[:MOST_NAMED]) + (", ..." if len(paths) > MOST_NAMED else "")
        notes.append(f"{name}: {some(len(paths), kind, f'{kind}s')} skipped: {listed}")
    return [str(path) for path in sorted(found)]


def _kind(path: Path) -> str | None:
    """What an entry of a folder is that is not read; None for a regular file and a folder."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return "broken link" if path.is_symlink() else "unreadable entry"
    if stat.S_ISDIR(mode):
        return "link to a folder" if path.is_symlink() else None
    return None if stat.S_ISREG(mode) else _KINDS.get(stat.S_IFMT(mode), "special file")


def _one(file: str, share: int) -> Log:
    from envbuild.explain import log_reader_and_search

    name = file if share > 1 else ""
    if file == "-":
        return log_reader_and_search.read(sys.stdin.buffer, share, name)
    try:
        with open(file, "rb") as stream:  # noqa: PTH123 - the same for a file and for what is no file, as /dev/fd/63
            return log_reader_and_search.read(stream, share, name)
    except OSError as error:
        raise FileError(f"{file} cannot be read: {error.strerror}", hint=_NAME_A_LOG) from error


def _called(file: str) -> str:
    return "standard input" if file == "-" else file


def _lines(log: Log, found: Explanation, profiles: Sequence[str]) -> Iterator[str]:
    yield from _heard(log, found)
    for match in found.matches:
        yield ""
        yield from _match(match, match.profile(profiles))
    if found.unknown:
        yield "not known: nothing in this log is the sign of a cause that envbuild knows"
        yield from _own_error(found)
    for match in found.possible:
        yield ""
        yield f"possible: {_POSSIBLE.get(match.standing, 'the log does not show which version is loaded')}"
        yield from _match(match, match.profile(profiles))
    if found.read.first:
        first = found.read.first
        local = f"local rank {first.local} of its node" if first.local is not None else "one"
        rank = f"rank {first.rank}" if first.rank is not None else local
        yield ""
        yield f"first to fail: {rank}" + (f", exit {first.exit}" if first.exit is not None else "") + _at(first.line)
    yield from _ranks(found)
    for ruled in found.ruled_out:
        where = _where(ruled.line)
        yield f"not {ruled.advisory.id}, as {where} may look like: the versions or cards are others"
    if found.advice:
        yield ""
        yield "before the next run:"
        yield from (f"  - {text}" for text in found.advice)


_POSSIBLE = {
    "holds": "GPU and versions match this advisory, but no line of the log names it",
    "open": "these lines have several causes; the command below decides",
}


def _own_error(found: Explanation) -> Iterator[str]:
    """A fault of the program itself is no cause that versions or cards have; it is not hidden either."""
    error = found.read.error
    if error:
        yield f"the program's own error ({_where(error)}): {safe_line(error.text)}"
        missing = re.search(r"(?:ModuleNotFoundError|ImportError): No module named '([\w.]{1,80})'", error.text)
        if missing:
            said = "is not in this environment: install it, or add it to the profile's packages"
            yield f"  the package that has {missing[1]} {said}"


def _ranks(found: Explanation) -> Iterator[str]:
    """Which collectives the ranks waited in, and how far each came."""
    works = found.read.works
    if works.diverged:
        waits = ", ".join(f"rank {late.rank} in {late.operation} {late.number}" for late in works.diverged)
        yield ""
        yield f"the ranks diverged, each waited in another collective: {waits}"
        yield "  a branch on the rank or on its data around a collective, or another number of steps on one of them"
    if not works.told:
        return
    listed = ", ".join(f"rank {work.rank}: {work.enqueued}" for work in works.told[:MOST_RANKS])
    more = len(works.told) - MOST_RANKS
    yield ""
    yield f"last enqueued work: {listed}" + (f" and {more} more" if more > 0 else "")
    counts = {work.rank: work.enqueued for work in works.told}
    if works.behind:
        which, last = ", ".join(map(str, works.behind[:MOST_RANKS])), counts[works.behind[0]]
        how = "it has not ended its last one" if last == max(counts.values()) else f"it did not come to work {last + 1}"
        yield f"  of these the others wait for rank {which}: {how}"
    elif len(works.told) > 1:
        yield "  these ranks are level"
    if works.silent:
        silent = ", ".join(map(str, works.silent[:MOST_RANKS]))
        yield f"  last work of rank {silent} unknown: see its own output"


def _heard(log: Log, found: Explanation) -> Iterator[str]:
    """What was read, in a line: so that a wrong guess about the machine is seen."""
    from envbuild.facts.gpu_models import UNLISTED

    said = found.read.situation
    named = [name for name in ("cublas", "cudnn", "nccl") if name in said.libraries]
    libraries = [f"{name} {said.libraries[name]}" for name in named if name in found.read.stated]
    brought = [f"{name} {said.libraries[name]}" for name in named if name not in found.read.stated]
    whose = f" (which brings {', '.join(brought)})" if brought else ""
    parts = [
        ", ".join(
            f"compute capability {gpu.compute_capability}" if gpu.id == UNLISTED else gpu.id for gpu in said.gpus
        ),
        f"torch {said.torch}{whose}" if said.torch else "",
        *libraries,
        *(
            f"{name} {' or '.join(found.read.candidates[name])} (not sure)"
            for name in ("torch", "cublas", "cudnn", "nccl")
            if name in found.read.candidates
        ),
        f"driver {said.driver}" if said.driver else "",
        f"{said.gpu_count} GPUs{' or more' if found.read.more_gpus else ''}" if said.gpu_count else "",
    ]
    yield f"lines: {len(log.lines)}; found in the log: {', '.join(filter(None, parts)) or 'nothing'}"


def _match(match: SignatureMatch, profile: str | None) -> Iterator[str]:
    from envbuild.explain import cause_ranking
    from envbuild.resolve import advisory_remedy

    name = profile or "NAME"
    kind = match.advisory.severity if match.advisory else "cause"
    yield f"{kind} {match.id}: {match.title}"
    yield f"  confidence {match.confidence:.2f}" + {
        "holds": ": GPU and versions match this advisory",
        "fits": ": the GPU and versions in the log fit this advisory",
        "not loaded": ": the versions in the log do not match, but the log does not show which are loaded",
    }.get(match.standing, "")
    yield from (
        f"  {line.file}{':' if line.file else ''}{line.number:>6}: {safe_line(line.text)}" for line in match.lines
    )
    remedy, prove = cause_ranking.of_profile(match.remedy, name), cause_ranking.of_profile(match.prove or "", name)
    yield f"  cure: {remedy}"
    yield from (f"  in the profile: {line}" for line in advisory_remedy.yaml_lines(match.write))
    yield from (f"  find out {text}" for text in match.find_out)
    if prove:
        yield f"  prove: {prove}"
    if profile is None and re.search(r"\bNAME\b", f"{remedy} {prove}"):
        yield "  (NAME: the profile of your card; `envbuild show` lists them)"


def _at(line: Line) -> str:
    return f" ({_where(line)}: {safe_line(line.text)})"


def _where(line: Line) -> str:
    return f"{line.file}:{line.number}" if line.file else f"line {line.number}"


def safe_line(text: str) -> str:
    """A line of a log as it may be repeated: short, and without what looks like a secret."""
    hidden = _SECRET.sub(lambda match: f"{match[1] or match[2] or ''}***", text.strip())
    return hidden if len(hidden) <= WIDTH else hidden[: WIDTH - 3] + "..."
