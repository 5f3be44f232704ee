"""Parses untrusted YAML and records the file and line of every value. Also resolves paths within a project.

Aliases, duplicate keys and tags are refused, except tags that name the value's own kind (!!str, !!map, !!seq). Size and
depth are limited. (With aliases, a few hundred bytes can expand to gigabytes.)
"""

from __future__ import annotations

import contextlib
import copy
import errno
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any, BinaryIO, NamedTuple

import yaml

from envbuild.util.errors import EnvbuildError, Fault, ProfileError
from envbuild.util.errors import display as display

Path = tuple[str | int, ...]

MAX_BYTES = 1_000_000
MAX_DEPTH = 30


class Place(NamedTuple):
    file: str
    line: int


@dataclass
class Document:
    """A parsed document. `data`: its content as dicts, lists and scalars; `places`: the file and line of each value, by
    path."""

    file: str
    data: dict[str, Any]
    places: dict[Path, Place] = field(default_factory=dict)

    def place(self, path: Path) -> Place:
        """The file and line of the value at `path`; if they are not known, those of the nearest enclosing value."""
        while path and path not in self.places:
            path = path[:-1]
        return self.places.get(path, Place(self.file, 1))

    def fault(self, path: Path, message: str) -> Fault:
        place = self.place(path)
        return Fault(message, place.file, place.line, field_name(path))


def field_name(path: Path) -> str | None:
    """The text for a path in messages: "env.A" for ("env", "A"); "apt[0]" for ("apt", 0)."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text or None


def read(
    file: FilePath,
    error: type[EnvbuildError] = ProfileError,
    *,
    empty: bool = False,
    faults: list[Fault] | None = None,
) -> Document:
    """Read a file that contains one YAML mapping. `empty`: accept a file that is empty or has only comments. `faults`:
    a list that receives the faults of single keys and values, which are then left out of the result; if `faults` is
    None, the faults are raised.

    Raises `error`, with the file and line, if the file cannot be read or parsed.
    """
    return parse(yaml_text(file, error), display(file), error, empty=empty, faults=faults)


def yaml_text(file: FilePath, error: type[EnvbuildError] = ProfileError) -> str:
    """Return the text of a file that `read` would parse. Raises `error` if it cannot be read."""
    name = display(file)
    try:
        raw = regular(file, MAX_BYTES)
    except OSError as problem:
        raise error(f"{name} cannot be read: {problem.strerror}") from problem
    if len(raw) > MAX_BYTES:
        raise error(f"{name} is larger than {MAX_BYTES} bytes")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as problem:
        line = raw.count(b"\n", 0, problem.start) + 1
        fault = Fault(f"invalid UTF-8 byte 0x{raw[problem.start]:02x}", name, line)
        raise error(f"{name} is not UTF-8", hint="save it as UTF-8", faults=[fault]) from problem


def parse(
    text: str,
    name: str,
    error: type[EnvbuildError] = ProfileError,
    *,
    empty: bool = False,
    faults: list[Fault] | None = None,
) -> Document:
    """Parse a text that contains one YAML mapping, as `read` does. `name`: the file's name in faults."""
    document = Document(name, {})
    found: list[Fault] = []
    try:
        content = _Composer(text, document, found, error).content()
    except yaml.MarkedYAMLError as problem:
        raise error(f"{name} is not valid YAML", faults=[_syntax(problem, name)]) from problem
    except yaml.YAMLError as problem:
        raise error(f"{name} is not valid YAML", faults=[Fault(str(problem).splitlines()[0], name)]) from problem
    if content is _NOTHING and empty:
        return Document(name, {})
    if content is _NOTHING:
        raise error(f"{name} is empty", hint="it must hold `key: value` lines")
    if not isinstance(content, dict):
        hint = "it must hold `key: value` lines"
        raise error(f"{name} is not a mapping of keys to values", hint=hint, faults=found)
    document.data = content
    if found and faults is None:
        raise error(f"{name} is not a usable document", faults=found)
    if faults is not None:
        faults += found
    return document


_STR, _INT, _FLOAT, _BOOL, _NULL, _DATE, _MAP, _SEQ = (
    f"tag:yaml.org,2002:{kind}" for kind in ("str", "int", "float", "bool", "null", "timestamp", "map", "seq")
)


