"""Turns a wheel into the files that uv installs from it. Nothing is written, and only small members are read.

The rules are those of uv (container_definition_export.UV_VERSION) with UV_NO_INSTALLER_METADATA=1 and without bytecode.
The tests compare the files with those that uv installs. Wheels that uv refuses are refused here too; so are wheels that
uv installs with a wrong RECORD.
"""

from __future__ import annotations

import base64
import binascii
import csv
import hashlib
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass

from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from envbuild.fetch.wheel_file_lists_and_clashes import is_inside, replaces_environment
from envbuild.image.layers.layer_writer import LayerEntry, LayerFile, LayerFolder, WheelContent
from envbuild.image.layers.wheel_reader import WheelMember, WheelReader
from envbuild.resolve.plan_resolver import VENV
from envbuild.util.errors import printable

_PLACEHOLDER = b"#!python"
# Names that a script must not have, because it would hide an interpreter. uv refuses most of them too.
_RESERVED = re.compile(r"bin/(?:python|pypy|graalpy|pyodide)w?[0-9.]*t?(?:\.exe)?(?:/|\Z)", re.IGNORECASE)
_SECTION = re.compile(r"\[([^\[\]]+)\]")
_COMMAND = re.compile(r"(?P<module>[\w.-]+) *: *(?P<function>[\w.]+)(?: *\[ *\w[\w ,.-]*\])?")
_VERSIONED_PIP = re.compile(r"pip3\.[0-9]+")
_SCRIPT = """#!{python}
# -*- coding: utf-8 -*-
import sys
from {module} import {name}
if __name__ == "__main__":
    if sys.argv[0].endswith("-script.pyw"):
        sys.argv[0] = sys.argv[0][:-11]
    elif sys.argv[0].endswith(".exe"):
        sys.argv[0] = sys.argv[0][:-4]
    sys.exit({function}())
"""


@dataclass(frozen=True)
class RecordRow:
    """A row of RECORD. `digest`: as written there, such as "sha256=..."; `size`: bytes, or empty."""

    path: str
    digest: str = ""
    size: str = ""


def installed_files(wheel: WheelReader, python: str, environment: str = VENV) -> list[LayerEntry]:
    """Return what uv installs from a wheel, with paths from the root of the image. `python`: such as "3.11";
    `environment`: the virtual environment's folder, whose path has no space and is short enough for a shebang.

    Raises WheelRefused.
    """
    return _Installer(wheel, python, environment).entries()


def hash_in_record(content: bytes) -> str:
    """Return the sha256 as RECORD has it: base64 for URLs, without padding."""
    raw = hashlib.sha256(content).digest()
    return f"sha256={base64.urlsafe_b64encode(raw).rstrip(b'=').decode()}"


def parse_record(text: str) -> list[RecordRow]:
    """Return the rows of a RECORD, in order. Raises ValueError."""
    rows = []
    try:
        for fields in csv.reader(io.StringIO(text, newline=""), strict=True):
            if fields and (len(fields) != 3 or not re.fullmatch("[0-9]*", fields[2], re.ASCII)):
                raise ValueError(f"invalid row {fields}"[:200])
            if fields:
                rows.append(RecordRow(fields[0].lstrip("/"), fields[1], fields[2]))
    except csv.Error as error:
        raise ValueError(str(error)) from None
    return rows


