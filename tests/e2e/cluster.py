"""A real Slurm on this machine: munge, a controller and two nodes that each report a GPU (on /dev/null)."""

from __future__ import annotations

import secrets
import shlex
import socket
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from .daemons import Daemons
from .support import CHECKOUT, free_port, until

LIBRARIES = "usr/lib/x86_64-linux-gnu"
NODES = {"gpu-h20": "h20", "gpu-a100": "a100"}
CLIENTS = ("sbatch", "squeue", "scontrol", "scancel", "sinfo", "srun")


def unpacked(tree: Path) -> Path:
    """A folder with Slurm and munge. Skips if they cannot be downloaded."""
    done = subprocess.run([CHECKOUT / "scripts" / "slurm", tree], capture_output=True, text=True, timeout=900)
    if done.returncode != 0:
        pytest.skip(done.stderr.strip())
    return tree


@dataclass
class Cluster:
    """A running Slurm. `programs`: a folder for PATH, with the clients of this cluster."""

    tree: Path
    folder: Path
    daemons: Daemons = field(init=False)

    def __post_init__(self) -> None:
        self.daemons = Daemons(self.folder / "log")

    @property
    def programs(self) -> Path:
        return self.folder / "bin"

    @property
    def environment(self) -> Mapping[str, str]:
        libraries = self.tree / LIBRARIES
        return {"SLURM_CONF": str(self.folder / "slurm.conf"), "LD_LIBRARY_PATH": f"{libraries}:{libraries}/slurm-wlm"}

    def write(self) -> None:
        """Write the configuration, a key, and the clients."""
        host = socket.gethostname()
        for part in ("bin", "state", "log", *(f"spool-{name}" for name in NODES)):
            (self.folder / part).mkdir(parents=True)
        (self.folder / "munge.key").write_bytes(secrets.token_bytes(1024))
        (self.folder / "munge.key").chmod(0o400)
        nodes = "\n".join(
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()} CPUs=4 RealMemory=64000 "
            f"Gres=gpu:{card}:1 Feature={name} State=UNKNOWN"
            for name, card in NODES.items()
        )
        (self.folder / "slurm.conf").write_text(
            f"""ClusterName=e2e
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={free_port()}
AuthType=auth/munge
AuthInfo=socket={self.folder}/munge.sock
SlurmUser=root
StateSaveLocation={self.folder}/state
SlurmdSpoolDir={self.folder}/spool-%n
SlurmctldPidFile={self.folder}/slurmctld.pid
SlurmdPidFile={self.folder}/slurmd-%n.pid
PluginDir={self.tree}/{LIBRARIES}/slurm-wlm
SlurmdParameters=config_overrides
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
ReturnToService=2
SlurmdTimeout=5
KillWait=10
MinJobAge=10
SchedulerParameters=batch_sched_delay=0
MpiDefault=none
{nodes}
PartitionName=main Nodes={",".join(NODES)} Default=YES MaxTime=INFINITE State=UP PreemptMode=REQUEUE
""",
            encoding="utf-8",
        )
        (self.folder / "gres.conf").write_text(
            "".join(f"NodeName={name} Name=gpu Type={card} File=/dev/null\n" for name, card in NODES.items()),
            encoding="utf-8",
        )
        for name in CLIENTS:
            given = " ".join(f"{key}={shlex.quote(value)}" for key, value in self.environment.items())
            file = self.programs / name
            file.write_text(
                f'#!/bin/sh\nexec env {given} {shlex.quote(str(self.tree / "usr/bin" / name))} "$@"\n', encoding="utf-8"
            )
            file.chmod(0o755)

    def start(self, *names: str, clocks: Mapping[str, str] | None = None) -> None:
        """Start the daemons, and wait until every node is up. `clocks`: name of a daemon -> how much its clock differs,
        such as "+2h"."""
        library = self.tree / LIBRARIES / "faketime" / "libfaketimeMT.so.1"
        for name in names or ("munged", "slurmctld", *NODES):
            shift = (clocks or {}).get(name)
            env = {"LD_PRELOAD": str(library), "FAKETIME": shift, "FAKETIME_DONT_FAKE_MONOTONIC": "1"} if shift else {}
            if name == "munged":
                at = self.folder
                argv = [f"--key-file={at}/munge.key", f"--socket={at}/munge.sock", f"--pid-file={at}/munged.pid",
                        f"--seed-file={at}/seed", "--foreground", "--force"]  # fmt: skip
                self._daemon(name, "munged", *argv, env=env)
                until("munged's socket", (at / "munge.sock").exists)
            elif name == "slurmctld":
                self._daemon(name, "slurmctld", "-D", env=env)
            else:
                step = self.tree / "usr/sbin/slurmstepd"
                self._daemon(name, "slurmd", "-D", "-N", name, "-d", str(step), env=env)
        up = ("sinfo", "-h", "-N", "-t", "idle,alloc,mix,comp", "-o", "%N")
        until(f"the nodes to be up, see {self.folder}/log", lambda: self.ask(*up).count("\n") == len(NODES), 60)

    def _daemon(self, name: str, program: str, *argv: str, env: Mapping[str, str]) -> None:
        self.daemons.start(name, self.tree / "usr/sbin" / program, *argv, env={**self.environment, **env})

    def stop(self) -> None:
        """Cancel the running jobs, and stop the daemons; the controller is the last but one."""
        subprocess.run([self.programs / "scancel", "--user=root"], capture_output=True, timeout=30)
        try:
            until("no job to be left", lambda: not self.ask("squeue", "-h").strip(), 40)
        finally:
            self.daemons.end_all([*NODES, "slurmctld", "munged"])

    def ask(self, program: str, *arguments: str) -> str:
        """Return the output of a Slurm client program; empty if the controller does not answer."""
        done = subprocess.run([self.programs / program, *arguments], capture_output=True, text=True, timeout=60)
        return done.stdout if done.returncode == 0 else ""


@pytest.fixture(scope="session")
def cluster(workplace: Path) -> Iterator[Cluster]:
    made = Cluster(unpacked(workplace / "slurm"), workplace / "cluster")
    with ExitStack() as stack:
        stack.callback(made.stop)
        made.write()
        made.start()
        yield made
