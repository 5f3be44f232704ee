"""Rewrites a line to the plain form of its message, and joins messages that are broken over two lines. Pure.

The plain form has straight quotes and single spaces, no escapes of JSON, HTML or Markdown, and no prefix that a program
put before each line (docker compose, kubectl, Ray, mpirun, srun).
"""

from __future__ import annotations

import html
import re
from collections import Counter
from collections.abc import Iterator, Sequence

_CHARACTERS = str.maketrans(
    {"‘": "'", "’": "'", "‚": "'", "‛": "'", "`": "'", "´": "'", "“": '"', "”": '"', "„": '"', "«": '"', "»": '"',
     "\u00a0": " ", "\u200b": None, "\u3000": " ", "‐": "-", "‑": "-", "–": "-", "—": "-", "−": "-",
     "。": ".", "、": ","}
)  # fmt: skip
_ENTITY = re.compile(r"&(?:#\d{1,5}|#[xX][0-9a-fA-F]{1,4}|quot|apos|lt|gt|amp|nbsp);")
_TAG = re.compile(
    r"</?(?:a|b|code|del|em|font|i|ins|kbd|mark|pre|samp|span|strong|tt|u)(?: [^<>]{1,200})?>"
    r"|(?P<block></?(?:blockquote|br|div|h\d|li|p|td|th|tr)(?: [^<>]{0,200})?/?>)"
)
"""HTML tags. `block`: those between which a reader sees a space."""


def _windows_path(character: str) -> str:
    """Returns a pattern of an absolute path on Windows, with single or doubled backslashes, and at least two of them. A
    backslash after the name of a file, such as train.py, is not part of the path: it may begin an escaped line break.
    `character`: of the names in the path."""
    not_after_file = r"(?<!\w\.[a-z])(?<!\w\.[a-z]{2})(?<!\w\.[a-z]{3})"
    single, doubled = (
        f"(?:{not_after_file}{separator}{character}*){{2,}}" for separator in (r"\\(?!\\)", r"\\\\(?!\\)")
    )
    return f"(?<![A-Za-z])[A-Za-z]:(?:{single}|{doubled})"


_PATH_WITH_SPACES, _PATH = _windows_path(r"[^\\\"'<>|*?:]"), _windows_path(r"[^\\\"'<>|*?:\s]")
WINDOWS_PATH = re.compile(rf"((?<=[\"']){_PATH_WITH_SPACES}(?=\\?[\"'])|{_PATH})")
"""An absolute path on Windows. It contains spaces only if it is quoted."""
_ESCAPES = (
    (re.compile(r"\\(?:r\\)?n|\\t"), " "),
    (re.compile(r"\\'"), "'"),
    (re.compile(r'\\"'), '"'),
    (re.compile(r"\\([_*`<>\[\]()#])"), r"\1"),
    (re.compile(r"%20"), " "),
    (re.compile(r"\*\*|__(?=[A-Z ])|'''?(?=\S)"), ""),
)
_PREFIX = re.compile(
    r"^\s{0,8}(?:"
    r"[\w.-]{1,60}(?:[-_]\d{1,4})? {1,20}\| "  # docker compose
    r"|\[\d{1,5},\d{1,5}\]<std(?:err|out)>: ?"  # mpirun --tag-output
    r"|\([\w.:@-]{1,80}(?: \w{1,20})? (?:pid|ip)=[\w.:, =-]{1,60}\) "  # Ray
    r"|\[(?:pod|container)/[\w./-]{1,120}\] "  # kubectl logs --prefix
    r"|\[?(?:default\d{1,4}|rank ?\d{1,5}|worker[-_ ]?\d{1,4})\]?: ?"  # torchrun --tee, torch
    r"|\d{1,4}: (?=[A-Z])"  # srun --label
    r"|\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[.,\d]{0,10}(?:Z|[+-]\d\d:?\d\d)? (?:std(?:err|out) [FP] )?"  # kubectl, docker
    r"|> (?:> )?"  # quoted in an issue
    r")"
)
_UNICODE = re.compile(r"(?:\\u[0-9a-fA-F]{4})+")
_SPACES = re.compile(r"(?<=\S)[ \t]{2,}(?=\S)")
_TRIGGERS = tuple(
    re.compile(text)
    for text in (
        *("‘", "’", "`", "´", "“", "”", "„", "«", "»", "\u00a0", "\u3000", "‑", "–", "—", "−"),
        *("&#0", "&#x", "&quot;", "&apos;", "&lt;", "&gt;", "&amp;", "&nbsp;", "<br", "<span", "<div", "<pre", "<code"),
        *("</p>", "</li>", "</td>", "</th>", "</a>", "</b>", "</i>", "</em>", "</strong>", "</font>", "</kbd>", "</h"),
        r"\\n", r"\\t", r"\\u", r"\\'", r'\\"', r"\\_", r"%20", r"\*\*", r"  ", r" \| ", r"<std", r"pid=", r"ip=",
        r"\[pod/", r"\[container/", r"default", r"rank", r"worker", r"Z ", r"^> ", r"\d: ",
    )
)  # fmt: skip
"""Patterns of texts in most of the lines that `normalized` changes. A text stands for its shape: 0 is any digit. Other
changed lines have none of these texts: for example, if only a <p>, <u> or <tt>, an ideographic full stop, or one space
at the end is changed."""
_MOST_PREFIXES = 3


