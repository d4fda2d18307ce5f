"""Layers that ours are measured against: as published, as other packages have them. All with our projections, but for timm's."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from layers.base import TokenMixer

K, SAMPLED, WINDOW = 9, 32, 16


def top_scores(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    values, index = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).topk(K)
    return values.softmax(-1), index


def expand_and_gather(v: Tensor, weight: Tensor, index: Tensor, conv: nn.Conv1d) -> Tensor:
    """Every neighbor of every token laid out, weighted, and convolved: v (G, D, N), weight and index (G, N, K)."""
    g, d, n = v.shape
    expanded = v[..., None].expand(g, d, n, K).contiguous()
    laid_out = torch.gather(expanded, 2, index[:, None].expand(g, d, n, K))  # (G, D, N, K)
    return conv((laid_out * weight[:, None].expand(g, d, n, K)).reshape(g, d, n * K))


class PublishedConvNN(TokenMixer):
    """All tokens as candidates."""

    convolution_type = "depthwise"

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__(dim, num_heads)
        groups = self.head_dim if self.convolution_type == "depthwise" else 1
        self.conv = nn.Conv1d(self.head_dim, self.head_dim, K, stride=K, groups=groups, bias=False)

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weight, index = top_scores(q, k)
        out = expand_and_gather(v.flatten(0, 1).transpose(1, 2), weight.flatten(0, 1), index.flatten(0, 1), self.conv)
        return out.transpose(1, 2).unflatten(0, v.shape[:2])


class PublishedStandard(PublishedConvNN):
    convolution_type = "standard"


class PublishedSampled(PublishedConvNN):
    """Random candidates, and the token itself first."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        n = q.shape[2]
        drawn = torch.randperm(n, device=q.device)[:SAMPLED]
        scores = q @ k[:, :, drawn].transpose(-1, -2) * self.scale
        values, column = scores.topk(K - 1)
        own = torch.arange(n, device=q.device).view(n, 1).expand(*q.shape[:3], 1)
        weight = torch.cat([torch.ones_like(values[..., :1]), values], -1).softmax(-1)
        index = torch.cat([own, drawn[column]], -1)
        out = expand_and_gather(v.flatten(0, 1).transpose(1, 2), weight.flatten(0, 1), index.flatten(0, 1), self.conv)
        return out.transpose(1, 2).unflatten(0, v.shape[:2])


class PlainAttention(TokenMixer):
    """Dense attention in three operators. NOTE: in bfloat16 on a CPU it is the stronger rival: SDPA's backward is slow there."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.transpose(-1, -2) * self.scale).softmax(-1) @ v


class MaskedTopK(TokenMixer):
    """KVT as published: a mask over all scores from torch.topk."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.transpose(-1, -2) * self.scale
        mask = torch.zeros_like(scores, requires_grad=False)
        mask.scatter_(-1, scores.topk(K).indices, 1.0)
        return torch.where(mask > 0, scores, torch.full_like(scores, -torch.inf)).softmax(-1) @ v


class MaskedWindow(TokenMixer):
    """Dense scores, a pattern that is built for each call, softmax."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        place = torch.arange(q.shape[2], device=q.device)
        mask = (place[:, None] - place).abs() <= K // 2
        scores = q @ k.transpose(-1, -2) * self.scale
        return scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v


class LocalWindows(TokenMixer):
    """The module of local-attention, as its page shows it."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__(dim, num_heads)
        from local_attention import LocalAttention

        self.windows: Any = LocalAttention(window_size=WINDOW, look_backward=1, look_forward=1, dim=self.head_dim, autopad=True)

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = self.windows(q, k, v)
        return out


class NattenWindow(TokenMixer):
    """natten's own operator: K tokens of the sequence."""

    forward_only = not torch.cuda.is_available()  # on a CPU it has no backward

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__(dim, num_heads)
        import natten

        self.natten: Any = natten

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # on a CPU: that it is not compiled
            out: Tensor = self.natten.na1d(*(t.transpose(1, 2) for t in (q, k, v)), kernel_size=K)
        return out.transpose(1, 2)


def timm_attention(dim: int, num_heads: int) -> nn.Module:
    from timm.layers import Attention

    layer: nn.Module = Attention(dim, num_heads=num_heads)
    return layer
