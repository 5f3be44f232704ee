"""Reads all data about a machine in parallel. Takes at most a few seconds, even if a driver or a server hangs."""

from __future__ import annotations

import datetime
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from envbuild.doctor import (
    cpu_memory_and_os,
    disk_shm_and_cuda_software_reader,
    docker_engine_reader,
    kernel_log_reader,
    network_reachability_reader,
    nvml_reader,
    pci_nvswitch_and_rdma_reader,
    site_settings_validation,
)
from envbuild.doctor.machine_readings import Host, clean
from envbuild.doctor.parallel_tasks_with_time_limit import run_in_parallel

SECONDS = 3.5
"""The time limit of each part of the reading. Parts that contact other programs or hosts have shorter limits."""
MARGIN = 0.2
"""A part that sends several requests in sequence must end this many seconds before SECONDS have passed."""


def read(root: Path = Path("/")) -> Host:
    """Reads a machine. `root`: the folder that contains the machine's /proc, /sys, /dev and /usr; "/" outside
    containers.

    Nothing is raised if the machine lacks something. Raises FactsError if the site's own facts are invalid.
    """
    end = time.monotonic() + SECONDS - MARGIN

    def engine() -> dict[str, Any]:
        found = docker_engine_reader.read()
        disks = tuple(disk_shm_and_cuda_software_reader.disks(found.data))
        return {"engine": found, "disks": disks, "mirrors": network_reachability_reader.mirrors(found, end)}

    def packages() -> dict[str, Any]:
        trusted = tuple(
            network_reachability_reader.authorities()
        )  # before the indexes: both need pip's configuration, which is then read only once
        return {"authorities": trusted, "indexes": network_reachability_reader.index_answers(end)}

    def kernel() -> dict[str, Any]:
        return {
            "machine": cpu_memory_and_os.read(root),
            "pci": pci_nvswitch_and_rdma_reader.pci(root),
            "switches": pci_nvswitch_and_rdma_reader.switches(root),
            "fabric_manager": pci_nvswitch_and_rdma_reader.fabric_manager(root),
            "log": kernel_log_reader.log(root),
            "shm": disk_shm_and_cuda_software_reader.shm_bytes(root),
            "rdma": tuple(pci_nvswitch_and_rdma_reader.rdma_ports(root)),
            "memlock": pci_nvswitch_and_rdma_reader.memlock(),
            "software": disk_shm_and_cuda_software_reader.software(root),
        }

    tasks: dict[str, Callable[[], dict[str, Any]]] = {
        "NVML": lambda: {"driver": nvml_reader.read(root)},
        "the engine": engine,
        "the registries": lambda: {"registries": network_reachability_reader.registries()},
        "the package indexes": packages,
        "the proxies": lambda: {"proxies": network_reachability_reader.proxies()},
        "the settings": lambda: {"site": site_settings_validation.read()},
        "the kernel": kernel,
    }
    found = run_in_parallel(list(tasks.values()), SECONDS)
    parts: dict[str, Any] = {}
    for part in found:
        parts |= part or {}
    if "machine" not in parts:  # "the kernel" was late: use what Python knows
        parts["machine"] = cpu_memory_and_os.unread()
    return Host(
        name=clean(platform.node(), 100),
        time=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        late=tuple(name for name, part in zip(tasks, found, strict=True) if part is None),
        **parts,
    )
