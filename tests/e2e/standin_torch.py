"""Stand-ins for torch of at most half a megabyte: they compute nothing. One contains the real code that compiles
extensions, and one passes the probe env.libs of the self-test.

The real torch for CUDA 13 has 6 GB with its dependencies, and the one for the CPU 0.6 GB. With them, building, auditing
and pushing each image would take long, and each self-test would import torch for two seconds.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from unit.support import write_wheel

from .support import command

# Files that torch.utils.cpp_extension imports, copied unchanged from this environment's torch.
_REAL = ("_appdirs.py", "torch_version.py", "_vendor/__init__.py", "_vendor/packaging/*.py", "utils/cpp_extension.py",
         "utils/_cpp_extension_versioner.py", "utils/file_baton.py", "utils/hipify/*.py")  # fmt: skip
_LINKED = ("c10", "torch", "torch_cpu", "torch_python", "c10_cuda", "torch_cuda")  # linked to each CUDAExtension
_PACKAGE = """
from torch import version
from torch.version import __version__

class _C:
    _cuda_getArchFlags = staticmethod(lambda: "sm_80 sm_90")

class cuda:
    _is_compiled = staticmethod(lambda: True)
    is_available = staticmethod(lambda: False)

class xpu:
    _is_compiled = staticmethod(lambda: False)

class backends:
    class mps:
        is_built = staticmethod(lambda: False)
"""
# Every name in it exists, can be called, and is a class without values: enough to import the whole self-test.
_IDLE = """
import sys

class _Any(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything

    def __call__(cls, *_, **__):
        return Anything

    __getitem__ = __call__

class Anything(metaclass=_Any):
    pass

def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return Anything

class device:
    def __init__(self, name):
        self.type = str(name)

class version:
    cuda = hip = None

for _name in ("distributed", "nn", "nn.functional", "nn.parallel"):
    _module = sys.modules[f"torch.{_name}"] = type(sys)(f"torch.{_name}")
    _module.__getattr__, _module.__path__ = __getattr__, []
"""


def content(version: str, cuda: str) -> str:
    """Return the stand-in's source: the parts of torch that an audit uses."""
    return (
        f"__version__ = {version!r}\n"
        f"class version:\n    cuda = {cuda!r}\n    hip = None\n"
        "class _C:\n    _cuda_getArchFlags = staticmethod(lambda: 'sm_80 sm_90')\n"
    )


def write_idle(folder: Path, version: str, needs: Sequence[str]) -> None:
    """Write a wheel of the stand-in with which the probe env.libs passes on the CPU: it finds every function and calls
    it. All probes that compare a result fail with it."""
    files = {"torch/__init__.py": f"__version__ = {version!r}\n{_IDLE}".encode()}
    write_wheel(folder, "torch", version, needs, files=files)


def write_idle_index(folder: Path, versions: Mapping[str, str]) -> dict[str, str]:
    """Write wheels of the stand-in with which env.libs passes, and of stand-ins for numpy and what torch requires, and
    download the real pip. `versions`: those of all but pip. Return the variables that make this folder the only
    index."""
    needs = ("mpmath", "networkx", "typing-extensions")
    write_idle(folder, versions["torch"], needs)
    for name in ("numpy", *needs):
        write_wheel(folder, name, versions[name])
    command(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, "pip")
    return {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder), "PIP_CONFIG_FILE": os.devnull}


def write_compiling(folder: Path, version: str, cuda: str, needs: Sequence[str]) -> None:
    """Write a wheel of the stand-in that compiles extensions; the libraries that these are linked with are empty."""
    found = importlib.util.find_spec("torch")
    assert found and found.origin
    real = Path(found.origin).parent
    empty = folder.parent / "empty.so"
    command("gcc", "-shared", "-s", "-x", "c", "/dev/null", "-o", empty)
    version_file = f"__version__ = '{version}+cu{cuda.replace('.', '')}'\ncuda = {cuda!r}\nhip = xpu = None\n"
    files = {
        "torch/__init__.py": _PACKAGE.encode(),
        "torch/version.py": version_file.encode(),
        "torch/utils/__init__.py": b"",
        **{f"torch/lib/lib{name}.so": empty.read_bytes() for name in _LINKED},
        **{
            f"torch/{path.relative_to(real).as_posix()}": path.read_bytes()
            for pattern in _REAL
            for path in real.glob(pattern)
        },
    }
    write_wheel(folder, "torch", version, [*needs, "typing-extensions"], files=files)
