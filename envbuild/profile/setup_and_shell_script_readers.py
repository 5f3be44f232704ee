"""Reads setup.py and shell scripts that install packages as requirements for pip, without running them. Pure.

Of a setup.py, the literal list `install_requires` counts. Of a shell script, the packages of its lines `pip install`
and `conda install` count. What depends on a condition, a variable or a computation is a fault with its line.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from envbuild.profile.environment_and_lock_file_readers import Entry, conda_entry
from envbuild.util.errors import ProfileError

MAX_SCRIPT_BYTES = 200_000
"""The setup.py of PyTorch has 60,000 bytes. The syntax tree of a file takes a hundred times its size in memory."""
_INSTEAD = "write the packages to a requirements.txt, and name that file"
_LIST = "install_requires"


def setup_entries(text: str, name: str) -> Iterator[Entry]:
    """The requirements in the list install_requires of a setup.py. Raises ProfileError if the file is too large or is
    not valid Python."""
    if len(text) > MAX_SCRIPT_BYTES:
        raise ProfileError(f"{name} is larger than {MAX_SCRIPT_BYTES} bytes", hint=_INSTEAD)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python reports invalid escapes of the file as warnings
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        # MemoryError: Python raises it for source that is nested too deeply
        where = f" in line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        why = "is nested too deeply" if isinstance(error, RecursionError | MemoryError) else "is not valid Python 3"
        raise ProfileError(f"{name} {why}{where}", hint=_INSTEAD) from None
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _called(node) == "setup"]
    lists = [(call, word.value) for call in calls for word in call.keywords if word.arg == _LIST]
    if len(lists) != 1:
        missing = "setup() is not called with it: name the file that lists the dependencies, such as pyproject.toml"
        several = f"there is more than one list, and which one counts is decided when the file runs; {_INSTEAD}"
        last = ([call for call, _ in lists] or calls)[-1:]
        yield Entry(last[0].lineno if last else 1, _LIST, fault=several if lists else missing)
        return
    call, value = lists[0]
    if isinstance(value, ast.Name):
        found = _value_of(tree, call, value)
        if isinstance(found, str):
            yield Entry(value.lineno, _LIST, fault=f"{found}; {_INSTEAD}")
            return
        value = found
    yield from _literal_entries(value)


def _called(call: ast.Call) -> str:
    """The last name of the function that is called: setup for setuptools.setup(...)."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _literal_entries(value: ast.expr) -> Iterator[Entry]:
    """The requirements of a literal: a list or tuple of texts, or a text with a requirement on each line."""
    if isinstance(value, ast.Constant) and isinstance(value.value, str):
        parts: list[ast.expr] = [value]
    elif isinstance(value, ast.List | ast.Tuple):
        parts = value.elts
    else:
        fault = f"not a list of texts, but computed when the file runs, which envbuild never does; {_INSTEAD}"
        yield Entry(value.lineno, _LIST, fault=fault)
        return
    for part in parts:
        if not isinstance(part, ast.Constant) or not isinstance(part.value, str):
            yield Entry(part.lineno, _LIST, fault=f"this element is not a text; {_INSTEAD}")
            continue
        for line in part.value.splitlines():
            requirement = line.partition(" #")[0].strip()  # setuptools removes comments in the same way
            if requirement and not requirement.startswith("#"):
                yield Entry(part.lineno, requirement, requirement=requirement)


def _value_of(tree: ast.Module, call: ast.Call, use: ast.Name) -> ast.expr | str:
    """The value of a name whose only assignment is a literal, or why the value is not certain. Any use of the name
    outside the call of setup() may change the list."""
    inside = {id(node) for node in ast.walk(call)}
    values = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if len(targets) == 1 and isinstance(targets[0], ast.Name) and targets[0].id == use.id:
                values.append(node.value)
                inside.add(id(targets[0]))
    if len(values) != 1:
        return f"{len(values)} assignments give the list its value, instead of one"
    for node in ast.walk(tree):
        changed = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == use.id
        named = {getattr(node, key, None) for key in ("id", "name", "asname", "arg")}
        if changed or (use.id in named and id(node) not in inside and not isinstance(node, ast.keyword)):
            return f"line {getattr(node, 'lineno', 1)} may change the list"
    return values[0]


