"""Renders an explanation as text or Markdown that a person can paste into a bug report. Pure.

Each cause has the sections Cause (or Possible cause), Found and Fix; then Prove if a command can test the fix, and
Sources if any are cited. Lines are wrapped or cut at COLUMNS columns; only a long word of a command is longer.
"""

from __future__ import annotations

import re
import shlex
import textwrap
import unicodedata
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from envbuild.explain import cause_ranking, explanation_document
from envbuild.explain.cause_ranking import Explanation, SignatureMatch
from envbuild.explain.log_reader_and_search import Line, Log, log_pattern
from envbuild.explain.rank_failure_and_last_collectives import Late
from envbuild.explain.secret_masking import safe_line
from envbuild.facts import database
from envbuild.facts.advisory_model import Situation
from envbuild.facts.gpu_fact_types import UNLISTED
from envbuild.resolve import advisory_remedy
from envbuild.util.errors import some

COLUMNS = 100
MOST_RANKS = 16
MOST_XIDS = 5
_CONDA = {"cublas": "libcublas", "cudnn": "cudnn", "nccl": "nccl"}
"""conda's packages of CUDA libraries. Pins of the other libraries are left out of the conda command."""
_XID = log_pattern(r"\bxid \(pci:[0-9a-f:.]{4,20}\): (\d{1,3})\b")


@dataclass(frozen=True)
class Section:
    """A part of the report. `heading`: whether the section begins a diagnosis. `quoted`: lines of the log. `commands`:
    pairs of a tool (such as pip, or "") and the command for this tool."""

    title: str
    text: str = ""
    bullets: tuple[str, ...] = ()
    quoted: tuple[Line, ...] = ()
    commands: tuple[tuple[str, str], ...] = ()
    heading: bool = False


def render(
    log: Log, found: Explanation, profiles: Container[str], markdown: bool = False, files: Sequence[str] = ("-",)
) -> Iterator[str]:
    """The lines of the report. `profiles`: the names of the known profiles. `files`: the names of the log files."""
    first = True
    for section in _sections(log, found, profiles, files):
        if not first and (markdown or section.heading):
            yield ""
        first = False
        yield from _markdown(section) if markdown else _plain(section)


def _sections(log: Log, found: Explanation, profiles: Container[str], files: Sequence[str]) -> Iterator[Section]:
    yield Section("Log", _read(log, found))
    yield from _ranks(found)
    yield from _xids(log)
    for match in found.matches:
        fix = explanation_document.fix_command(match, files)
        yield from _match(match, found.read.situation, match.profile(profiles), fix)
    error = tuple(_own_error(found)) if found.unknown else ()
    stopped = found.read.first or found.read.works.last or found.read.works.timed_out
    healthy = found.unknown and not (found.read.symptoms or error or found.possible or found.ruled_out or stopped)
    if healthy:
        yield Section("No known cause and no sign of a failure found in this log", bullets=_NO_SIGN, heading=True)
    elif found.unknown:
        yield Section("No known cause found in this log", bullets=error, heading=True)
        if found.read.symptoms:
            yield Section("Symptom", ", ".join(sorted(found.read.symptoms)))
    for match in found.possible:
        yield from _match(match, found.read.situation, match.profile(profiles), possible=True)
    if found.decide:
        yield Section("Decide", bullets=found.decide)
    if found.ruled_out:
        yield Section(
            "Ruled out",
            bullets=tuple(
                f"{ruled.advisory.id} ({_where(ruled.line)}): versions or GPU do not match" for ruled in found.ruled_out
            ),
        )
    if found.advice and not healthy:
        yield Section("Before the next run", bullets=found.advice)