def form_patterns() -> tuple[re.Pattern[str], ...]:
    """Returns patterns whose required texts are in most of the lines that `normalized` changes. Changed lines without
    these texts are searched only as they are."""
    return _TRIGGERS


def without_prefix(text: str) -> str:
    for _ in range(_MOST_PREFIXES):
        match = _PREFIX.match(text)
        if match is None:
            break
        text = text[match.end() :]
    return text


def _unescaped(match: re.Match[str]) -> str:
    """The characters of escapes. Two of them may be the halves of one character; half a character becomes U+FFFD."""
    return bytes.fromhex(match[0].replace("\\u", "")).decode("utf-16-be", "replace")


def normalized(text: str) -> str:
    """Returns a line with straight quotes and single spaces, and without escapes, tags and prefixes. Numbers and paths
    are not replaced with placeholders. But %20 becomes a space, also within a path."""
    if "\\u" in text:
        text = _UNICODE.sub(_unescaped, text)
    if "<" in text:
        text = _TAG.sub(lambda tag: " " if tag["block"] else "", text).strip()
    if "&" in text:
        text = _ENTITY.sub(lambda entity: html.unescape(entity[0]), text)
    parts = WINDOWS_PATH.split(text) if ":\\" in text else [text]
    parts[::2] = map(_without_escapes, parts[::2])  # the others are paths
    return _SPACES.sub(" ", without_prefix("".join(parts)).translate(_CHARACTERS)).rstrip()


def _without_escapes(text: str) -> str:
    for pattern, character in _ESCAPES:
        text = pattern.sub(character, text)
    return text


