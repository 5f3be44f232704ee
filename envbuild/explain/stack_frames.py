"""Reads stack traces, and names the components in which a program crashed. Detects the stacks of a hung program. Pure.

Supported formats: gdb, lldb, pstack, coredumpctl, UCX, glibc, torch, Python's faulthandler and py-spy, and the kernel's
line about a trap. The table `components` of signatures.yaml names libraries and functions.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from envbuild.explain.log_reader_and_search import Line, Log, log_pattern
from envbuild.facts import log_signatures
from envbuild.facts.log_signatures import NEUTRAL

OTHER = "other"
"""The component of a library that the table `components` does not contain."""
INNER = 3
"""Number of innermost frames, not counting neutral ones, that show where a program crashed."""
DEPTH, HEADS = 40, 60
"""Limits: 2 * DEPTH lines are read of one stack, and HEADS stacks are found with one pattern of _HEADS."""

_HEADS = (
    r"^\s{0,8}(?:\* )?#0 ",
    r"frame #0: ",
    r"\(most recent call first\)",
    r"^\s{0,8}thread .{1,60}\((?:idle|active)",
    r"=+ ?backtrace",
    r"caught signal \d",
    r"\b(?:traps:|trap |segfault at ).{0,200} in \S{1,80}\.so",
    r"signal: (?:floating|segmentation|illegal|bus|aborted)",
)
_CRASH = (
    r"(?:received|terminated with|caught|got|stop reason =|killed by) signal:? {0,2}\(?(?:sig(?!stop|int|trap)|\d)",
    r"fatal python error: (?!none)",
    r"\bexc_(?:bad|arith|crash)",
    r"\btraps?: |segfault at |\bdivide error\b",
    r"^signal: ",
    r"signal: (?:floating|segmentation|illegal|bus|aborted)",
    r"ended by SIG(?:FPE|SEGV|ILL|BUS|ABRT)",
    r"(?:floating[ -]point exception|segmentation fault|illegal instruction|bus error)\b",
)
_NO_INSTRUCTION = r"\bSIGILL\b|\btrap invalid opcode\b|(?<!warp )(?<!lane )\billegal instruction\b(?! was)"
_RAISED = (r"exception raised from ", r"what\(\):", r"torch\.acceleratorerror")
"""Text before a stack that torch itself prints for an error. Such a stack does not show a hang."""
_NUMBERED = re.compile(r"^\s{0,8}(?:\* )?(?:frame )?#\d{1,3}:?\s{1,4}(?P<rest>.{1,1500})", re.IGNORECASE)
_FROM = re.compile(r"(?:\bfrom |\bin |\()(?P<library>/?[\w.+/@-]{1,300}\.(?:so|dylib)[\w.-]{0,40})")
_LLDB = re.compile(r"(?P<library>[\w.+-]{1,120})`(?P<function>[\w:~<>]{1,200})")
_SOURCE = re.compile(r"\bat (?P<source>(?:[A-Za-z]:)?[\w./\\+@-]{1,300}):\d{1,6}")
_FUNCTION = re.compile(r"^(?:0x[0-9a-f]{1,16} )?(?:in )?(?P<function>[\w:~?$.@]{1,300})")
_UCX = re.compile(r"^\s{0,8}\d{1,3}\s{1,4}0x[0-9a-f]{4,16} (?P<function>[\w:~]{1,300})\(")
_GLIBC = re.compile(r"(?P<library>[\w.+/-]{1,300}\.so[\w.]{0,40})\((?P<function>\w{0,200})\+?0x[0-9a-f]")
_TRAP = re.compile(r"(?:traps:|trap |segfault at ).{0,200} in (?P<library>\S{1,80}\.so[\w.-]{0,40})\[?")
_PYTHON = re.compile(r"^\s{0,8}File \"(?P<source>[^\"]{1,400})\", line \d{1,7} in (?P<function>\S{1,200})")
_PY_SPY = re.compile(r"^\s{1,12}(?P<function>[\w<>.]{1,200}) \((?P<source>[^()]{1,300}):\d{1,7}\)$")
_INNERMOST = re.compile(r"^\s{0,8}(?:\* )?(?:frame )?#0\b")
_MORE = re.compile(r"^\s{2,12}(?:from|at) \S")


@dataclass(frozen=True)
class Frame:
    """One frame of a stack. `source`: the source file of a Python frame, or of a native frame for which the debugger
    printed no library; else ""."""

    function: str
    library: str
    source: str
    line: Line

    @property
    def component(self) -> str:
        for row in log_signatures.components():
            if any(pattern.search(self.library or self.source) for pattern in row.libraries):
                return row.component
            if any(pattern.search(self.function) for pattern in row.functions):
                return row.component
        python = self.source.endswith((".py", ".pyx")) or self.source.startswith("<")
        return NEUTRAL if python or not (self.library or self.source) else OTHER


@dataclass(frozen=True)
class Stacks:
    """`crashed_in`: the components of the innermost frames of the stack that crashed; empty if unknown. `hang`: whether
    the stacks were recorded from a process that was still running."""

    crashed_in: frozenset[str] = frozenset()
    hang: bool = False


def read(log: Log) -> Stacks:
    heads = {id(line) for pattern in _HEADS for line, _ in log.find(log_pattern(pattern), HEADS)}
    if not heads:
        return Stacks()
    found = [frames for frames in _stacks(log, heads) if frames]
    if log.has([log_pattern(pattern) for pattern in _CRASH]):
        # any library may be built for instructions that the CPU lacks
        return Stacks(crashed_in=_inner(found) - ({OTHER} if log.has([log_pattern(_NO_INSTRUCTION)]) else set()))
    return Stacks(hang=bool(found) and not log.has([log_pattern(pattern) for pattern in _RAISED]))


def _inner(found: list[list[Frame]]) -> frozenset[str]:
    """Returns the components of the innermost frames, without neutral ones, of the first stack that has such frames."""
    for frames in found:
        named = [component for frame in frames if (component := frame.component) != NEUTRAL]
        if named:
            return frozenset(named[:INNER])
    return frozenset()


def _stacks(log: Log, heads: set[int]) -> Iterator[list[Frame]]:
    """Yields all stacks: first the stack of faulthandler's current thread, then the others in the order of the log."""
    places = [place for place, line in enumerate(log.lines) if id(line) in heads]
    current = [place for place in places if log.lines[place].text.lstrip().lower().startswith("current thread")]
    for place in [*current, *(place for place in places if place not in current)]:
        yield list(_frames(log, place))


