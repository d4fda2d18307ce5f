"""The bank: embeddings, labels and a FAISS index; it answers "the k nearest, but not yourself".

The flat kinds are exact. FAISS proposes a few rows more than asked for; their distances are computed anew, without cancellation,
and a bound on FAISS's rounding tells for which queries no other row can belong among the k. Where it cannot tell (many equal
distances, say) more rows are proposed. The other kinds are as good as their proposals; the order among those is exact too.
"""

from __future__ import annotations

import math
import os
import threading
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from classifiers.index import (
    AUTO_FLAT_ROWS,
    BLOCK,
    MISSING,
    ROUNDING,
    Neighbors,
    Proposer,
    blocks,
    check_kind,
    checked_rows,
    integers,
    kept,
    load_faiss,
    rank,
    recipe,
    scan,
    some_of,
    squared_lengths,
)
from inputs import store
from utils import BadOption, one_of, say

EVICTIONS = ("fifo", "class-balanced")
FACTS = ("dim", "kind", "cap", "evict", "_next_id", "_next_birth")
SLACK = 4  # rows proposed beyond those asked for
PROPOSALS = 1 << 22  # of one FAISS call, at most: 48 MB


_banks: weakref.WeakSet[Bank] = weakref.WeakSet()


def _in_child() -> None:
    for bank in list(_banks):  # another thread of the parent may have held the lock
        bank._lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


