"""A GPU that the CPU plays: the paths that probes take on CUDA, over the CPU's kernels."""

import torch

from envbuild.selftest.harness.job_document import JobDocument
from envbuild.selftest.harness.probe_context import Context


class Card(Context):
    def __init__(self, job: JobDocument) -> None:
        super().__init__(job)
        self.device = torch.device("cpu")

    @property
    def on_cpu(self) -> bool:
        return False
