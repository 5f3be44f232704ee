"""Builds stand-ins for the driver's libraries: libcuda and NVML with the functions of the real ones. Environment
variables (STUB_...) set their answers.

Lines NAME=NUMBER in the file that STUB_NOW names override these variables, and may change while a process runs.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

_COMMON = """
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
static long value(const char *name, long otherwise)
{ const char *t = getenv(name), *now = getenv("STUB_NOW"); long found = t ? atol(t) : otherwise;
  FILE *file = now ? fopen(now, "r") : 0; char line[99]; unsigned n = strlen(name);
  while (file && fgets(line, sizeof line, file))
    if (!strncmp(line, name, n) && line[n] == '=') found = atol(line + n + 1);
  if (file) fclose(file);
  return found; }
static const char *text(const char *name, const char *none) { const char *t = getenv(name); return t ? t : none; }
"""
# STUB_CARDS describes each GPU: "name=NVIDIA H20,total=96;name=NVIDIA H200,ecc=5"; missing values are those of a sound
# GPU, unless other variables such as STUB_ECC set them. A handle is the number of the GPU, counted from 1, or a letter
# of its bus id, for STUB_ECC and the like.
_CARDS = """
static const char *part(long card, const char *name)
{ const char *t = text("STUB_CARDS", ""); long n = strlen(name);
  if (card < 1 || card > 64) return 0;
  while (--card) { t = strchr(t, ';'); if (!t) return 0; t++; }
  for (; *t && *t != ';'; t++)
    if ((t == text("STUB_CARDS", "") || t[-1] == ',' || t[-1] == ';') && !strncmp(t, name, n) && t[n] == '=')
      return t + n + 1;
  return 0; }
static long own(void *card, const char *name, long otherwise)
{ const char *t = part((long)card, name); return t ? atol(t) : otherwise; }
static void copy(void *card, const char *name, const char *none, char *out, unsigned n)
{ const char *t = part((long)card, name); unsigned i = 0; if (!t) t = none;
  for (; i + 1 < n && t[i] && t[i] != ',' && t[i] != ';'; i++) out[i] = t[i];
  out[i] = 0; }
typedef struct { unsigned pid; unsigned long long bytes; unsigned gi, ci; } Process;
typedef struct { char old[16]; unsigned domain, bus, device, ids, subsystem; char bus_id[32]; } Pci;
typedef struct { unsigned version; unsigned char cluster[16]; int status; unsigned clique; unsigned char state;
  unsigned health; } Fabric;
int nvmlInitWithFlags(unsigned flags) { sleep(value("STUB_HANGS", 0)); return value("STUB_NVML", 0); }
int nvmlShutdown(void) { return 0; }
int nvmlSystemGetCudaDriverVersion_v2(int *v) { *v = value("STUB_CUDA", 12040); return 0; }
int nvmlDeviceGetCount_v2(unsigned *count)
{ const char *t = text("STUB_CARDS", ""); *count = *t != 0; while ((t = strchr(t, ';'))) { t++; ++*count; } return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **card)
{ *card = (void *)(long)(index + 1); return own(*card, "error", 0); }
int nvmlDeviceGetName(void *card, char *out, unsigned n) { copy(card, "name", "NVIDIA H20", out, n); return 0; }
int nvmlDeviceGetUUID(void *card, char *out, unsigned n)
{ strcpy(out, "GPU-00000000-0000-0000-0000-000000000000"); out[39] += (long)card; return 0; }
int nvmlDeviceGetPciInfo_v3(void *card, Pci *pci)
{ memset(pci, 0, sizeof *pci); strcpy(pci->bus_id, "00000000:10:00.0"); pci->bus_id[10] += (long)card; return 0; }
int nvmlDeviceGetCudaComputeCapability(void *card, int *major, int *minor)
{ long both = own(card, "cc", 90); *major = both / 10; *minor = both % 10; return 0; }
int nvmlDeviceGetMemoryInfo(void *card, unsigned long long *sizes)
{ unsigned long long gib = 1 << 30; sizes[0] = own(card, "total", value("STUB_TOTAL", 96)) * gib;
  sizes[2] = own(card, "used", 0) * gib; sizes[1] = sizes[0] - sizes[2]; return 0; }
int nvmlDeviceGetMigMode(void *card, unsigned *now, unsigned *then)
{ *now = own(card, "mig", 0); *then = own(card, "mig_pending", *now); return 0; }
int nvmlDeviceGetMaxMigDeviceCount(void *card, unsigned *most) { *most = 7; return 0; }
int nvmlDeviceGetMigDeviceHandleByIndex(void *card, unsigned index, void **slice)
{ *slice = card; return index < own(card, "slices", 0) ? 0 : 6; }
int nvmlDeviceGetEccMode(void *card, unsigned *now, unsigned *then) { *now = *then = own(card, "ecc_on", 1); return 0; }
int nvmlDeviceGetGpuFabricInfoV(void *card, Fabric *fabric)
{ fabric->state = own(card, "fabric", 0); fabric->status = own(card, "fabric_status", 0); return 0; }
int nvmlDeviceGetComputeRunningProcesses_v3(void *card, unsigned *count, Process *found)
{ long pid = own(card, "pid", 0); if (!pid) { *count = 0; return 0; }
  if (!found) { *count = 1; return 7; }
  *count = 1; found->pid = pid; found->bytes = own(card, "used", 0) * (1ull << 30); return 0; }
