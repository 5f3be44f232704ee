"""Reads the Docker Engine (version, runtimes, CDI devices, NVIDIA's hooks, mirrors), and the version of buildx.

Nothing is raised if no engine answers.
"""

from __future__ import annotations

import shutil
from typing import Any

from envbuild.doctor.machine_readings import EngineReading, clean, short_address
from envbuild.doctor.network_reachability_reader import MAX_PLACES
from envbuild.doctor.parallel_tasks_with_time_limit import run_in_parallel
from envbuild.image import docker_client_finder, docker_engine
from envbuild.util.errors import EnvbuildError

ENGINE_SECONDS = 2
_HOOKS = ("nvidia-container-runtime-hook", "nvidia-cdi-hook")


def read() -> EngineReading:
    """Reads the engine that the docker command uses, and the version of its buildx plugin."""
    late = f"no answer within {ENGINE_SECONDS} s"
    answering, found = run_in_parallel([_engine, _buildx], ENGINE_SECONDS)
    return EngineReading(**{"fault": late} if answering is None else answering, **found or {"buildx_fault": late})


def _buildx() -> dict[str, Any]:
    try:
        words = docker_client_finder.find_client(ENGINE_SECONDS).buildx.split()
    except EnvbuildError as error:
        return {"buildx_fault": clean(error.message)}
    return {"buildx": clean(words[1]) if len(words) > 1 else "unknown"}


def _engine() -> dict[str, Any]:
    try:
        found = docker_engine.Engine(timeout=ENGINE_SECONDS)
        host, info = found.host, found.info
    except EnvbuildError as error:
        # doctor shows its own hint instead of START
        why = (error.hint or "").partition("\n")[0] if error.hint != docker_engine.START else ""
        return {"fault": clean(f"{error.message} ({why})" if why else error.message, 400)}
    devices = (str(device.get("ID", "")) for device in info.get("DiscoveredDevices") or ())
    mirrors = (info.get("RegistryConfig") or {}).get("Mirrors") or ()
    local = host.startswith("unix://")
    return {
        "host": short_address(host),
        "version": clean(found.version),
        "local": local,
        "runtimes": tuple(clean(name) for name in list(info.get("Runtimes") or ())[:50]),
        "hooks": tuple(name for name in _HOOKS if local and shutil.which(name)),
        "cdi": tuple(clean(device) for device in devices if device.startswith("nvidia.com/gpu"))[:100],
        "data": str(found.data_folder) if found.data_folder else None,
        "mirrors": tuple(str(mirror) for mirror in list(mirrors)[:MAX_PLACES]),
    }
