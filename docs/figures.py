"""Make the pictures of docs/gallery.md from what the experiments wrote: ``python docs/figures.py``.

It reads ``SUBCOMMAND-output`` of the folder that it is called in, as the subcommands leave it, and writes small
pictures into ``docs/figures/``. In each is the command that made it, which a test compares with the page.
"""

import json
from pathlib import Path

from PIL import Image
from PIL.PngImagePlugin import PngInfo

FOLDER = Path(__file__).parent / "figures"
SHOWN = {
    "demo": ("same-model", "layers", "attention"),
    "denoise": ("theorem", "softmax"),
    "redunet": ("sphere", "turned"),
    "layers": ("epochs", "principal"),
    "icl": ("learning", "error"),  # of its preset "opposite"
}
WIDTH = 900  # pixels
COLOURS = 128


def command(facts: dict) -> str:
    """Return the command of a run from its metrics."""
    preset = "" if facts["experiment"] == "demo" else f" --preset {facts['preset']}"  # the demo has one, and --quick
    return f"python -m crate_kernels {facts['experiment']}{preset} --seed {facts['seed']}"


def shrink(source: Path, facts: dict) -> Path:
    """Write a small copy of a picture, with its origin; return the path."""
    picture = Image.open(source).convert("RGB")
    picture.thumbnail((WIDTH, WIDTH), Image.Resampling.LANCZOS)
    origin = PngInfo()
    origin.add_text("command", command(facts))
    origin.add_text("machine", ", ".join(f"{key} {value}" for key, value in facts["machine"].items()))
    path = FOLDER / f"{facts['experiment']}-{source.name}"
    few = picture.quantize(
        COLOURS, Image.Quantize.MAXCOVERAGE, kmeans=2, dither=Image.Dither.NONE
    )  # keeps rare colours
    few.save(path, optimize=True, pnginfo=origin)
    return path


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for subcommand, pictures in SHOWN.items():
        output = Path(f"{subcommand}-output")
        if (output / "metrics.json").exists():
            facts = json.loads((output / "metrics.json").read_text())
            for name in pictures:
                print(shrink(output / f"{name}.png", facts))
        else:
            print(f"{output} is not there: python -m crate_kernels {subcommand} makes it")
