"""Compares the code of each probe with the code recorded for its version (envbuild/selftest/probes/versions.json).
Evidence counts as long as the versions of its probes stay the same.

python tests/selftest/probe_versions.py      raise the version of each probe whose code changed, and record the code

A probe's code is the module of its function and all modules of the self-test that it imports, directly or indirectly,
without the harness. The harness has a version of its own, "harness". Comments, docstrings and line numbers are not part
of the code.
"""

from __future__ import annotations

import ast
import hashlib
import json
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from envbuild.facts import probe_catalogue_reader
from envbuild.facts.probe_catalogue_reader import HARNESS

ROOT = Path(__file__).parents[2]
PACKAGE = "envbuild.selftest"
VERSIONS = ROOT / "envbuild" / "selftest" / "probes" / "versions.json"
CODE = Path(__file__).with_suffix(".json")
SHARED = (f"{PACKAGE}.harness", f"{PACKAGE}.__main__")  # prefixes of modules that every probe uses
_BODIES = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def code(root: Path = ROOT) -> dict[str, str]:
    """Return the sha256 of the code of each probe, and of the harness."""
    modules = _modules(root)
    found = {HARNESS: [name for name in modules if name.startswith(SHARED)]}
    for name, probe in probe_catalogue_reader.known_probes().items():
        (entry,) = (module for module in modules if module.endswith(f".{probe.function[0]}"))
        found[name] = sorted(_reached(entry, modules))
    return {name: _digest(parts, modules) for name, parts in found.items()}


def changed(versions: Mapping[str, int], before: Mapping[str, Mapping[str, object]]) -> list[str]:
    """Return the probes whose code differs from that of their version; `before`: the recorded version and code of
    each."""
    now = code()
    return [name for name in now if before.get(name) != {"version": versions.get(name), "code": now[name]}]


def raised(versions: Mapping[str, int], before: Mapping[str, Mapping[str, object]]) -> dict[str, int]:
    """Return the versions, raised by one where the code changed and the version did not; the version of a new probe
    begins with 1."""
    now = code()

    def version(name: str) -> int:
        known = before.get(name)
        if known is None:
            return versions.get(name, 1)
        same = known["code"] == now[name] or known["version"] != versions[name]
        return versions[name] if same else versions[name] + 1

    return {name: version(name) for name in now}


def _modules(root: Path) -> dict[str, ast.Module]:
    folder = root / PACKAGE.replace(".", "/")
    files = {".".join(file.relative_to(root).with_suffix("").parts): file for file in sorted(folder.rglob("*.py"))}
    return {name: _bare(file.read_text(encoding="utf-8")) for name, file in files.items()}


@cache
def _bare(text: str) -> ast.Module:
    """Return the module without docstrings."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, _BODIES) and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
    return tree


def _reached(module: str, modules: Mapping[str, ast.Module]) -> set[str]:
    """Return the module and its direct and indirect imports, except modules shared by all probes."""
    found: set[str] = set()
    left = [module]
    while left:
        name = left.pop()
        if name not in found and not name.startswith(SHARED):
            found.add(name)
            left += [other for other in _imports(modules[name]) if other in modules]
    return found


@cache
def _imports(tree: ast.Module) -> tuple[str, ...]:
    """Return the names that a module imports; each may be a module or a name in one."""
    return tuple(_imported(tree))


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield from (str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names))
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def _digest(names: list[str], modules: Mapping[str, ast.Module]) -> str:
    whole = hashlib.sha256()
    for name in names:
        whole.update(f"{name}\0{_dump(modules[name])}\0".encode())
    return whole.hexdigest()


@cache
def _dump(tree: ast.Module) -> str:
    """Return the module as text. Most modules are part of several probes."""
    return ast.dump(tree)


def main() -> int:
    before = json.loads(CODE.read_text(encoding="utf-8")) if CODE.exists() else {}
    versions = json.loads(VERSIONS.read_text(encoding="utf-8")) if VERSIONS.exists() else {}
    new = raised(versions, before)
    now = code()
    VERSIONS.write_text(json.dumps(new, indent=2) + "\n", encoding="utf-8")
    rows = {name: {"version": version, "code": now[name]} for name, version in new.items()}
    CODE.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    for name in new:
        if new[name] != versions.get(name):
            print(f"{name}: version {new[name]}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
