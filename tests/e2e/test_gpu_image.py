"""A real GPU image, built on a machine without a GPU: step-video, torch 2.3.1 with cuBLAS overridden, 5.5 GB.

A second image with another cuBLAS, and one with a foreign cuBLAS, are only built by `make test-images`. `make test`
shows with stand-ins for torch which layers change (test_toolchain.py) and what the audit finds (test_audit.py), and not
the size of the changed layers, nor which cuBLAS a real torch loads.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import uv
from selftest.environments import SONAMES, library

from .support import CHECKOUT, Project, Result, docker

CUBLAS = "12.5.2.13"
UNPROVED = 4


def layers(tag: str) -> list[str]:
    found: list[str] = json.loads(docker("image", "inspect", "--format", "{{json .RootFS.Layers}}", tag))
    return found


def found(result: Result) -> set[str]:
    """Return ids of the audit's findings above a note."""
    return {row["id"] for row in result.document["findings"] if row["severity"] != "note"}


def inside(tag: str, *argv: str, network: str = "none") -> str:
    return docker("run", "--rm", "--network", network, tag, *argv)


def test_without_a_gpu_it_is_built_and_not_verified(gpu_made: Result, gpu_name: str) -> None:
    assert (gpu_made.code, gpu_made.document["state"]) == (0, "unverified")
    assert [proof["state"] for proof in gpu_made.document["evidence"]] == ["missing"]
    assert "verified" not in docker("image", "ls", "--format", "{{.Tag}}", f"envbuild/{gpu_name}").split()


def test_without_a_gpu_make_stops_before_anything_is_fetched(gpu_project: Project, gpu_name: str) -> None:
    shown = gpu_project.run("make", gpu_name, "--dry-run", "--json").document
    if shown["proof"] != "impossible":
        pytest.skip("this machine has the GPU")
    done = gpu_project.run("make", gpu_name, "--locked", "--json")
    assert (done.code, done.error["kind"]) == (UNPROVED, "not-proved")
    assert [step["name"] for step in done.document["steps"]] == ["load profile", "resolve"]
    assert "the engine has no GPU" in done.error["message"] and "--allow-unproved" in done.error["hint"]
    assert "proof: not possible here" in done.stderr


def test_torch_loads_the_overridden_library_alone(gpu_tag: str) -> None:
    code = "import torch; print(sorted({l.split()[-1] for l in open('/proc/self/maps') if 'libcublas' in l}))"
    mapped = inside(gpu_tag, "python", "-c", code)
    assert mapped.count("libcublas.so") == 1
    assert "/opt/venv/lib/python3.11/site-packages/nvidia/cublas/lib/libcublas.so.12" in mapped
    versions = inside(gpu_tag, "python", "-c", "import importlib.metadata as m; print(m.version('nvidia-cublas-cu12'))")
    assert versions.strip() == CUBLAS


def test_its_only_label_is_its_lock(gpu_made: Result, gpu_tag: str) -> None:
    labels = json.loads(docker("image", "inspect", "--format", "{{json .Config.Labels}}", gpu_tag))
    assert labels == {"io.envbuild.lock": gpu_made.document["lock"]}


def test_the_metadata_ask_for_the_overridden_version(gpu_tag: str) -> None:
    assert "No broken requirements" in inside(gpu_tag, "pip", "check")
    asks = inside(
        gpu_tag, "sh", "-c", "grep -h cublas /opt/venv/lib/python3.11/site-packages/torch-*.dist-info/METADATA"
    )
    assert f"nvidia-cublas-cu12=={CUBLAS}" in asks
    # RECORD has the new METADATA's hash: an uninstall or an audit finds nothing changed
    code = (
        "import base64,hashlib,importlib.metadata as m\n"
        "for f in m.files('torch'):\n"
        " if f.name == 'METADATA':\n"
        "  d = hashlib.sha256(f.locate().read_bytes()).digest()\n"
        "  print(base64.urlsafe_b64encode(d).rstrip(b'=').decode() == f.hash.value,"
        " f.locate().stat().st_size == f.size)"
    )
    assert inside(gpu_tag, "python", "-c", code).strip() == "True True"


def test_its_audit_is_clean(gpu_tag: str, project: Project) -> None:
    result = project.run("audit", gpu_tag, "--profile", str(CHECKOUT / "profiles/projects/step-video.yaml"), "--json")
    assert result.code == 0, result.stderr
    loaded = {row["name"]: row["version"] for row in result.document["libraries"] if row["loaded"]}
    assert loaded["cublas"] == loaded["cublasLt"] == CUBLAS
    assert loaded["cudnn"] == loaded["cudnn_ops_infer"] == "8.9.2.26"
    assert found(result) == set()  # clean: nothing above a note that the profile does not accept
    assert result.seconds < 5 * 15  # five times the budget


@pytest.mark.images
def test_its_audit_names_a_foreign_cublas(gpu_tag: str, project: Project, run_id: str, tmp_path: Path) -> None:
    """torch's own libraries have valid RPATHs. A libcublas that is loaded on its own does not find the libcublasLt next
    to it."""
    for kind in ("cublas", "cublasLt"):
        (tmp_path / SONAMES[kind]).write_bytes(library(kind, "12.1.3.1"))
    lines = [f"FROM {gpu_tag}", "COPY lib* /usr/local/cuda/lib64/", "ENV LD_LIBRARY_PATH=/usr/local/cuda/lib64"]
    (tmp_path / "Dockerfile").write_text("\n".join(lines))
    reference = f"envbuild-e2e/{run_id}:audit-gpu"
    docker("build", "--quiet", "--network=none", "--tag", reference, tmp_path)
    result = project.run("audit", reference, "--json")
    assert {"several-copies", "ld-library-path", "cublaslt-order"} <= found(result)
    loaded = {row["name"]: row["version"] for row in result.document["libraries"] if row["loaded"]}
    assert loaded["cublas"] == CUBLAS


