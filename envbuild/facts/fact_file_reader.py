"""Reads and validates the fact files: those shipped in facts/data/, and a site's own.

A site's GPUs and advisories come from `facts.d/*.yaml` (or `*.yml`) in the folder of its config.yaml, in the format of
facts/data/gpus.yaml and facts/data/advisories.yaml. Files with other names are not read.

`rows` and `extensible` raise FactsError if the rows that they read are malformed. The error lists all malformed entries
of those rows, with file and line. `read` only parses a file and does not validate its values.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass as plain
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from envbuild.facts.advisory_model import Advisory
from envbuild.facts.fact_field_types import FactRow
from envbuild.facts.gpu_fact_types import Gpu
from envbuild.util import user_folders, yaml_and_project_paths
from envbuild.util.errors import FactsError, Fault, near
from envbuild.util.yaml_and_project_paths import Document

_FOLDER = Path(__file__).parent / "data"
T = TypeVar("T", bound=FactRow)

_WORDS = {
    "missing": "missing",
    "unexpected_keyword_argument": "unknown key",
    "string_type": "must be text: write it in quotes",
    "tuple_type": "must be a list",
    "frozen_set_type": "must be a list",
    "dataclass_type": "must be a mapping of keys to values",
}
_CITED = re.compile(r"https://\S+|[\w.-]+/[\w.-]+(#[0-9]+|@[0-9a-f]{7,40})?")
"""A source that is written in full: a URL, or a GitHub repository, thread or commit."""


@cache
def read(name: str) -> Document:
    """Read facts/data/<name>.yaml."""
    return yaml_and_project_paths.read(_FOLDER / f"{name}.yaml", FactsError)


def _raise(faults: list[Fault]) -> None:
    if faults:
        raise FactsError("the facts are invalid", hint="correct the named lines", faults=faults)


def _rows(
    doc: Document, kind: str, row: type[T], faults: list[Fault], *, site: bool = False
) -> Iterator[tuple[T, yaml_and_project_paths.Path]]:
    """Yield the valid rows of the list `kind`, each with its path. Errors in the other rows are added to `faults`.
    `site`: whether the file is a site's own, whose patterns are compiled at once to find the invalid ones."""
    listed = doc.data.get(kind, [])
    if not isinstance(listed, list) or not all(isinstance(value, dict) for value in listed):
        faults.append(doc.fault((kind,), "must be a list of mappings"))
        return
    common = {"as_of": doc.data["as_of"]} if "as_of" in doc.data else {}
    sources = doc.data.get("sources", {})
    if not isinstance(sources, dict):
        wrong = doc.fault(("sources",), "must be a mapping of keys to values")
        faults += [] if wrong in faults else [wrong]  # reported once, although a file may be read for two kinds of rows
        return
    adapter = TypeAdapter(row)
    for index, value in enumerate(listed):
        path = (kind, index)
        for key in ("match", "signature"):
            if isinstance(value.get(key), dict):  # a single alternative may be written without a list
                value = {**value, key: [value[key]]}
        try:  # as JSON: lists become tuples and sets, while scalars are strictly typed
            found = adapter.validate_json(json.dumps({**common, **value}), context=site)
        except ValidationError as error:
            for item in error.errors():
                message = item["ctx"]["error"] if item["type"] == "value_error" else item["msg"]
                faults.append(doc.fault((*path, *item["loc"]), str(_WORDS.get(item["type"], message))))
            continue
        for key in ("source", "arch_source", "cite"):
            for text in getattr(found, key, ()):
                if text not in sources and not _CITED.fullmatch(text):
                    faults.append(doc.fault((*path, key), f"{text!r} is not a key of sources, a URL or owner/repo#N"))
        yield found, path


@cache
def rows(name: str, kind: str, row: type[T]) -> tuple[T, ...]:
    """Return the rows of the list `kind` in facts/data/<name>.yaml."""
    faults: list[Fault] = []
    found = tuple(item for item, _ in _rows(read(name), kind, row, faults))
    _raise(faults)
    return found


