"""Every precision flag that this torch has is declared before a probe runs."""

from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

import torch

from envbuild.selftest.harness import probe_process
from envbuild.selftest.harness.job_document import SETTINGS, JobDocument
from envbuild.selftest.harness.probe_context import Context


class Flags(SimpleNamespace):
    def __getattr__(self, name: str) -> bool:
        """Fail as torch 2.0 does for a flag that it does not have."""
        raise AssertionError("Unknown attribute " + name)


@pytest.mark.parametrize("known", [SETTINGS, SETTINGS[:-1]])
def test_every_flag_there_is_is_declared(monkeypatch: pytest.MonkeyPatch, known: tuple[str, ...]) -> None:
    flags = Flags(**dict.fromkeys(known, True))
    monkeypatch.setattr(torch.backends.cuda, "matmul", flags)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    context = Context(JobDocument("0" * 32, settings={"allow_tf32": True}, threads=torch.get_num_threads()))
    probe_process._prepare(context)
    declared = {name: name == "allow_tf32" for name in known}
    assert vars(flags) == declared
    with pytest.raises(KeyError), context.with_default_flags():
        assert vars(flags) == dict.fromkeys(known, True)
        raise KeyError
    assert vars(flags) == declared
