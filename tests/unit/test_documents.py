"""The README and what it leads to: links lead somewhere, commands and their options exist, the first page is first."""

from __future__ import annotations

import doctest
import importlib
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest

import envbuild
from envbuild.cli.entry import COMMANDS

ROOT = Path(envbuild.__file__).parents[1]
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    "docs/crash.md",
    "docs/profiles.md",
    "docs/proving.md",
    "docs/settings.md",
    "docs/architecture.md",
)
KNOWN = {name for group in COMMANDS.values() for name in group}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text) if not link.startswith("https://")]
    assert [link for link in links if not (ROOT / page).parent.joinpath(link).exists()] == []


def lines(page: str) -> list[list[str]]:
    """The commands of a page, each as words, without what its remark says."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = re.findall(r"^    (?:\$ )?envbuild ([a-z].*)$", text, re.MULTILINE)
    found += re.findall(r"`envbuild ([a-z][^`]*)`", text)
    return [line.partition("#")[0].split() for line in found]


@pytest.mark.parametrize("page", PAGES)
def test_commands_and_their_options_exist(page: str) -> None:
    for name, *words in lines(page):
        assert name in KNOWN, f"envbuild {name}"
        command: click.Command = importlib.import_module(f"envbuild.cli.{name.replace('-', '_')}").command
        known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        if isinstance(command, click.Group):
            inner = command.commands[words[0]].params
            known |= {option for parameter in inner for option in (*parameter.opts, *parameter.secondary_opts)}
        options = {word.rstrip(",;.") for word in words if word.startswith("-") and word != "-"}
        assert options <= known | {"--help"}, f"envbuild {name}: {options - known}"


def test_the_first_page_is_what_is_sought_first() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    titles = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert titles[:4] == ["A job has crashed", "A first image", "Your own project", "Base images and CI"]
    assert "No GPU profile has been tested on a physical GPU yet".lower() in text.partition("\n## ")[0].lower()
    assert len(text.splitlines()) < 200


def consoles(page: str) -> list[tuple[str, str]]:
    """The commands of a page that stand with their output, and that output: `...` there is any text."""
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = re.findall(r"^```console\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    found = [part.partition("\n") for block in blocks for part in re.split(r"^\$ ", block, flags=re.MULTILINE) if part]
    return [(command, output) for command, _, output in found]


def test_the_readme_shows_what_its_commands_print(tmp_path: Path) -> None:
    """In a folder that holds the log of its example; texts of the checkout's profiles are named from the checkout."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (log,) = re.findall(r"train\.log</summary>\n\n```text\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    (tmp_path / "train.log").write_text(log, encoding="utf-8")
    (tmp_path / "profiles").mkdir()
    shown = consoles("README.md")
    assert len(shown) >= 4
    for command, output in shown:
        name, *words = shlex.split(command)
        assert name == "envbuild"
        done = subprocess.run(
            [sys.executable, "-m", "envbuild", *words], cwd=tmp_path, capture_output=True, text=True, timeout=120
        )
        printed = (done.stdout + done.stderr).replace(f"{ROOT}/", "")
        same = doctest.OutputChecker().check_output(output, printed, doctest.ELLIPSIS)
        assert same, f"$ {command}\n{printed}"
