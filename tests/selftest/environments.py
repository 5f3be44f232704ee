"""Small environments that look to the loader like those of torch for CUDA, with faults on request: wheels with RECORDs,
and libraries built here with the sonames, RPATH and RUNPATH of the real ones.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import subprocess
import tempfile
import venv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .device import container

_SOURCE = """
#include <stddef.h>
#ifdef cublas
int cublasGetProperty(int what, int *value) { int all[] = {VERSION}; *value = all[what]; return 0; }
#endif
#ifdef cublasLt
int cublasLtGetProperty(int what, int *value) { int all[] = {VERSION}; *value = all[what]; return 0; }
#endif
#ifdef cudnn
size_t cudnnGetVersion(void) { int all[] = {VERSION}; return all[0] * 10000 + all[1] * 100 + all[2]; }
#endif
#ifdef nccl
int ncclGetVersion(int *value) { int all[] = {VERSION}; *value = all[0] * 10000 + all[1] * 100 + all[2]; return 0; }
#endif
#ifdef crash
__attribute__((constructor)) static void begin(void) { __builtin_trap(); }
#endif
"""
SONAMES = {
    "cublas": "libcublas.so.12",
    "cublasLt": "libcublasLt.so.12",
    "cudnn": "libcudnn.so.9",
    "nccl": "libnccl.so.2",
}
_ARCH = """
const char *architectures = "sm_50 sm_80 sm_90";
"""
TORCH = """
import ctypes, os
__version__ = "{version}"
class version:
    cuda, hip = {cuda!r}, None
class _C:
    @staticmethod
    def _cuda_getArchFlags():
        return {architectures!r}
if version.cuda:
    ctypes.CDLL(os.path.join(os.path.dirname(__file__), "lib", "libtorch_cuda.so"))