class _Loader(yaml.CSafeLoader):
    """Parses only decimal numbers: 1:30:00, 1:30.0 and 0012 are strings, not numbers of base 60 and 8."""

    yaml_implicit_resolvers = {  # noqa: RUF012
        first: [known for known in every if known[0] not in (_INT, _FLOAT)]
        for first, every in yaml.CSafeLoader.yaml_implicit_resolvers.items()
    }


_Loader.add_implicit_resolver(_INT, re.compile(r"[-+]?(0|[1-9][0-9]*)\Z"), list("-+0123456789"))
_Loader.add_implicit_resolver(
    _FLOAT,
    re.compile(
        r"[-+]?([0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)([eE][-+][0-9]+)?\Z|[-+]?\.(inf|Inf|INF)\Z|\.(nan|NaN|NAN)\Z"
    ),
    list("-+.0123456789"),
)

_UNFIT = "wrong indentation: indent the lines of one mapping or list equally"
_AT_BEGIN = ("found unexpected end of stream", "could not find expected ':'")
# envbuild's message for each message of libyaml. {line}: the line at which the value being parsed begins.
_SYNTAX = {
    "mapping values are not allowed in this context": "unexpected colon: put a value that contains `: ` in quotes, and "
    "indent the lines of one mapping equally",
    "could not find expected ':'": "this line is not `key: value`",
    "did not find expected ',' or ']'": "the list [...] that begins in line {line} is not closed or lacks a comma",
    "did not find expected ',' or '}'": "the mapping {{...}} that begins in line {line} is not closed or lacks a comma",
    "did not find expected key": f"{_UNFIT}, and write nothing after a quoted value or a closing bracket",
    "did not find expected '-' indicator": "this line belongs to a list, but does not begin with `- `",
    "did not find expected <document start>": _UNFIT,
    "found character that cannot start any token": "a value must not begin with a tab, @, ` or %: use spaces or quotes",
    "found a tab character that violates indentation": "a tab in the indentation: use spaces",
    "found unexpected end of stream": "the quote that begins here is not closed",
    "found unknown escape character": 'a backslash within "...": write two backslashes, or use single quotes',
    "but found another document": "a second document begins here: a file must contain only one",
}


def _syntax(problem: yaml.MarkedYAMLError, name: str) -> Fault:
    """The fault for a parser error, with a clearer message for known errors."""
    line = problem.problem_mark.line + 1 if problem.problem_mark else None
    begin = problem.context_mark.line + 1 if problem.context_mark else line
    message = problem.problem or "syntax"
    words = _SYNTAX[message].format(line=begin) if message in _SYNTAX else message
    return Fault(words, name, begin if message in _AT_BEGIN else line)


_CONSTRUCTOR = yaml.constructor.SafeConstructor()
_SCALARS: Mapping[str, Callable[[yaml.ScalarNode], Any]] = {
    _DATE: lambda node: node.value,  # a date stays a string, as written
    _INT: lambda node: int(node.value),
    _FLOAT: _CONSTRUCTOR.construct_yaml_float,
    _BOOL: _CONSTRUCTOR.construct_yaml_bool,
    _NULL: lambda node: None,
}
_NOTHING = object()