def _frames(log: Log, place: int) -> Iterator[Frame]:
    """Yields the frames of the stack whose head is the line at `place`, up to the first line that is not a frame.
    Up to three lines before the first frame, and lines that continue a frame, are skipped."""
    lines = list(islice(log.lines, place, place + 2 * DEPTH))
    began = False
    for number, line in enumerate(lines):
        text = line.text
        if number + 1 < len(lines) and _MORE.match(lines[number + 1].text):
            text = f"{text} {lines[number + 1].text.strip()}"
        frame = _frame(text, line)
        if frame is None:
            if not _MORE.match(text) if began else number > 2:
                return
            continue
        if began and _INNERMOST.match(text):  # the next stack begins
            return
        began = True
        yield frame


def _frame(text: str, line: Line) -> Frame | None:
    if match := _PYTHON.match(text) or _PY_SPY.match(text):
        return Frame(match["function"], "", match["source"], line)
    if match := _NUMBERED.match(text):
        rest = match["rest"]
        if inner := _LLDB.search(rest):
            return Frame(inner["function"], inner["library"], "", line)
        function, library, source = _FUNCTION.match(rest), _last(_FROM, rest), _SOURCE.search(rest)
        return Frame(
            function["function"] if function else "",
            library["library"] if library else "",
            source["source"] if source and not library else "",
            line,
        )
    if match := _UCX.match(text):
        return Frame(match["function"], "", "", line)
    if match := _TRAP.search(text):
        return Frame("", match["library"], "", line)
    if match := _GLIBC.search(text):
        return Frame(match["function"], match["library"], "", line)
    return None


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    found = None
    for match in pattern.finditer(text):
        found = match
    return found