def _match(
    match: SignatureMatch,
    situation: Situation,
    profile: str | None,
    fix: str | None = None,
    possible: bool = False,
) -> Iterator[Section]:
    name = profile or "NAME"
    kind = f"known fault, severity {match.advisory.severity}; " if match.advisory else ""
    title = f"{'Possible cause' if possible else 'Cause'}: {match.id} ({kind}confidence {match.confidence:.2f})"
    yield Section(title, match.title, heading=True)
    speaks = tuple(explanation_document.evidence_words(match, 1))
    against = tuple(explanation_document.evidence_words(match, -1))
    line = () if match.lines and not possible else ("no line of the log names it",) if not match.lines else ()
    bullets = [f"supporting: {'; '.join(speaks)}"] if speaks else []
    if against or line:
        bullets.append(f"against: {'; '.join(dict.fromkeys((*against, *line)))}")
    yield Section("Found", bullets=tuple(bullets), quoted=match.lines)
    remedy = cause_ranking.of_profile(match.remedy, name)
    prove = cause_ranking.of_profile(match.prove or "", name)
    by_packages = _changes_packages(match)
    remark = _FIX_REMARK if by_packages else _VARIABLE_REMARK if _sets_variable(match) else _GENERAL_REMARK
    named = (
        ("NAME is the profile of your GPU; `envbuild show` lists them",)
        if profile is None and re.search(r"\bNAME\b", f"{remedy} {prove}")
        else ()
    )
    yield Section(
        "Fix",
        remedy,
        bullets=(
            *(f"find out {text}" for text in match.find_out),
            *named,
            *(("save the log to a file, and write its name for LOG",) if fix and "LOG" in fix.split() else ()),
            *((_CONFLICT,) if _overridden(match, situation) else ()),
            *_no_torch_for_driver(match, situation),
            *((_VARIABLE,) if fix and _sets_variable(match) else ()),
        ),
        commands=(
            *((("envbuild", f"{fix}{remark}"),) if fix else ()),
            *fix_commands(match, situation),
        ),
    )
    if prove:
        yield Section("Prove", commands=tuple(prove_commands(prove)))
    if match.cite:
        short = (cite if display_width(cite) < COLUMNS - 2 else cite.partition("#")[0] for cite in match.cite)
        yield Section("Sources", ", ".join(dict.fromkeys(short)))


def prove_commands(prove: str) -> Iterator[tuple[str, str]]:
    """Yield the commands that test a fix. A probe is run both in the active environment, which the pip commands change,
    and in the profile's image."""
    test, probe, name = prove.partition(" --probe ")
    if probe:
        yield "here", f'{test} --python "$(which python)"{probe}{name}'
        yield "image", prove
    else:
        yield "", prove


_FIX_REMARK = "   # for your active environment; --apply runs the fix"
_GENERAL_REMARK = "   # shows the commands for your active environment"
_VARIABLE_REMARK = "   # prints the line for your job script"
_VARIABLE = (
    "put the line that sets or unsets the variable into the job script, where the variable is set: `envbuild fix` "
    "prints the line, and `fix --apply` cannot change variables of your shell"
)
_CONFLICT = (
    "pip reports a conflict with torch's own pin and installs the library anyway; a later pip install of a package "
    "that requires torch may bring the old version back: `envbuild fix --apply` also changes what torch requires, so "
    "that the new version stays"
)


def _sets_variable(match: SignatureMatch) -> bool:
    """Whether the fix, or a part of it, is a variable."""
    return "env" in match.write or bool(match.advisory and match.advisory.by_library_path)


def _changes_packages(match: SignatureMatch) -> bool:
    """Whether `envbuild fix` changes packages. A fault that LD_LIBRARY_PATH causes is fixed by this variable alone."""
    by_variable = match.advisory and match.advisory.by_library_path
    return not by_variable and bool({"torch", "pins", "packages"} & match.write.keys())


