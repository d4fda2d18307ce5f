"""Features of a frozen backbone: computed once for each view of each row, kept on disk, and served as batches."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from inputs import store
from inputs.batches import Batches, FeatureBatches
from inputs.rows import Batch
from ranks import here
from utils import BadOption, say


@dataclass(frozen=True)
class Reading:
    """What features follow from that neither the weights nor the batches tell."""

    model: str
    layer: tuple[Any, ...]  # name and options of the layers, those that leave no trace in the weights too
    use_amp: bool


class Features:
    """Features that `embed` makes of batches, kept (if there is a folder) with their checksum under the hash of all that they
    follow from. `weights` is the `digest_of` the backbone's. `also`: where they may lie besides; `owner`: the run that the folder is in."""

    def __init__(
        self,
        embed: Callable[[Batch], Tensor],
        weights: str,
        reading: Reading,
        folder: Path | None,
        also: tuple[Path, ...] = (),
        owner: store.Owner | None = None,
    ) -> None:
        self.embed, self.weights, self.reading, self.folder, self.also, self.owner = embed, weights, reading, folder, also, owner

    def batches(self, part: str, images: Batches, *, views: int = 1, epochs: int = 0) -> FeatureBatches:
        """The rows in `views` views of evaluation, and as training sees them in its first `epochs` epochs."""
        found = [self.of(f"{part}-view-{v}" if v else part, images.seen_as(v)) for v in range(views)]
        found += [self.of(f"{part}-augmented-{e}", images, found[0], e) for e in range(epochs)]
        return FeatureBatches(
            torch.stack(found),
            images.split.y,
            data=images.data,
            batch_size=images.batch_size,
            device=images.device,
            train=images.train,
            seed=images.seed,
            copies=images.split.copies,
        )

    def of(self, name: str, images: Batches, plain: Tensor | None = None, epoch: int = 0) -> Tensor:
        """From disk if they are there, else computed and put there. `plain` stands where an epoch leaves a row out."""
        key, rows = f"{name}-{self.key(images, epoch if plain is not None else images.view)}", len(images.split)
        folder = self.folder and self.folder / key
        with contextlib.ExitStack() as stack:
            read: list[Tensor] = []
            if (place := here().on_first(lambda: self._place(folder, key, rows, read, stack))) is not None:
                found = read[0] if read else _kept(place, rows)
                assert found is not None
                return found.to(images.device)
            say(f"features: {rows:,} rows of {name} through the backbone")
            computed = self._computed(images, plain, epoch)  # (N, F)
            if folder is not None:
                here().on_first(lambda: store.save(folder, {"features": {"x": computed}}, {"rows": rows, "of": name}, self.owner))
        return computed.to(images.device)

    def _place(self, folder: Path | None, key: str, rows: int, read: list[Tensor], stack: contextlib.ExitStack) -> Path | None:
        """Where the features are, which are then `read`; None if they must be computed. Until the stack is closed nobody else does."""
        for place in (*([folder] if folder else []), *(p / key for p in self.also)):
            if (found := _kept(place, rows)) is not None:
                read.append(found)
                return place
        # Of several runs that need the same, one computes and the others wait. A run's own folder has one writer anyway.
        if folder is not None and self.owner is None:
            stack.enter_context(one_at_a_time(folder))
            if (found := _kept(folder, rows)) is not None:
                read.append(found)
                return folder
        return None

    @torch.no_grad()
    def _computed(self, images: Batches, plain: Tensor | None, epoch: int) -> Tensor:
        if plain is None:
            return images.answers(self.embed)
        found = plain.clone()
        for numbers, rows in images.blocks(self.embed, epoch):
            found[numbers] = rows
        return found

    def key(self, images: Batches, view: int) -> str:
        """Of the weights, the rows, and how they are read. Another order or type of what goes in makes every cache stale."""
        split, reading = images.split, self.reading
        rows = "\n".join(stamp(path) for path in split.x) if images.files else np.ascontiguousarray(split.x)
        random = images.noise > 0 or view > 0 or images.augment
        read = (reading.model, *reading.layer, images.size, images.noise, reading.use_amp)
        read += (images.train, images.augment, images.data.flip, view, images.seed * random)
        fitted = sorted(images.data.fitted.items())
        return digest_of(self.weights, rows, repr(read), repr(fitted), repr(split.x.shape))[:16]


def _kept(folder: Path, rows: int) -> Tensor | None:
    """Features of so many rows from disk, if they are there and whole."""
    if not (folder / store.INDEX).exists():
        return None
    try:
        x = store.load(folder)[0].get("features", {}).get("x")
        if x is None or x.dim() != 2 or len(x) != rows or not x.is_floating_point():
            raise BadOption("feature_cache", "does not hold the features of these rows", str(folder))
    except BadOption as error:
        say(f"features: computed anew; the cache is damaged ({error.rule})")
        return None
    return x


@contextlib.contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Waits until no other process is in here for the same folder. The system lets go of a lock whose process died."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = folder.with_name(f"{folder.name}.lock")
    with lock.open("a") as file:
        with contextlib.suppress(ImportError, OSError):  # a system, or a file system, without locks: the work is done twice
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        yield
        lock.unlink(missing_ok=True)


def stamp(path: str) -> str:
    """An image file's name and when it was written."""
    return f"{path} {Path(path).stat().st_mtime_ns}"


def digest_of(*parts: Tensor | np.ndarray | str) -> str:
    digest = hashlib.sha256()
    for part in parts:
        if isinstance(part, str):
            digest.update(part.encode())
        else:
            digest.update(np.ascontiguousarray(part.detach().cpu().numpy() if isinstance(part, Tensor) else part).data)
    return digest.hexdigest()
