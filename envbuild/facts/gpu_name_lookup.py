"""Finds the GPU models for a name that a person types, for example copied from nvidia-smi, lspci or a catalogue.

For names that a machine reports, use `database.gpu_by_name`, which accepts only whole names of the facts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from itertools import chain

from envbuild.facts import database
from envbuild.facts.gpu_fact_types import Gpu
from envbuild.util import errors

_LONGEST = 120  # maximum number of characters in a name
_SHORTEST = 4  # minimum number of characters in a name that was cut off: a hundred names begin with RTX
# Forms of a name: lspci prints "NVIDIA Corporation GH100 [H100 PCIe] (rev a1)", nvidia-smi -L prints "GPU 0: NVIDIA H20
# (UUID: GPU-1f2e...)", --query-gpu prints "NVIDIA H20, 97871 MiB, 550.54.15", and a Kubernetes label of a time-sliced
# GPU is "NVIDIA-L40S-SHARED".
_MOST = 4  # maximum number of models in a question
_PCI_NAME = re.compile(r"\[([^\[\]]+)\][^\[\]]*$")
_AROUND = re.compile(r"^ *gpu *\d+ *:|(?:, *[\d.]+(?: mib)? *)+$|\((?:r|tm|rev \w+|uuid:[^()]*)\)|-shared$")
_MIG = re.compile(r"\bmig\b.*")
_LAPTOP = re.compile(r"(?:\bmax-?q */ *)?\b(?:mobile|notebook)\b(?: */ *max-?q\b)?")
# Parts that do not distinguish models: the memory (80GB), its kind (HBM3), how the GPU is connected, its revision.
_VARIANT = re.compile(
    r"\b(?:\d+ ?g(?:i?b)?|hbm\d?e?|gddr\d?x?|sxm\d?|pcie|nvl\d*|dgxs|fhhl|lite hash rate|refresh|rev\. ?\w"
    r"|developer kit)\b"
)
_CUT = ("...", "…")  # nvidia-smi's table shortens names: NVIDIA A100-SXM...
_MAKER = re.compile(r"^(?:nvidia|corporation|geforce|tesla|jetson|hgx|dgx)+")
_OPTIONAL = {"ac", "active", "ada", "blackwell", "design", "edition", "generation", "server", "with", "workstation"}
_OPTIONAL_AHEAD = {"gtx", "quadro", "rtx"}  # optional only at the start of a name: a TITAN RTX is not a TITAN


def candidates(name: str) -> tuple[Gpu, ...]:
    """Return the GPU models that a name may mean: none, one, or several if the name is ambiguous ("RTX 6000").

    The whole name must match: "NVIDIA H2" does not match H20. Case, blanks, dashes, NVIDIA, GeForce, memory and form
    factor are ignored; "Ti", "SUPER", "Laptop" and letters after the number are significant. A name that nvidia-smi cut
    off ("GeForce RTX 208...") may mean every model whose name begins in this way. "A2 / A16" means both models.
    """
    text = name[:_LONGEST].lower()
    inside = _PCI_NAME.search(text)
    text = _LAPTOP.sub("laptop", _MIG.sub("", _AROUND.sub("", inside[1] if inside else text)))
    if text.rstrip().endswith(_CUT):
        return _beginning_with(_key(text))
    parts = [_meant_by(part) for part in text.split("/")]
    return _meant_by(text) or (tuple(dict.fromkeys(chain(*parts))) if all(parts) else ())


def suggestion(name: str, others: Iterable[str]) -> str | None:
    """Return "did you mean A or B?" with GPU models and `others` (further names, such as profiles) similar to `name`,
    or None."""
    return errors.near(_key(name[:_LONGEST]), dict.fromkeys([*others, *database.gpus()]), most=_MOST)


def question(name: str) -> str | None:
    """Return "did you mean l20?" with the ids of the GPU models that `name` may mean, or of those with similar names;
    None if no name is similar."""
    found = candidates(name)
    return f"did you mean {' or '.join(gpu.id for gpu in found[:_MOST])}?" if found else suggestion(name, ())


def _meant_by(text: str) -> tuple[Gpu, ...]:
    plain = _key(_VARIANT.sub(" ", text))
    for key in (_key(text), plain):
        if found := tuple(gpu for gpu in database.gpus().values() if key in _keys(gpu)):
            return found
    return tuple(gpu for gpu in database.gpus().values() if _pattern(gpu).fullmatch(plain))


def _beginning_with(start: str) -> tuple[Gpu, ...]:
    if len(start) < _SHORTEST:
        return ()
    return tuple(gpu for gpu in database.gpus().values() if any(key.startswith(start) for key in _keys(gpu)))


def _key(text: str) -> str:
    """Return a name in normalised form: "NVIDIA GeForce RTX 4090" -> "rtx4090"."""
    return _MAKER.sub("", "".join(re.findall("[a-z0-9]+", text.lower()))).removesuffix("gpu")


@cache
def _keys(gpu: Gpu) -> frozenset[str]:
    return frozenset(map(_key, (gpu.id, *gpu.all_names, *gpu.aliases)))


@cache
def _pattern(gpu: Gpu) -> re.Pattern[str]:
    """Return a pattern for the model's id and names, in which some parts are optional. Aliases are not part of it,
    since they must match completely."""
    return re.compile("|".join(_with_options(name.lower()) for name in (gpu.id, *gpu.all_names)))


def _with_options(name: str) -> str:
    words = [word for word in re.findall("[a-z0-9]+", name) if not _MAKER.fullmatch(word)]
    if not words:
        return "(?!)"  # matches nothing
    words[:1] = re.findall("^(?:gtx|rtx)|.+", words[0])  # an id is one word: rtx4090
    found, ahead = "", True
    for word in words:
        ahead = ahead and word in _OPTIONAL_AHEAD
        optional = ahead or word in _OPTIONAL or _VARIANT.fullmatch(word)
        found += f"(?:{word})?" if optional else word
    return found