class Bank:
    """Embeddings with labels and ids. An id is a row's number in the training split, or assigned; it never changes.

    The properties `embeddings`, `labels` and `ids` show what is there now: rows in no particular order once some were evicted.
    What was computed in inference mode may be added: the bank's own tensors, and what it returns, are ordinary ones.
    """

    def __init__(self, dim: int, *, kind: str = "auto", cap: int | None = None, evict: str = "fifo") -> None:
        if dim < 1:
            raise BadOption("embed_dim", "must be at least 1", dim)
        if cap is not None and cap < 1:
            raise BadOption("cap", "must be at least 1", cap)
        check_kind(kind, dim)
        self.dim, self.kind, self.cap, self.evict = dim, kind, cap, one_of("evict", evict, EVICTIONS)
        self._size = self._next_id = self._next_birth = 0
        self._rows = torch.empty(0, dim)  # each of these has room to grow: only the first _size slots are rows
        self._labels, self._ids, self._births = (torch.empty(0, dtype=torch.long) for _ in range(3))
        self._forget()
        self._lock = threading.RLock()  # FAISS gives wrong answers, or crashes, when searched while rows are added
        _banks.add(self)

    def _forget(self) -> None:
        """Everything that is made of the rows."""
        self._center: Tensor | None = None
        self._shifted: Tensor | None = None  # rows minus center, where that is needed
        self._lengths: Tensor | None = None  # squared, of what FAISS sees
        self._centered_at = 0
        self._proposer: Proposer | None = None
        self._sorted: tuple[Tensor, Tensor] | None = None

    def __len__(self) -> int:
        return self._size

    def __getstate__(self) -> dict[str, Any]:
        """For copies and other processes: neither lock nor index, which is built anew."""
        return {k: v for k, v in vars(self).items() if k not in ("_lock", "_proposer")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.RLock(), _proposer=None)
        _banks.add(self)

    @property
    def embeddings(self) -> Tensor:
        return self._rows[: self._size]

    @property
    def labels(self) -> Tensor:
        return self._labels[: self._size]

    @property
    def ids(self) -> Tensor:
        return self._ids[: self._size]

    def require_classes(self, num_classes: int) -> None:
        """Every class must have a row: one without could never be voted for."""
        absent = [c for c, rows in enumerate(self.labels.bincount(minlength=num_classes).tolist()) if not rows]
        if absent:
            raise BadOption("bank", "must hold every class; it has no row of " + ", ".join(map(str, absent[:10])))

    # ------------------------------------------------ rows in

    @torch.inference_mode(False)
    @torch.no_grad()
    def add(self, embeddings: Any, labels: Any, ids: Any = None) -> Tensor:
        """New rows, and who leaves if there are more than `cap`. Returns the ids."""
        rows, _ = checked_rows(embeddings, self.dim, "embeddings")
        labels = integers(labels, len(rows), "labels")
        with self._lock:
            ids = torch.arange(self._next_id, self._next_id + len(rows)) if ids is None else integers(ids, len(rows), "ids")
            if len(ids.unique()) < len(ids) or torch.isin(ids, self.ids).any():
                raise BadOption("ids", "must be new: each row of the bank has an id of its own")
            births = torch.arange(self._next_birth, self._next_birth + len(rows))
            self._next_birth += len(rows)
            self._next_id = max(self._next_id, int(ids.max()) + 1) if len(ids) else self._next_id
            new, slots = torch.arange(len(rows)), torch.arange(self._size, self._size + len(rows))
            if self.cap is not None and self._size + len(rows) > self.cap:
                stays = kept(torch.cat([self.labels, labels]), torch.cat([self._births[: self._size], births]), self.cap, self.evict)
                new = stays[self._size :].nonzero()[:, 0]
                free = (~stays[: self._size]).nonzero()[:, 0]  # slots of those who leave; the others are appended
                slots = torch.cat([free, torch.arange(self._size, self._size + len(new) - len(free))])
            self._write(slots, rows[new], labels[new], ids[new], births[new])
        return ids

    @torch.inference_mode(False)
    @torch.no_grad()
    def replace(self, ids: Any, embeddings: Any, labels: Any = None) -> None:
        """New embeddings (and labels) for rows that are there."""
        rows, _ = checked_rows(embeddings, self.dim, "embeddings")
        with self._lock:
            ids = integers(ids, len(rows), "ids")
            slots = self._slots(ids)
            if (slots < 0).any() or len(ids.unique()) < len(ids):
                raise BadOption("ids", "must be ids of rows in the bank, each once")
            labels = self._labels[slots] if labels is None else integers(labels, len(rows), "labels").clone()
            self._write(slots, rows.clone(), labels, ids.clone(), self._births[slots])  # the caller may hand in views of the bank

    @torch.inference_mode(False)
    @torch.no_grad()
    def refresh(self, embeddings: Any | Iterable[Any], labels: Any = None) -> None:
        """New embeddings for all rows, in the order of `ids`: one tensor, or blocks of rows as they are computed."""
        blocks = [embeddings] if hasattr(embeddings, "shape") else embeddings
        rows, done = torch.empty(self._size, self.dim), 0
        for block in blocks:
            checked, _ = checked_rows(block, self.dim, "embeddings")
            if done + len(checked) <= len(rows):
                rows[done : done + len(checked)] = checked
            done += len(checked)
        if done != len(rows):
            raise BadOption("embeddings", f"must be as many as there are rows in the bank ({len(rows)})", done)
        labels = (self.labels if labels is None else integers(labels, len(rows), "labels")).clone()
        with self._lock:  # a search sees the old rows or the new ones
            if len(rows) != self._size:
                raise BadOption("embeddings", "must not be refreshed while rows are added")
            self._rows, self._labels = rows, labels
            self._ids, self._births = self.ids.clone(), self._births[: self._size].clone()
            self._forget()

    def _write(self, slots: Tensor, rows: Tensor, labels: Tensor, ids: Tensor, births: Tensor) -> None:
        if not len(slots):
            return
        self._size = max(self._size, int(slots.max()) + 1)
        for name in ("_rows", "_labels", "_ids", "_births", "_shifted", "_lengths"):
            part = getattr(self, name)
            if part is not None and len(part) < self._size:
                room = max(self._size, min(2 * len(part), self.cap or 2 * len(part)))  # doubled, so that growing stays linear
                setattr(self, name, torch.cat([part, part.new_empty(room - len(part), *part.shape[1:])]))
        self._rows[slots], self._labels[slots], self._ids[slots], self._births[slots] = rows, labels, ids, births
        self._sorted = None
        if self._shifted is not None and self._center is not None:
            rows = self._shifted[slots] = rows - self._center
        if self._lengths is not None:
            self._lengths[slots] = squared_lengths(rows)
        if self._proposer is not None:
            self._proposer.add(rows, slots)

    # ------------------------------------------------ neighbors out

    @torch.inference_mode(False)
    @torch.no_grad()
    def search(self, queries: Any, k: int, exclude: Any = None) -> Neighbors:
        """The k nearest rows of each query, without the rows whose ids `exclude` names: (B,) or (B, M), -1 for none."""
        device = queries.device if isinstance(queries, Tensor) else torch.device("cpu")
        with self._lock:
            slots, distance = self._nearest(queries, k, exclude)
            mask, safe = slots >= 0, slots.clamp_min(0)
            embedding = F.embedding(safe, self._rows)  # (B, K, D)
            if not mask.all():
                embedding.masked_fill_(~mask[..., None], 0)
            index, label = self._ids[safe].masked_fill(~mask, MISSING), self._labels[safe].masked_fill(~mask, 0)
        return Neighbors(*(part.to(device) for part in (distance, index, label, embedding, mask)))

    @torch.inference_mode(False)
    @torch.no_grad()
    def table(self, k: int, *, block: int = 2048) -> tuple[Tensor, Tensor]:
        """Distances and ids (rows, K) of the neighbors of every row, itself excluded, in the order of `ids`; no embeddings."""
        with self._lock:
            parts = [self._nearest(self._rows[at], k, self._ids[at]) for at in blocks(self._size, block)]
            slots = torch.cat([slot for slot, _ in parts]) if parts else torch.empty(0, k, dtype=torch.long)
            index = self._ids[slots.clamp_min(0)].masked_fill(slots < 0, MISSING)
            return torch.cat([distance for _, distance in parts]) if parts else torch.empty(0, k), index

    @torch.inference_mode(False)
    def take(self, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Embeddings (..., D), labels and mask of ids, as a table holds them; ids that have left the bank are masked."""
        with self._lock:
            slots = self._slots(index.cpu())
            mask, safe = slots >= 0, slots.clamp_min(0)
            embedding, label = self._rows[safe].masked_fill_(~mask[..., None], 0), self._labels[safe].masked_fill_(~mask, 0)
        return embedding.to(index.device), label.to(index.device), mask.to(index.device)

    def _slots(self, ids: Tensor) -> Tensor:
        if self._sorted is None:
            self._sorted = self.ids.sort()
        known, slot = self._sorted
        if not len(known):
            return torch.full_like(ids, MISSING)
        place = torch.searchsorted(known, ids.contiguous()).clamp_max(len(known) - 1)
        return slot[place].masked_fill(known[place] != ids, MISSING)

    def _nearest(self, queries: Any, k: int, exclude: Any) -> tuple[Tensor, Tensor]:
        """Slots (B, K), MISSING where there is none, and distances (B, K)."""
        rows, squared = checked_rows(queries, self.dim, "queries")
        if not 1 <= k <= self._size:
            raise BadOption("k", f"must be from 1 to the number of rows in the bank ({self._size})", k)
        banned = torch.full((len(rows), 1), MISSING) if exclude is None else torch.as_tensor(exclude).detach().cpu()
        banned = banned[:, None] if banned.ndim == 1 else banned  # (B, M)
        if banned.ndim != 2 or len(banned) != len(rows) or banned.is_floating_point() or banned.dtype == torch.bool:
            raise BadOption("exclude", f"must be ids, ({len(rows)},) or ({len(rows)}, M)", tuple(banned.shape))
        self._prepare()
        search = self._approximate if self._proposer is not None else self._exact
        return search(rows, squared, k, banned)

    def _prepare(self) -> None:
        """Center and index, if the rows have changed enough to need them anew."""
        if self._centered_at == 0 or self._size > 2 * self._centered_at:
            # NOTE: far from the origin |q|^2 + |x|^2 - 2 q.x cancels to noise. Normalized embeddings are near it, and not copied.
            some = self.embeddings[:: max(1, self._size // 10_000)].double()
            mean = some.mean(0)
            far = mean.square().sum() > 4 * (some - mean).square().sum(1).mean() and "L2norm" not in self.kind
            if far or self._center is not None:
                self._proposer = None  # it holds rows minus another center
            self._center = mean.float() if far else None
            self._shifted = self.embeddings - self._center if self._center is not None else None
            self._lengths, self._centered_at = None, self._size
        text = recipe(self.kind, self._size, self.dim)
        if text and (self._proposer is None or not self._proposer.serves(text, self._size)):
            if self.kind == "auto":
                say(f"bank: {text} ({self._size:,} rows; flat below {AUTO_FLAT_ROWS:,})")
            self._proposer = Proposer(text, self._base())

    def _base(self) -> Tensor:
        """What FAISS sees."""
        return (self._rows if self._shifted is None else self._shifted)[: self._size]

    def _exact(self, rows: Tensor, squared: Tensor, k: int, banned: Tensor) -> tuple[Tensor, Tensor]:
        if self._lengths is None:
            self._lengths = squared_lengths(self._base())
        inner, lengths = self.kind == "ip", self._lengths[: self._size]
        seen, shift = rows, torch.zeros(len(rows), dtype=torch.float64)
        if self._center is not None:
            if inner:  # q.(x - c) = q.x - q.c: the same order
                shift = rows.double() @ self._center.double()
            else:
                seen = rows - self._center
                squared = seen.square().sum(1)
        slots, distance = torch.empty(len(rows), k, dtype=torch.long), torch.empty(len(rows), k)
        work = [(torch.arange(len(rows)), min(self._size, k + banned.shape[1] + SLACK))]
        while work:
            todo, count = work.pop()
            if len(todo) * count > PROPOSALS and len(todo) > 1:
                work += [(half, count) for half in todo.chunk(2)]
                continue
            score, found = scan(some_of(seen, todo), self._base(), lengths, count, inner)
            slots[todo], distance[todo], last = self._ranked(some_of(rows, todo), found, k, some_of(banned, todo))
            if count == self._size or not len(todo):
                continue
            # FAISS gave every other row a score no better than its last one; this is the least that their distance can be.
            worst, length = score[:, -1].double(), squared[todo].double()
            if inner:  # rounding is below that of |q| |x|
                bound = -worst - shift[todo] - (self.dim + 8) * ROUNDING * (length * lengths.max()).sqrt() - 1e-30
            else:  # rounding is below C (|q|^2 + |x|^2), and |x|^2 is at most 2 |q|^2 + 2 |q - x|^2
                unit = (2 * self.dim + 16) * ROUNDING
                bound = (worst - 3 * unit * length - 1e-30) / (1 + 3 * unit)  # the third: that of `last`
            undecided = todo[~(last < bound)]
            if len(undecided):
                work.append((undecided, min(self._size, 4 * count)))
        return slots, distance

    def _approximate(self, rows: Tensor, squared: Tensor, k: int, banned: Tensor) -> tuple[Tensor, Tensor]:
        assert self._proposer is not None
        seen = rows if self._center is None else rows - self._center
        found = self._proposer.propose(seen, min(self._size, 4 * k + banned.shape[1]), self._size)
        return self._ranked(rows, found, k, banned)[:2]

    def _ranked(self, rows: Tensor, found: Tensor, k: int, banned: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The k best of the slots found (B, M): slots, distances, and the k-th distance of each query in float64."""
        if found.shape[1] < k:
            found = torch.cat([found, found.new_full((len(found), k - found.shape[1]), MISSING)], 1)
        slots, distance = torch.empty(len(rows), k, dtype=torch.long), torch.empty(len(rows), k)
        last = torch.empty(len(rows), dtype=torch.float64)
        for at in blocks(len(rows), BLOCK // max(1, found.shape[1] * banned.shape[1])):
            safe = found[at].clamp_min(0)  # (b, M)
            ids = self._ids[safe]  # raises if a slot is out of bounds
            allowed = (found[at] >= 0) & ~(ids[..., None] == banned[at][:, None]).any(2)
            order, exact = rank(rows[at], self._rows, safe, ids, allowed, self.kind == "ip")
            there = exact[:, :k] < math.inf
            slots[at], distance[at] = safe.gather(1, order[:, :k]).masked_fill(~there, MISSING), exact[:, :k].float()
            last[at] = exact[:, k - 1]
        return slots, distance, last

    # ------------------------------------------------ to disk and back

    @torch.inference_mode(False)
    def sample(self, count: int) -> Bank:
        """A bank of so many random rows, drawn by torch's generator; every row is looked at, whatever the kind."""
        with self._lock:
            slots = torch.randperm(self._size)[:count]
            part = Bank(self.dim, kind="ip" if self.kind == "ip" else "flat")
            part._write(torch.arange(len(slots)), self._rows[slots], self._labels[slots], self._ids[slots], torch.arange(len(slots)))
        return part

    @torch.inference_mode(False)
    def pack(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Rows as tensors, and what JSON can hold of the rest."""
        with self._lock:
            rows = {"embedding": self.embeddings, "label": self.labels, "id": self.ids, "birth": self._births[: self._size]}
            rows = {name: part.clone() for name, part in rows.items()}
            return rows, {name: getattr(self, name) for name in FACTS} | {"shapes": {k: list(v.shape) for k, v in rows.items()}}

    @classmethod
    def unpack(cls, rows: Mapping[str, Tensor], facts: Mapping[str, Any]) -> Bank:
        if {name: list(part.shape) for name, part in rows.items()} != facts["shapes"]:
            raise BadOption("bank", "must be whole: its rows are not those that it names")
        bank = cls(facts["dim"], kind=facts["kind"], cap=facts["cap"], evict=facts["evict"])
        bank._rows, bank._labels, bank._ids, bank._births = (rows[name] for name in ("embedding", "label", "id", "birth"))
        bank._size, bank._next_id, bank._next_birth = len(bank._rows), facts["_next_id"], facts["_next_birth"]
        return bank

    @torch.inference_mode(False)
    def save(self, folder: Path, *, index: bool = False) -> None:
        """Rows with their checksums; with `index`, the FAISS index beside them (else it is built anew)."""
        with self._lock:
            rows, facts = self.pack()
            groups: dict[str, dict[str, Tensor]] = {"bank": rows}
            if index and self._size:
                self._prepare()
            if index and self._proposer is not None:
                content = torch.from_numpy(load_faiss().serialize_index(self._proposer.index))
                center = torch.empty(0) if self._center is None else self._center
                groups["index"] = {"faiss": content, "slot_of": self._proposer.slot_of, "center": center}
                facts["index"] = [self._proposer.text, self._proposer.built, self._centered_at]
            store.save(folder, groups, {"bank": facts})

    @classmethod
    def load(cls, folder: Path) -> Bank:
        """A bank as it was saved. Every byte is checked; an index that fails is built anew, rows that fail are refused."""
        try:
            groups, everything = store.load(folder, "bank")
        except BadOption as error:
            raise BadOption("bank", error.rule, error.value) from None
        facts = everything.get("bank")
        if not isinstance(facts, dict):
            raise BadOption("bank", "must be a folder that a bank was saved to", str(folder))
        bank = cls.unpack(groups.get("bank", {}), facts)
        if "index" in facts:
            text, built, bank._centered_at = facts["index"]
            try:
                cached = store.load(folder, "index")[0]["index"]
                index = load_faiss().deserialize_index(cached["faiss"].numpy())
            except (BadOption, RuntimeError) as error:  # RuntimeError: of another version of FAISS
                say(f"bank: the FAISS index is built anew: {error}")
                bank._centered_at = 0
                return bank
            if len(cached["center"]):
                bank._center = cached["center"]
                bank._shifted = bank._rows - bank._center
            bank._proposer = Proposer(text, bank._base(), index, cached["slot_of"], built)
        return bank