def fix_commands(match: SignatureMatch, situation: Situation) -> Iterator[tuple[str, str]]:
    """Yields the commands of each tool that make the fix, and the lines to write into a profile."""
    write: Mapping[str, Any] = match.write if _changes_packages(match) else {}
    packages: Sequence[str] = write.get("packages", ())
    torch = [f"torch=={write['torch']}"] if "torch" in write else []
    wheels = [f"{distribution}=={version}" for distribution, version in _wheels(match, situation)]
    conda = [f"pytorch={write['torch']}"] if "torch" in write else []
    conda += [f"{_CONDA[name]}={version}" for name, version in write.get("pins", {}).items() if name in _CONDA]
    if packages and match.advisory and match.advisory.about_apex:
        for tool, uninstall in (("pip", "pip uninstall apex"), ("uv", "uv pip uninstall apex")):
            yield tool, f"{uninstall}   # if it is not NVIDIA's; then nothing else"
    if torch or wheels or packages:
        # pip and uv refuse torch and a version that torch excludes in one command
        separate = torch and _overridden(match, situation)
        lists = [[*torch, *packages], wheels] if separate else [[*torch, *wheels, *packages]]
        for tool, install in (("pip", "pip install"), ("uv", "uv pip install")):
            yield tool, " && ".join(f"{install} {shlex.join(words)}" for words in lists)
    if conda or packages:
        yield "conda", f"conda install {shlex.join([*conda, *packages])}"
    if match.advisory and match.advisory.by_library_path:
        yield "shell", "unset LD_LIBRARY_PATH"
    for name, value in match.write.get("env", {}).items():
        yield "shell", f"export {name}={shlex.quote(value)}"
    for package, variables in match.change.env_with.items():
        for name, value in variables.items() if package not in situation.distributions else ():
            yield "shell", f"export {name}={shlex.quote(value)}   # if the program uses {package}"
    for line in advisory_remedy.yaml_lines(match.write):
        yield "profile", line


def _no_torch_for_driver(match: SignatureMatch, situation: Situation) -> Iterator[str]:
    """Yields a remark if the log's driver runs no torch release that fixes the cause. A fault that LD_LIBRARY_PATH
    causes needs no other torch."""
    if situation.driver is None or match.change.torch is None or "torch" in match.write:
        return
    if match.advisory and match.advisory.by_library_path:
        return
    release = advisory_remedy.written(match.change, replace(situation, driver=None))
    if "torch" in release:
        minimum = database.driver_minimum(release["cuda"]).compatible
        yield (
            f"driver {situation.driver} does not run the CUDA {release['cuda']} of torch {release['torch']}, "
            f"which needs driver {minimum}"
        )


def _wheels(match: SignatureMatch, situation: Situation) -> Iterator[tuple[str, str]]:
    """The distribution and version of each library that the fix pins."""
    major = str(match.write.get("cuda") or situation.cuda or "12").partition(".")[0]
    for library, version in match.write.get("pins", {}).items():
        distribution = database.libraries()[library].distributions.get(major)
        if distribution:
            yield distribution, version


def _overridden(match: SignatureMatch, situation: Situation) -> bool:
    """Whether the fix pins a library to a version other than the one that torch requires. This is assumed for a torch
    whose version is unknown, because torch's wheels require exact versions."""
    torch = match.write.get("torch") or situation.torch
    release = database.torch_release(torch) if torch else None
    return any(
        release is None or release.pins.get(distribution, f"=={version}") != f"=={version}"
        for distribution, version in _wheels(match, situation)
    )


def _read(log: Log, found: Explanation) -> str:
    """Returns a line with the facts read from the log, so that the user notices wrong facts."""
    situation = found.read.situation
    named = [name for name in ("cublas", "cudnn", "nccl") if name in situation.libraries]
    libraries = [f"{name} {situation.libraries[name]}" for name in named if name in found.read.stated]
    brought = [f"{name} {situation.libraries[name]}" for name in named if name not in found.read.stated]
    whose = f" (which brings {', '.join(brought)})" if brought else ""
    parts = [
        ", ".join(
            f"compute capability {gpu.compute_capability}" if gpu.id == UNLISTED else gpu.id for gpu in situation.gpus
        ),
        f"torch {situation.torch}{whose}" if situation.torch else "",
        *libraries,
        *(
            f"{name} {' or '.join(found.read.candidates[name])} (not sure)"
            for name in ("torch", "cublas", "cudnn", "nccl")
            if name in found.read.candidates
        ),
        f"driver {situation.driver}" if situation.driver else "",
        f"{situation.gpu_count} GPUs{' or more' if found.read.more_gpus else ''}" if situation.gpu_count else "",
    ]
    return f"{some(len(log.lines), 'line')}; found: {', '.join(filter(None, parts)) or 'no versions, no GPU'}"


