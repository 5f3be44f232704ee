"""A stand-in for torch of half a megabyte: it computes nothing, but it can contain the real code that compiles
extensions.

The real torch for CUDA 13 has 6 GB with its dependencies. With it, building and auditing each image would take long.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
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


def content(version: str, cuda: str) -> str:
    """Return the stand-in's source: the parts of torch that an audit uses."""
    return (
        f"__version__ = {version!r}\n"
        f"class version:\n    cuda = {cuda!r}\n    hip = None\n"
        "class _C:\n    _cuda_getArchFlags = staticmethod(lambda: 'sm_80 sm_90')\n"
    )


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
