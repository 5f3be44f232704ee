"""`envbuild audit` on real images and environments: seeded defects are named, and nothing on a clean one.

The defects in an image are those for which it differs from an environment: its loader, variables and files.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from selftest.environments import SONAMES, Environment, good, library, virtual

from .support import Project, Proved, Result, docker

SITE = "/seed/lib/python3.11/site-packages"


@dataclass(frozen=True)
class Bench:
    """Builds images that hold a small environment in place of torch's, and audits them for an H20."""

    light: Proved
    project: Project
    folder: Path
    run_id: str

    def image(self, name: str, spoil: Callable[[Environment, Path], None], *lines: str) -> str:
        context = self.folder / name
        (context / "system").mkdir(parents=True)
        spoil(good(context / "site"), context / "system")
        path = "/seed/bin:/usr/local/bin:/usr/bin:/bin"
        text = [
            f"FROM {self.light.tag}",
            'RUN ["python3", "-m", "venv", "--without-pip", "/seed"]',
            f"COPY site {SITE}",
            "COPY system /usr/local/cuda/lib64",
            f"ENV PATH={path} VIRTUAL_ENV=/seed",
            "LABEL io.envbuild.lock=",
            *lines,
        ]
        (context / "Dockerfile").write_text("\n".join(text), encoding="utf-8")
        reference = f"envbuild-e2e/{self.run_id}:audit-{name}"
        docker("build", "--quiet", "--network=none", "--tag", reference, context)
        return reference

    def audit(self, *arguments: str) -> Result:
        return self.project.run("audit", *arguments)


@pytest.fixture(scope="module")
def gpu_profile(project: Project, run_id: str) -> str:
    """Return the name of a profile for an H20."""
    name = f"audited-h20-{run_id}"
    project.write(
        name, base={"bootstrap": "bookworm"}, python="3.11", torch="2.3.1", gpus=["h20"], pins={"cublas": "12.5.2.13"}
    )
    return name


@pytest.fixture(scope="module")
def bench(light: Proved, project: Project, workplace: Path, run_id: str) -> Bench:
    return Bench(light, project, workplace / "audit", run_id)


def found(result: Result, severity: str | None = None) -> set[str]:
    """Return ids of findings: above a note, or of one severity."""
    rows = result.document["findings"]
    return {r["id"] for r in rows if r["severity"] == severity or (severity is None and r["severity"] != "note")}


def nothing(made: Environment, system: Path) -> None:
    """Change nothing."""


def foreign(made: Environment, system: Path) -> None:
    for kind in ("cublas", "cublasLt"):
        (system / SONAMES[kind]).write_bytes(library(kind, "12.1.3.1"))
    (system / "libnvJitLink.so.12").write_bytes(library("nccl", "12.1.105"))


def missing(made: Environment, system: Path) -> None:
    foreign(made, system)
    for file in (made.site / "nvidia/cublas/lib").iterdir():
        file.unlink()


def bundled(made: Environment, system: Path) -> None:
    made.put(made.site / "torch/lib" / SONAMES["cublas"], library("cublas", "12.1.3.1"))


def twice(made: Environment, system: Path) -> None:
    made.cublas("12.1.3.1")
    made.cublas()


def left(made: Environment, system: Path) -> None:
    made.put(made.site / "nvidia/cublas/lib/libcublas.so.11", library("cublas", "11.11.3.6"))


def patched(made: Environment, system: Path) -> None:
    with (made.site / "nvidia/cublas/lib" / SONAMES["cublasLt"]).open("ab") as file:
        file.write(b"x")


def websites(made: Environment, system: Path) -> None:
    made.wheel("apex", "0.9.10.dev0", {"apex/__init__.py": b"", "apex/models/__init__.py": b""})


def cpu_only(made: Environment, system: Path) -> None:
    made.torch(cuda=None)
    (made.site / "torch-2.3.1.dist-info/METADATA").write_text("Name: torch\nVersion: 2.3.1\n")


def old(made: Environment, system: Path) -> None:
    for path in made.site.glob("nvidia_cublas*/*"):
        path.unlink()
    for path in made.site.glob("nvidia_cublas*"):
        path.rmdir()
    made.cublas("12.1.3.1")


def unmet(made: Environment, system: Path) -> None:
    made.wheel("needy", "1", {}, ["nvidia-nccl-cu12==2.20.5"])


def old_cards(made: Environment, system: Path) -> None:
    made.torch(architectures="sm_50 sm_80")


CUDA_PATH = "ENV LD_LIBRARY_PATH=/usr/local/cuda/lib64"
SEEDS: dict[str, tuple[Callable[[Environment, Path], None], tuple[str, ...], set[str], int]] = {
    "clean": (nothing, (), set(), 0),
    "system-copy": (foreign, (), set(), 0),
    "ld-path": (foreign, (CUDA_PATH,), {"several-copies", "ld-library-path", "cublaslt-order", "nvjitlink-shadow"}, 0),
    "supplied": (missing, (CUDA_PATH,), {"cublas-hopper-fpe", "nvjitlink-shadow"}, 5),
    "patched": (patched, (), {"modified-library"}, 5),
}
IN_ENVIRONMENTS: dict[str, tuple[Callable[[Environment, Path], None], set[str], int]] = {
    "bundled": (bundled, {"bundled-copy", "several-copies"}, 0),
    "twice": (twice, {"duplicate-distribution"}, 5),
    "left": (left, {"left-behind", "several-copies"}, 0),
    "apex": (websites, {"wrong-apex"}, 5),
    "cpu-only": (cpu_only, {"cpu-only"}, 5),
    "old": (old, {"cublas-hopper-fpe"}, 5),
    "unmet": (unmet, {"requirement-unmet"}, 0),
    "arch": (old_cards, {"no-kernel"}, 5),
}


