"""How rows become batches on the device.

Sets in memory stay uint8; a batch is cropped and flipped (each row by its own draw) in one gather, normalized and resized on
the device. Image files stream through worker processes that decode, crop and resize; the rest is the same. Evaluation can see
every image in further views, and rows that a frozen backbone has read come back as its features.

Nothing here keeps a running generator: the order follows from (seed, epoch) and what happens to a row from (seed, epoch, row),
or from (seed, view, row). So batch size, workers and a stop in the middle of an epoch change nothing.
"""

from __future__ import annotations

import copy
import functools
import os
import signal
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from dataset import Data, Split
from utils import BadOption, fold_in, uniforms

ORDER, AUGMENT, NOISE, MIX, VIEW, BANK = range(10, 16)  # names of the random streams
CROP_SCALE, CROP_RATIO = (0.08, 1.0), (3 / 4, 4 / 3)
VIEW_SCALE = (0.6, 1.0)  # gentler than training's: a view has to show what the label names
SMALL = 48  # sides up to this are resized by matrix products on a CPU
EVAL_CROP = 0.875  # the share of the shorter side that evaluation sees of an image file


@dataclass(frozen=True)
class Batch:
    """x on the device; target class numbers (B,) or soft targets (B, C); index: row numbers in the split (B,), or (B, 2)
    when two rows were mixed into one; embedded: x is the backbone's features already (B, F)."""

    x: Tensor
    target: Tensor
    index: Tensor
    embedded: bool = False

    def __len__(self) -> int:
        return len(self.x)


class AnyBatches(ABC):
    """Rows of a split in the order of an epoch, a batch at a time; what a row becomes is the subclass's."""

    def __init__(self, split: Split, data: Data, *, batch_size: int, device: torch.device, train: bool, seed: int) -> None:
        self.split, self.data, self.device = split, data, device
        self.batch_size, self.train, self.seed, self.view = batch_size, train, seed, 0
        self.target = torch.from_numpy(split.y).to(device)

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
        return np.random.default_rng(fold_in(self.seed, ORDER, epoch)).permutation(n) if self.train else np.arange(n)

    def parts(self, epoch: int, start: int = 0) -> list[np.ndarray]:
        """Row numbers of each batch."""
        order = self.order(epoch)
        return [order[a:b] for a, b in self.bounds()[start:]]

    @abstractmethod
    def epoch(self, epoch: int = 0, start: int = 0) -> Iterator[Batch]:
        """Epoch `epoch` from batch `start` on."""

    @abstractmethod
    def check_view(self, view: int) -> None:
        """Raises if the rows have no such view."""

    def plain(self) -> Self:
        """All rows in their order, as evaluation sees them: what goes into a bank."""
        return self.seen_as(0)

    def seen_as(self, view: int) -> Self:
        """All rows in their order, as evaluation sees them in this view. Shares the memory of the rows."""
        self.check_view(view)
        made = copy.copy(self)
        made.train, made.view = False, view
        return made


class Batches(AnyBatches):
    """One split as batches. In evaluation, view 0 is the images as they are, view 1 their mirror images where the data set
    may be mirrored, and every other view a random crop of each."""

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
        view: int = 0,
    ) -> None:
        super().__init__(split, data, batch_size=batch_size, device=device, train=train, seed=seed)
        self.check_view(view)
        if view and (train or augment):
            raise ValueError(f"views are for evaluation: with train or augment, view must be 0, got {view}")
        self.size, self.augment, self.noise, self.view = size, augment, noise, view
        self.workers = min(os.cpu_count() or 1, 8) if workers is None else workers
        self.files = data.kind == "files"
        if data.kind != "table":
            shift, scale = (torch.tensor(data.fitted[k], dtype=torch.float32, device=device).view(1, -1, 1, 1) for k in ("mean", "std"))
            self.scale, self.shift, self.std = 1 / (255 * scale), -shift / scale, scale
        # Images that augmentation will crop get their border of zeros once, here.
        self.border = border_of(split.x) if augment and data.kind == "image" else 0
        self.x = None if self.files else self._to_device(torch.from_numpy(split.x))

    def _to_device(self, x: Tensor) -> Tensor:
        return F.pad(x, (self.border,) * 4).to(self.device) if self.border else x.to(self.device)

    def check_view(self, view: int) -> None:
        if view < 0:
            raise ValueError(f"view must be at least 0, got {view}")
        if view and self.data.kind == "table":
            raise BadOption("tta", "needs images: the rows of a table have no views", view)

    def seen_as(self, view: int) -> Self:
        made = super().seen_as(view)
        made.augment, made.border = False, 0
        if self.border:
            assert self.x is not None
            made.x = self.x[:, :, self.border : -self.border, self.border : -self.border]
        return made

    def epoch(self, epoch: int = 0, start: int = 0) -> Iterator[Batch]:
        parts = self.parts(epoch, start)
        streamed = iter(self._stream(epoch, parts)) if self.files else None
        try:
            for rows in parts:
                index = torch.from_numpy(rows).to(self.device)
                x = _arrived(next(streamed)).to(self.device, non_blocking=True) if streamed else self._gather(rows, index, epoch)
                yield Batch(self._finish(self._viewed(x, rows), rows, epoch), self.target[index], index)
        finally:
            streamed = None  # stops the workers now; after an error they would wait for the garbage collector, 5 s each

    @property
    def mirrored(self) -> bool:
        return self.view == 1 and self.data.flip

    def _viewed(self, x: Tensor, rows: np.ndarray) -> Tensor:
        """Images, or the noise that is on them, in this view."""
        if self.mirrored:
            return x.flip(-1)
        if not self.view or self.files:  # image files were cropped by their worker, which has more of the image
            return x
        border = border_of(x)
        draws = uniforms(fold_in(self.seed, VIEW, self.view), rows, 3)  # (B, 3)
        # Padded a batch at a time: there are several views, and the whole set once more for each would not fit.
        return cropped(F.pad(x, (border,) * 4), torch.arange(len(x), device=x.device), draws, border, self.data.flip)

    # ------------------------------------------------ in memory

    def _gather(self, rows: np.ndarray, index: Tensor, epoch: int) -> Tensor:
        assert self.x is not None
        if not self.border:
            return self.x[index]
        return cropped(self.x, index, uniforms(fold_in(self.seed, AUGMENT, epoch), rows, 3), self.border, self.data.flip)

    def _finish(self, x: Tensor, rows: np.ndarray, epoch: int) -> Tensor:
        """Normalize, add noise, resize. Normalizing first is the same (resizing averages) and has fewer pixels to touch."""
        if x.dtype != torch.uint8:
            return x
        x = x.float().mul_(self.scale).add_(self.shift)
        if self.noise:
            # NOTE: test and validation images get the same noise in every epoch, or epochs could not be compared.
            seed = fold_in(self.seed, NOISE, epoch if self.train else 0)
            noise = normals(seed, rows, x[0].numel(), self.device).view_as(x).mul_(self.noise / self.std)
            # NOTE: noise moves with its image: were it fresh in every view, the mean over views would undo it. Crops of image
            # files are the exception, being made of pixels that view 0 never had.
            x = x + self._viewed(noise, rows)
        if self.size and self.size != tuple(x.shape[2:]):
            x = resized(x, self.size)
        return x

    # ------------------------------------------------ image files

    def _stream(self, epoch: int, parts: list[np.ndarray]) -> Iterator[Tensor | BadOption]:
        side = (self.size or self.data.shape[1:])[0]
        crop = Crop(fold_in(self.seed, AUGMENT, epoch), self.data.flip, CROP_SCALE) if self.augment else None
        if self.view and not self.mirrored:
            crop = Crop(fold_in(self.seed, VIEW, self.view), self.data.flip, VIEW_SCALE)
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


