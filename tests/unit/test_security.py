"""docs/security.md and tests/attacks/README.md: every test that they name exists. In docs/security.md, everybody who
may be hostile has a test, and every dependency has a reason; requirements.txt has a hash for each."""

from __future__ import annotations

import ast
import re
import tomllib
from functools import cache
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
PAGE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")


def cells(text: str) -> list[list[str]]:
    """Return the rows of the only table in a text as cells, without its header."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def rows(heading: str) -> list[list[str]]:
    """Return the rows of the only table below a heading as cells, without its header."""
    return cells(PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0])


HOSTILE = rows("Who may be hostile")
SHOWN = rows("What each attacker cannot do, and the test that shows it")
BROKEN = cells((TESTS / "attacks" / "README.md").read_text(encoding="utf-8"))
NAMED = sorted({name for _, _, names in (*SHOWN, *BROKEN) for name in names.split(", ")})
# Rows of the first table that have a shorter name in the second.
SHORT_NAMES = {
    "a registry, or anybody who can write to it": "a registry",
    "a base image named by digest": "a base image",
    "an archive (CUDA toolkit, compatibility libraries)": "an archive",
    "the source of an extension, and what its build runs": "the source of an extension",
    "a driver, a kernel log, a node of a cluster (`doctor`)": "a driver, a kernel log, a node (`doctor`)",
    "the author of a log given to `explain`": "the author of a log",
}


@cache
def names_in(file: Path) -> frozenset[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


def test_each_test_that_is_named_is_there() -> None:
    assert NAMED
    for name in NAMED:
        file, _, test = name.partition("::")
        assert test.startswith("test_") and (TESTS / file).is_file(), name
        assert test in names_in(TESTS / file), name


def test_everybody_who_may_be_hostile_is_shown_not_to_reach_something() -> None:
    assert len(HOSTILE) > 10 and all(len(row) == 3 and all(row) for row in (*HOSTILE, *SHOWN))
    assert {SHORT_NAMES.get(who, who) for who, _, _ in HOSTILE} <= {who for who, _, _ in SHOWN}


# dependencies


def declared() -> dict[str, Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return {canonicalize_name(found.name): found for found in map(Requirement, project["dependencies"])}


def pinned() -> dict[str, tuple[str, int]]:
    """Return name -> its version and the number of its hashes."""
    text = (ROOT / "requirements.txt").read_text(encoding="utf-8").replace("\\\n", " ")
    found = {}
    for line in text.splitlines():
        if line.strip() and not line.lstrip().startswith("#"):
            match = re.match(r"([a-z0-9-]+)==([^\s;]+)", line)
            assert match, f"no pin: {line[:80]}"
            found[match[1]] = (match[2], len(re.findall(r"--hash=sha256:[0-9a-f]{64}", line)))
    return found


def test_every_dependency_has_its_reason_and_no_other() -> None:
    assert [name for name, _ in rows("Dependencies")] == sorted(declared())


def test_every_dependency_is_pinned_by_hash_within_its_bounds() -> None:
    found = pinned()
    assert all(hashes for _, hashes in found.values())
    for name, wanted in declared().items():
        assert wanted.specifier.contains(found[name][0]), name
    assert len(found) > len(declared())
    assert "http" not in (ROOT / "requirements.txt").read_text(encoding="utf-8"), "it contains no address"