@pytest.mark.parametrize("name", IN_ENVIRONMENTS)
def test_a_defect_seeded_in_an_environment_is_named_and_nothing_else(
    name: str, project: Project, gpu_profile: str, tmp_path: Path
) -> None:
    spoil, wanted, code = IN_ENVIRONMENTS[name]
    python, site = virtual(tmp_path / "venv")
    spoil(good(site), tmp_path)
    result = project.run("audit", "--python", str(python), "--profile", gpu_profile, "--json", LD_LIBRARY_PATH="")
    assert (found(result), result.code) == (wanted, code), result.stdout
    assert ("error" in result.document) == (code == 5)


@pytest.mark.parametrize("name", SEEDS)
def test_a_defect_seeded_in_an_image_is_named_and_nothing_else(name: str, bench: Bench, gpu_profile: str) -> None:
    spoil, lines, wanted, code = SEEDS[name]
    image = bench.image(name, spoil, *lines)
    result = bench.audit(image, "--profile", gpu_profile, "--json")
    assert (found(result), result.code) == (wanted, code), result.stdout
    assert result.document["target"] == image
    assert ("error" in result.document) == (code == 5)


def test_nothing_is_found_in_an_image_that_envbuild_made(quick: Proved) -> None:
    result = quick.project.run("audit", quick.tag)
    assert result.code == 0, result.stderr
    first, *_, last = result.stdout.splitlines()
    assert first.startswith(f"{quick.tag}: Python 3.11") and f"judged for {quick.name}" in first
    assert last == "clean"


def test_an_image_that_differs_from_its_label(bench: Bench) -> None:
    reference = f"envbuild-e2e/{bench.run_id}:audit-changed"
    text = f"FROM {bench.light.tag}\nRUN rm -r /opt/venv/lib/python3.11/site-packages/mpmath*\n"
    docker("build", "--quiet", "--network=none", "--tag", reference, "-", stdin=text)
    result = bench.light.project.run("audit", reference, "--json")
    assert result.code == 5
    assert found(result, "defect") == {"not-as-locked"}
    assert found(result, "warn") == {"requirement-unmet"}


def test_images_without_torch_or_python(bench: Bench) -> None:
    plain = bench.image("plain", nothing, f"RUN rm -r {SITE}/torch {SITE}/torch-2.3.1.dist-info")
    result = bench.audit(plain)
    assert result.code == 3 and "torch is not installed; the contents are listed" in result.stderr, result.stderr
    reference = f"envbuild-e2e/{bench.run_id}:audit-empty"
    empty = bench.folder / "empty"
    empty.mkdir()
    (empty / "Dockerfile").write_text("FROM scratch\nCOPY Dockerfile /\n")
    docker("build", "--quiet", "--tag", reference, empty)
    result = bench.audit(reference)
    assert result.code == 5 and "no Python" in result.stderr and "Traceback" not in result.stderr
    result = bench.audit(f"envbuild-e2e/{bench.run_id}:none", "--json")
    assert (result.code, result.error["kind"]) == (6, "engine")


def test_an_image_with_a_forged_collector_output_is_refused(bench: Bench) -> None:
    """The image's Python prints a frame of a different run, and after it a terminal escape sequence."""
    script = "#!/bin/sh\nprintf 'ENVBUILD 0 0 0 {}\\\\n\\\\033[2J'\n"
    reference = f"envbuild-e2e/{bench.run_id}:audit-liar"
    text = f"FROM {bench.light.tag}\nRUN printf '{script}' >/usr/local/bin/python && chmod 755 /usr/local/bin/python\n"
    text += "ENV PATH=/usr/local/bin:/usr/bin:/bin\n"
    docker(
        "build",
        "--quiet",
        "--network=none",
        "--tag",
        reference,
        "-",
        stdin=text.replace("\n'", "'").replace("#!/bin/sh\n", "#!/bin/sh\\n"),
    )
    result = bench.audit(reference)
    assert result.code == 5 and "no result" in result.stderr
    assert "\x1b" not in result.stdout + result.stderr


def test_an_environment_is_audited_without_an_engine(project: Project, tmp_path: Path) -> None:
    python, site = virtual(tmp_path / "venv")
    good(site)
    nowhere = {"DOCKER_HOST": f"unix://{tmp_path}/none", "LD_LIBRARY_PATH": ""}
    for arguments in (["--python", str(python)], ["--python", str(tmp_path / "venv")], ["--here"]):
        result = project.run("audit", *arguments, VIRTUAL_ENV=str(tmp_path / "venv"), **nowhere)
        assert result.code == 0 and result.stdout.splitlines()[-1] == "clean", result.stdout + result.stderr
        assert result.stdout.startswith(f"{python}: ")
        assert result.seconds < 10


def test_this_very_environment_is_audited_in_time(project: Project) -> None:
    result = project.run("audit", "--python", sys.executable, "--json")
    # ten times its budget: every file is hashed, and other tests run at the same time; a busy, slow machine took 61 s
    assert result.seconds < 100
    assert result.code in ((0, 5) if importlib.util.find_spec("torch") else (3,))


@pytest.mark.parametrize("path", ["/nowhere", "/etc/passwd", "/bin/ls", "/proc", "/proc/self/mem"])
def test_a_path_that_is_not_a_python_is_reported(project: Project, path: str) -> None:
    result = project.run("audit", "--python", path)
    assert result.code == 2 and "Traceback" not in result.stderr, result.stderr
