"""A GPU that the CPU plays: the paths that probes take on CUDA, over the CPU's kernels."""

import torch

from envbuild.selftest.context import Context
from envbuild.selftest.job import Job


class Card(Context):
    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.device = torch.device("cpu")

    @property
    def on_cpu(self) -> bool:
        return False