@pytest.mark.parametrize("installer", ["pip", "uv"])
def test_a_later_install_leaves_it_as_locked(gpu_tag: str, installer: str, scratch: Path) -> None:
    """Both installers install a package that requires torch, without any index. With torch's original pin of the
    library this would be impossible."""
    folder = wheel_that_needs_torch(scratch)
    arguments = ["install", "--no-index", "--find-links", "/w", "needs-torch"]
    command = ["pip", *arguments] if installer == "pip" else ["/w/uv", "pip", *arguments]
    show = "import importlib.metadata as m; print(m.version('needs-torch'), m.version('nvidia-cublas-cu12'))"
    script = f'{" ".join(command)} >/dev/null && python -c "{show}"'
    done = docker("run", "--rm", "--network", "none", "-v", f"{folder}:/w:ro", gpu_tag, "sh", "-c", script)
    assert done.split() == ["1.0", CUBLAS]


def wheel_that_needs_torch(scratch: Path) -> Path:
    source = scratch / "source"
    source.mkdir()
    (source / "pyproject.toml").write_text(
        '[build-system]\nrequires=["hatchling"]\nbuild-backend="hatchling.build"\n'
        '[project]\nname="needs-torch"\nversion="1.0"\ndependencies=["torch>=2"]\n'
    )
    (source / "needs_torch.py").write_text("")
    folder = scratch / "wheels"
    subprocess.run([uv.find_uv_bin(), "build", "--quiet", "--wheel", "-o", folder, source], check=True)
    shutil.copy(uv.find_uv_bin(), folder / "uv")
    return folder


def test_it_runs_for_any_uid_and_carries_what_torch_needs(gpu_tag: str) -> None:
    done = docker("run", "--rm", "--network", "none", "--user", "4242", "--read-only", "--tmpfs", "/tmp", gpu_tag,
                  "sh", "-c", "python -c 'import torch; print(torch.version.cuda)'; command -v g++ gcc; "
                  "ls /usr/include/python3.11/Python.h; ldconfig -p")  # fmt: skip
    for part in ("12.1", "/usr/bin/g++", "Python.h", "libibverbs.so.1", "librdmacm.so.1", "libnuma.so.1"):
        assert part in done


def test_a_profile_is_written_from_what_it_holds(gpu_tag: str, gpu_project: Project, gpu_name: str) -> None:
    """The pins are those of the image, with numpy unchanged. envbuild accepts the profile; no GPU is needed."""
    name = f"{gpu_name}-again"
    done = gpu_project.run("init", name, "--from-image", gpu_tag, "--json")
    assert (done.code, done.document["file"]) == (0, f"profiles/{name}.yaml"), done.stderr
    shown = gpu_project.run("show", name, "--json")
    assert shown.code == 0, shown.stderr
    pins = shown.document["pins"]
    assert (pins["python"], pins["torch"], pins["cuda"], pins["cublas"]) == ("3.11", "2.3.1", "12.1", CUBLAS)
    text = gpu_project.profile(name).read_text(encoding="utf-8")
    assert "torch 2.3.1 requires ==12.1.3.1" in text and "numpy==1.26.4" in text
    assert [line for line in text.splitlines() if line.startswith("  - ")] == ['  - "numpy==1.26.4"']


@pytest.mark.images
def test_another_pin_changes_the_layer_of_its_library(gpu_made: Result, gpu_other: Result, gpu_tag: str) -> None:
    """A pull downloads the library and the metadata that name the version; all other layers keep their digests."""
    assert gpu_other.code == 0, gpu_other.stderr
    before, after = layers(gpu_tag), layers(gpu_other.document["tags"][0])
    changed = [index for index, (old, new) in enumerate(zip(before, after, strict=True)) if old != new]
    # the profile's own packages come between them
    assert changed == [len(before) - 3, len(before) - 1]
    sizes = [int(size) for size in docker("history", "--human=false", "--format", "{{.Size}}", gpu_tag).split()]
    filled = [size for size in reversed(sizes) if size]
    assert filled[changed[0]] <= 0.12 * sum(filled)
    assert filled[changed[1]] < 2_000_000  # torch has a RECORD of 1 MB


@pytest.mark.images
def test_a_tried_pin_changes_no_file_and_moves_no_tag(
    gpu_made: Result, gpu_other: Result, gpu_project: Project, gpu_name: str
) -> None:
    assert gpu_other.document["lock"] != gpu_made.document["lock"]
    shipped = CHECKOUT / "profiles" / "projects" / "step-video.lock.yaml"
    assert gpu_project.lock(gpu_name).read_bytes() == shipped.read_bytes()
    assert gpu_project.run("status", gpu_name, "--json").code == UNPROVED


def test_a_refused_pin_is_refused(gpu_project: Project, gpu_name: str) -> None:
    done = gpu_project.run("show", gpu_name, "--pin", "cublas=12.1.3.1", "--json")
    assert done.code == 3
    assert ("cublas-hopper-fpe", "refused") in {(a["id"], a["state"]) for a in done.document["advisories"]}
    assert "12.4.5.8" in done.error["faults"][0]["message"]
