"""ConvNN attention: a convolution over the K nearest tokens (arXiv 2511.14137)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from layers import functional as L
from layers import lists
from layers.base import TokenMixer, check_neighbors, count_tokens
from utils import BadOption, one_of, whole_number

CONVOLUTIONS = ("depthwise", "standard", "depthwise-separable")
SAMPLING = ("all", "random", "spatial", "grid")


class ConvNNAttention(TokenMixer):
    """Hard top-K neighbors, weighted by similarity, through a convolution over their ranks.

    With `sampling_type` other than "all", a token's list is itself first, then the K - 1 best of the sampled candidates.
    `self_score="one"` gives the token itself the published constant score, "real" its own similarity. Candidates that
    are "random" are drawn anew each training step; in eval they are all tokens (`eval_sampling="all"`) or a draw that never
    changes ("fixed"; it is the same in all layers, so some tokens are then read by none but themselves).
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        near_dim: int | None = None,  # channels a head that are mixed by neighbors, where a branch leaves it not all of them
        *,
        K: int = 9,
        magnitude_type: str = "matmul",
        softmax_topk_val: bool = True,
        convolution_type: str = "depthwise",
        sampling_type: str = "all",
        num_samples: int = -1,
        sample_padding: int = 0,
        eval_sampling: str = "all",
        self_score: str = "one",
        coordinate_encoding: bool | str = False,
        grid: tuple[int, int] | None = None,
        num_prefix_tokens: int = 0,
        **base: Any,
    ) -> None:
        super().__init__(dim, num_heads, **base)
        self.near_dim = self.head_dim if near_dim is None else near_dim
        self.scale = max(self.near_dim, 1) ** -0.5
        self.K, self.magnitude_type, self.softmax_topk_val = K, magnitude_type, softmax_topk_val
        self.convolution_type = convolution_type
        self.sampling_type, self.num_samples, self.sample_padding = sampling_type, num_samples, sample_padding
        self.eval_sampling, self.self_score = eval_sampling, self_score
        names = {True: "1d", False: "", "False": "", "True": "1d"}  # the published flag is a switch; a file may hold it as text
        self.coordinate_encoding = names.get(coordinate_encoding, str(coordinate_encoding))
        self.grid, self.num_prefix_tokens = grid, num_prefix_tokens
        self._check_options()
        self.conv = self._convolution() if self.near_dim else None

    def _check_options(self) -> None:
        one_of("magnitude_type", self.magnitude_type, L.MAGNITUDES)
        one_of("convolution_type", self.convolution_type, CONVOLUTIONS)
        one_of("sampling_type", self.sampling_type, SAMPLING)
        one_of("eval_sampling", self.eval_sampling, ("all", "fixed"))
        one_of("self_score", self.self_score, ("one", "real"))
        if self.coordinate_encoding not in ("", "1d", "2d"):
            raise BadOption("coordinate_encoding", "must be one of False, True, 1d, 2d", self.coordinate_encoding)
        check_neighbors(self.K, count_tokens(self.grid, self.num_prefix_tokens))
        if self.grid is None and (self.sampling_type == "grid" or self.coordinate_encoding == "2d"):
            option = "sampling_type" if self.sampling_type == "grid" else "coordinate_encoding"
            raise BadOption(option, "needs the token grid, which this model does not give", getattr(self, option))
        if self.sampling_type == "all":
            return
        if self.num_samples < 1:
            raise BadOption("num_samples", f"must be at least 1 with sampling_type {self.sampling_type}", self.num_samples)
        whole_number("sample_padding", self.sample_padding, 0)
        if self.grid is not None:
            self._check_samples(count_tokens(self.grid, self.num_prefix_tokens) or 0)
        if self.sampling_type == "grid" and self.grid is not None:
            rows, columns = L.grid_samples(self.grid, self.num_samples, self.sample_padding)
            if rows * columns != self.num_samples:
                L.say_once(f"num_samples: {self.num_samples} do not fill rows of the grid; taking {rows} x {columns} = {rows * columns}")

    def _check_samples(self, tokens: int) -> None:
        room = tokens
        if self.sampling_type == "spatial":
            room = tokens - 2 * self.sample_padding
        elif self.sampling_type == "grid" and self.grid is not None:
            room = max(0, self.grid[0] - 2 * self.sample_padding) * max(0, self.grid[1] - 2 * self.sample_padding)
        if self.num_samples > room:
            raise BadOption("num_samples", f"must be at most the number of tokens to choose from ({max(room, 0)})", self.num_samples)

    def _convolution(self) -> nn.Module:
        """Holds the weights under the published names; `mix` applies them rank by rank."""
        channels = self.near_dim + {"": 0, "1d": 1, "2d": 2}[self.coordinate_encoding]
        if self.convolution_type == "standard":
            return nn.Conv1d(channels, self.near_dim, self.K, stride=self.K, bias=False)
        if self.convolution_type == "depthwise-separable":
            depthwise = nn.Conv1d(channels, channels, self.K, stride=self.K, groups=channels, bias=False)
            return nn.Sequential(depthwise, nn.Conv1d(channels, self.near_dim, 1, bias=False))
        # Depthwise gives each channel back on its own: coordinates take part in the choice of neighbors, not in the output.
        conv = nn.Conv1d(self.near_dim, self.near_dim, self.K, stride=self.K, groups=self.near_dim, bias=False)
        nn.init.ones_(conv.weight)  # at the start the layer is plain top-K attention
        return conv

    def candidates(self, tokens: int, device: torch.device) -> Tensor | None:
        """Tokens that the others choose from, in ascending order; None: all of them, and no place is kept for oneself."""
        if self.sampling_type == "all":
            return None
        self._check_samples(tokens)
        if self.sampling_type != "random":
            return self.cached(("candidates", tokens, device), lambda: self._spaced(tokens).to(device))
        if self.training or self.eval_sampling == "fixed":
            return L.drawn_tokens(tokens, self.num_samples, fixed=not self.training, device=device)
        return torch.arange(tokens, device=device)

    def _spaced(self, tokens: int) -> Tensor:
        if self.sampling_type == "grid" and self.grid is not None:
            self._check_grid(tokens)
            return L.grid_tokens(self.grid, self.num_samples, self.sample_padding, self.num_prefix_tokens)
        return L.spaced_tokens(tokens, self.num_samples, self.sample_padding)

    def _check_grid(self, tokens: int) -> None:
        if tokens != count_tokens(self.grid, self.num_prefix_tokens):
            raise BadOption("grid", f"must fit the {tokens} tokens ({self.num_prefix_tokens} of them class and register tokens)", self.grid)

    def neighbors(self, q: Tensor, k: Tensor, candidates: Tensor | None) -> tuple[Tensor, Tensor]:
        """Which K tokens each token reads, in rank order, and their weights, both (B, H, N, K): of comparable q and k, in any setting."""
        if candidates is None:
            dot, index = L.nearest(q, k, self.K)
            score = L.similarity(dot, q, self.magnitude_type, self.scale)
            return index, L.rank_weights(score, self.magnitude_type, self.softmax_topk_val)
        index = self.itself_and_nearest(q, k, candidates)
        missing = index == index[..., :1]
        missing[..., 0] = False
        # NOTE a token that stands in for a missing one has no weight, and no gradient may pass it.
        dot = L.pair_dot(q, k, index).masked_fill(missing, 0)
        score = L.similarity(dot, q, self.magnitude_type, self.scale)
        if self.self_score == "one":
            one = torch.full_like(score[..., :1], L.constant_self_score(self.magnitude_type))
            score = torch.cat([one, score[..., 1:]], -1)
        return index, L.rank_weights(score, self.magnitude_type, self.softmax_topk_val, missing)

    def itself_and_nearest(self, q: Tensor, k: Tensor, candidates: Tensor) -> Tensor:
        """Each token, then the K - 1 best of the other candidates; itself again where there are too few: (B, H, N, K)."""
        found = min(self.K, 1 + len(candidates))
        itself = torch.arange(q.shape[2], device=q.device)[:, None].expand(*q.shape[:3], 1)  # (B, H, N, 1)
        index = lists.chosen(q, k, found, candidates, None) if found > 1 else itself
        return torch.cat([index, itself.expand(-1, -1, -1, self.K - found)], -1)

    def _with_coordinates(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        n, device = tensors[0].shape[2], tensors[0].device

        def make() -> Tensor:
            if self.coordinate_encoding == "2d" and self.grid is not None:
                self._check_grid(n)
                return L.plane_coordinates(self.grid, self.num_prefix_tokens, device)
            return L.line_coordinates(n, device)

        place = self.cached(("coordinates", n, device), make)  # (N, 1) or (N, 2)
        return tuple(L.append_coordinates(t, place) for t in tensors)

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        check_neighbors(self.K, q.shape[2])
        values = L.full_precision(v)
        if self.coordinate_encoding:
            q, k = self._with_coordinates(q, k)
            if self.convolution_type != "depthwise":
                (values,) = self._with_coordinates(values)
        assert self.conv is not None
        ranks, *pointwise = self.conv.parameters()
        kernel = ranks.to(values.dtype)  # (D, 1, K) depthwise, or (E, D, K)
        kernel = kernel[:, 0].t() if kernel.shape[1] == 1 else kernel.permute(2, 0, 1)
        out = self.convolved(*L.comparable(L.full_precision(q), L.full_precision(k), self.magnitude_type), values, kernel)
        for matrix in pointwise:  # (E, D, 1)
            out = F.linear(out, matrix[..., 0].to(out.dtype))
        return self.attn_drop(out.to(v.dtype))  # on the output, as published: ranks are what the convolution tells apart

    def convolved(self, q: Tensor, k: Tensor, values: Tensor, kernel: Tensor) -> Tensor:
        """The convolution over the ranks of comparable q and k."""
        candidates = self.candidates(q.shape[2], q.device)
        enough = candidates is None or len(candidates) >= self.K > 1
        if not self.softmax_topk_val or self.magnitude_type == "euclidean" or not enough:
            index, weight = self.neighbors(q, k, candidates)
            return L.rank_conv(values, index, weight, kernel)
        scale = self.scale if self.magnitude_type == "matmul" else 1.0
        one = candidates is not None and self.self_score == "one"
        first = L.constant_self_score(self.magnitude_type) if one else None
        return self.attend(q, k, values, self.K, scale, drop=False, among=candidates, first=first, kernel=kernel).out

    def extra_repr(self) -> str:
        sampled = "" if self.sampling_type == "all" else f", num_samples={self.num_samples}"
        return f"{super().extra_repr()}, K={self.K}, sampling_type={self.sampling_type}{sampled}, magnitude_type={self.magnitude_type}"