_NO_SIGN = (
    "if the run did fail, its stderr is missing: run it again as `COMMAND 2>&1 | tee train.log`, with "
    "PYTHONFAULTHANDLER=1, and for several GPUs with NCCL_DEBUG=INFO",
)


def _own_error(found: Explanation) -> Iterator[str]:
    """Yields the exception of the user's program. Such an error may be in the program itself, and not be caused by
    versions or GPUs."""
    error = found.read.error
    if error:
        yield f"the program's own error ({_where(error)}): {safe_line(error.text)}"
        missing = re.search(r"(?:ModuleNotFoundError|ImportError): No module named '([\w.]{1,80})'", error.text)
        if missing:
            yield f"the package that has {missing[1]} is not in this environment: install it, or add it to the profile"


def _size(late: Late) -> str:
    return "" if late.elements is None else f" ({some(late.elements, 'element')})"


def _ranks(found: Explanation) -> Iterator[Section]:
    """Reports the rank that lags, diverged or failed first. It comes before the causes, because the other ranks' errors
    are often only consequences."""
    works, first = found.read.works, found.read.first
    bullets: list[str] = []
    if first:
        local = f"local rank {first.local} of its node" if first.local is not None else "a rank"
        rank = f"rank {first.rank}" if first.rank is not None else local
        status = f", exit {first.exit}" if first.exit is not None else ""
        bullets.append(f"first to fail: {rank}{status} ({_where(first.line)}: {safe_line(first.line.text)})")
    if works.diverged:
        same = len({late.operation for late in works.diverged}) == 1
        waits = ", ".join(
            f"rank {late.rank} in {late.operation} {late.number}{_size(late) if same else ''}"
            for late in works.diverged[:MOST_RANKS]
        )
        differs = "gave one collective different sizes" if same else "diverged: each waited in a different collective"
        bullets.append(f"the ranks {differs}: {waits}")
        bullets.append(
            "look for a branch on the rank or on its data around a collective, or for different numbers of steps"
        )
    counts = {work.rank: work.enqueued for work in works.last} or {late.rank: late.number for late in works.timed_out}
    if works.behind:
        which, last = ", ".join(map(str, works.behind[:MOST_RANKS])), counts[works.behind[0]]
        how = (
            f"it timed out in collective {last}; the latest that timed out is {max(counts.values())}"
            if works.timed_out
            else "it has not completed its last one"
            if last == max(counts.values())
            else f"it did not reach work {last + 1}"
        )
        bullets.append(f"the others wait for rank {which}: {how}")
    if works.last:
        listed = ", ".join(f"rank {work.rank}: {work.enqueued}" for work in works.last[:MOST_RANKS])
        more = len(works.last) - MOST_RANKS
        level = "; these ranks made equal progress" if len(works.last) > 1 and not works.behind else ""
        bullets.append(f"last enqueued work: {listed}{f' and {more} more' if more > 0 else ''}{level}")
    if works.timed_out:
        listed = ", ".join(f"rank {late.rank}: {late.number}" for late in works.timed_out[:MOST_RANKS])
        more = len(works.timed_out) - MOST_RANKS
        bullets.append(f"timed out in work (SeqNum): {listed}{f' and {more} more' if more > 0 else ''}")
    if works.silent:
        silent = ", ".join(map(str, works.silent[:MOST_RANKS]))
        one = len(works.silent) == 1
        explained = works.behind or works.diverged or first
        wait = "" if explained else f"; the others may wait for {'it' if one else 'one of them'}"
        bullets.append(f"last work of rank {silent} unknown: see {'its' if one else 'their'} own output{wait}")
    if bullets:
        yield Section("Ranks", bullets=tuple(bullets))


