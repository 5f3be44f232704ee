"""`make pretend` runs every probe on every simulated GPU."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from envbuild.selftest.harness import job_document, probe_scheduler
from envbuild.selftest.probes.probe_catalogue import PROBES
from pretend import campaign, launch
from pretend.gpus import GPUS


@pytest.mark.parametrize("gpu", GPUS)
def test_level_standard_of_a_gpu_has_every_probe(gpu: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Except dist.nodes, which needs several machines. No probe runs here: only the plan is made."""
    given: list[Any] = []
    monkeypatch.setattr(launch, "run", lambda *arguments, **_: given.append(arguments))
    campaign.healthy(gpu, "standard", tmp_path, {})
    ((model, catalogue, document, _),) = given
    job = job_document.parse(document, frozenset(probe.name for probe in PROBES))
    planned = {probe.name for probe in probe_scheduler.plan(PROBES, job)}
    assert (model, catalogue) == (gpu, launch.CATALOGUE)
    assert {"attention.cases", "optim.torch"} <= planned == {probe.name for probe in PROBES} - {"dist.nodes"}
