"""A GPU simulated on the CPU: the CUDA code paths of probes, over the CPU's kernels."""

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