def site_files() -> tuple[Path, ...]:
    """A site's own fact files, sorted by name. A name with a leading dot is an editor's or a tool's. Raises FactsError
    if the folder cannot be listed: without the site's advisories, a version that they refuse would be chosen."""
    folder = user_folders.config_file().parent / "facts.d"
    if not os.path.lexists(folder):
        return ()
    try:
        files = sorted(folder.iterdir())
    except OSError as error:
        raise FactsError(f"{folder} cannot be listed: {error.strerror}", hint="it must be a readable folder") from error
    return tuple(file for file in files if file.suffix in (".yaml", ".yml") and not file.name.startswith("."))


def facts_digest() -> str:
    """Return the sha256 (hex) of the names and contents of all fact files, including the site's own. It identifies the
    facts that a run used."""
    found = hashlib.sha256()
    for file in (*sorted(_FOLDER.glob("*.yaml")), *site_files()):
        content = file.read_bytes()
        found.update(f"{file.name}\0{len(content)}\0".encode() + content)
    return found.hexdigest()


@plain(frozen=True)
class Extensible:
    """The facts that a site can extend. `gpus`: by id. `names`: complete name -> GPU. `mig`: the end of a MIG slice's
    name."""

    gpus: Mapping[str, Gpu]
    names: Mapping[str, Gpu]
    mig: re.Pattern[str]
    advisories: tuple[Advisory, ...]


@cache
def _extensible(site: tuple[Path, ...]) -> Extensible:
    shipped = read("gpus")
    faults: list[Fault] = []
    own: list[Document] = []
    for file in site:
        try:
            own.append(yaml_and_project_paths.read(file, FactsError))
        except FactsError as error:
            faults += error.faults or [Fault(error.message)]
    for doc in own:
        for key in sorted(set(doc.data) - {"as_of", "sources", "gpus", "advisories"}):
            faults.append(doc.fault((key,), "unknown key (known: as_of, sources, gpus, advisories)"))
    gpus: dict[str, Gpu] = {}
    names: dict[str, Gpu] = {}
    found: dict[str, tuple[Advisory, Document, yaml_and_project_paths.Path]] = {}
    for doc in (shipped, read("advisories"), *own):
        for gpu, path in _rows(doc, "gpus", Gpu, faults):
            taken = [gpu.id] if gpu.id in gpus else [name for name in gpu.all_names if name in names]
            faults += [doc.fault(path, f"{name!r} is known already") for name in taken]
            gpus[gpu.id] = gpu
            names.update(dict.fromkeys(gpu.all_names, gpu))
        for advisory, path in _rows(doc, "advisories", Advisory, faults, site=doc in own):
            if advisory.id in found:
                faults.append(doc.fault(path, f"advisory {advisory.id!r} is known already"))
            found[advisory.id] = (advisory, doc, path)
    for advisory, doc, path in found.values():
        named = {gpu for match in advisory.match for gpu in match.gpus}
        faults += [
            doc.fault((*path, "match"), _unknown(f"GPU {gpu!r}", gpu, gpus)) for gpu in sorted(named - set(gpus))
        ]
        for series in sorted({series for match in advisory.match for series in match.series}):
            if not any(name.startswith(series) for name in names):
                faults.append(doc.fault((*path, "match"), f"no GPU's name begins with {series!r}"))
        for other in sorted(advisory.shows.like - set(found)):
            faults.append(doc.fault((*path, "shows", "like"), _unknown(f"advisory {other!r}", other, found)))
    _raise(faults)
    mig = re.compile(shipped.data["mig_suffix"])
    return Extensible(gpus, names, mig, tuple(advisory for advisory, _, _ in found.values()))


def extensible() -> Extensible:
    """The shipped facts, then the site's."""
    return _extensible(site_files())


def _unknown(what: str, name: str, known: Mapping[str, Any]) -> str:
    hint = near(name, known)
    return f"unknown {what}{f' ({hint})' if hint else ''}"