int nvmlDeviceGetGraphicsRunningProcesses_v3(void *card, unsigned *count, Process *found) { *count = 0; return 0; }
"""
_CUDA = """
int cuDriverGetVersion(int *v) { *v = value("STUB_CUDA", 12040); return 0; }
int cuInit(unsigned flags) { return value("STUB_INIT", 0); }
int cuGetErrorName(int code, const char **name) { *name = text("STUB_NAME", "CUDA_ERROR_UNKNOWN"); return 0; }
int cuDeviceGetCount(int *count) { *count = value("STUB_COUNT", 1); return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
int cuDeviceGetPCIBusId(char *out, int length, int device) { strcpy(out, "0000:1A:00.0"); out[6] += device; return 0; }
"""
_NVML = """
typedef struct { void *device; unsigned long long kind, data; unsigned gi, ci; } Event;
static int supported(void) { return value("STUB_OLD", 0) ? 3 : value("STUB_ERROR", 0); }
static long last;
int nvmlInit_v2(void) { return value("STUB_NVML", 0); }
const char *nvmlErrorString(int code)
{ return code == 15 ? "GPU is lost" : code == 999 ? "Unknown Error" : "Driver Not Loaded"; }
int nvmlSystemGetDriverVersion(char *out, unsigned n) { strncpy(out, text("STUB_DRIVER", "550.54.15"), n); return 0; }
int nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **card) { *card = (void *)(long)id[6]; return 0; }
int nvmlDeviceGetTotalEccErrors(void *card, int kind, int counter, unsigned long long *count)
{ *count = kind == 1 ? own(card, "ecc", value(counter ? "STUB_ECC_EVER" : "STUB_ECC", 0)) : value("STUB_CORRECTED", 99);
  return supported(); }
int nvmlDeviceGetRemappedRows(void *card, unsigned *c, unsigned *u, unsigned *pending, unsigned *failed)
{ *c = 7; *u = value("STUB_REMAPPED", 7); *pending = own(card, "pending", value("STUB_PENDING", 0));
  *failed = own(card, "failed", value("STUB_FAILED", 0)); return supported(); }
int nvmlDeviceGetRetiredPagesPendingStatus(void *card, unsigned *pending)
{ *pending = value("STUB_RETIRING", 0); return value("STUB_RETIRING", 0) ? 0 : 3; }
int nvmlDeviceGetComputeMode(void *card, int *mode)
{ *mode = own(card, "mode", value("STUB_MODE", 0)); return supported(); }
int nvmlDeviceGetPcieReplayCounter(void *card, unsigned *n) { *n = value("STUB_REPLAYS", 4); return 0; }
int nvmlDeviceGetCurrPcieLinkGeneration(void *card, unsigned *n) { *n = value("STUB_GENERATION", 5); return 0; }
int nvmlDeviceGetMaxPcieLinkGeneration(void *card, unsigned *n) { *n = 5; return 0; }
int nvmlDeviceGetCurrPcieLinkWidth(void *card, unsigned *n) { *n = 16; return 0; }
int nvmlDeviceGetMaxPcieLinkWidth(void *card, unsigned *n) { *n = 16; return 0; }
int nvmlDeviceGetTemperature(void *card, int sensor, unsigned *n)
{ sleep(value("STUB_SLEEPS", 0)); if (value("STUB_CRASHES", 0)) abort(); *n = value("STUB_CELSIUS", 40); return 0; }
int nvmlDeviceGetPowerUsage(void *card, unsigned *n) { *n = 350000; return 0; }
int nvmlDeviceGetClockInfo(void *card, int clock, unsigned *n) { *n = clock == 1 ? 1980 : 2619; return 0; }
int nvmlDeviceGetCurrentClocksThrottleReasons(void *card, unsigned long long *mask)
{ *mask = value("STUB_LIMITED", 1); return 0; }
typedef struct { unsigned id, scope; long long stamp, latency; unsigned kind, code;
  union { unsigned n; double d; } value; } Value;
int nvmlDeviceGetFieldValues(void *card, int count, Value *values)
{ for (int i = 0; i < count; i++)
    values[i].value.n = value("STUB_NVLINK", 2), values[i].code = values[i].id == 38 ? 3 : 0;
  return value("STUB_OLD", 0) ? 13 : 0; }
int nvmlEventSetCreate(void **set) { *set = &last; return value("STUB_OLD", 0) ? 3 : 0; }
int nvmlDeviceRegisterEvents(void *card, unsigned long long kinds, void *set) { return kinds == 8 ? 0 : 2; }
int nvmlEventSetWait_v2(void *set, Event *event, unsigned timeout)
{ long now = value("STUB_XID", 0); if (now == last) return 10;
  last = now; event->kind = 8; event->data = now; event->device = (void *)'A'; return now ? 0 : 10; }
"""


def build(folder: Path, *, cuda: bool = True, nvml: bool = True, release: str = "550.54.15") -> dict[str, str]:
    """Build the stand-ins into a folder, with this driver release in their names. Return the environment variables with
    which the loader finds them. Skips the test if gcc is missing."""
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs gcc")
    folder.mkdir(parents=True, exist_ok=True)
    chosen = {f"libcuda.so.{release}": _CUDA} if cuda else {}
    chosen.update({f"libnvidia-ml.so.{release}": _CARDS + _NVML} if nvml else {})
    for name, source in chosen.items():
        (folder / "source.c").write_text(_COMMON + source)
        subprocess.run([compiler, "-w", "-shared", "-fPIC", "-o", folder / name, folder / "source.c"], check=True)
        (folder / name).with_name(name.replace(release, "1")).symlink_to(name)
    return {"LD_LIBRARY_PATH": str(folder)}
