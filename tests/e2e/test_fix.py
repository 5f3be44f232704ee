"""`envbuild fix --image` on the real engine: the printed Dockerfile is built, and the image that it gives is fixed."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest
from selftest.environments import good
from unit.repair.test_repair_run import libraries, recorded

from .support import Project, Proved, Result, command, docker, handle

pytestmark = pytest.mark.engine

SITE = "/seed/lib/python3.11/site-packages"
PACKAGES = "/opt/venv/lib/python3.11/site-packages"
FAULTY, FIXED = "12.1.3.1", "12.4.5.8"
LOG = """\
NVIDIA H20, driver 550.54.15
torch 2.3.1+cu121
Fatal Python error: Floating point exception
  File "/seed/lib/python3.11/site-packages/torch/nn/modules/linear.py", line 116 in forward
"""
REQUIRED = 'from importlib.metadata import requires, version; print(version("nvidia-cublas-cu12"), requires("torch"))'


@dataclass(frozen=True)
class Team:
    """An image that was not made by envbuild: torch 2.3.1 with the faulty cuBLAS, pip, and a user who is not root. pip
    takes packages from a folder of the image, so that it needs no network."""

    project: Project
    folder: Path
    image: str

    def fix(self, image: str, *arguments: str) -> Result:
        return self.project.run("fix", "train.log", "--image", image, *arguments)


@pytest.fixture(scope="module")
def team(light: Proved, workplace: Path, run_id: str) -> Team:
    context = workplace / "fix-image"
    (context / "wheels").mkdir(parents=True)
    made = good(context / "site")
    for path in (*made.site.glob("nvidia_cublas*/*"), *made.site.glob("nvidia_cublas*")):
        path.rmdir() if path.is_dir() else path.unlink()
    made.cublas(FAULTY)
    recorded(context / "wheels", "nvidia-cublas-cu12", FIXED, files=libraries(FIXED, "cublas", "cublasLt"))
    lines = [
        f"FROM {light.tag}",
        'RUN ["python3", "-m", "venv", "--without-pip", "/seed"]',
        f"RUN cp -r {PACKAGES}/pip {PACKAGES}/pip-*.dist-info {SITE}/ && cp /opt/venv/bin/pip* /seed/bin/",
        f"COPY site {SITE}",
        "COPY wheels /wheels",
        "ENV PATH=/seed/bin:/usr/local/bin:/usr/bin:/bin VIRTUAL_ENV=/seed PIP_NO_INDEX=1 PIP_FIND_LINKS=/wheels",
        "LABEL io.envbuild.lock=",
        "USER nobody",
    ]
    (context / "Dockerfile").write_text("\n".join(lines), encoding="utf-8")
    image = f"envbuild-e2e/{run_id}:train"
    docker("build", "--quiet", "--network=none", "--tag", image, context)
    (light.project.folder / "train.log").write_text(LOG, encoding="utf-8")
    return Team(light.project, context, image)


def test_the_printed_dockerfile_gives_a_fixed_image(team: Team) -> None:
    before = handle(team.image)
    done = team.fix(team.image, "--json")
    assert done.code == 0, done.stderr
    plan = done.document
    assert (plan["state"], plan["profile"]) == ("fixable", None), plan
    printed = team.fix(team.image).stdout.splitlines()
    assert all(f"  {line}" in printed for line in plan["dockerfile"])
    assert plan["dockerfile"][:2] == [f"FROM {team.image}", "USER root"] and plan["dockerfile"][-1] == "USER nobody"
    (team.folder / "fixed").mkdir()
    (team.folder / "fixed" / "Dockerfile").write_text("\n".join(plan["dockerfile"]), encoding="utf-8")
    (build,) = plan["commands"]
    command(*build["argv"], cwd=team.folder)
    fixed = f"{team.image}-fixed"
    (prove,) = plan["prove"]
    assert fixed in shlex.split(prove)
    audited = team.project.run(*shlex.split(prove)[1:], "--json")
    assert audited.code == 0 and "cublas-hopper-fpe" not in {row["id"] for row in audited.document["findings"]}
    again = team.fix(fixed, "--json").document
    assert (again["state"], again["dockerfile"]) == ("healthy", [])
    assert "Nothing to fix." in team.fix(fixed).stdout
    assert handle(team.image) == before, "the image itself is not changed"
    assert docker("run", "--rm", fixed, "id", "-un").strip() == "nobody"
    version, _, requires = docker("run", "--rm", fixed, "python", "-c", REQUIRED).partition(" ")
    assert version == FIXED and f"nvidia-cublas-cu12=={FAULTY}" not in requires.replace(" ", "")


def test_an_image_without_faults_needs_nothing(team: Team, quick: Proved) -> None:
    done = quick.project.run("fix", "--image", quick.tag, "--json")
    assert (done.code, done.document["state"], done.document["commands"]) == (0, "healthy", []), done.stdout


def test_a_missing_image_is_an_error(team: Team) -> None:
    done = team.fix(f"{team.image}-missing")
    assert done.code == 6 and "-missing" in done.stderr, done.stderr
