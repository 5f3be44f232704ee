"""Locks the profile of each shipped project with the requirements file of the project, as it is at a stated commit.

python benchmarks/project_requirements.py FOLDER     writes benchmarks/results/project_requirements.md

FOLDER contains a git repository OWNER+NAME/repo for each project, with the stated commit. No file is committed: only
its repository, commit, name and outcome. If a file does not lock, the requirements that the error names are left out,
and the rest is locked as a requirements.txt, until it locks. So the page lists every requirement that cannot be had.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from machine import write
from options import program
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from envbuild.lock import lock_creation_and_update, lock_file
from envbuild.profile import requirements_reader
from envbuild.resolve import profile_reader_and_overrides
from envbuild.resolve.plan_resolver import resolve
from envbuild.util.errors import EnvbuildError, NetworkError

HERE = Path(__file__).resolve().parent
ROUNDS = 20


@dataclass(frozen=True)
class Project:
    """A profile, and the file of its project. `commit`: the one at which the profile was written."""

    profile: str
    repository: str
    commit: str
    file: str


PROJECTS = (
    Project("amphion", "open-mmlab/Amphion", "d3de90f02e7f", "env.sh"),
    Project("onediff-svd", "siliconflow/onediff", "98898c49155a", "setup.py"),
    Project("open-sora", "hpcaitech/Open-Sora", "7ad6a96a135f", "requirements.txt"),
    Project("step-video", "stepfun-ai/Step-Video-T2V", "675e08c0dd08", "setup.py"),
    Project("step-video-packages", "stepfun-ai/Step-Video-T2V", "675e08c0dd08", "setup.py"),
    Project("xdit", "xdit-project/xDiT", "175e0bfec974", "setup.py"),
    Project("xdit-apex", "xdit-project/xDiT", "175e0bfec974", "setup.py"),
)


@dataclass
class Outcome:
    """`error`: the error about the real file, empty if it locks; `exceptions`: requirement and why it cannot be had;
    `left_out`: the notes about ignored lines; `rest`: how many requirements lock, None if they do not."""

    project: Project
    error: str = ""
    exceptions: list[tuple[str, str]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    rest: int | None = None


def name_of(requirement: str) -> str:
    """The canonical name of a requirement; the text itself for a URL."""
    try:
        return str(canonicalize_name(Requirement(requirement).name))
    except InvalidRequirement:
        return requirement


def exceptions_of(error: EnvbuildError, remaining: list[tuple[str, int]]) -> dict[str, str]:
    """The requirements that an error names, each with the reason. `remaining`: the requirements with their lines."""
    text = " ".join(f"{error.message} {error.hint or ''}".split())
    missing = re.search(r"without a wheel for [^:]*: ((?:[A-Za-z0-9_.-]+ [^ ,]+(?:, )?)+)", text)
    only_source = dict(one.split(" ") for one in missing[1].strip(", ").split(", ")) if missing else {}
    without = {*only_source, *re.findall(r"([A-Za-z0-9][A-Za-z0-9_.-]*)[^ ]* has no usable wheels", text)}
    required = {str(canonicalize_name(name)) for name in re.findall(r"you require ([A-Za-z0-9_-]+)", text)}
    faults = [(fault.line, fault.message) for fault in error.faults]
    found = {}
    for requirement, line in remaining:
        name, lines = (
            name_of(requirement),
            [why for number, why in faults if number == line and "cannot be locked" in why],
        )
        if name in only_source:
            found[requirement] = f"only source on the index ({only_source[name]})"
        elif name in required and without - {name}:
            found[requirement] = (
                f"requires a package that has only source on the index: {' or '.join(sorted(without - {name}))}"
            )
        elif name == requirement and lines:
            found[requirement] = lines[0]
    return found


def tried(project: Project, text: str) -> Outcome:
    """Lock a profile with the text of its project's file, and without the lines that cannot be had."""
    found = Outcome(project)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / project.repository.partition("/")[2].lower() / project.file
        file.parent.mkdir()
        file.write_text(text, encoding="utf-8")
        os.chdir(file.parent)
        try:
            python = profile_reader_and_overrides.load(project.profile).profile.python
            listed = [(line, place.line) for line, place in requirements_reader.read(file, python).lines]
            remaining = list(dict.fromkeys(listed))
            for number in range(ROUNDS):
                try:
                    before = lock_file.read(profile_reader_and_overrides.load(project.profile).known_lock)
                    loaded = profile_reader_and_overrides.load(project.profile, None, file)
                    if number == 0:
                        found.left_out += loaded.notes
                    lock_creation_and_update.update_lock(resolve(loaded), before)
                    found.rest = len({name_of(line) for line, _ in remaining})
                    return found
                except EnvbuildError as error:
                    if isinstance(error, NetworkError) and "did not answer" in error.message:
                        raise
                    found.error = found.error or error.message
                    excepted = exceptions_of(error, remaining)
                    if not excepted:
                        print(number, error.message, error.hint, *error.faults, sep="\n")
                        return found
                found.exceptions += excepted.items()
                remaining = [(line, place) for line, place in remaining if line not in excepted]
                file = file.with_name("requirements.txt")
                file.write_text("".join(f"{line}\n" for line, _ in remaining), encoding="utf-8")
        finally:
            os.chdir(HERE)
    return found


def page(outcomes: list[Outcome]) -> list[str]:
    """The page of results, as lines of Markdown."""
    lines = [
        "# The profiles of projects with the projects' own requirements files",
        "",
        "Made by `python benchmarks/project_requirements.py FOLDER`: `envbuild lock PROFILE --requirements FILE` with",
        "each file as it is. If a file does not lock, the error names requirements and what to do about them. Without",
        "all those that are listed below, the rest of the file locks together with the profile.",
        "",
        "| project | commit | file | profile | outcome | cannot be had | lock |",
        "|---|---|---|---|---|---|---|",
        *(
            f"| {one.project.repository} | {one.project.commit} | {one.project.file} | {one.project.profile} "
            f"| {'an error that names what cannot be had' if one.error else 'locks'} "
            f"| {len(one.exceptions) or '-'} | {'none' if one.rest is None else one.rest} |"
            for one in outcomes
        ),
    ]
    for one in outcomes:
        if one.exceptions or one.left_out:
            lines += ["", f"## {one.project.profile}", ""]
            lines += [f"- `{requirement}` cannot be had: {reason}" for requirement, reason in one.exceptions]
            lines += [f"- ignored: {note}" for note in one.left_out]
    return lines


def git(repository: Path, *words: str) -> str:
    return subprocess.run(["git", "-C", repository, *words], check=True, capture_output=True, text=True).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description="Lock the profiles of projects with the projects' own files.")
    parser.add_argument("folder", type=Path, help="folder of the repositories: OWNER+NAME/repo")
    folder = parser.parse_args().folder.resolve()
    outcomes = []
    for project in PROJECTS:
        place = folder / project.repository.replace("/", "+") / "repo"
        outcomes.append(tried(project, git(place, "show", f"{project.commit}:{project.file}")))
        print(project.profile, "-", outcomes[-1].error or "locks", len(outcomes[-1].exceptions), flush=True)
    write("project_requirements", page(outcomes))


if __name__ == "__main__":
    program(main)
