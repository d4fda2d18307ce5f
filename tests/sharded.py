"""A bank in parts beside a whole one, in the same processes: `torchrun --nproc-per-node N -m tests.sharded` says where they differ.

Each process asks for rows of its own, as many as it likes (some for none); the whole bank, which each has here, says what is right.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from classifiers.bank import Bank, Neighbors
from classifiers.class_means import ClassMeans
from classifiers.sharded_bank import ShardedBank
from ranks import here, together
from training.checkpoint import pieces_of

CLASSES = 3


def drawn(rows: int, dim: int, seed: int) -> Tensor:
    return torch.randn(rows, dim, generator=torch.Generator().manual_seed(seed))


def both(rows: Tensor, **options: Any) -> tuple[Bank, ShardedBank]:
    """A bank of all rows, and in parts."""
    labels, ids, part = torch.arange(len(rows)) % CLASSES, torch.arange(len(rows)), here().part(len(rows))
    whole, own = Bank(rows.shape[1], **options), Bank(rows.shape[1], **options)
    whole.add(rows, labels, ids)
    own.add(rows[part], labels[part], ids[part])
    return whole, ShardedBank(own, labels)


class Compared:
    """What was compared, and what differed, to the last bit."""

    def __init__(self) -> None:
        self.count, self.different = 0, list[str]()

    def equal(self, a: Tensor, b: Tensor, what: str) -> None:
        self.count += 1
        if a.dtype != b.dtype or not torch.equal(a, b):
            self.different.append(f"process {here().rank}: {what}: {a.tolist()} {b.tolist()}")

    def found(self, one: Neighbors, parts: Neighbors, what: str) -> None:
        for name in ("distance", "index", "label", "embedding", "mask"):
            self.equal(getattr(one, name), getattr(parts, name), f"{what}: {name}")


def cases() -> dict[str, Tensor]:
    tied = drawn(61, 7, 1)
    tied[torch.randperm(61, generator=torch.Generator().manual_seed(2))[:40]] = tied[0].clone()  # 40 equal rows, on all processes
    far = drawn(97, 5, 3) * 1e-4 + 100  # closer together than float32 products can tell
    sphere = F.normalize(drawn(89, 11, 8))  # as far from the first three, to float32, in an order that only float64 knows
    sphere[:3] = 0
    grid = torch.cartesian_prod(*[torch.arange(3.0)] * 4)  # (81, 4): many rows equally far from a query
    return {
        "random": drawn(101, 13, 4),
        "40 equal": tied,
        "far from the origin": far,
        "sphere": sphere,
        "grid": grid,
        "unit": F.normalize(drawn(53, 3, 5)),
    }


def searches(same: Compared) -> None:
    rank, world = here().rank, here().world
    for name, rows in cases().items():
        copies = torch.tensor([min(torch.arange(len(rows))[(rows == row).all(1)]) for row in rows])
        for options in ({}, {"kind": "ip"}, {"copies": copies}):
            whole, parts = both(rows, **options)
            part = len(rows) // world
            for k in (1, 4, part, min(part + 1, len(rows)), len(rows)):
                what = f"{name}, {list(options)}, k {k}"
                queries = torch.cat([rows[rank::5], drawn(3 * rank, rows.shape[1], rank) + rows.mean(0)])
                same.found(whole.search(queries, k), parts.search(queries, k), what)
                own = torch.arange(len(rows))[rank::5]  # without themselves, and with a second row that is left out
                pairs = torch.stack((own, own.flip(0)), 1)
                for exclude in (own, pairs):
                    one, two = (bank.search(rows[own], k, exclude) for bank in (whole, parts))
                    same.found(one, two, f"{what}, without {exclude.ndim}")
                few = own[: 0 if rank else 2]  # most have nothing to ask
                same.found(whole.search(rows[few], k, few), parts.search(rows[few], k, few), f"{what}, few queries")


def small_parts(same: Compared) -> None:
    """Fewer rows than neighbors in a part, and fewer than processes in all."""
    for count in (2, 5, 7):
        whole, parts = both(drawn(count, 3, count))
        queries = drawn(4, 3, here().rank)
        same.found(whole.search(queries, count), parts.search(queries, count), f"{count} rows")
        one = torch.full((4,), 1)
        same.found(whole.search(queries, count, one), parts.search(queries, count, one), f"{count} rows without one")


def others(same: Compared) -> None:
    """What is taken, summed, sampled, held and kept."""
    rows = drawn(101, 13, 6)
    whole, parts = both(rows)
    index = torch.tensor([[3, 100, -1], [3, 0, 101]])[:, : 3 - here().rank]
    for a, b in zip(whole.take(index), parts.take(index), strict=True):
        same.equal(a, b, "taken")
    one, two = (ClassMeans(bank, CLASSES).cosine(rows[:7], torch.arange(7)) for bank in (whole, parts))
    same.equal(torch.ones(()), (one - two).abs().max().lt(1e-6).float(), f"class means {(one - two).abs().max()}")
    for a, b in zip(whole.every(4), parts.every(4), strict=True):
        same.equal(a, b, "every fourth")
    torch.manual_seed(0)
    sample = whole.sample(31)
    torch.manual_seed(0)
    some = parts.sample(31)
    assert len(some) == 31
    same.found(sample.search(rows[:9], 31), some.search(rows[:9], 31), "a sample")
    index = torch.arange(here().rank, 60)[None]
    held = parts.holding(index)
    assert not held.in_parts
    assert len(held) == index.numel()
    same.equal(held.take(index)[0], whole.take(index)[0], "held")
    turns = parts.turns(29, 5)
    assert here().largest(len(turns)) == len(turns)
    same.equal(parts.of_all([rows[at] for at in turns]), rows[:29], "turns")


def in_pieces(same: Compared) -> None:
    rows = drawn(101, 13, 7)
    whole, parts = both(rows, copies=torch.arange(101) // 2 * 2)
    pieces, facts = pieces_of(parts)
    pieces.size = 17  # type: ignore[attr-defined]
    found = [pieces[name] for name in pieces]
    kept = {name: torch.cat([piece[name] for piece in found if name in piece]) for name in found[0]}
    if len(kept["embedding"]):
        again = Bank.unpack(kept, facts["bank"])
        same.found(whole.search(rows, 9, torch.arange(101)), again.search(rows, 9, torch.arange(101)), "from pieces")
    assert (len(kept["embedding"]) == 101) == here().only_first(lambda: True, bool)


def approximate(same: Compared) -> None:
    """An index over each part finds what `--recall` asks for; all that it finds has its exact distance."""
    rows = F.normalize(drawn(1201, 7, 9))
    parts, flat = both(rows, kind="ivf")[1], Bank(7, kind="flat")
    flat.add(rows, torch.zeros(1201, dtype=torch.long))
    queries = rows[here().rank :: 7]
    near = parts.search(queries, 5)
    share = (near.distance <= flat.search(queries, 5).distance[:, -1:]).double().mean()
    same.equal(torch.tensor(True), share > 0.97, f"recall {share:.3f}")
    torch.testing.assert_close((near.embedding - queries[:, None]).square().sum(2), near.distance, rtol=1e-5, atol=1e-6)


def compared() -> dict[str, float]:
    """How much was compared, and how much differed, on all processes; what differed is printed."""
    same = Compared()
    for compare in (searches, small_parts, others, in_pieces, approximate):
        compare(same)
    print(*same.different[:5], sep="\n")
    return here().summed({"compared": float(same.count), "different": float(len(same.different))})


if __name__ == "__main__":
    torch.set_num_threads(1)
    with together(60):
        print(compared())