_TOKEN = re.compile(
    r"""(?P<space>[^\S\n]+) | (?P<comment>\#[^\n]*)
    | (?P<redirect>[0-9]*(?:&>>?|>>?[&|]?|<<<|<<-?|<>|<&?)) | (?P<end>&&|\|\||;;|[;&|()\n])
    | (?P<word>(?:[^\s;&|()'"\\]|\\[^\n]|'[^']*'|"(?:[^"\\]|\\.)*")+)""",
    re.VERBOSE | re.DOTALL,
)
_PIECE = re.compile(r"""\\(.)|'([^']*)'|"((?:[^"\\]|\\.)*)\"""", re.DOTALL)
_BLOCKS = {"if": 1, "for": 1, "while": 1, "until": 1, "case": 1, "{": 1, "fi": -1, "done": -1, "esac": -1, "}": -1}
_BEFORE = re.compile(
    r"if|then|do|else|elif|while|until|!|[{}]|sudo|command|exec|time|nohup|-[HEn]|[A-Za-z_][A-Za-z0-9_]*=.*", re.DOTALL
)
"""Words that may stand before the name of a command."""
_PIP = re.compile(r"(.*/)?pip[0-9.]*")
_CONDA = re.compile(r"(.*/)?(conda|mamba|micromamba)")
_SYSTEM = re.compile(r"(.*/)?(apt|apt-get|aptitude|yum|dnf|apk|brew|zypper|pacman)")
_HARMLESS = re.compile(
    r"set|echo|printf|export|cd|mkdir|exit|true|:|\[|\[\[|test|return|local|case|for|fi|done|esac|read|shift|unset|function"
)
_TESTS = ("[", "[[", "test")
_INDEX = re.compile(r"-[if]|--(index-url|extra-index-url|pypi-url|find-links|trusted-host)")
_VALUE = re.compile(
    r"-[rceift]|--(requirement|constraint|editable|index-url|extra-index-url|pypi-url|find-links|trusted-host|target|prefix"
    r"|root|platform|python-version|implementation|abi|no-binary|only-binary|upgrade-strategy|progress-bar|timeout|retries"
    r"|config-settings?|global-option|build-option|install-option|exists-action|proxy|cert|client-cert|src|report|log"
    r"|cache-dir|use-feature|use-deprecated|python|root-user-action)"
)
"""Options of pip whose value is the next word."""
_NO_VERSION = re.compile(
    r"-[UqvIy]+|--(upgrade|quiet|verbose|yes|user|force-reinstall|ignore-installed|upgrade-strategy|break-system-packages"
    r"|no-warn-script-location|no-warn-conflicts|disable-pip-version-check|no-input|root-user-action|no-cache|cache-dir"
    r"|default-timeout|system|isolated|proxy|cert|no-compile|compile|no-clean|check-build-dependencies|log|exists-action)(=.*)?"
)
_CONDA_VALUE = re.compile(r"-[cnp]|--(channel|name|prefix|solver)")
_NOT_EVALUATED = f"it depends on a condition, loop or function, which envbuild does not evaluate; {_INSTEAD}"
_VARIABLE = f"it contains a variable or command of the shell, which envbuild does not evaluate; {_INSTEAD}"


@dataclass
class _Command:
    """One command of a script. `words`: without quotes; `unknown`: those of which the shell replaces a part;
    `conditional`: whether the shell may skip the command."""

    line: int
    conditional: bool
    words: list[str] = field(default_factory=list)
    unknown: set[str] = field(default_factory=set)


def shell_entries(text: str, name: str) -> Iterator[Entry]:
    """The packages that a shell script installs. Raises ProfileError if the file is too large or installs none."""
    if len(text) > MAX_SCRIPT_BYTES:
        raise ProfileError(f"{name} is larger than {MAX_SCRIPT_BYTES} bytes", hint=_INSTEAD)
    others, found = list[int](), False
    for command in _commands(text):
        if isinstance(command, Entry):
            found = True
            yield command
            continue
        entries = _entries_of(command)
        if entries is None:
            others.append(command.line)
            continue
        for entry in entries:
            found = True
            if command.conditional and not entry.note:
                yield Entry(command.line, "this command", fault=_NOT_EVALUATED)
                break
            known = entry.note or not command.unknown & {entry.name, entry.option.partition(" ")[2]}
            yield entry if known else Entry(command.line, entry.name, fault=_VARIABLE)
    if not found:
        raise ProfileError(f"{name} has no line with pip install or conda install", hint=_INSTEAD)
    if others:
        lines = [str(line) for line in dict.fromkeys(others)]
        more = f" (and lines {', '.join(lines[1:10])}{', ...' if len(lines) > 10 else ''})" if lines[1:] else ""
        yield Entry(others[0], f"this command{more}", note="only pip, conda and apt commands are read, and none is run")


