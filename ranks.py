"""The processes that train one model together, as torchrun starts them, or the only one there is.

Whoever works with others asks `here()`: for its part of the rows, for what all parts make together, for what the first one does alone.
`Alone` gives the plain answers, so that nobody has to ask how many processes there are.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

from utils import SPEAKS, BadOption, Halt, Stopped, processes, say, shortened

T = TypeVar("T")
Blocks = Iterable[tuple[Tensor, Tensor]]
GRACE = 5.0  # seconds in which those that are left find each other


class Alone:
    """One process."""

    rank, world = 0, 1

    # ------------------------------------------------ rows

    def part(self, count: int) -> slice:
        """Of rows that are looked at: as many for each process, one after the other."""
        return slice(count * self.rank // self.world, count * (self.rank + 1) // self.world)

    def pairs(self, count: int) -> np.ndarray:
        """Of a batch that is trained on: whole pairs of place i and place count - 1 - i, which MixUp mixes."""
        place = np.arange(count)
        return place[np.minimum(place, count - 1 - place) % self.world == self.rank]

    def gathered(self, parts: Iterable[Tensor]) -> Tensor:
        """The rows of all parts, in order."""
        return torch.cat(list(parts))

    def blocks(self, blocks: Blocks) -> Blocks:
        """Blocks of (row numbers, rows) of all processes."""
        return blocks

    def exchanged(self, parts: Sequence[Tensor], counts: Sequence[int] | None = None) -> list[Tensor]:
        """Rows for each process, which get there; and those that came from each. `counts`: how many come, where that is known."""
        return list(parts)

    def sum(self, x: Tensor) -> Tensor:
        """Over all processes."""
        return x

    # ------------------------------------------------ a step

    def wrapped(self, module: nn.Module) -> nn.Module:
        """A module from a batch to its loss; the gradients that it leaves will be the mean over the processes."""
        return module

    def during(self, module: nn.Module, *, counts: bool, last: bool) -> AbstractContextManager[Any]:
        """Around forward and backward of a batch. It `counts`, or only stands in for none; after the `last` of a group gradients meet."""
        return contextlib.nullcontext()

    def joined(self, *parts: Tensor) -> tuple[Tensor, ...]:
        """Rows of a batch, of all processes; each gets the gradient of its own."""
        return parts

    def total(self, count: int) -> int:
        """Rows of a batch, on all processes."""
        return count

    def summed(self, values: dict[str, float]) -> dict[str, float]:
        """Sums over all processes."""
        return values

    def largest(self, number: int) -> int:
        """Of the numbers of all processes."""
        return number

    # ------------------------------------------------ what one does for all

    def on_first(self, call: Callable[[], T]) -> T:
        """What the first process finds, for all; so are its mistakes."""
        return call()

    def only_first(self, call: Callable[[], T], meanwhile: Callable[[], T]) -> T:
        """What the first process does at the end, when nobody waits for it, and what the others do."""
        return call()


class Lost(Halt):
    """Another process has ended, or hangs."""


class Ranks(Alone):
    """One process of several: gloo between CPUs, nccl between GPUs."""

    def __init__(self, seconds: float) -> None:
        cuda = torch.cuda.is_available()
        if cuda:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        self.talks = "nccl" if cuda else "gloo"
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timedelta(seconds=seconds))
        self.rank, self.world, self.seconds = dist.get_rank(), dist.get_world_size(), seconds
        self.store = dist.distributed_c10d._get_default_store()
        self.counts, self.has_norms = True, False

    # ------------------------------------------------ rows

    def gathered(self, parts: Iterable[Tensor]) -> Tensor:
        found = list(parts)
        own = torch.cat(found) if found else None
        told: list[Any] = [None] * self.world
        with self.listening():
            dist.all_gather_object(told, None if own is None else (len(own), own.shape[1:], own.dtype, own.device.type))
            shape, dtype, device = next(like for like in told if like is not None)[1:]
            counts = [like[0] if like else 0 for like in told]
            rooms = [torch.zeros(max(counts), *shape, dtype=dtype, device=device) for _ in counts]
            padded = torch.zeros_like(rooms[0])
            if own is not None:
                padded[: len(own)] = own
            dist.all_gather(rooms, padded)
        return torch.cat([room[:count] for room, count in zip(rooms, counts, strict=True)])

    def blocks(self, blocks: Blocks) -> Blocks:
        own = list(blocks)
        return [(self.gathered(numbers for numbers, _ in own), self.gathered(rows for _, rows in own))]

    def exchanged(self, parts: Sequence[Tensor], counts: Sequence[int] | None = None) -> list[Tensor]:
        sent = [len(part) for part in parts]
        rows = torch.cat(list(parts))
        with self.listening():
            if counts is None:
                told = torch.empty(self.world, dtype=torch.long)
                dist.all_to_all_single(told, torch.tensor(sent))
                counts = told.tolist()
            found = rows.new_empty(sum(counts), *rows.shape[1:])
            dist.all_to_all_single(found, rows, list(counts), sent)
        return list(found.split(list(counts)))

    # ------------------------------------------------ a step

    def wrapped(self, module: nn.Module) -> nn.Module:
        self.has_norms = any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in module.modules())
        for harmless in ("Grad strides do not match", "`broadcast_buffers` is deprecated"):  # of a class token; for another name
            warnings.filterwarnings("ignore", harmless)
        return DistributedDataParallel(module, broadcast_buffers=False)  # buffers are alike: statistics are of all rows

    @contextlib.contextmanager
    def during(self, module: nn.Module, *, counts: bool, last: bool) -> Iterator[None]:
        assert isinstance(module, DistributedDataParallel)
        self.counts = counts
        shared = SharedStatistics(self) if self.has_norms else contextlib.nullcontext()
        with self.listening(), contextlib.nullcontext() if last else module.no_sync(), shared:
            yield

    def joined(self, *parts: Tensor) -> tuple[Tensor, ...]:
        own = len(parts[0]) if self.counts else 0
        counts = [0] * self.world
        counts[self.rank] = own
        counts = self.sum(torch.tensor(counts)).tolist()
        start = sum(counts[: self.rank])
        around = [(part.new_zeros(start, *part.shape[1:]), part.new_zeros(sum(counts) - start - own, *part.shape[1:])) for part in parts]
        return tuple(self.sum(torch.cat([before, part[:own], after])) for part, (before, after) in zip(parts, around, strict=True))

    def total(self, count: int) -> int:
        return int(self.sum(torch.tensor(count * self.counts)))

    def summed(self, values: dict[str, float]) -> dict[str, float]:
        return dict(zip(values, self.sum(torch.tensor(list(values.values()), dtype=torch.float64)).tolist(), strict=True))

    def largest(self, number: int) -> int:
        found = torch.tensor(number)
        with self.listening():
            dist.all_reduce(found, dist.ReduceOp.MAX)
        return int(found)

    def sum(self, x: Tensor) -> Tensor:
        with self.listening():
            found: Tensor = _Sum.apply(x)
        return found

    # ------------------------------------------------ what one does for all

    def on_first(self, call: Callable[[], T]) -> T:
        said: list[Any] = [None, None]
        if self.rank == 0:
            try:
                said[0] = call()
            except (BadOption, Halt, OSError) as error:
                said[1] = error if isinstance(error, BadOption) else str(error)
                self._broadcast(said)
                raise
        self._broadcast(said)
        if said[1] is not None:
            raise said[1] if isinstance(said[1], BadOption) else Halt(said[1], 1)
        found: T = said[0]
        return found

    def _broadcast(self, said: list[Any]) -> None:
        with self.listening():
            dist.broadcast_object_list(said, 0, device=torch.device("cpu"))

    def only_first(self, call: Callable[[], T], meanwhile: Callable[[], T]) -> T:
        return call() if self.rank == 0 else meanwhile()

    # ------------------------------------------------ when others end

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """While others are needed: where they can't be reached, says which."""
        try:
            yield
        except (RuntimeError, dist.DistError) as error:
            if not any(word in str(error) for word in ("gloo", "Connection", "Timed out", "timed out", "NCCL", "closed")):
                raise
            raise Lost(self._who_is_lost(str(error)), 1) from None

    def leave(self, error: BaseException) -> None:
        """What ends this process, for the others. What only it has met, it says itself."""
        if isinstance(error, Lost):
            return
        words = shortened(f"{type(error).__name__}: {error}", 200)
        with contextlib.suppress(RuntimeError):
            self.store.set(f"ended/{self.rank}", words)
            if self.rank and not isinstance(error, Stopped | KeyboardInterrupt):
                end = time.monotonic() + GRACE / 2
                while time.monotonic() < end and not self._told("ended", 0):
                    time.sleep(0.05)
                SPEAKS[0] = self._told("ended", 0) != words

    def _told(self, what: str, rank: int) -> str:
        """What a process has left for the others; "" if nothing."""
        return self.store.get(f"{what}/{rank}").decode() if self.store.check([f"{what}/{rank}"]) else ""

    def _who_is_lost(self, error: str) -> str:
        """NOTE: who hangs does not know that it does. So those that are left call each other, and who does not answer is the one."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher ends all when one has ended; here it is said which
        dist.distributed_c10d._abort_process_group()  # whoever waits for this process is freed, to answer too
        self.store.set(f"left/{self.rank}", "1")
        others, end = [rank for rank in range(self.world) if rank != self.rank], time.monotonic() + GRACE
        while time.monotonic() < end and not all(self._told("left", rank) or self._told("ended", rank) for rank in others):
            time.sleep(0.1)
        lost = [rank for rank in others if not self._told("left", rank)]
        why = "; ".join(filter(None, (self._told("ended", rank) for rank in lost)))
        why = why or f"it ended, or gave no sign for {self.seconds:g} s (--timeout): {shortened(error, 120)}"
        line = f"error: lost process {', '.join(map(str, lost))} of {self.world} ({why}); --resume goes on from the last checkpoint"
        if not lost:
            line = f"error: the {self.world} processes lost touch for {self.seconds:g} s (--timeout); all of them are still there"
        SPEAKS[0] = self.rank == min(set(range(self.world)) - set(lost))  # the first may be the one that is lost
        say(line)
        SPEAKS[0] = False  # all else that is said of this end is a consequence
        return line


class _Sum(torch.autograd.Function):
    """The sum over the processes. Each has the whole of it, so the gradients of all meet, too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        found = x.detach().clone()
        dist.all_reduce(found)
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        found = gradients[0].clone()
        dist.all_reduce(found)
        return found