def _xids(log: Log) -> Iterator[Section]:
    """Explains the Xids in the kernel's log, at most MOST_XIDS, and whether to drain the node."""
    numbers = {int(match[1]): line for line, match in reversed(log.find(_XID, 50))}
    rows = database.xids()
    bullets = []
    for number, line in sorted(numbers.items())[:MOST_XIDS]:
        row = rows.get(number)
        title = row.title if row else "unknown to envbuild"
        fit = "caused by a program: the GPU is healthy" if row and row.application else "drain the node, reset the GPU"
        bullets.append(f"Xid {number} ({_where(line)}): {title}; {fit}")
    if bullets:
        yield Section("Kernel", bullets=tuple(bullets))


def _plain(section: Section) -> Iterator[str]:
    if section.heading and section.text:
        yield section.title
        yield from _wrapped(" ", section.text)
    else:
        yield from _wrapped(f"{section.title}:", section.text)
    for bullet in section.bullets:
        yield from _wrapped("  -", bullet)
    for line in section.quoted:
        yield cut(f"  {_quoted(line)}")
    width = max((len(tool) for tool, _ in section.commands if tool), default=0)
    for tool, command in section.commands:
        yield from _command(f"  {f'{tool}:':{width + 1}} " if tool else "  ", command)


def _markdown(section: Section) -> Iterator[str]:
    if section.heading:
        yield f"### {section.title}"
        yield ""
        if section.text:
            yield from textwrap.wrap(section.text, COLUMNS, break_long_words=False, break_on_hyphens=False)
    else:
        yield from _wrapped(f"**{section.title}**:", section.text)
    if section.bullets:
        yield ""
    for bullet in section.bullets:
        yield from _wrapped("-", bullet)
    for quoted in (
        [_quoted(line) for line in section.quoted],
        [part for tool, command in section.commands for part in _command(f"{tool}: " if tool else "", command)],
    ):
        if quoted:
            yield from ("", "```text", *(line.replace("```", "'''") for line in quoted), "```")


_MOST_OF_PATH = 30  # characters of a path in front of a long quoted line


def _quoted(line: Line) -> str:
    place, text = f"{':' if line.file else ''}{line.number:>6}: ", safe_line(line.text)
    file = line.file
    if len(file) > _MOST_OF_PATH and display_width(f"{file}{place}{text}") > COLUMNS:
        file = f"...{file[-_MOST_OF_PATH:]}"
    return cut(f"{file}{place}{text}")


def _wrapped(head: str, text: str) -> list[str]:
    """Return `text` after `head`, in lines of at most COLUMNS columns."""
    indent = " " * (len(head) + 1) if head.strip() == "-" else "  "
    lines: list[str] = []
    line = head
    for word in text.split():
        if display_width(line) + 1 + display_width(word) > COLUMNS and line.strip():
            lines.append(line)
            line = f"{indent}{word}"
        else:
            line = f"{line} {word}" if line else word
    return [cut(part) for part in (*lines, line)]


def _command(head: str, command: str) -> Iterator[str]:
    """Wraps a long command with backslashes. Its remark, which a backslash cannot continue, goes on a line of its own
    if it is too long for the command's line."""
    text, _, remark = command.partition("   # ")
    line = head
    for word in re.findall(r"(?:'[^']*'|\S)+\s*", text):
        if display_width(line) + display_width(word.rstrip()) + 2 > COLUMNS and line.strip() and line != head:
            yield f"{line.rstrip()} \\"
            line = " " * (len(head) + 2)
        line += word
    line = line.rstrip()
    if remark and display_width(line) + len(remark) + 5 <= COLUMNS:
        yield f"{line}   # {remark}"
        return
    yield line
    if remark:
        yield f"{' ' * len(head)}# {remark}"


def display_width(text: str) -> int:
    """The width in terminal columns: East Asian wide characters take two."""
    return len(text) if text.isascii() else sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def cut(text: str) -> str:
    """Shorten the text to COLUMNS columns if it is longer."""
    if display_width(text) <= COLUMNS:
        return text
    while display_width(text) > COLUMNS - 3:
        text = text[: max(len(text) - max((display_width(text) - COLUMNS + 3) // 2, 1), 0)]
    return f"{text}..."


def _where(line: Line) -> str:
    return f"{line.file}:{line.number}" if line.file else f"line {line.number}"
