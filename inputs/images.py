"""Image files: decoded, cropped and resized in worker processes."""

from __future__ import annotations

import signal
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from utils import BadOption, check_file, uniforms

CROP_SCALE, CROP_RATIO = (0.08, 1.0), (3 / 4, 4 / 3)
VIEW_SCALE = (0.6, 1.0)  # gentler than training's: a view has to show what the label names
WAITING = 10_000  # files that are asked for at one time: each takes 1.8 kB until its turn comes, 25 GB of 14 million
EVAL_CROP = 0.875  # of the shorter side, what evaluation sees of an image file


class Crop(NamedTuple):
    seed: int
    flip: bool
    scale: tuple[float, float]


def stream(
    paths: np.ndarray, parts: list[np.ndarray], *, side: int, crop: Crop | None, workers: int, pinned: bool
) -> Iterator[Tensor | BadOption]:
    """The images of each part, uint8 (B, 3, side, side), decoded by worker processes; each goes through `arrived`."""
    loader: DataLoader[Any] = DataLoader(
        _Files(paths, side, crop),
        batch_sampler=[part.tolist() for part in parts],
        num_workers=workers,
        pin_memory=pinned,
        collate_fn=_collate,
        # Of its own, so that starting workers takes nothing from the generator that dropout draws from.
        generator=torch.Generator().manual_seed(0),
        worker_init_fn=_leave_ctrl_c_to_the_parent,
    )
    return iter(loader)


def _leave_ctrl_c_to_the_parent(worker: int) -> None:
    """A terminal sends Ctrl-C to every process; the parent still wants the batches of the step that it finishes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _collate(items: list[Tensor | BadOption]) -> Tensor | BadOption:
    """An image that can't be read crosses the process border as a value: raised over there it would lose its type."""
    return next((i for i in items if isinstance(i, BadOption)), None) or torch.stack(items)  # type: ignore[arg-type]


def arrived(x: Tensor | BadOption) -> Tensor:
    """A batch from `stream`; raises what kept an image from being read."""
    if isinstance(x, BadOption):
        raise x
    return x


class _Files(Dataset[Any]):
    """Decoded, cropped and resized images, uint8 (3, S, S)."""

    def __init__(self, paths: np.ndarray, side: int, crop: Crop | None) -> None:
        self.paths, self.side, self.crop = paths, side, crop

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, row: int) -> Tensor | BadOption:
        from PIL import Image

        try:
            with Image.open(self.paths[row]) as file:
                image = eight_bit(file).convert("RGB")
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:  # what Pillow raises for a damaged file
            return BadOption("dataset", f"has an image that can't be read ({type(error).__name__})", str(self.paths[row]))
        return torch.from_numpy(square(image, self.side, self.crop, row))


def square(image: Any, side: int, crop: Crop | None = None, row: int = 0) -> np.ndarray:
    """An RGB image of Pillow's, cropped and resized: (3, S, S) uint8."""
    from PIL import Image

    draws = uniforms(crop.seed if crop else 0, [row], 5)[0]
    box = random_box(image.size, draws, crop.scale) if crop else center_box(image.size)
    image = image.resize((side, side), Image.Resampling.BILINEAR, box=box, reducing_gap=3.0)
    if crop and crop.flip and draws[4] < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return np.ascontiguousarray(np.asarray(image).transpose(2, 0, 1))


def broken(paths: Sequence[str]) -> dict[str, str]:
    """Files that no image can be read from, each with the reason, as far as a file tells before its pixels: kind, size and mode."""
    found: dict[str, str] = {}
    with ThreadPoolExecutor(8) as pool:  # most of the time goes into waiting for the disk
        for start in range(0, len(paths), WAITING):
            some = paths[start : start + WAITING]
            found |= {path: reason for path, reason in zip(some, pool.map(_reason, some), strict=True) if reason}
    return found


def _reason(path: str) -> str:
    from PIL import Image

    try:
        check_file("dataset", path)
        with warnings.catch_warnings(action="ignore"), Image.open(path) as file:
            if file.mode == "F":
                return "float pixels have no known range"
            return "" if min(file.size) > 0 else f"its size is {file.size}"
    except Exception as error:  # Pillow's readers raise what they stumble over, struct.error and KeyError too
        return "no plain file" if isinstance(error, BadOption) else type(error).__name__


def eight_bit(file: Any) -> Any:
    """An image of 8 bits a channel. Left to Pillow, 16-bit pixels would be cut off at 255."""
    from PIL import Image

    if file.mode == "F":
        raise ValueError("float pixels have no known range")
    if file.mode.startswith("I"):  # 16 bit, in Pillow's several ways
        return Image.fromarray((np.asarray(file).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8))
    return file


def random_box(size: tuple[int, int], draws: np.ndarray, scale: tuple[float, float] = CROP_SCALE) -> tuple[float, float, float, float]:
    """A crop of random area, shape and place, in one draw: what does not fit is cut to the image."""
    width, height = size
    area = width * height * (scale[0] + draws[0] * (scale[1] - scale[0]))
    ratio = np.exp(np.log(CROP_RATIO[0]) + draws[1] * (np.log(CROP_RATIO[1]) - np.log(CROP_RATIO[0])))
    w, h = min(float(np.sqrt(area * ratio)), width), min(float(np.sqrt(area / ratio)), height)
    left, top = float(draws[2]) * (width - w), float(draws[3]) * (height - h)
    return left, top, min(left + w, width), min(top + h, height)


def center_box(size: tuple[int, int]) -> tuple[float, float, float, float]:
    side = min(size) * EVAL_CROP
    left, top = (size[0] - side) / 2, (size[1] - side) / 2
    return left, top, left + side, top + side
