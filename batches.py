"""How rows become batches on the device.

Sets in memory stay uint8; a batch is cropped and flipped (each row by its own draw) in one gather, normalized and resized on
the device. Image files stream through worker processes that decode, crop and resize; the rest is the same.

Nothing here keeps a running generator: the order follows from (seed, epoch) and what happens to a row from (seed, epoch, row).
So batch size, workers and a stop in the middle of an epoch change nothing.
"""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from dataset import Data, Split
from utils import BadOption, mix, uniforms

ORDER, AUGMENT, NOISE, MIX = range(10, 14)  # names of the random streams
CROP_SCALE, CROP_RATIO = (0.08, 1.0), (3 / 4, 4 / 3)
SMALL = 48  # sides up to this are resized by matrix products on a CPU
EVAL_CROP = 0.875  # the share of the shorter side that evaluation sees of an image file


@dataclass(frozen=True)
class Batch:
    """x on the device; target class numbers (B,) or soft targets (B, C); index: row numbers in the split (B,), or (B, 2)
    when two rows were mixed into one."""

    x: Tensor
    target: Tensor
    index: Tensor

    def __len__(self) -> int:
        return len(self.x)


class Batches:
    """One split as batches. `epoch(e, start)` gives epoch e from batch `start` on."""

    def __init__(
        self,
        split: Split,
        data: Data,
        *,
        batch_size: int,
        device: torch.device,
        size: tuple[int, int] | None = None,
        train: bool = False,
        augment: bool = False,
        noise: float = 0.0,
        seed: int = 0,
        workers: int | None = None,
    ) -> None:
        self.split, self.data, self.device, self.size = split, data, device, size
        self.batch_size, self.train, self.augment, self.noise, self.seed = batch_size, train, augment, noise, seed
        self.workers = min(os.cpu_count() or 1, 8) if workers is None else workers
        self.target = torch.from_numpy(split.y).to(device)
        self.files = data.kind == "files"
        if data.kind != "table":
            shift, scale = (torch.tensor(data.fitted[k], dtype=torch.float32, device=device).view(1, -1, 1, 1) for k in ("mean", "std"))
            self.scale, self.shift, self.std = 1 / (255 * scale), -shift / scale, scale
        self.x = None if self.files else self._to_device(torch.from_numpy(split.x))

    def _to_device(self, x: Tensor) -> Tensor:
        """In-memory rows on the device; images that will be cropped get their border of zeros once, here."""
        self.border = max(1, x.shape[-1] // 8) if self.augment and x.ndim == 4 else 0
        return F.pad(x, (self.border,) * 4).to(self.device) if self.border else x.to(self.device)

    def __len__(self) -> int:
        return len(self.bounds())

    def bounds(self) -> list[tuple[int, int]]:
        """First and last row of each batch. A last training batch of one row is left out: BatchNorm has no variance for it."""
        n = len(self.split)
        starts = [(i, min(i + self.batch_size, n)) for i in range(0, n, self.batch_size)]
        alone = self.train and self.batch_size > 1 and len(starts) > 1 and starts[-1][1] - starts[-1][0] == 1
        return starts[:-1] if alone else starts

    def order(self, epoch: int) -> np.ndarray:
        n = len(self.split)
        return np.random.default_rng(mix(self.seed, ORDER, epoch)).permutation(n) if self.train else np.arange(n)

    def epoch(self, epoch: int = 0, start: int = 0) -> Iterator[Batch]:
        order = self.order(epoch)
        parts = [order[a:b] for a, b in self.bounds()[start:]]
        streamed = iter(self._stream(epoch, parts)) if self.files else None
        try:
            for rows in parts:
                index = torch.from_numpy(rows).to(self.device)
                x = _arrived(next(streamed)).to(self.device, non_blocking=True) if streamed else self._gather(rows, index, epoch)
                yield Batch(self._finish(x, rows, epoch), self.target[index], index)
        finally:
            streamed = None  # stops the workers now; after an error they would wait for the garbage collector, 5 s each

    # ------------------------------------------------ in memory

    def _gather(self, rows: np.ndarray, index: Tensor, epoch: int) -> Tensor:
        assert self.x is not None
        if not self.border:
            return self.x[index]
        height, width = self.data.shape[1:]
        draws = uniforms(mix(self.seed, AUGMENT, epoch), rows, 3)  # (B, 3)
        top, left = (torch.from_numpy((draws[:, i] * (2 * self.border + 1)).astype(np.int64)) for i in (0, 1))
        ys = top[:, None] + torch.arange(height)  # (B, H)
        xs = left[:, None] + torch.arange(width)  # (B, W)
        if self.data.flip:
            xs = torch.where(torch.from_numpy(draws[:, 2] < 0.5)[:, None], xs.flip(1), xs)
        channels = torch.arange(self.x.shape[1], device=self.device)[None, :, None, None]
        ys, xs = ys.to(self.device)[:, None, :, None], xs.to(self.device)[:, None, None, :]
        return self.x[index[:, None, None, None], channels, ys, xs]  # (B, C, H, W)

    def _finish(self, x: Tensor, rows: np.ndarray, epoch: int) -> Tensor:
        """Normalize, add noise, resize. Normalizing first is the same (resizing averages) and has fewer pixels to touch."""
        if x.dtype != torch.uint8:
            return x
        x = x.float().mul_(self.scale).add_(self.shift)
        if self.noise:
            # NOTE: test and validation images get the same noise in every epoch, or epochs could not be compared.
            seed = mix(self.seed, NOISE, epoch if self.train else 0)
            x = x + normals(seed, rows, x[0].numel(), self.device).view_as(x).mul_(self.noise / self.std)
        if self.size and self.size != tuple(x.shape[2:]):
            x = resized(x, self.size)
        return x

    # ------------------------------------------------ image files

    def _stream(self, epoch: int, parts: list[np.ndarray]) -> Iterator[Tensor | BadOption]:
        side = (self.size or self.data.shape[1:])[0]
        crop = (mix(self.seed, AUGMENT, epoch), self.data.flip) if self.augment else None
        loader: DataLoader[Any] = DataLoader(
            _Files(self.split.x, side, crop),
            batch_sampler=[part.tolist() for part in parts],
            num_workers=self.workers,
            pin_memory=self.device.type == "cuda",
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


def _arrived(x: Tensor | BadOption) -> Tensor:
    if isinstance(x, BadOption):
        raise x
    return x


class _Files(Dataset[Any]):
    """Decoded, cropped and resized images, uint8 (3, S, S)."""

    def __init__(self, paths: np.ndarray, side: int, crop: tuple[int, bool] | None) -> None:
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
        draws = uniforms(self.crop[0], [row], 5)[0] if self.crop else None
        box = random_box(image.size, draws) if draws is not None else center_box(image.size)
        image = image.resize((self.side, self.side), Image.Resampling.BILINEAR, box=box, reducing_gap=3.0)
        if draws is not None and self.crop and self.crop[1] and draws[4] < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1)


def eight_bit(file: Any) -> Any:
    """An image of 8 bits a channel. Left to Pillow, 16-bit pixels would be cut off at 255."""
    from PIL import Image

    if file.mode == "F":
        raise ValueError("float pixels have no known range")
    if file.mode.startswith("I"):  # 16 bit, in Pillow's several ways
        return Image.fromarray((np.asarray(file).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8))
    return file


def random_box(size: tuple[int, int], draws: np.ndarray) -> tuple[float, float, float, float]:
    """A crop of random area, shape and place, in one draw: what does not fit is cut to the image."""
    width, height = size
    area = width * height * (CROP_SCALE[0] + draws[0] * (CROP_SCALE[1] - CROP_SCALE[0]))
    ratio = np.exp(np.log(CROP_RATIO[0]) + draws[1] * (np.log(CROP_RATIO[1]) - np.log(CROP_RATIO[0])))
    w, h = min(float(np.sqrt(area * ratio)), width), min(float(np.sqrt(area / ratio)), height)
    left, top = float(draws[2]) * (width - w), float(draws[3]) * (height - h)
    return left, top, min(left + w, width), min(top + h, height)


def center_box(size: tuple[int, int]) -> tuple[float, float, float, float]:
    side = min(size) * EVAL_CROP
    left, top = (size[0] - side) / 2, (size[1] - side) / 2
    return left, top, left + side, top + side


# ---------------------------------------------------------------- pixels


def resized(x: Tensor, size: tuple[int, int]) -> Tensor:
    """Bilinear, with antialiasing where the image shrinks."""
    if x.device.type != "cpu" or max(x.shape[2:]) > SMALL:
        return F.interpolate(x, size, mode="bilinear", antialias=size[0] < x.shape[2] or size[1] < x.shape[3])
    # The same as two small matrix products, which a CPU does nearly twice as fast for small images.
    rows, columns = bilinear_matrix(x.shape[2], size[0]), bilinear_matrix(x.shape[3], size[1])  # (out, in) each
    return rows @ (x @ columns.T)


@functools.cache
def bilinear_matrix(old: int, new: int) -> Tensor:
    """What bilinear resizing of one side does, as a matrix (new, old)."""
    return F.interpolate(torch.eye(old)[None, None], (new, old), mode="bilinear", antialias=new < old)[0, 0]


# ---------------------------------------------------------------- draws


def normals(seed: int, rows: np.ndarray, numbers: int, device: torch.device) -> Tensor:
    """(rows, numbers) standard normal draws, a function of (seed, row) alone (Box-Muller)."""
    half = (numbers + 1) // 2
    u = torch.from_numpy(uniforms(seed, rows, 2 * half)).to(device)  # (B, 2 * half)
    radius = torch.sqrt(-2 * torch.log1p(-u[:, :half]))
    angle = 2 * torch.pi * u[:, half:]
    return torch.cat((radius * torch.cos(angle), radius * torch.sin(angle)), 1)[:, :numbers]


def mixed(batch: Batch, num_classes: int, mixup_alpha: float, cutmix_alpha: float, seed: int) -> Batch:
    """MixUp (arXiv 1710.09412) or CutMix (arXiv 1905.04899) of each row with its mirror in the batch; with both on, a coin decides."""
    if not (mixup_alpha or cutmix_alpha):
        return batch
    rng = np.random.default_rng(seed)
    cut = bool(cutmix_alpha) and batch.x.ndim == 4 and (not mixup_alpha or rng.random() < 0.5)
    alpha = cutmix_alpha if cut else (mixup_alpha or cutmix_alpha)
    keep = float(rng.beta(alpha, alpha))
    other = batch.x.flip(0)
    if cut:
        height, width = batch.x.shape[2:]
        h, w = round(height * (1 - keep) ** 0.5), round(width * (1 - keep) ** 0.5)
        top, left = int(rng.integers(height - h + 1)), int(rng.integers(width - w + 1))
        x = batch.x.clone()
        x[:, :, top : top + h, left : left + w] = other[:, :, top : top + h, left : left + w]
        keep = 1 - h * w / (height * width)
    else:
        x = keep * batch.x + (1 - keep) * other
    soft = F.one_hot(batch.target, num_classes).to(x.dtype)
    return Batch(x, keep * soft + (1 - keep) * soft.flip(0), torch.stack((batch.index, batch.index.flip(0)), 1))
