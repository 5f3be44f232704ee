"""Every precision flag that this torch has is declared before a probe runs."""

from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

import torch

from envbuild.selftest import child
from envbuild.selftest.job import SETTINGS, Job


@pytest.mark.parametrize("known", [SETTINGS, SETTINGS[:-1]])
def test_every_flag_there_is_is_declared(monkeypatch: pytest.MonkeyPatch, known: tuple[str, ...]) -> None:
    flags = SimpleNamespace(**dict.fromkeys(known, True))
    monkeypatch.setattr(torch.backends.cuda, "matmul", flags)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    child._prepare(Job("0" * 32, settings={"allow_tf32": True}, threads=torch.get_num_threads()))
    assert vars(flags) == {name: name == "allow_tf32" for name in known}
