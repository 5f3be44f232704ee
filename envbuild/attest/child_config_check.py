"""Compares the configuration of a child image with that of its base image. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from typing import TypeVar

from envbuild.image.image_naming import LABEL
from envbuild.registry.image_content_reader import Config
from envbuild.util.untrusted_input_errors import Reason

# Variables that decide which files the dynamic loader, shells, Python and torch's libraries load, or how torch's
# libraries compute. CC and CXX: the compilers that Triton and torch.compile call. PYTORCH_KERNEL_CACHE_PATH: the folder
# from which torch loads compiled kernels. NVCC_PREPEND_FLAGS, NVCC_APPEND_FLAGS: options for all GPU code that nvcc
# compiles.
_DECISIVE = re.compile(
    r"LD_\w+|GLIBC_TUNABLES|GCONV_PATH|PYTHON\w+|CUDA\w*|CUBLAS\w+|CUDNN\w+|NVIDIA_\w+"
    r"|NCCL_(\w*PLUGIN|CONF_FILE)|TORCH_\w*(BLAS|CUDNN)\w*|TORCH_(EXTENSIONS_DIR|DEVICE_BACKEND_AUTOLOAD)"
    r"|PYTORCH_TUNABLEOP_\w+|TORCHINDUCTOR_\w+|TRITON_(HOME|INTERPRET|CACHE_MANAGER|\w*(PATH|DIR))|CC|CXX"
    r"|NVCC_(PREPEND|APPEND)_FLAGS|NVCC_CCBIN|PYTORCH_KERNEL_CACHE_PATH"
    r"|OPENSSL_(CONF|MODULES)|OMP_TOOL_LIBRARIES|NVTX_INJECTION64_PATH|IBV_\w+"
    r"|ONEDNN_\w+|DNNL_\w+|MKL_\w+|OPENBLAS_\w+|ATEN_\w+|DISABLE_ADDMM_CUDA_LT|BASH_ENV"
)
# Exceptions: variables that ordinary child images set. They cause nothing to be loaded, and change a result at most by
# rounding (numbers of threads).
_HARMLESS = re.compile(
    r"PYTHON(DONTWRITEBYTECODE|FAULTHANDLER|HASHSEED|IOENCODING|UNBUFFERED|UTF8)"
    r"|CUDA_(DEVICE_ORDER|VISIBLE_DEVICES|LAUNCH_BLOCKING|MODULE_LOADING)|NVIDIA_(DRIVER_CAPABILITIES|VISIBLE_DEVICES)"
    r"|(CUDNN|CUBLAS|CUBLASLT)_LOG\w+|(ONEDNN|DNNL|MKL)_VERBOSE|(MKL|OPENBLAS)_NUM_THREADS"
)
# A child may replace these settings, as `docker run` can. A child that runs its own program has to replace Cmd, because
# every image of envbuild has a default Cmd.
_FREE = ("Cmd", "WorkingDir")
_UNUSED = ("Image",)  # written by older builders, read by no engine
_ROOT = re.compile(r"(0|root)(:(0|root))?")


def configuration_differences(child: Config, base: Config) -> dict[str, object]:
    """Return the child's settings that differ from the base's, by key. Of Env and other mappings, only the items that
    differ are returned. None: the child removed the item, or a setting that is not a mapping."""
    theirs, ours = _settings(child), _settings(base)
    return {key: _difference(theirs.get(key), ours.get(key)) for key in sorted({*theirs, *ours})
            if theirs.get(key) != ours.get(key)}  # fmt: skip


def configuration_objections(child: Config, base: Config, forbidden: Collection[str]) -> Iterator[Reason]:
    """Yield the reasons why the base's verification does not extend to a child with this configuration.

    `forbidden`: keys that the policy does not allow a child to set.
    """
    ours = _settings(base)
    for key, found in configuration_differences(child, base).items():
        if key == "Env":
            yield from _variables(_changed_items(child.environment, base.environment), base.environment)
        elif key == "Entrypoint" or (key not in _FREE and _changed(key, found, ours.get(key))):
            text = f"{key} is {_shown(child.settings.get(key))}, but {_shown(ours.get(key))} in the base image"
            yield Reason("configuration", text)
        if key in forbidden:
            yield Reason("configuration", f"the policy forbids a child to set {key}: {_shown(found)}")


def _settings(config: Config) -> dict[str, object]:
    found = {**config.settings, "Env": config.environment, "Labels": config.labels}
    if _ROOT.fullmatch(str(found.get("User"))):
        del found["User"]
    return {key: value for key, value in found.items() if value and key not in _UNUSED}


_Value = TypeVar("_Value")


def _difference(theirs: object, ours: object) -> object:
    if not all(value is None or isinstance(value, dict) for value in (theirs, ours)):
        return theirs
    return _changed_items(theirs if isinstance(theirs, dict) else {}, ours if isinstance(ours, dict) else {})


def _changed_items(theirs: Mapping[str, _Value], ours: Mapping[str, _Value]) -> dict[str, _Value | None]:
    return {name: theirs.get(name) for name in sorted({*theirs, *ours}) if theirs.get(name) != ours.get(name)}


def _changed(key: str, found: object, ours: object) -> bool:
    """Whether the child changed or removed a value that the base sets. Of the labels, only those of envbuild count; the
    child must not add one of these either."""
    if key == "Labels":
        return isinstance(found, dict) and any(name.startswith(LABEL) for name in found)
    if isinstance(ours, dict) and isinstance(found, dict):
        return any(name in ours for name in found)
    return ours is not None


def _variables(found: Mapping[str, str | None], base: Mapping[str, str]) -> Iterator[Reason]:
    for name, value in found.items():
        if name in base:
            yield Reason("environment", f"{name} is {_shown(value)}, but {_shown(base[name])} in the base image")
        elif _DECISIVE.fullmatch(name) and not _HARMLESS.fullmatch(name):
            text = f"{name} is set in the child image, and decides what is loaded or computed"
            yield Reason("environment", f"{text}; set it in the profile, under env, and prove that profile")


def _shown(value: object) -> str:
    return "not set" if value is None else json.dumps(value)[:200]
