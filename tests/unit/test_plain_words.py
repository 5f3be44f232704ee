"""scripts/plain_words.py, which `make lint` runs: it finds an idiom in a tracked file, and none in this checkout."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[2]
SCRIPT = CHECKOUT / "scripts" / "plain_words.py"
IDIOM = "bes" + "ide"  # in two pieces, because the script reads this file as well


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, SCRIPT], cwd=folder, capture_output=True, text=True, timeout=60)


def seeded(folder: Path, text: str, name: str = "module.py") -> subprocess.CompletedProcess[str]:
    """Run the script in a new repository with one file."""
    (folder / name).write_text(text, encoding="utf-8")
    subprocess.run(["git", "init", "--quiet"], cwd=folder, check=True)
    subprocess.run(["git", "add", name], cwd=folder, check=True)
    return lint(folder)


@pytest.mark.parametrize("name", ["module.py", "page.md", "facts.yaml", "picture.svg", "script"])
def test_an_idiom_fails(tmp_path: Path, name: str) -> None:
    done = seeded(tmp_path, f"# the first line\n# a file {IDIOM} another\n", name)
    assert (done.returncode, done.stdout.startswith(f"{name}:2: '{IDIOM}': write ")) == (1, True)
    assert done.stderr == "1 idioms: reword these lines. RULES in scripts/plain_words.py has all idioms.\n"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("this is " + "no file", 1),
        ("These are " + "no files", 1),
        ("there is no file", 0),
        ("There are no files", 0),
        ("it is no longer read", 0),
        ("a file that is " + "none", 1),
        ("the value is None", 0),
        ("stands" + " in a list", 1),
        ("it stands in for docker", 0),
        ("is&#160;" + "no&#160;file", 1),
        ("a bes" + "ides b", 0),
    ],
)
def test_only_a_negated_noun_is_an_idiom(tmp_path: Path, text: str, code: int) -> None:
    assert seeded(tmp_path, text).returncode == code


@pytest.mark.slow
def test_lint_runs_it_and_this_checkout_has_no_idiom() -> None:
    recipe = (CHECKOUT / "Makefile").read_text(encoding="utf-8").split("\nlint:")[1].split("\n\n")[0]
    assert "scripts/plain_words.py" in recipe
    done = lint(CHECKOUT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