class _Composer:
    """Builds the content of a document from libyaml's events, and records the line of each value. Faults of single keys
    and values are added to `faults`. An alias or a too deep value raises `error`, invalid YAML raises yaml.YAMLError.
    """

    def __init__(self, text: str, document: Document, faults: list[Fault], error: type[EnvbuildError]) -> None:
        self.loader: Any = _Loader(text)
        self.document, self.file, self.faults, self.error = document, document.file, faults, error

    def content(self) -> Any:
        """The value of the only document of the text; _NOTHING if the text has none, or only an empty value."""
        self._next()  # the start of the stream
        if self.loader.check_event(yaml.StreamEndEvent):
            return _NOTHING
        self._next()  # the start of the document
        event = self._next()
        nothing = isinstance(event, yaml.ScalarEvent) and not event.value and self._tag(event) == _NULL
        self._record(event, ())
        value = self._value(event, ())
        self._next()  # the end of the document
        if not self.loader.check_event(yaml.StreamEndEvent):
            mark = self.loader.peek_event().start_mark
            raise yaml.composer.ComposerError(None, None, "but found another document", mark)
        return _NOTHING if nothing else value

    def _next(self, depth: int = 0) -> Any:
        """Take the next event. `depth`: the number of collections that contain it."""
        event = self.loader.get_event()
        if isinstance(event, yaml.AliasEvent):
            fault = self._fault(event, f"alias *{event.anchor}: aliases are not supported")
            raise self.error(
                f"{self.file} uses a YAML alias", hint="write the value out, or use extends:", faults=[fault]
            )
        if depth >= MAX_DEPTH and isinstance(event, yaml.CollectionStartEvent):
            fault = self._fault(event, f"deeper than {MAX_DEPTH} levels")
            raise self.error(f"{self.file} is nested too deeply", faults=[fault])
        return event

    def _fault(self, event: Any, message: str, path: Path = ()) -> Fault:
        return Fault(message, self.file, event.start_mark.line + 1, field_name(path))

    def _record(self, event: Any, path: Path) -> None:
        """Record the line of a value: that of its key, if it has one."""
        self.document.places[path] = Place(self.file, event.start_mark.line + 1)

    def _tag(self, event: Any) -> str:
        """Return the tag of the value that begins with `event`: the one that is written, or that of its form."""
        if not isinstance(event, yaml.ScalarEvent):
            return str(event.tag or (_MAP if isinstance(event, yaml.MappingStartEvent) else _SEQ))
        if event.tag not in (None, "!"):
            return str(event.tag)
        if not event.implicit[0] or event.value[:1] not in _Loader.yaml_implicit_resolvers:
            return _STR  # the result of `resolve`, which takes longer
        return str(self.loader.resolve(yaml.ScalarNode, event.value, event.implicit))

    def _value(self, event: Any, path: Path) -> Any:
        tag = self._tag(event)
        if tag == _STR and isinstance(event, yaml.ScalarEvent):
            return event.value
        if tag == _MAP and isinstance(event, yaml.MappingStartEvent):
            return self._mapping(path)
        if tag == _SEQ and isinstance(event, yaml.SequenceStartEvent):
            return self._list(path)
        if tag not in _SCALARS or event.tag not in (None, "!"):  # a text may have no other tag for scalars
            self.faults.append(self._fault(event, f"tag {tag} is not supported", path))
            self._skip(event, len(path))
            return None
        try:
            return _SCALARS[tag](yaml.ScalarNode(tag, event.value))
        except ValueError:  # Python reads no integer of more than 4300 digits
            self.faults.append(self._fault(event, "the number has too many digits", path))
            return None

    def _list(self, path: Path) -> list[Any]:
        result: list[Any] = []
        depth = len(path) + 1
        while not isinstance(event := self._next(depth), yaml.SequenceEndEvent):
            inner = (*path, len(result))
            self._record(event, inner)
            result.append(self._value(event, inner))
        return result

    def _mapping(self, path: Path) -> dict[str, Any]:
        result: dict[str, Any] = {}
        depth = len(path) + 1
        while not isinstance(event := self._next(depth), yaml.MappingEndEvent):
            if not isinstance(event, yaml.ScalarEvent) or self._tag(event) == "tag:yaml.org,2002:merge":
                self.faults.append(self._fault(event, "a key must be a plain word", path))
                self._skip(event, depth)
                self._skip(self._next(depth), depth)
                continue
            inner = (*path, event.value)
            if event.value in result:
                self.faults.append(self._fault(event, "given twice", inner))
                self._skip(self._next(depth), depth)
                continue
            self._record(event, inner)
            result[event.value] = self._value(self._next(depth), inner)
        return result

    def _skip(self, event: Any, depth: int) -> None:
        """Take the remaining events of the value that begins with `event`, which `depth` collections contain."""
        outside = depth
        while True:
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth == outside:
                return
            event = self._next(depth)