"""


def built(source: str, soname: str, *flags: str, linked: Mapping[str, bytes]) -> bytes:
    """Build a shared library; `linked`: files for the linker."""
    with tempfile.TemporaryDirectory() as folder:
        for name, content in linked.items():
            Path(folder, name).write_bytes(content)
        Path(folder, "source.c").write_text(source, encoding="utf-8")
        words = [
            "gcc",
            "-shared",
            "-fPIC",
            f"-Wl,-soname,{soname}",
            "-o",
            "out",
            "source.c",
            "-Wl,--no-as-needed",
            "-L.",
        ]
        done = subprocess.run([*words, *flags], cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return Path(folder, "out").read_bytes()


@functools.cache
def library(kind: str, version: str, *, crash: bool = False) -> bytes:
    """Build a stand-in that reports its version. libcublas requires libcublasLt and finds it by RUNPATH, as the real
    libcublas does."""
    numbers = ",".join(version.split(".")[:3])
    flags = [f"-D{kind}", f"-DVERSION={numbers}", *(["-Dcrash"] if crash else [])]
    flags += ["-Wl,--build-id", "-Wl,--enable-new-dtags,-rpath,$ORIGIN"]
    linked = {"lt.so": library("cublasLt", "12.0.0")} if kind == "cublas" else {}
    return built(_SOURCE, SONAMES[kind], *flags, *(["-l:lt.so"] if linked else []), linked=linked)


@functools.cache
def libtorch_cuda(needed: Sequence[str]) -> bytes:
    """Build a library that requires these, with torch's search order: RPATH, the wheels' folders first, its own
    last."""
    linked = {SONAMES[kind]: library(kind, "1.0.0") for kind in ("cublasLt", *needed)}
    rpath = ":".join([*(f"$ORIGIN/../../nvidia/{name}/lib" for name in ("cublas", "cudnn", "nccl")), "$ORIGIN"])
    flags = [f"-l:{SONAMES[kind]}" for kind in needed]
    return built(_ARCH, "libtorch_cuda.so", f"-Wl,--disable-new-dtags,-rpath,{rpath}", *flags, linked=linked)


# An extension module without Python's headers, which may be missing: PyModuleDef is written as 13 long integers, of
# which the sixth is the name.
_MODULE = """
#include <stdlib.h>
extern void *PyModule_Create2(void *, int);
static long definition[13] = {{1, 0, 0, 0, 0, (long)"{name}", 0, -1}};
__attribute__((section(".nv_fatbin"), aligned(8), used)) static const unsigned char code[] = {{{code}}};
{more}
void *PyInit_{name}(void) {{ {first}; return PyModule_Create2(definition, 1013); }}
"""


@functools.cache
def extension(name: str, *architectures: str, more: str = "", first: str = "", needs: str | None = None) -> bytes:
    """Build an extension module linked to torch's library, with code for these GPUs. `more`: further C definitions;
    `first`: the first statement of its initialization; `needs`: the soname of a library that it requires."""
    source = _MODULE.format(name=name, code=",".join(map(str, container(*architectures))), more=more, first=first)
    if not architectures:
        source = "\n".join(line for line in source.splitlines() if ".nv_fatbin" not in line)
    linked = {"libtorch_cuda.so": libtorch_cuda(())}
    flags = ["-Wl,-rpath,$ORIGIN/torch/lib", "-l:libtorch_cuda.so", "-Wl,--allow-shlib-undefined"]
    if needs:
        linked["needed.so"] = built("", needs, linked={})
        flags.append("-l:needed.so")
    return built(source, f"{name}.so", *flags, linked=linked)


@dataclass(frozen=True)
class Environment:
    """A package folder to be filled."""

    site: Path

    def wheel(self, name: str, version: str, files: Mapping[str, bytes], requires: Sequence[str] = ()) -> None:
        rows = []
        for file, content in files.items():
            path = self.put(self.site / file, content)
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            rows.append(f"{path.relative_to(self.site)},sha256={digest},{len(content)}\n")
        info = f"{name.replace('-', '_')}-{version}.dist-info"
        lines = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {text}" for text in requires)]
        self.put(self.site / info / "METADATA", ("Metadata-Version: 2.1\n" + "\n".join(lines) + "\n").encode())
        self.put(self.site / info / "RECORD", ("".join(rows) + f"{info}/METADATA,,\n{info}/RECORD,,\n").encode())

    def put(self, path: Path, content: bytes) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return path

    def cublas(self, version: str = "12.5.2.13") -> None:
        files = {f"nvidia/cublas/lib/{SONAMES[kind]}": library(kind, version) for kind in ("cublas", "cublasLt")}
        self.wheel("nvidia-cublas-cu12", version, files)

    def nvidia(self, kind: str, version: str) -> None:
        self.wheel(f"nvidia-{kind}-cu12", version, {f"nvidia/{kind}/lib/{SONAMES[kind]}": library(kind, version)})

    def torch(
        self, version: str = "2.3.1", *, cuda: str | None = "12.1", architectures: str = "sm_50 sm_80 sm_90",
        needed: Sequence[str] = ("cublas", "cublasLt", "cudnn", "nccl"), bundled: Mapping[str, bytes] | None = None,
        requires: Sequence[str] = ("nvidia-cublas-cu12",),
    ) -> None:  # fmt: skip
        local = f"+cu{cuda.replace('.', '')}" if cuda and "+" not in version else ""
        text = TORCH.format(version=version + local, cuda=cuda, architectures=architectures)
        files = {"torch/__init__.py": text.encode(), **(bundled or {})}
        if cuda:
            files["torch/lib/libtorch_cuda.so"] = libtorch_cuda(tuple(needed))
        self.wheel("torch", version, files, requires if cuda else ())


def good(site: Path) -> Environment:
    """Create an environment without faults."""
    made = Environment(site)
    made.cublas()
    made.nvidia("cudnn", "9.1.0.70")
    made.nvidia("nccl", "2.26.2")
    made.torch()
    return made


def virtual(folder: Path) -> tuple[Path, Path]:
    """Create an empty virtual environment as `python -m venv` does; return (its interpreter, its package folder)."""
    venv.EnvBuilder(symlinks=True).create(folder)
    (site,) = (folder / "lib").glob("python3.*/site-packages")
    return folder / "bin" / "python", site
