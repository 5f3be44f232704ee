"""Packages with CUDA kernels, compiled as `lock` proposes for GPUs of compute capability 9.0, and loaded in the image.

deepspeed takes ten minutes and flash-attn half an hour with two cores, so only `make test-compiled` runs them. The
figures go to benchmarks/results/compiled_<package>.md.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import yaml

from envbuild.facts import extension_compilers

from .support import CHECKOUT, Project, docker
from .test_extensions import audited, kept, steps

pytestmark = [pytest.mark.engine, pytest.mark.compiles]

# Each compiled module is loaded, which needs no GPU: all its symbols are found.
IMPORT = """
import importlib, sys, torch
print(torch.__version__)
for name in sys.argv[1:]:
    print(importlib.import_module(name).__file__)
"""


# The profile to extend for each package. The torch of h20 is too new for flash-attn.
PROFILES = {"deepspeed": "h20", "flash-attn": "h100"}
# flash-attn's own macros, which leave out variants of its kernels: all of them take hours with two cores.
_FEWER = " ".join(
    f"-DFLASHATTENTION_DISABLE_{feature}"
    for feature in ("BACKWARD", "DROPOUT", "ALIBI", "SOFTCAP", "LOCAL", "UNEVEN_K")
)
FEWER = {"flash-attn": {"CXXFLAGS": _FEWER, "NVCC_APPEND_FLAGS": _FEWER}}


@pytest.mark.parametrize("package", sorted(extension_compilers.compiled_packages()))
def test_the_proposed_entry_gives_a_package_that_loads(images: None, scratch: Path, run_id: str, package: str) -> None:
    place, name = Project.create(scratch / "place").with_cache(scratch), f"e2e-{package}-{run_id}"
    row = extension_compilers.compiled_packages()[package]
    (place.folder / "requirements.txt").write_text("\n".join([package, *row.packages]), encoding="utf-8")
    left_out = {"name": "apex", "none": "test_apex.py compiles it"}
    place.write(name, extends=PROFILES[package], extensions=[left_out], selftest={"require": ["env.libs"]})
    with_requirements = (name, "--requirements", "requirements.txt", "--json")
    hint = place.run("lock", *with_requirements).error["hint"]
    entries = yaml.safe_load(hint[hint.index("\nextensions:") :])["extensions"]
    proposed = next(entry for entry in entries if entry["name"] == package)
    proposed["build"]["env"] |= FEWER.get(package, {})
    place.change(name, extensions=[left_out, proposed])
    assert place.run("lock", *with_requirements).code == 0

    built = place.start("build", *with_requirements).finish(4 * 3600)
    assert steps(built)["extensions"] is False
    tag = built.document["tags"][0]
    run = ("run", "--rm", "--network", "none", "--read-only", "--tmpfs", "/tmp")
    torch, *output = docker(*run, tag, "python", "-c", IMPORT, *row.modules).splitlines()  # and warnings of deepspeed
    assert len([line for line in output if line.endswith(".so")]) == len(row.modules)
    listed = audited(place, tag)[package]
    assert {module: listed[module] for module in row.modules} == {module: ["sm_90"] for module in row.modules}

    sys.path.insert(0, str(CHECKOUT / "benchmarks"))
    import machine

    (file, _) = sorted(kept(place), key=lambda path: path.suffix)
    about = json.loads(file.read_text(encoding="utf-8"))
    machine.write(f"compiled_{package}", [
        f"# {package}, compiled for {PROFILES[package]}", "",
        f"Machine: {machine.described()}; load {' '.join(f'{value:.0f}' for value in os.getloadavg())} at the end. "
        "Made by `make test-compiled`.", "",
        f"{about['file']}, with the entry that `envbuild lock` proposes"
        f"{' and NVCC_APPEND_FLAGS=' + repr(_FEWER) if package in FEWER else ''}. torch "
        f"{torch}, CUDA {about['from']['cuda']}, nvcc from wheels, compute capability 9.0.", "",
        f"The compilation took {about['seconds']:.0f} s with {about['jobs']} jobs, the builder's layers included. The "
        f"wheel has {about['bytes'] / 1e6:.1f} MB; {', '.join(f'`{module}`' for module in row.modules)} was loaded in "
        "the image without a GPU, and its kernels are for sm_90 only, as the audit of the image lists.",
    ])  # fmt: skip
