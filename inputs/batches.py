"""How rows become batches on the device.

Sets in memory stay uint8; a batch is cropped and flipped (each row by its own draw) in one gather, normalized and resized on
the device. Image files stream through worker processes that decode, crop and resize; the rest is the same. Evaluation can see
every image in further views, and rows that a frozen backbone has read come back as its features.

Nothing here keeps a running generator: the order follows from (seed, epoch) and what happens to a row from (seed, epoch, row),
or from (seed, view, row). So batch size, workers and a stop in the middle of an epoch change nothing.
"""

from __future__ import annotations

import copy
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from inputs.augmentation import border_of, cropped, normals, resized
from inputs.images import CROP_SCALE, VIEW_SCALE, Crop, arrived, stream
from inputs.rows import Batch, Data, Split
from ranks import here
from utils import BadOption, fold_in, uniforms

ORDER, AUGMENT, NOISE, MIXUP, VIEW, BANK = range(10, 16)  # names of the random streams


class Part(NamedTuple):
    """The rows of a batch that this process reads."""

    rows: np.ndarray
    whole: int  # rows of the batch on all processes
    counts: bool = True  # whether they are its own, or stand in for none

    @staticmethod
    def of(rows: np.ndarray) -> Part:
        own = rows[here().pairs(len(rows))]
        return Part(own if len(own) else rows[:1], len(rows), len(own) > 0)


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

    def parts(self, epoch: int, start: int = 0) -> list[Part]:
        """The rows of each batch that this process reads; in evaluation, batches of its part of all rows."""
        order = self.order(epoch)
        if self.train:
            return [Part.of(order[a:b]) for a, b in self.bounds()[start:]]
        own, most = order[here().part(len(order))], -(-len(order) // here().world)  # each reads as many batches as who has most rows
        found = [own[i : i + self.batch_size] for i in range(start * self.batch_size, most, self.batch_size)]
        return [Part(rows if len(rows) else order[:1], len(rows), len(rows) > 0) for rows in found]

    @abstractmethod
    def epoch(self, epoch: int = 0, start: int = 0) -> Iterator[Batch]:
        """Epoch `epoch` from batch `start` on."""

    # ------------------------------------------------ what a model makes of them

    def answers(self, answer: Callable[[Batch], Tensor]) -> Tensor:
        """What `answer` makes of each batch, of all rows in their order. Each of several processes answers for its part."""
        return here().gathered(answer(batch)[: len(batch)] for batch in self.epoch())

    def blocks(self, answer: Callable[[Batch], Tensor], epoch: int = 0) -> Iterable[tuple[Tensor, Tensor]]:
        """The same, block by block, with the row numbers: in whatever order the epoch has them."""
        return here().blocks(self.own_blocks(answer, epoch))

    def own_blocks(self, answer: Callable[[Batch], Tensor], epoch: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Only those that this process answers for. There is a first one also where it has no row."""
        for batch in self.epoch(epoch):
            yield batch.index[: len(batch)].cpu(), answer(batch)[: len(batch)]

    # ------------------------------------------------ how they are seen

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
    ) -> None:
        super().__init__(split, data, batch_size=batch_size, device=device, train=train, seed=seed)
        self.size, self.augment, self.noise = size, augment, noise
        self.workers = min(os.cpu_count() or 1, 8) if workers is None else workers
        self.files = data.kind == "files"
        if data.kind != "table":
            shift, scale = (torch.tensor(data.fitted[k], dtype=torch.float32, device=device).view(1, -1, 1, 1) for k in ("mean", "std"))
            self.scale, self.shift, self.std = 1 / (255 * scale), -shift / scale, scale
        self.x = None if self.files else torch.from_numpy(split.x).to(self.device)

    def check_view(self, view: int) -> None:
        if view < 0:
            raise ValueError(f"view must be at least 0, got {view}")
        if view and self.data.kind == "table":
            raise BadOption("tta", "needs images: the rows of a table have no views", view)

    def seen_as(self, view: int) -> Self:
        made = super().seen_as(view)
        made.augment = False
        return made

    def epoch(self, epoch: int = 0, start: int = 0) -> Iterator[Batch]:
        parts = self.parts(epoch, start)
        streamed = iter(self._stream(epoch, [part.rows for part in parts])) if self.files else None
        try:
            for rows, whole, counts in parts:
                index = torch.from_numpy(rows).to(self.device)
                x = arrived(next(streamed)).to(self.device, non_blocking=True) if streamed else self._gather(rows, index, epoch)
                x = self._finish(self._viewed(x, rows), rows, epoch)
                yield Batch(x, self.target[index], index, whole=whole, counts=counts)
        finally:
            streamed = None  # stops the workers now; after an error they would wait for the garbage collector, 5 s each

    def prepared(self, x: Tensor, rows: np.ndarray) -> Tensor:
        """Rows that are not of the split, uint8 images or encoded rows of a table, as the model reads them: as if the split had them
        at `rows`."""
        return self._finish(self._viewed(x.to(self.device), rows), rows, 0)

    @property
    def mirrored(self) -> bool:
        return self.view == 1 and self.data.flip

    def _viewed(self, x: Tensor, rows: np.ndarray) -> Tensor:
        """Images, or the noise that is on them, in this view."""
        if self.mirrored:
            return x.flip(-1)
        if not self.view or self.files:  # image files were cropped by their worker, which has more of the image
            return x
        return self._cropped(x, uniforms(fold_in(self.seed, VIEW, self.view), rows, 3))

    def _cropped(self, x: Tensor, draws: np.ndarray) -> Tensor:
        """Padded a batch at a time: with a border, all images would take up to half as much memory again."""
        border = border_of(x)
        return cropped(F.pad(x, (border,) * 4), torch.arange(len(x), device=x.device), draws, border, self.data.flip)

    # ------------------------------------------------ in memory

    def _gather(self, rows: np.ndarray, index: Tensor, epoch: int) -> Tensor:
        assert self.x is not None
        x = self.x[index]
        crops = self.augment and self.data.kind == "image"
        return self._cropped(x, uniforms(fold_in(self.seed, AUGMENT, epoch), rows, 3)) if crops else x

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
        return stream(self.split.x, parts, side=side, crop=crop, workers=self.workers, pinned=self.device.type == "cuda")


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
        copies: np.ndarray | None = None,
    ) -> None:
        if views.ndim != 3 or not len(views) or views.shape[1] != len(target):
            raise ValueError(f"views must be (at least 1, {len(target)} rows, features), got {tuple(views.shape)}")
        split = Split(views[0].cpu().numpy(), target, copies)
        super().__init__(split, data, batch_size=batch_size, device=device, train=train, seed=seed)
        self.views = views.to(device)

    def check_view(self, view: int) -> None:
        if not 0 <= view < len(self.views):
            raise ValueError(f"view must be one of those that were embedded (0 to {len(self.views) - 1}), got {view}")

    def epoch(self, epoch: int = 0, start: int = 0) -> Iterator[Batch]:
        further = len(self.views) - 1
        view = self.view if not self.train else 1 + epoch % further if further else 0
        for rows, whole, counts in self.parts(epoch, start):
            index = torch.from_numpy(rows).to(self.device)
            yield Batch(self.views[view][index], self.target[index], index, embedded=True, whole=whole, counts=counts)


class Sets(NamedTuple):
    """The rows of a run."""

    train: AnyBatches
    val: AnyBatches | None
    test: AnyBatches
