"""Finds the GPU models for a name that a person types: from the packaging, nvidia-smi, lspci or a catalogue.

For names that a machine reports, use `database.gpu_by_name`, which accepts only whole names of the facts.
"""

from __future__ import annotations

import re
from functools import cache

from envbuild.facts import database
from envbuild.facts.gpu_models import Gpu

_LONGEST = 120  # characters of a name
# lspci prints "NVIDIA Corporation GH100 [H100 PCIe] (rev a1)".
_PCI_NAME = re.compile(r"\[([^\[\]]+)\][^\[\]]*$")
_MIG = re.compile(r"\bmig\b.*")
_LAPTOP = re.compile(r"(?:\bmax-?q */ *)?\b(?:mobile|notebook)\b(?: */ *max-?q\b)?")
# Parts that do not distinguish models: the memory (80GB), its kind (HBM3), how the GPU is connected.
_VARIANT = re.compile(r"\b(?:\d+ ?g(?:i?b)?|hbm\d?e?|sxm\d?|pcie|nvl\d*|dgxs|fhhl)\b")
_MAKER = re.compile(r"^(?:nvidia|corporation|geforce|tesla|jetson|hgx|dgx)+")
_OPTIONAL = {"ac", "active", "ada", "blackwell", "design", "edition", "generation", "server", "with", "workstation"}
_OPTIONAL_AHEAD = {"gtx", "quadro", "rtx"}  # at the start of a name only: a TITAN RTX is not a TITAN


def candidates(name: str) -> tuple[Gpu, ...]:
    """The models that a name may mean: none, one, or several if the name is ambiguous ("RTX 6000").

    The whole name must match: "NVIDIA H2" is not an H20. Case, blanks, dashes, NVIDIA, GeForce, memory and form factor
    are ignored; "Ti", "SUPER", "Laptop" and letters after the number are significant.
    """
    text = name[:_LONGEST].lower()
    inside = _PCI_NAME.search(text)
    text = _LAPTOP.sub("laptop", _MIG.sub("", inside[1] if inside else text))
    written, plain = _key(text), _key(_VARIANT.sub(" ", text))
    gpus = tuple(database.gpus().values())
    exact = tuple(gpu for gpu in gpus if written in _keys(gpu))
    return exact or tuple(gpu for gpu in gpus if plain in _keys(gpu) or _pattern(gpu).fullmatch(plain))


def _key(text: str) -> str:
    """The normalised name: "NVIDIA GeForce RTX 4090" -> "rtx4090"."""
    return _MAKER.sub("", "".join(re.findall("[a-z0-9]+", text.lower()))).removesuffix("gpu")


@cache
def _keys(gpu: Gpu) -> frozenset[str]:
    return frozenset(map(_key, (gpu.id, *gpu.all_names, *gpu.aliases)))


@cache
def _pattern(gpu: Gpu) -> re.Pattern[str]:
    """A pattern for the model's names with their optional parts. An alias must match completely."""
    return re.compile("|".join(_with_options(name.lower()) for name in (gpu.id, *gpu.all_names)))


def _with_options(name: str) -> str:
    words = [word for word in re.findall("[a-z0-9]+", name) if not _MAKER.fullmatch(word)]
    words[:1] = re.findall("^(?:gtx|rtx)|.+", words[0])  # an id is one word: rtx4090
    found, ahead = "", True
    for word in words:
        ahead = ahead and word in _OPTIONAL_AHEAD
        optional = ahead or word in _OPTIONAL or _VARIANT.fullmatch(word)
        found += f"(?:{word})?" if optional else word
    return found
