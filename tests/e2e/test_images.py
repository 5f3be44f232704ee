"""The real image of each named project and of h20's line for older drivers, one image at a time: built, audited without
findings other than notes, and with the versions that its lock names. A run of all of them writes
benchmarks/results/images.md.

Each image takes 5 GB and some minutes, so only `make test-images` builds these images; step-video is built by
test_gpu_image.py every time, and h20 by test_apex.py. xdit-apex takes an hour more, in which apex is compiled
(APEX_GIT: as in test_apex.py).
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from .support import CHECKOUT, Project, docker, machine_cache

pytestmark = [pytest.mark.engine, pytest.mark.images]

PROFILES = CHECKOUT / "profiles"
LOCKS = {
    file.name.removesuffix(".lock.yaml"): file
    for file in sorted([*PROFILES.glob("projects/*.lock.yaml"), PROFILES / "h20-cu12.lock.yaml"])
    if file.name != "step-video.lock.yaml"
}
ROOM = 25_000_000_000  # wheels, context and layers of one image take up to 20 GB while it is built

# the audit's name of a library -> the beginning of the name of its distribution
CARRIED_BY = {
    "cublas": "nvidia-cublas",
    "cublasLt": "nvidia-cublas",
    "cudnn": "nvidia-cudnn",
    "nccl": "nvidia-nccl",
    "cudart": "nvidia-cuda-runtime",
}
IMPORTS = {
    "amphion": "import librosa, torchaudio, transformers; librosa.cqt",
    "step-video-packages": "import accelerate, diffusers, transformers; transformers.T5EncoderModel",
    "open-sora": "import torchvision; torchvision.ops.nms",
    "onediff-svd": "torch.ones(2).numpy()",
    "xdit": "import accelerate, diffusers, transformers; transformers.T5EncoderModel",
    "xdit-apex": "import accelerate, diffusers, transformers; transformers.T5EncoderModel",
}


@dataclass(frozen=True)
class Built:
    """An image built from the project's profile `name`, which extends the shipped profile `profile`. `name` contains
    the id of this test session."""

    profile: str
    project: Project
    name: str
    tag: str

    @property
    def locked(self) -> dict[str, str]:
        """Return distribution -> version."""
        read = yaml.safe_load(self.project.lock(self.name).read_text(encoding="utf-8"))
        return {wheel["name"]: wheel["version"] for wheel in read["content"]["wheels"]}


@pytest.fixture(scope="module", params=LOCKS)
def built(request: pytest.FixtureRequest, images: None, workplace: Path, run_id: str) -> Iterator[Built]:
    """Build from the committed lock; image, build cache and downloads are removed before the next one."""
    profile: str = request.param
    free = shutil.disk_usage(machine_cache("wheels")).free
    if free < ROOM:
        pytest.skip(f"{free / 1e9:.0f} GB are free, {ROOM / 1e9:.0f} GB are needed")
    root = workplace / f"image-{profile}"
    project = Project.create(root).with_cache(root, "wheels")
    for known in machine_cache("wheels").iterdir():
        (project.cached("wheels") / known.name).symlink_to(known)
    project.use_apex_mirror()
    name = f"e2e-{run_id}-{profile}"
    project.write(name, extends=profile)
    shutil.copy(LOCKS[profile], project.lock(name))
    try:
        done = project.start("build", name, "--locked", "--json").finish(7200)
        assert done.code == 0, f"{done.stdout}\n{done.stderr}"
        yield Built(profile, project, name, done.document["tags"][0])
    finally:
        listed = docker("image", "ls", "--format", "{{.Repository}}:{{.Tag}}", f"envbuild/{name}").split()
        if listed:
            docker("image", "rm", "--force", *listed)
        docker("buildx", "prune", "--force")
        shutil.rmtree(root)


@pytest.fixture(scope="module")
def rows() -> Iterator[dict[str, str]]:
    """A row of the results page for each profile. If all images were tested, the page is written."""
    found: dict[str, str] = {}
    yield found
    if set(found) == set(LOCKS):
        sys.path.insert(0, str(CHECKOUT / "benchmarks"))
        import machine

        machine.write("images", [
            "# Images of the projects and of a line for older drivers", "",
            f"Machine: {machine.described()}, without a GPU. Made by `make test-images`: each image was built from the "
            "committed lock and audited. The versions are those of the loaded libraries. The audit had no findings "
            "other than notes, and the modules that a project needs were imported.", "",
            "| profile | torch | cuBLAS | cuDNN | NCCL | CUDA runtime | GB |",
            "|---|---|---|---|---|---|---|",
            *found.values(),
        ])  # fmt: skip


def test_it_audits_clean_and_has_loaded_what_is_locked(built: Built, rows: dict[str, str]) -> None:
    done = built.project.run("audit", built.tag, "--profile", built.name, "--json")
    assert done.code == 0, done.stderr
    assert [found for found in done.document["findings"] if found["severity"] != "note"] == []
    loaded = {row["name"]: row["version"] for row in done.document["libraries"] if row["loaded"]}
    wanted = {
        library: version
        for library, beginning in CARRIED_BY.items()
        for name, version in built.locked.items()
        if name.startswith(beginning)
    }
    assert set(wanted) == set(CARRIED_BY)
    assert {library: loaded.get(library) for library in wanted} == wanted
    versions = [built.locked["torch"], *(wanted[library] for library in ("cublas", "cudnn", "nccl", "cudart"))]
    size = int(docker("image", "inspect", "--format", "{{.Size}}", built.tag)) / 1e9
    rows[built.profile] = f"| {' | '.join([built.profile, *versions])} | {size:.1f} |"


def test_it_imports_what_the_project_needs(built: Built) -> None:
    code = f"import torch; print(torch.__version__.partition('+')[0]); {IMPORTS.get(built.profile, '')}"
    output = docker(
        "run", "--rm", "--network", "none", "--read-only", "--tmpfs", "/tmp", built.tag, "python", "-c", code
    )
    assert output.strip() == built.locked["torch"]
    assert "No broken requirements" in docker("run", "--rm", "--network", "none", built.tag, "pip", "check")
