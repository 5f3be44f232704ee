"""The real apex, compiled for GPUs of the H100's architecture and found in their images; a second run has nothing to
compile. The two profiles have different torch releases.

It takes half an hour for each profile, so only `make test-apex` runs it. APEX_GIT: the URL of a mirror of the
repository. The figures go to benchmarks/results/apex_<profile>.md.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from envbuild.lock import lock_file

from .support import CHECKOUT, Project, docker
from .test_extensions import audited, kept, steps

pytestmark = [pytest.mark.engine, pytest.mark.compiles]

# Each module is loaded, which needs no GPU: all its symbols are found.
IMPORT = """
import importlib, json, sys, torch
names = json.loads(sys.argv[1])
for name in names:
    importlib.import_module(name)
import apex.normalization, apex.optimizers
print(len(names), "modules loaded")
"""


@pytest.fixture
def place(images: None, scratch: Path) -> Project:
    """A project with its own cache of compiled wheels, so that compilation is tested; downloads come from the machine's
    cache."""
    made = Project.create(scratch / "place").with_cache(scratch)
    made.use_apex_mirror()
    return made


@pytest.mark.parametrize("profile", ["h20", "h200"])
def test_apex_is_compiled_once_and_found_in_the_image(place: Project, run_id: str, profile: str) -> None:
    name = f"e2e-apex-{profile}-{run_id}"
    place.write(name, extends=profile)
    shutil.copy(CHECKOUT / "profiles" / f"{profile}.lock.yaml", place.lock(name))
    first = place.start("build", name, "--locked", "--json").finish(7200)
    assert steps(first)["extensions"] is False
    tag = first.document["tags"][0]
    (file, _) = sorted(kept(place), key=lambda path: path.suffix)
    about = json.loads(file.read_text(encoding="utf-8"))
    wanted = about["from"]["source"]["modules"]
    run = ("run", "--rm", "--network", "none", "--read-only", "--tmpfs", "/tmp")
    assert docker(*run, tag, "python", "-c", IMPORT, json.dumps(wanted)).split()[0] == str(len(wanted))

    listed = audited(place, tag)["apex"]
    assert set(wanted) <= set(listed)
    code = {code for module in wanted for code in listed[module] or ()}
    assert code == {"sm_90"}

    second = place.start("build", name, "--locked", "--json").finish(300)
    assert steps(second)["build"] is True
    rebuilt = place.start("build", name, "--locked", "--no-cache", "--json").finish(1200)
    assert steps(rebuilt)["extensions"] is True
    assert rebuilt.document["image"] == first.document["image"]
    assert second.seconds < 30

    sys.path.insert(0, str(CHECKOUT / "benchmarks"))
    import machine

    lock = lock_file.read(place.lock(name))
    assert lock
    torch = lock.versions["torch"]
    size = json.loads(docker("image", "inspect", tag))[0]["Size"]
    took = {step["name"]: step["seconds"] for step in first.document["steps"]}
    rest = {step["name"]: step["seconds"] for step in rebuilt.document["steps"]}
    machine.write(f"apex_{profile}", [
        f"# apex, compiled for {profile}", "",
        f"Machine: {machine.described()}; load {' '.join(f'{value:.0f}' for value in os.getloadavg())} at the end. "
        "Made by `make test-apex`.", "",
        f"apex {about['from']['source']['git'][:12]}, torch {torch}, CUDA {about['from']['cuda']}, nvcc from wheels, "
        "compute capability 9.0.", "",
        "| what | s |", "|---|---|",
        f"| compile, {about['jobs']} jobs, the builder's layers included | {about['seconds']:.0f} |",
        f"| `envbuild build {profile}`, apex not compiled before | {first.seconds:.0f} |",
        f"| ... of which the image's layers | {took['build']:.0f} |",
        f"| `envbuild build {profile}` again | {second.seconds:.1f} |",
        f"| `envbuild build {profile} --no-cache`: the wheel from the cache | {rebuilt.seconds:.0f} |",
        f"| ... of which finding the wheel | {rest['extensions']:.1f} |", "",
        f"The wheel, {about['sha256'][:12]}, has {about['bytes'] / 1e6:.1f} MB and {len(wanted)} compiled modules, all "
        "loaded in the image without a GPU. The audit of the image found machine code for "
        f"{', '.join(sorted(code))} in them, and for no other GPU. The image has {size / 1e9:.1f} GB.",
    ])  # fmt: skip