class FeatureBatches(AnyBatches):
    """Features that are ready (views, rows, features) as batches. View 0 is the plain one, for the bank and for evaluation;
    training takes the others in turn, or view 0 if it is the only one."""

    def __init__(
        self,
        views: Tensor,
        target: np.ndarray,
        *,
        data: Data,
        batch_size: int,
        device: torch.device,
        train: bool = False,
        seed: int = 0,
    ) -> None:
        if views.ndim != 3 or not len(views) or views.shape[1] != len(target):
            raise ValueError(f"views must be (at least 1, {len(target)} rows, features), got {tuple(views.shape)}")
        super().__init__(Split(views[0].cpu().numpy(), target), data, batch_size=batch_size, device=device, train=train, seed=seed)
        self.views = views.to(device)

    def check_view(self, view: int) -> None:
        if not 0 <= view < len(self.views):
            raise ValueError(f"view must be one of those that were embedded (0 to {len(self.views) - 1}), got {view}")

    def epoch(self, epoch: int = 0, start: int = 0) -> Iterator[Batch]:
        further = len(self.views) - 1
        view = self.view if not self.train else 1 + epoch % further if further else 0
        for rows in self.parts(epoch, start):
            index = torch.from_numpy(rows).to(self.device)
            yield Batch(self.views[view][index], self.target[index], index, embedded=True)


# ---------------------------------------------------------------- image files


class Crop(NamedTuple):
    seed: int
    flip: bool
    scale: tuple[float, float]


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
        crop = self.crop
        draws = uniforms(crop.seed if crop else 0, [row], 5)[0]
        box = random_box(image.size, draws, crop.scale) if crop else center_box(image.size)
        image = image.resize((self.side, self.side), Image.Resampling.BILINEAR, box=box, reducing_gap=3.0)
        if crop and crop.flip and draws[4] < 0.5:
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


# ---------------------------------------------------------------- pixels


def border_of(x: Tensor | np.ndarray) -> int:
    """Pixels by which a crop may be off."""
    return max(1, x.shape[-1] // 8)


def cropped(x: Tensor, index: Tensor, draws: np.ndarray, border: int, flip: bool) -> Tensor:
    """Rows `index` of x (N, C, H + 2 borders, W + 2 borders), each cut to (H, W) and mirrored by its own draws (B, 3), in one gather."""
    height, width = x.shape[2] - 2 * border, x.shape[3] - 2 * border
    top, left = (torch.from_numpy((draws[:, i] * (2 * border + 1)).astype(np.int64)) for i in (0, 1))
    ys = top[:, None] + torch.arange(height)  # (B, H)
    xs = left[:, None] + torch.arange(width)  # (B, W)
    if flip:
        xs = torch.where(torch.from_numpy(draws[:, 2] < 0.5)[:, None], xs.flip(1), xs)
    channels = torch.arange(x.shape[1], device=x.device)[None, :, None, None]
    ys, xs = ys.to(x.device)[:, None, :, None], xs.to(x.device)[:, None, None, :]
    return x[index[:, None, None, None], channels, ys, xs]  # (B, C, H, W)


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
    target = keep * soft + (1 - keep) * soft.flip(0)
    return replace(batch, x=x, target=target, index=torch.stack((batch.index, batch.index.flip(0)), 1))
