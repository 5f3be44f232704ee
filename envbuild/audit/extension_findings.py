"""Finds faults in the compiled extensions of an environment: apex and others built against torch. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from envbuild.audit.collected_environment import HeldExtension, Holdings
from envbuild.audit.finding_types import Finding
from envbuild.facts import torch_cuda_arch_list_parser
from envbuild.facts.gpu_fact_types import Gpu
from envbuild.selftest.inventory import extension_file_reader

_DRIVERS = ("libcuda.so.1: cannot open", "libnvidia-ml.so.1: cannot open")
_MOST = 8  # maximum number of files in a message


def extension_findings(held: Holdings, gpus: Iterable[Gpu], required: Mapping[str, Sequence[str]]) -> list[Finding]:
    """Return all findings about compiled extensions. `required`: distribution -> the modules that a profile requires;
    if one is missing or has no code for a GPU, the finding is a defect."""
    found = [*_apex(held), *_missing(held, required)]
    for (name, version), files in held.extended.items():
        found += _broken(f"{name} {version}", files)
        for gpu in gpus:
            found += _kernels(f"{name} {version}", files, gpu, frozenset(required.get(name, ())))
    return found


def _apex(held: Holdings) -> Iterator[Finding]:
    """Check apex. The apex on the package index is an unrelated package, and a default build of NVIDIA's apex has no
    kernels."""
    apex, version = held.apex, held.installed.get("apex")
    what = apex.path if apex else f"apex {version}"
    if apex is None and version is None:
        return
    if apex is None or not {"normalization", "multi_tensor_apply"} & set(apex.parts):
        text = f"{what} is not NVIDIA's apex: the apex on the package index is an unrelated package"
        yield Finding("wrong-apex", "defect", text, "uninstall apex; build NVIDIA/apex from source")
    elif not apex.compiled:
        text = f"{what} was built without its CUDA extensions"
        yield Finding("apex-not-compiled", "warn", text, "build it with APEX_CPP_EXT=1 APEX_CUDA_EXT=1")


def _missing(held: Holdings, required: Mapping[str, Sequence[str]]) -> Iterator[Finding]:
    for name, modules in required.items():
        there = {file.module for file in held.extensions if file.there}
        missing = [module for module in modules if module not in there]
        if missing and name not in held.installed:
            text = f"{name}, which the profile requires, is not installed"
            yield Finding("extension-modules", "defect", text, f"build and install {name}, or use the profile's image")
        elif missing:
            text = f"{name} lacks modules that the profile requires: {', '.join(missing)}"
            yield Finding("extension-modules", "defect", text, f"build {name} again, for example with envbuild build")
    for (name, version), files in held.extended.items():
        gone = [file.path for file in files if not file.there]
        if gone:
            text = f"{name} {version} installed files that are missing now: {_listed(gone)}"
            yield Finding("extension-files", "defect", text, f"install {name} again")


def _broken(who: str, files: Sequence[HeldExtension]) -> Iterator[Finding]:
    """Check that extensions can be loaded. Only an undefined symbol is a defect for certain: a missing library may
    belong to an optional part of the extension."""
    for file in files:
        if file.damaged:
            text = f"{file.path} of {who} is not a shared library, or its device code cannot be read"
            yield Finding("extension-damaged", "warn", text, "install it again")
        if file.failure is None:
            continue
        text = f"{file.path} of {who} cannot be loaded: {file.failure}"
        if not file.tried:
            text = f"loading {file.path} of {who} was not tried: {file.failure}"
            yield Finding("extension-untried", "note", text, "")
        elif file.failure.startswith(extension_file_reader.LOADED_AFTER):
            text = f"{file.path} of {who} was {file.failure} of the same folder, which the loader does not find"
            remedy = "none, if importing the package loads them, as torchaudio does"
            yield Finding("extension-load", "note", text, remedy)
        elif any(driver in file.failure for driver in _DRIVERS):
            remedy = "run the audit again on a machine with a driver"
            yield Finding("extension-untried", "note", f"{text}: it needs a driver", remedy)
        elif "undefined symbol" in file.failure:
            remedy = "build it against this torch and these CUDA libraries, or install a build for them"
            yield Finding("extension-symbol", "defect", text, remedy)
        else:
            yield Finding(
                "extension-load", "warn", text, "install the missing library, or a build for this environment"
            )


def _kernels(who: str, files: Sequence[HeldExtension], gpu: Gpu, required: frozenset[str]) -> Iterator[Finding]:
    """Check that the device code supports the GPU. An extension may have files for different GPUs, so a file without
    code for this GPU is a defect only if a profile requires it."""
    card = f"{gpu.id} (compute capability {gpu.compute_capability})"
    coded = [(file, file.architectures) for file in files if file.architectures is not None]
    serves = [torch_cuda_arch_list_parser.serves(found, gpu.compute_capability) for _, found in coded]
    wrong = [file for (file, _), how in zip(coded, serves, strict=True) if how is None and file.module in required]
    if wrong:
        text = f"{who} has no code for {card} in {_listed(file.path for file in wrong)}"
        yield Finding("extension-kernel", "defect", text, f"build it for compute capability {gpu.compute_capability}")
    elif coded and "compiled" not in serves:
        has = "only PTX to compile" if "ptx" in serves else "no code"
        every = sorted({text for _, found in coded for text in found})
        text = f"{who} has {has} for {card}: {' '.join(every)}"
        remedy = f"install a build for compute capability {gpu.compute_capability}"
        yield Finding("extension-kernel", "warn", text, remedy)


def _listed(texts: Iterable[str]) -> str:
    every = list(texts)
    return ", ".join(every[:_MOST]) + (f" and {len(every) - _MOST} more" if len(every) > _MOST else "")