_PROGRESS = re.compile(r"^[^|]{0,80}\d{1,3}%\|[^|]{0,200}\||\b\d{1,9}/\d{1,9} \[[\d:]{1,9}<")
"""A line of tqdm."""
_RECORD = re.compile(
    r"^(?:\[|\{|File \"|Traceback|#\d|\d{4}-\d\d-\d\d|\d\d:\d\d:\d\d|(?:[A-Z]\w{0,60})?(?:Error|Exception|Warning)\b"
    r"|terminate called|(?:ERROR|WARN|INFO|DEBUG|FATAL)|[-=*#]{3}|\+|\||>>>|\$ |[EWIF]\d{4} "
    r"|[\w./-]{1,80}:\d{1,6}:|[A-Za-z]:[\\/][\w.\\/ -]{1,200}:\d{1,6}:)"
)
"""The beginning of a new message, which does not continue the line before it."""
_ENDED = re.compile(r"[.!?}|。]$|\.py, line \d{1,6}$")
_SHORTEST, _WIDTH, _LONGEST = 12, 76, 300
"""Lengths in characters. A line of prose that the next line continues has at least _SHORTEST; a line that a terminal of
unknown width or a program broke has at least _WIDTH. Lines longer than _LONGEST are not joined."""
_CONTINUES = "('\"`,_/<&="
"""If a line begins with one of these characters, it continues the line before it."""
_OPEN = re.compile(
    r"(?:\b(?:an?|the|to|of|is|are|was|in|on|at|by|for|with|from|and|or|not|no|version|symbol|error|code|cannot|could)"
    r"|[>=<:(,])$",
    re.IGNORECASE,
)
"""The end of a line after which the message continues."""
_PROMPT = re.compile(r"^\s{0,8}(?:>>>|In ?\[\d{1,4}\]:) \S")
"""An expression that was typed at the prompt of Python. The next line is its value."""
_UNIT = re.compile(r"(?:[KMG]i?B|GPUs?)\b")
_MOST_BETWEEN = 2
_NARROWEST, _WIDEST, _BROKEN = 30, 200, 3
"""A terminal of a width between the first two numbers broke the lines of a log if at least _BROKEN lines are that long,
and none is longer."""
MOST_JOINED = 20_000
"""Maximum number of joined lines that are searched."""


def joined(lines: Sequence[tuple[str, str]]) -> Iterator[tuple[int, int, str]]:
    """Joins each line with the next if a message may continue there: after a break between words in prose, or after a
    break in a long line, even within a word, by a terminal or a program. Lines of a progress bar between the two are
    skipped.

    `lines`: (file, text) of each line. Yields the index of the first line, the position of the break, and the joined
    text.
    """
    count, width = 0, _terminal_width(lines)
    for index, (file, first) in enumerate(lines):
        if count >= MOST_JOINED:
            return
        length = len(first)
        if not _SHORTEST <= length <= _LONGEST or _PROGRESS.search(first):
            continue
        following = index + 1
        while (
            following < min(len(lines), index + 1 + _MOST_BETWEEN)
            and lines[following][0] == file
            and _PROGRESS.search(lines[following][1])
        ):
            following += 1
        if following >= len(lines) or lines[following][0] != file:
            continue
        second = without_prefix(lines[following][1]).lstrip().removeprefix("> ")
        if second.partition(" ")[0] == first.partition(" ")[0]:  # two records of one kind
            continue
        if length == width:
            count += 1
            yield index, length, _unbroken(lines, index, width)
        head = first.rstrip().removesuffix("\\").rstrip()
        if len(second) < 2 or len(second) > _LONGEST or not head or _RECORD.match(second) or _ENDED.search(head):
            continue
        prose = second[0].islower() or second[0] in _CONTINUES or not second[0].isascii()
        value = bool(_PROMPT.match(first)) and len(second) < _WIDTH
        if prose or value or length >= _WIDTH or _OPEN.search(head) or (head[-1].isdigit() and _UNIT.match(second)):
            count += 1
            yield index, len(head), f"{head} {second}"
        if head[-1] in "-_/" or (length >= _WIDTH and first[-1].isalnum() and second[0].isalnum()):
            count += 1
            yield index, len(head), f"{head}{second}"


def _terminal_width(lines: Sequence[tuple[str, str]]) -> int | None:
    """Returns the width of the terminal that broke the lines of a log; None if the lines do not show one."""
    lengths = Counter(len(text) for _, text in lines)
    longest = max(lengths, default=0)
    return longest if _NARROWEST <= longest <= _WIDEST and lengths[longest] >= _BROKEN else None


def _unbroken(lines: Sequence[tuple[str, str]], index: int, width: int) -> str:
    """Returns the text that a terminal broke at `width`, from the line at `index` on."""
    file, text = lines[index]
    for other, following in lines[index + 1 : index + 2 + _LONGEST // width]:
        if other != file or len(text) > _LONGEST:
            break
        text += following
        if len(following) < width:
            break
    return text