class SharedStatistics(TorchFunctionMode):
    """BatchNorm in training, of whatever module, takes mean and variance of the rows on all processes."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self.ranks = ranks

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.batch_norm and kwargs and kwargs.get("training"):
            return self.batch_norm(*args, **kwargs)
        return func(*args, **(kwargs or {}))

    def batch_norm(
        self,
        x: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = True,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        """NOTE: mean first, then squares of what is left: of squares alone, a large mean leaves no digits for the variance."""
        axes, shape, counts = [0, *range(2, x.ndim)], [1, -1] + [1] * (x.ndim - 2), float(self.ranks.counts)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        rows = wide.new_full((1,), x.numel() / x.shape[1])
        sums = self.ranks.sum(torch.cat([wide.sum(axes), rows]) * counts)
        count = sums[-1].detach()
        mean = sums[:-1] / count
        away = wide - mean.view(shape)
        var = self.ranks.sum(away.square().sum(axes) * counts) / count
        if running_mean is not None and running_var is not None:
            with torch.no_grad():
                running_mean.lerp_(mean.to(running_mean.dtype), momentum)
                running_var.lerp_((var * (count / (count - 1))).to(running_var.dtype), momentum)
        found = away * (var + eps).rsqrt().view(shape)
        if weight is not None and bias is not None:
            # NOTE: times 1, or the gradient of a bias would be a view of that of a single pixel, shared with a parallel layer's, and both
            # would be clipped in the same memory.
            found = found * weight.view(shape) + bias.view(shape) * 1
        return found.to(x.dtype)


_here: list[Alone] = [Alone()]


def here() -> Alone:
    """This process among those of its run."""
    return _here[-1]


@contextlib.contextmanager
def together(seconds: float) -> Iterator[None]:
    """The processes that torchrun has started, from the first word to the last. The first speaks for all."""
    if processes() == 1 or here().world > 1:
        yield
        return
    ranks = Ranks(seconds)
    SPEAKS[0] = ranks.rank == 0
    say(f"processes: {ranks.world} ({ranks.talks}; --batch_size is that of all together)")
    _here.append(ranks)
    try:
        yield
    except BaseException as error:
        ranks.leave(error)
        raise
    finally:
        _here.pop()
        gc.collect()  # NOTE: what still holds the group, such as DistributedDataParallel, would abort when it ends
        if dist.is_initialized():
            dist.destroy_process_group()
