"""The documents: links lead somewhere, every command has the options that it is shown with, and most commands run.

A command that needs an engine, a GPU, a cluster or a network is not run here: `NOT_RUN` names the reason, and its own
parser checks its options.
"""

from __future__ import annotations

import doctest
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

import envbuild
from envbuild.cli.entry import COMMANDS, cli
from envbuild.util import user_folders
from unit.support import envbuild as run_envbuild

ROOT = Path(envbuild.__file__).parents[1]
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "evidence/README.md",
    *sorted(file.relative_to(ROOT).as_posix() for file in (ROOT / "docs").rglob("*.md")),
)
GUIDES = tuple(page for page in PAGES if page.startswith("docs/guides/"))
# Pages whose text mentions commands of earlier versions.
OF_THEIR_TIME = {"CHANGELOG.md", *(page for page in PAGES if page.startswith("docs/decisions/"))}
RECORDS = sorted((ROOT / "docs" / "decisions").glob("0*.md"))
KNOWN = {name for group in COMMANDS.values() for name in group}

# The beginning of a command -> why it is not run here. Each is the beginning of a command on some page.
NOT_RUN = {
    "make": "needs a Docker Engine",
    "build": "needs a Docker Engine",
    "bisect": "needs a Docker Engine",
    "prune": "needs a Docker Engine",
    "status": "needs a Docker Engine",
    "save": "needs a Docker Engine",
    "load": "needs a Docker Engine",
    "audit registry/image:tag": "needs a Docker Engine",
    "push": "needs a Docker Engine and a registry",
    "verify": "needs a registry, or the evidence of another user",
    "pin-digests": "needs a registry",
    "test step-video": "needs a cluster",
    "test h20": "needs a GPU, or an image",
    "test a100": "needs a GPU",
    "test v100": "needs a GPU",
    "test cpu": "needs an image, or torch for half a minute",
    "test mine --python": "needs torch, and a lock",
    "lock mine": "needs a package index",
    "lock cpu": "needs a package index",
    "lock --check": "needs the lock of the page's own profile: tests/unit/cli/test_entry.py",
    "lock ID": "ID is a placeholder",
    "show ID": "ID is a placeholder",
    "init ID": "ID is a placeholder",
    "init mine --from-env": "is the alternative to the command above it",
    "init myproject": "an example of a command's help",
    "doctor": "asks the network, the engine and other nodes",
    "audit --here": "reads the environment of the shell",
    "fix": "needs an environment with torch: tests/unit/repair",
    "run": "needs an environment with torch: tests/unit/repair",
    "install": "needs the wheels of the lock: tests/unit/repair",
    "docs": "changes the files of the folder: tests/unit/report/test_docs.py",
}
PLACEHOLDERS = {"COMMIT": "0" * 40, "REGISTRY": "registry.example", "MYAPP": "registry.example/app"}


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def anchors(text: str) -> set[str]:
    """Return the ids that GitHub generates for the headings of a page."""
    titles = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    without_code = re.sub(r"```.*?```|`[^`\n]*`", "", text_of(page), flags=re.DOTALL)
    wrong = []
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code):
        path, _, anchor = link.partition("#")
        if "://" in path:
            continue
        target = (ROOT / page).parent / path if path else ROOT / page
        if not target.exists() or (anchor and anchor not in anchors(target.read_text(encoding="utf-8"))):
            wrong.append(link)
    assert wrong == []


def commands(page: str) -> list[str]:
    """Return the commands of a page, on separate lines or as code in a sentence, without their comments."""
    found = re.findall(r"^(?:    |\$ )envbuild ([a-z].*)$", text_of(page), re.MULTILINE)
    found += re.findall(r"`envbuild ([a-z][^`]*)`", text_of(page).replace("\n", " "))
    return [line.partition(" #")[0].strip() for line in found]


def lines(page: str) -> Iterator[str]:
    """Return the commands of a page that are on separate lines."""
    for line in re.findall(r"^    envbuild (.*)$", text_of(page), re.MULTILINE):
        yield line.partition(" #")[0].strip()


def words_of(line: str) -> list[str]:
    for name, value in PLACEHOLDERS.items():
        line = re.sub(rf"\b{name}\b", value, line)
    return shlex.split(line)


@pytest.mark.parametrize("page", PAGES)
def test_a_command_on_a_line_of_its_own_is_one_that_its_parser_takes(page: str) -> None:
    for line in lines(page):
        with cli.make_context("envbuild", words_of(line)) as context:
            command: click.Command = cli
            while isinstance(command, click.Group):
                name, found, rest = command.resolve_command(context, [*context._protected_args, *context.args])
                assert found is not None, line
                context = found.make_context(name, rest, parent=context)
                command = found


@pytest.mark.parametrize("page", [page for page in PAGES if page not in OF_THEIR_TIME])
def test_a_command_in_a_sentence_has_the_options_that_it_is_shown_with(page: str) -> None:
    for line in commands(page):
        name, *words = line.split()
        if name == "--help" or name.endswith("/"):
            continue
        assert name in KNOWN, f"envbuild {line}"
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        parameters = list(command.params)
        if isinstance(command, click.Group) and words:
            parameters += command.commands[words[0]].params
        known = {option for parameter in parameters for option in (*parameter.opts, *parameter.secondary_opts)}
        own = words[: words.index("--")] if "--" in words else words  # the rest is for the program that it starts
        options = {word.rstrip(",;.") for word in own if word.startswith("-") and word != "-"}
        assert options <= known | {"--help"}, f"envbuild {line}: {options - known}"