def write_record(rows: list[RecordRow]) -> bytes:
    """Return a RECORD of these rows, sorted."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(sorted((row.path, row.digest, row.size) for row in rows))
    return text.getvalue().encode()


class _Installer:
    """Collects the entries of one wheel and the rows of its new RECORD."""

    def __init__(self, wheel: WheelReader, python: str, environment: str) -> None:
        self.wheel, self.python = wheel, python
        self.interpreter = f"{environment}/bin/python"
        self.root = environment.lstrip("/")
        self.site = f"lib/python{python}/site-packages"
        self.info = self._metadata_folder()
        self.data = f"{self.info.removesuffix('.dist-info')}.data"
        self.distribution = canonicalize_name(self.info.partition("-")[0])
        self.record = self._required("RECORD")
        self.listed = self._listed()
        self._found: dict[str, LayerEntry] = {}
        self._rows: list[RecordRow] = []

    # what a wheel must have

    def _metadata_folder(self) -> str:
        """Return the wheel's only .dist-info folder. Its name and version must be those of the wheel's file name."""
        folders = sorted({m.name.partition("/")[0] for m in self.wheel.members if ".dist-info/" in m.name})
        folders = [folder for folder in folders if folder.endswith(".dist-info")]
        if len(folders) != 1:
            raise self.wheel.refused(None, f"one .dist-info folder is needed, not {len(folders)}")
        try:
            name, version, _, _ = parse_wheel_filename(self.wheel.name)
            inner_name, _, inner_version = folders[0].removesuffix(".dist-info").partition("-")
            same = canonicalize_name(inner_name) == name and Version(inner_version) == version
        except (InvalidWheelFilename, InvalidVersion) as error:
            raise self.wheel.refused(None, str(error)) from None
        if not same:
            raise self.wheel.refused(folders[0], "the folder's name or version does not match the wheel's file name")
        return folders[0]

    def _required(self, name: str) -> WheelMember:
        member = self.wheel.by_name.get(f"{self.info}/{name}")
        if member is None:
            raise self.wheel.refused(f"{self.info}/{name}", "missing")
        return member

    def _listed(self) -> dict[str, RecordRow]:
        """Return the rows of the wheel's RECORD; of two rows for one path the first one counts, as it does for uv."""
        try:
            rows = parse_record(self.wheel.text(self.record).decode())
        except ValueError as error:
            raise self.wheel.refused(self.record.name, printable(str(error))) from None
        return {row.path: row for row in reversed(rows)}

    def _check_format(self) -> None:
        member = self._required("WHEEL")
        if not re.search(rb"(?m)^Wheel-Version:[ \t]*1\.[0-9]+[ \t]*\r?$", self.wheel.text(member)):
            raise self.wheel.refused(member.name, "the format of the wheel is not 1.x")
        self._required("METADATA")

    # the files

    def entries(self) -> list[LayerEntry]:
        self._check_format()
        for member in self.wheel.members:
            if member != self.record:
                self._add_member(member)
        for name, module, function in self._commands():
            body = _SCRIPT.format(
                python=self.interpreter, module=module, name=function.partition(".")[0], function=function
            ).encode()
            self._add_script(f"bin/{name}", body, None)
        row = self.listed.get(self.record.name, RecordRow(self.record.name, "", str(self.record.size)))
        if row.digest:
            raise self.wheel.refused(self.record.name, "it has a hash of itself")
        content = write_record([*self._rows, row])
        self._put(LayerFile(self._path(f"{self.site}/{self.record.name}"), content, self.record.executable), None)
        return list(self._found.values())

    def _add_member(self, member: WheelMember) -> None:
        path = self._target(member)
        if path is None:
            return
        if member.is_folder:
            self._put(LayerFolder(self._path(path.rstrip("/"))), member)
            return
        row = self.listed.get(member.name, RecordRow(member.name, "", str(member.size)))
        if self._scheme(member) == "scripts" and self.wheel.head(member, len(_PLACEHOLDER)) == _PLACEHOLDER:
            self._check_hash(row, member, hashlib.sha256(self.wheel.text(member)).hexdigest())
            first, rest = f"#!{self.interpreter}\n".encode(), self.wheel.text(member).partition(b"\n")[2]
            self._add_script(path, first + rest, member)
            return
        executable = member.executable or self._scheme(member) == "scripts"
        content = WheelContent(self.wheel, member, self._hash(row, member))
        self._put(LayerFile(self._path(path), content, executable), member)
        self._rows.append(RecordRow(self._in_record(path), row.digest, row.size))

    def _scheme(self, member: WheelMember) -> str | None:
        """Return the folder of .data that a member is in; None for a member outside of .data."""
        if not member.name.startswith(f"{self.data}/"):
            return None
        return member.name.removeprefix(f"{self.data}/").partition("/")[0]

    def _target(self, member: WheelMember) -> str | None:
        """Return where a member is installed, below the environment; None for a folder that is not installed."""
        scheme = self._scheme(member)
        if scheme is None:
            return f"{self.site}/{member.name}"
        _, separator, rest = member.name.removeprefix(f"{self.data}/").partition("/")
        folders = {
            "purelib": f"{self.site}/",
            "platlib": f"{self.site}/",
            "headers": f"include/site/python{self.python}/{self.distribution}/",
            "scripts": "bin/",
            "data": "",
        }
        if scheme and (scheme not in folders or not separator):
            raise self.wheel.refused(member.name, "unknown folder of .data")
        if not rest:
            return None
        if scheme == "scripts" and "/" in rest:
            raise self.wheel.refused(member.name, "a folder among the scripts")
        return folders[scheme] + rest

    def _in_record(self, path: str) -> str:
        """Return an installed path as RECORD has it: relative to site-packages."""
        inside = path.startswith(f"{self.site}/")
        return path.removeprefix(f"{self.site}/") if inside else f"../../../{path}"

    def _path(self, path: str) -> str:
        """Return the path from the root of the image. lib64 is a link to lib in every virtual environment."""
        return f"{self.root}/{re.sub('^lib64(?=/|$)', 'lib', path)}"

    def _put(self, entry: LayerEntry, member: WheelMember | None) -> None:
        name = member.name if member else None
        path = entry.path.removeprefix(f"{self.root}/")
        if replaces_environment(path, isinstance(entry, LayerFolder)) or _RESERVED.match(path):
            raise self.wheel.refused(name, f"{path} is a part of the environment")
        known = self._found.setdefault(entry.path, entry)
        if known is not entry and known != entry:
            raise self.wheel.refused(name, f"{path} is installed twice")

    def _add_script(self, path: str, body: bytes, member: WheelMember | None) -> None:
        self._put(LayerFile(self._path(path), body, True), member)
        self._rows.append(RecordRow(self._in_record(path), hash_in_record(body), str(len(body))))

    # RECORD

    def _hash(self, row: RecordRow, member: WheelMember) -> str | None:
        """Return the sha256 of a row, hex, or None if the row has no hash."""
        if not row.digest:
            return None
        algorithm, _, text = row.digest.partition("=")
        if algorithm == "sha256" and re.fullmatch("[0-9a-f]{64}", text):  # not in the format, but gmsh 4.15.2 has it
            return text
        try:
            raw = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
        except (binascii.Error, ValueError):
            raw = b""
        if algorithm != "sha256" or len(raw) != 32:
            raise self.wheel.refused(member.name, f"RECORD has no valid sha256 of it: {row.digest[:100]!r}")
        return raw.hex()

    def _check_hash(self, row: RecordRow, member: WheelMember, found: str) -> None:
        wanted = self._hash(row, member)
        if wanted not in (None, found):
            raise self.wheel.refused(member.name, f"sha256 {found}, in RECORD {wanted}")

    # entry points

    def _commands(self) -> Iterator[tuple[str, str, str]]:
        """Yield name, module and function of each generated script."""
        member = self.wheel.by_name.get(f"{self.info}/entry_points.txt")
        sections = self._sections(member) if member else {}
        console, gui = sections.get("console_scripts", {}), sections.get("gui_scripts", {})
        if self.distribution == "pip" and "pip" in console:
            # pip's wheel is built once for all versions of Python, so its own pip3.N may be for another version
            console = {name: value for name, value in console.items() if not _VERSIONED_PIP.fullmatch(name)}
            console[f"pip{self.python}"] = console["pip"]
        for name, value in (*console.items(), *gui.items()):
            assert member
            match = _COMMAND.fullmatch(value)
            if match is None or "/" in name or not is_inside(name):
                raise self.wheel.refused(member.name, f"invalid entry point {f'{name} = {value}'[:200]!r}")
            yield name, match["module"], match["function"]

    def _sections(self, member: WheelMember) -> dict[str, dict[str, str]]:
        """Return name -> value by section. Raises WheelRefused for a line that is neither empty, a comment, a section
        nor `name = value`, for a repeated section or name, for an indented line after a `name = value`, and for
        unprintable characters."""
        sections: dict[str, dict[str, str]] = {}
        section: dict[str, str] | None = None
        try:
            text = self.wheel.text(member).decode()
        except UnicodeDecodeError:
            raise self.wheel.refused(member.name, "invalid UTF-8") from None
        for number, raw in enumerate(text.split("\n"), 1):
            line = raw.removesuffix("\r").replace("\t", " ").strip(" ")
            if not line or line.startswith(("#", ";")):
                continue
            header = _SECTION.fullmatch(line)
            name, separator, value = (part.strip(" ") for part in line.partition("="))
            if section and raw[0] in " \t":  # uv reads it as a part of the line before
                raise self.wheel.refused(member.name, f"indented line {number}")
            if header and header[1] not in sections:
                section = sections[header[1]] = {}
            elif (
                not line.startswith("[") and separator and name and name not in (section or {}) and section is not None
            ):
                section[name] = value
            else:
                raise self.wheel.refused(member.name, f"invalid line {number}: {line[:200]!r}")
            if not line.isprintable():
                raise self.wheel.refused(member.name, f"unprintable characters in line {number}")
        return sections