def merge(parent: Document, child: Document) -> Document:
    """Merge `child` into `parent`: mappings are merged key by key; any other value of `child` replaces the parent's
    value. Values keep their file and line."""
    merged = Document(child.file, {}, {(): child.places.get((), parent.place(()))})

    def copy(source: Document, path: Path, value: Any) -> Any:
        merged.places[path] = source.place(path)
        for inner, _ in _children(path, value):
            merged.places[inner] = source.place(inner)
        return value

    def combine(path: Path, low: Mapping[str, Any], high: Mapping[str, Any]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key in [*low, *(k for k in high if k not in low)]:
            here = (*path, key)
            if key not in high:
                result[key] = copy(parent, here, low[key])
            elif isinstance(high[key], dict) and isinstance(low.get(key), dict):
                merged.places[here] = child.place(here)
                result[key] = combine(here, low[key], high[key])
            else:
                result[key] = copy(child, here, high[key])
        return result

    merged.data = combine((), parent.data, child.data)
    return merged


def without(doc: Document, paths: Iterable[Path]) -> Document:
    """Return a copy without the values at `paths`. If a path leads into a list, the whole list is removed, because the
    other indices would change. If the value is missing, the mapping that should contain it is removed."""
    rest = Document(doc.file, copy.deepcopy(doc.data), doc.places)
    for path in paths:
        holders: list[tuple[dict[str, Any], str]] = []
        inner: Any = rest.data
        for key in path:
            if not isinstance(key, str) or not isinstance(inner, dict) or key not in inner:
                break
            holders.append((inner, key))
            inner = inner[key]
        if holders:
            holder, key = holders[-1]
            del holder[key]
    return rest


def _children(path: Path, value: Any) -> Iterator[tuple[Path, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key), inner
        yield from _children((*path, key), inner)


@dataclass
class RecordedReads:
    """`files`: the files that `open_regular` opened, by absolute path, each with its state when it was opened. `paths`:
    the absolute paths that `inside` resolved, as they were before links were followed."""

    files: dict[FilePath, os.stat_result] = field(default_factory=dict)
    paths: set[str] = field(default_factory=set)


_records: list[RecordedReads] = []


@contextlib.contextmanager
def recorded_reads() -> Iterator[RecordedReads]:
    """Collect what is read within the `with` block: all files of a project that profiles and locks are read from."""
    record = RecordedReads()
    _records.append(record)
    try:
        yield record
    finally:
        _records.remove(record)


def open_regular(file: FilePath) -> BinaryIO:
    """Open a regular file for reading. Raises OSError if it cannot be opened; for a FIFO or a device too, without
    blocking."""
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    state = os.fstat(descriptor)
    if stat.S_ISREG(state.st_mode):
        for record in _records:
            record.files.setdefault(FilePath(os.path.abspath(file)), state)  # noqa: PTH100 - do not resolve links
        return open(descriptor, "rb")  # noqa: PTH123
    os.close(descriptor)
    raise OSError(errno.EINVAL, "not a regular file")


def regular(file: FilePath, most: int) -> bytes:
    """Read at most the first `most` + 1 bytes of a regular file. The file's reported size is ignored, because it is 0
    below /proc. Raises OSError."""
    with open_regular(file) as stream:
        return stream.read(most + 1)


def inside(named: str, folder: FilePath, root: FilePath) -> FilePath:
    """Resolve the path `named`, with its links, relative to `folder`. Opens no file.

    Raises ValueError if the result is outside `root`, the project's folder. Otherwise the author of a profile could
    have other files read, and an error message could quote their content.
    """
    try:
        root, file = root.resolve(), (folder / named).resolve()
    except (OSError, RuntimeError, ValueError) as error:  # circular links, or a NUL in the name
        raise ValueError(f"{named} cannot be read: {error}") from None
    for record in _records:
        record.paths.add(str(FilePath.cwd() / folder / named))
    if not file.is_relative_to(root):
        raise ValueError(f"{named} leads out of the project's folder, {display(root)}")
    return file


def home(file: FilePath) -> FilePath:
    """The project's folder for a profile's file: the folder that contains profiles/, if the file is in profiles/ or in
    profiles/projects/; otherwise the folder of the file.

    `file` may be relative to the working folder, for example a bare name if the working folder is profiles/.
    """
    folder = FilePath(os.path.abspath(file)).parent  # noqa: PTH100 - a profile that is a link belongs to the folder of the link
    above = folder.parent if folder.name == "projects" else folder
    return above.parent if above.name == "profiles" else folder