def _commands(text: str) -> Iterator[_Command | Entry]:
    """The commands of a script in its order, and a fault for each line that cannot be split into words."""
    depth, line, start, after_or = 0, 1, True, False
    skipped, here, awaits = "", deque[str](), ""
    command = _Command(1, False)
    text = text.replace("\r\n", "\n")
    position = 0
    while position < len(text):
        if text.startswith("\\\n", position):
            position, line = position + 2, line + 1
            continue
        match = _TOKEN.match(text, position)
        if match is None:
            yield Entry(line, "this line", fault=f"a quote or backslash without its end; {_INSTEAD}")
            command, after = _Command(line, False), text.find("\n", position)
            position = after if after >= 0 else len(text)
            continue
        position, kind, token = match.end(), match.lastgroup, match[0]
        if kind == "redirect":
            awaits = "<<" if token.strip("0123456789") in ("<<", "<<-") else "file"
        elif kind == "word" and awaits:
            if awaits == "<<":
                here.append(_unquoted(token))
            awaits = ""
        elif kind == "word":
            if command.words[:1] == ["function"] and token == "{":
                command, start = _Command(line, False), True
            if token in _BLOCKS and start:
                depth = max(0, depth + _BLOCKS[token])
            start = start and _BEFORE.fullmatch(token) is not None
            if not command.words:
                command = _Command(line, depth > 0 or after_or)
            command.words.append(_unquoted(token))
            if _is_expanded(token):
                command.unknown.add(command.words[-1])
        elif kind == "end":
            tested = bool(command.words) and command.words[0] in _TESTS
            if command.words:
                yield command
            command, start, awaits = _Command(line, False), True, ""
            after_or = token == "||" or (token == "&&" and (after_or or tested))
        line += token.count("\n")
        while token == "\n" and here:  # the lines up to the end of a here-document are not commands
            skipped, _, _ = text[position:].partition("\n")
            if position >= len(text) or skipped.strip() == here[0]:
                here.popleft()
            position, line = position + len(skipped) + 1, line + 1
    if command.words:
        yield command


def _unquoted(token: str) -> str:
    """A word of the shell without its quotes and backslashes."""
    return _PIECE.sub(lambda match: next((part for part in match.groups() if part is not None), ""), token)


def _is_expanded(token: str) -> bool:
    """Whether the shell replaces a variable or a command in a word."""
    plain = re.sub(r"\\.|'[^']*'", "", token)
    return "$" in plain or "`" in plain


def _entries_of(command: _Command) -> Iterator[Entry] | None:
    """The entries of a command that installs packages; an iterator without any for a command without effect on
    packages; None for any other command."""
    words = deque(command.words)
    while words and _BEFORE.fullmatch(words[0]):
        words.popleft()
    if not words:
        return iter(())
    rest = list(words)
    if _HARMLESS.fullmatch(rest[0]):
        return iter(())
    if rest[0] in command.unknown and "install" in rest and "pip" not in rest[1:3]:
        return iter([Entry(command.line, "this command", fault=_VARIABLE)])
    if rest[1:3] == ["-m", "pip"]:
        return _pip_entries(rest[3:], command.line)
    if rest[:2] == ["uv", "pip"]:
        return _pip_entries(rest[2:], command.line)
    if _PIP.fullmatch(rest[0]):
        return _pip_entries(rest[1:], command.line)
    if _CONDA.fullmatch(rest[0]):
        return _conda_entries(rest[1:], command.line)
    if _SYSTEM.fullmatch(rest[0]) and set(rest) & {"install", "add", "-S"}:
        named = (word for word in rest[1:] if not word.startswith("-") and word not in ("install", "add"))
        note = "not a package for pip; if you need it, name its Debian package under apt"
        return (Entry(command.line, word, note=note) for word in named)
    return None


def _pip_entries(words: Sequence[str], line: int) -> Iterator[Entry]:
    """The packages and options of the words after `pip`, as lines of a requirements.txt."""
    waiting = deque(words)
    while waiting and waiting[0].startswith("-"):
        waiting.popleft()
    action = waiting.popleft() if waiting else ""
    if action != "install":
        if action == "uninstall":
            yield Entry(line, "pip uninstall", note="the lock has only packages that a requirement needs")
        return
    while waiting:
        word = waiting.popleft()
        if not word.startswith("-"):
            yield Entry(line, word, option=word)
        elif word == "--no-deps":
            yield Entry(line, "option --no-deps", note="the lock has what each package requires")
        else:
            value = waiting.popleft() if _VALUE.fullmatch(word) and waiting else ""
            if _INDEX.fullmatch(word.partition("=")[0]):
                yield Entry(line, word, option=word.partition("=")[0])
            elif _NO_VERSION.fullmatch(word):
                yield Entry(line, f"option {word.partition('=')[0]}", note="it changes no version")
            else:
                yield Entry(line, word, option=f"{word} {value}".strip())


def _conda_entries(words: Sequence[str], line: int) -> Iterator[Entry]:
    """The packages of the words after `conda`, under their names on the package index."""
    waiting = deque(words)
    action = waiting.popleft() if waiting else ""
    if action == "env":
        yield Entry(
            line, "conda env", fault="name the environment.yml instead, and add the packages of this script to it"
        )
    if action not in ("install", "create"):
        return
    while waiting:
        word = waiting.popleft()
        if word in ("-f", "--file") or word.startswith("--file="):
            yield Entry(line, f"option {word.partition('=')[0]}", fault=f"not read from this file; {_INSTEAD}")
            if "=" not in word and waiting:
                waiting.popleft()
        elif _CONDA_VALUE.fullmatch(word):
            if waiting:
                waiting.popleft()
        elif not word.startswith("-"):
            yield conda_entry(word, line)
