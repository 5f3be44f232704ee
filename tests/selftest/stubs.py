"""A driver that is not there: libcuda and NVML with the real ones' functions, whose answers the environment holds."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

_COMMON = """
#include <stdlib.h>
#include <string.h>
static long said(const char *name, long otherwise) { const char *t = getenv(name); return t ? atol(t) : otherwise; }
static const char *text(const char *name, const char *none) { const char *t = getenv(name); return t ? t : none; }
"""
_CUDA = """
int cuDriverGetVersion(int *v) { *v = said("STUB_CUDA", 12040); return 0; }
int cuInit(unsigned flags) { return said("STUB_INIT", 0); }
int cuGetErrorName(int code, const char **name) { *name = text("STUB_NAME", "CUDA_ERROR_UNKNOWN"); return 0; }
int cuDeviceGetCount(int *count) { *count = said("STUB_COUNT", 1); return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
int cuDeviceGetPCIBusId(char *out, int length, int device) { strcpy(out, "0000:1A:00.0"); out[6] += device; return 0; }
"""
_NVML = """
typedef struct { void *device; unsigned long long kind, data; unsigned gi, ci; } Event;
static int supported(void) { return said("STUB_OLD", 0) ? 3 : said("STUB_ERROR", 0); }
static int left = -1;
int nvmlInit_v2(void) { return said("STUB_NVML", 0); }
const char *nvmlErrorString(int code)
{ return code == 15 ? "GPU is lost" : code == 999 ? "Unknown Error" : "Driver Not Loaded"; }
int nvmlSystemGetDriverVersion(char *out, unsigned n) { strncpy(out, text("STUB_DRIVER", "550.54.15"), n); return 0; }
int nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **card) { *card = (void *)(long)id[6]; return 0; }
int nvmlDeviceGetTotalEccErrors(void *card, int kind, int counter, unsigned long long *count)
{ *count = kind == 1 ? said(counter ? "STUB_ECC_EVER" : "STUB_ECC", 0) : 99; return supported(); }
int nvmlDeviceGetRemappedRows(void *card, unsigned *c, unsigned *u, unsigned *pending, unsigned *failed)
{ *c = *u = 7; *pending = said("STUB_PENDING", 0); *failed = said("STUB_FAILED", 0); return supported(); }
int nvmlDeviceGetRetiredPagesPendingStatus(void *card, unsigned *pending)
{ *pending = said("STUB_RETIRING", 0); return said("STUB_RETIRING", 0) ? 0 : 3; }
int nvmlDeviceGetComputeMode(void *card, int *mode) { *mode = said("STUB_MODE", 0); return supported(); }
int nvmlEventSetCreate(void **set) { *set = &left; return said("STUB_OLD", 0) ? 3 : 0; }
int nvmlDeviceRegisterEvents(void *card, unsigned long long kinds, void *set) { return kinds == 8 ? 0 : 2; }
int nvmlEventSetWait_v2(void *set, Event *event, unsigned timeout)
{ if (left < 0) left = said("STUB_XID", 0) ? 1 : 0; if (!left) return 10;
  left--; event->kind = 8; event->data = said("STUB_XID", 0); return 0; }
"""


def build(folder: Path, *, cuda: bool = True, nvml: bool = True, release: str = "550.54.15") -> dict[str, str]:
    """Build them into a folder, libcuda as of a driver release; the environment in which the loader finds them."""
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs gcc")
    folder.mkdir(parents=True, exist_ok=True)
    chosen = {f"libcuda.so.{release}": _CUDA} if cuda else {}
    chosen.update({f"libnvidia-ml.so.{release}": _NVML} if nvml else {})
    for name, source in chosen.items():
        (folder / "source.c").write_text(_COMMON + source)
        subprocess.run([compiler, "-w", "-shared", "-fPIC", "-o", folder / name, folder / "source.c"], check=True)
        (folder / name).with_name(name.replace(release, "1")).symlink_to(name)
    return {"LD_LIBRARY_PATH": str(folder)}
