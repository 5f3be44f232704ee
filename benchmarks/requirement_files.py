"""Measures which share of 40 public requirement files resolves under the pins of the profile h20.

python benchmarks/requirement_files.py FOLDER     writes benchmarks/results/requirement_files.md and .json

FOLDER contains a git repository OWNER+NAME/repo for each repository. This rule picks the files; it was written before
the code that reads them:

1. Repositories: those whose issues and pull requests the facts of envbuild cite as sources (OWNER/NAME#NUMBER or a URL,
   in envbuild/facts/data), in alphabetical order. Repositories without a snapshot of at most 500 MiB are left out.
2. Files of a repository: at most two files at its root, in alphabetical order, with one of these names:
   requirements*.txt, requirements*.in, environment*.yml, environment*.yaml, uv.lock, pylock*.toml, or pyproject.toml
   with a table [project].
3. Of all these files, the first 40.

Whether a file resolves is not part of the rule. No file is committed: only its repository, commit, name and outcome.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from machine import write
from options import program

from envbuild.lock import lock_creation_and_update, lock_file
from envbuild.resolve import plan_resolver, profile_reader_and_overrides
from envbuild.util.errors import EnvbuildError, NetworkError

PROFILE = "h20"
FILES = 40
PER_REPOSITORY = 2
HERE = Path(__file__).resolve().parent
DATA = HERE.parent / "envbuild" / "facts" / "data"
_CITED = re.compile(
    r"\b([A-Za-z0-9_.-]+/[A-Za-z0-9_.-]+)#[0-9]+|github\.com/([A-Za-z0-9_.-]+/[A-Za-z0-9_.-]+)/(?:issues|pull)"
)
_NAMES = re.compile(r"requirements[^/]*\.(txt|in)|environment[^/]*\.ya?ml|uv\.lock|pylock[^/]*\.toml|pyproject\.toml")

# The class of a failure, by a text of its message; the first that matches counts.
CLASSES = (
    ("names a source that no index has (git, URL or folder)", r"a URL cannot be locked|does not have this source"),
    ("installs the project itself (-e or a path)", r"option -e|--editable"),
    ("not a file that envbuild reads", r"not a requirements file|no table \[project\]|no project of its own|dynamic"),
    ("a lock for another Python", r"another Python than the profile's"),
    ("apex, which must be compiled", r"NVIDIA's is built from source"),
    ("a package without a wheel for this Python", r"no usable wheels|no wheels|has no wheel|only a pre-release"),
    ("a version far behind the newest release", r"far behind|behind [0-9]"),
    ("a name that the index does not have", r"was not found in|not found in the package registry"),
    ("contradicts the profile's torch", r"torch(vision|audio)?[=<>!~]"),
    ("two wheels install the same file", r"install the same|same path|both install"),
    ("requirements that contradict each other", r"cannot be resolved together"),
)  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """The outcome of one file. `requirements`: how many packages it names, 0 if it could not be read; `left_out`: how
    many of its lines are ignored, with a note; `failure`: the class of the failure, empty if the file resolves;
    `detail`: the beginning of the error message."""

    repository: str
    commit: str
    file: str
    requirements: int
    left_out: int
    failure: str
    detail: str


def cited_repositories() -> list[str]:
    """The repositories that the facts cite, in alphabetical order without regard to case."""
    found = {
        (match[1] or match[2]).removesuffix(".git")
        for file in sorted(DATA.glob("*.yaml"))
        for match in _CITED.finditer(file.read_text(encoding="utf-8"))
    }
    return sorted(found, key=str.lower)


def _git(repository: Path, *words: str) -> str:
    return subprocess.run(
        ["git", "-C", str(repository), *words], check=True, capture_output=True, text=True, errors="replace"
    ).stdout


_INCLUDED = re.compile(r"(.*/)?requirements?([^/]*|/[^/]*)\.(txt|in)")


def included_files(repository: Path) -> Iterator[tuple[str, str]]:
    """Yield path and text of each file of a repository that a requirements file may include."""
    for name in _git(repository, "ls-tree", "-r", "--name-only", "HEAD").splitlines():
        if _INCLUDED.fullmatch(name):
            with contextlib.suppress(subprocess.CalledProcessError):  # the snapshot lacks large files
                yield name, _git(repository, "show", f"HEAD:{name}")


def picked_files(folder: Path) -> Iterator[tuple[str, str, str, str]]:
    """Yield repository, commit, name and text of each file that the rule picks, without the limit of 40."""
    for repository in cited_repositories():
        place = folder / repository.replace("/", "+") / "repo"
        if not place.is_dir():
            continue
        commit = _git(place, "rev-parse", "HEAD").strip()
        taken = 0
        for name in sorted(_git(place, "ls-tree", "--name-only", "HEAD").splitlines()):
            if taken == PER_REPOSITORY or not _NAMES.fullmatch(name):
                continue
            try:
                text = _git(place, "show", f"HEAD:{name}")
            except subprocess.CalledProcessError:  # the snapshot lacks large files
                continue
            if name == "pyproject.toml" and not re.search(r"^\[project\]", text, re.MULTILINE):
                continue
            taken += 1
            yield repository, commit, name, text


def failure_class(text: str) -> str:
    """The class of an error message."""
    return next((name for name, pattern in CLASSES if re.search(pattern, text)), "other")


def tried(snapshot: Path, repository: str, commit: str, name: str, text: str) -> Outcome:
    """Resolve one file under the profile's pins, with the profile's lock as the previous one. `snapshot`: the git
    repository of the file, which has the files that it includes. Raises NetworkError if a server does not answer."""
    requirements = left_out = 0
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / repository.partition("/")[2].lower().replace(".", "-") / name
        for path, own in (*included_files(snapshot), (name, text)):
            (file.parent / path).parent.mkdir(parents=True, exist_ok=True)
            (file.parent / path).write_text(own, encoding="utf-8")
        os.chdir(file.parent)
        try:
            shipped = profile_reader_and_overrides.load(PROFILE)
            before = lock_file.read(shipped.known_lock)
            loaded = profile_reader_and_overrides.load(PROFILE, None, file)
            requirements, left_out = len(loaded.profile.packages) - len(shipped.profile.packages), len(loaded.notes)
            lock_creation_and_update.update_lock(plan_resolver.resolve(loaded), before)
        except EnvbuildError as error:
            if isinstance(error, NetworkError) and "did not answer" in error.message:
                raise
            faults = [f"{Path(fault.file or '').name}: {fault.message}" for fault in error.faults]
            whole = "\n".join([error.message, *faults, error.hint or ""])
            detail = " ".join((faults or [error.hint or error.message])[0].split())
            return Outcome(repository, commit, name, requirements, left_out, failure_class(whole), detail[:160])
        finally:
            os.chdir(HERE)
    return Outcome(repository, commit, name, requirements, left_out, "", "")


def page(outcomes: list[Outcome]) -> list[str]:
    """The page of results, as lines of Markdown."""
    good = sum(not one.failure for one in outcomes)
    classes = Counter(one.failure for one in outcomes if one.failure)
    return [
        "# Public requirement files under the pins of h20",
        "",
        f"{good} of {len(outcomes)} files resolve. Made by `python benchmarks/requirement_files.py FOLDER`. Its",
        "docstring has the rule that picks the files. Lines that contradict the profile's pins are left out with a",
        "note, and count as left out here.",
        "",
        "| files | why they do not resolve |",
        "|---|---|",
        *(f"| {count} | {name} |" for name, count in classes.most_common()),
        "",
        "| repository | commit | file | requirements | left out | outcome |",
        "|---|---|---|---|---|---|",
        *(
            f"| {one.repository} | {one.commit[:12]} | {one.file} | {one.requirements or '-'} | {one.left_out or '-'} "
            f"| {one.failure or 'resolves'} |"
            for one in outcomes
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="The share of public requirement files that resolve.")
    parser.add_argument("folder", type=Path, help="folder of the repositories: OWNER+NAME/repo")
    folder = parser.parse_args().folder
    outcomes = []
    for number, picked in enumerate(picked_files(folder)):
        if number == FILES:
            break
        outcomes.append(tried(folder / picked[0].replace("/", "+") / "repo", *picked))
        print(outcomes[-1].repository, outcomes[-1].file, "-", outcomes[-1].failure or "resolves", flush=True)
    (HERE / "results" / "requirement_files.json").write_text(
        json.dumps([asdict(one) for one in outcomes], indent=1) + "\n", encoding="utf-8"
    )
    write("requirement_files", page(outcomes))


if __name__ == "__main__":
    program(main)