@pytest.fixture
def folder(project: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project folder with the files that the guides mention."""
    log = re.findall(r"train\.log</summary>\n\n```text\n(.*?)^```", text_of("README.md"), re.MULTILINE | re.DOTALL)[0]
    (project / "train.log").write_text(log, encoding="utf-8")
    (project / "logs").mkdir()
    (project / "logs" / "rank0.log").write_text(log, encoding="utf-8")
    (project / "dmesg.txt.gz").write_bytes(b"")
    prints = ROOT / "tests" / "golden" / "fingerprints"
    for name, source in (("a100", "torch-2.0.1"), ("v100", "torch-2.13.0")):
        shutil.copy(prints / f"{source}.json", project / f"{name}.json")
    (project / "passphrase").write_text("a passphrase\n", encoding="utf-8")
    monkeypatch.setenv("DOCKER_HOST", f"unix://{project}/no-engine.sock")
    monkeypatch.setenv("ENVBUILD_KEY_PASSPHRASE_FILE", str(project / "passphrase"))
    user_folders.config_file().parent.mkdir(parents=True)
    user_folders.config_file().write_text(
        f"ci_install: git+https://git.example/envbuild@{'0' * 40}\n", encoding="utf-8"
    )
    return project


@pytest.mark.parametrize("page", [*GUIDES, "README.md", "docs/profiles.md", "docs/selftest.md", "docs/explain.md"])
def test_commands_run(page: str, folder: Path) -> None:
    """All in one folder, in the order of the page."""
    for line in lines(page):
        if reason(line) is not None:
            continue
        done = run_envbuild(
            *[str(Path(word).expanduser()) if word.startswith("~/") else word for word in words_of(line)]
        )
        assert done.code == 0, f"envbuild {line}\n{done.stderr}"


def reason(line: str) -> str | None:
    """Return why a command is not run here; None if it is."""
    return next((why for begin, why in NOT_RUN.items() if f"{line} ".startswith(f"{begin} ")), None)


def test_every_reason_is_that_of_a_command() -> None:
    every = [f"{line} " for page in PAGES for line in lines(page)]
    assert [begin for begin in NOT_RUN if not any(line.startswith(f"{begin} ") for line in every)] == []


def test_the_first_page_is_what_is_sought_first() -> None:
    text = text_of("README.md")
    titles = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert titles[:4] == ["A job has crashed", "A first image", "Your own project", "Base images and CI"]
    assert "No GPU profile has been tested on a physical GPU yet".lower() in text.partition("\n## ")[0].lower()
    assert len(text.splitlines()) < 200


def test_every_decision_is_in_their_list() -> None:
    files = {file.name for file in (ROOT / "docs" / "decisions").glob("0*.md")}
    assert set(re.findall(r"\((0[^)]*\.md)\)", text_of("docs/decisions/README.md"))) == files


@pytest.mark.parametrize("file", RECORDS, ids=lambda file: file.stem)
def test_a_decision_has_the_form_of_a_record_and_at_most_350_words(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    headings = re.findall(r"^#+ .*$", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    assert headings[1:] == ["## Context", "## Decision", "## Consequences"]
    assert text.splitlines()[0] == headings[0]
    assert re.fullmatch(
        r"Status: (accepted|draft|superseded (in part )?by \[\d+\]\(\d{4}-[a-z0-9-]+\.md\))", text.splitlines()[2]
    )
    assert len(text.split()) <= 350


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    """In strict mode, broken links and anchors and pages that are missing in the menu are errors."""
    pytest.importorskip("mkdocs", reason="mkdocs is not installed: make docs")
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site" / "guides" / "crash.html").is_file()


def consoles(page: str) -> list[tuple[str, str]]:
    """Return the commands of a page that are shown with their output, and that output; `...` there matches any text."""
    blocks = re.findall(r"^```console\n(.*?)^```", text_of(page), re.MULTILINE | re.DOTALL)
    found = [part.partition("\n") for block in blocks for part in re.split(r"^\$ ", block, flags=re.MULTILINE) if part]
    return [(command, output) for command, _, output in found]


def test_the_readme_shows_what_its_commands_print(folder: Path) -> None:
    """Run in a folder that contains the example log. Texts from the checkout's profiles are compared with the
    checkout."""
    shown = consoles("README.md")
    assert len(shown) >= 4
    for command, output in shown:
        name, *words = shlex.split(command)
        assert name == "envbuild"
        done = subprocess.run(
            [sys.executable, "-m", "envbuild", *words], cwd=folder, capture_output=True, text=True, timeout=120
        )
        printed = (done.stdout + done.stderr).replace(f"{ROOT}/", "")
        same = doctest.OutputChecker().check_output(output, printed, doctest.ELLIPSIS)
        assert same, f"$ {command}\n{printed}"
