"""Image descriptions with tiny layers, without a lock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from envbuild.image.layers.layer_writer import LayerFile, WrittenLayer, write_layer
from envbuild.image.oci.image_description import DescribedLayer, ImageDescription, OciImage
from envbuild.image.oci.layer_blobs import learn_layers
from unit.support import sha


@dataclass
class SampleRecipe:
    """A layer with one file. `error`: raised after the first block; `written`: how often the layer was written."""

    name: str
    content: bytes
    keeps_blob: bool = False
    error: BaseException | None = None
    written: int = 0

    @property
    def key(self) -> str:
        return sha(f"{self.name} {self.keeps_blob}")

    def write(self, packed: Callable[[bytes], object], plain: Callable[[bytes], object]) -> WrittenLayer:
        self.written += 1
        if self.error:
            packed(b"begin")
            raise self.error
        return write_layer([LayerFile(f"opt/{self.name}", self.content)], packed, plain)


def described(*recipes: SampleRecipe) -> ImageDescription:
    layers = tuple(DescribedLayer(recipe.name, f"sample {recipe.name}", recipe) for recipe in recipes)
    settings = {"Cmd": ["python"], "Env": ["PATH=/bin"], "Labels": {"org.example": "1"}, "WorkingDir": "/"}
    return ImageDescription("linux/amd64", layers, settings)


def sample() -> tuple[list[SampleRecipe], ImageDescription]:
    recipes = [SampleRecipe("base", b"b" * 3_000_000, keeps_blob=True), SampleRecipe("own", bytes(range(256)) * 9000)]
    return recipes, described(*recipes)


def written() -> OciImage:
    """The sample with its layers written."""
    return learn_layers(sample()[1], lambda line: None)
