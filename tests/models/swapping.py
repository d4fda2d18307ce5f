"""What the tests of the swap have in common: layers to put in, and models in which every part shows."""

from __future__ import annotations

from typing import Any

import timm
import torch
from torch import Tensor, nn

import layers
from utils import BadOption

WIDTH = {"embed_dim": 33, "num_heads": 3, "depth": 2, "num_classes": 7}  # heads of 11
SIZE = {"img_size": (48, 80)}  # 3 x 5 patches of 16


class SwapTopK(layers.TokenMixer):
    """The K largest logits by masking the dense matrix: slow, and plain to see."""

    def __init__(self, dim: int, num_heads: int = 8, *, K: int = 9, **base: Any) -> None:
        super().__init__(dim, num_heads, **base)
        if K < 1:
            raise BadOption("K", "must be at least 1", K)
        self.K = K

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        logits = q @ k.transpose(-2, -1) * self.scale
        least = logits.topk(self.K).values[..., -1:]
        return self.attn_drop(logits.masked_fill(logits < least, float("-inf")).softmax(-1)) @ v


class SwapConv(SwapTopK):
    """With parameters of its own."""

    def __init__(self, dim: int, num_heads: int = 8, **base: Any) -> None:
        super().__init__(dim, num_heads, **base)
        self.conv = nn.Conv1d(self.head_dim, self.head_dim, self.K, stride=self.K)


class SwapGrid(layers.Attention):
    """Wants to know where its tokens are."""

    def __init__(self, dim: int, num_heads: int = 8, *, grid: Any = None, num_prefix_tokens: int = 0, **base: Any) -> None:
        super().__init__(dim, num_heads, **base)
        self.grid, self.num_prefix_tokens = grid, num_prefix_tokens

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        assert q.shape[2] == self.num_prefix_tokens + self.grid[0] * self.grid[1]
        return super().mix(q, k, v)


class SwapOwnForward(layers.Attention):
    """Reads its projections in its own way."""

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        return x


SWAP_LAYERS = (SwapTopK, SwapConv, SwapGrid, SwapOwnForward)


def make(name: str, seed: int, **options: Any) -> Any:
    """A model in which every part shows: random norms and layer scales, and attention that is far from uniform."""
    torch.manual_seed(seed)
    model = timm.create_model(name, **options)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
            elif parameter.dim() == 2:
                parameter.mul_(20 if "qkv" in key else 5)
    return model.eval()


def vit(seed: int = 0, **options: Any) -> Any:
    return make("vit_tiny_patch16_224", seed, **{**WIDTH, **SIZE, **options})


def assert_close(found: Tensor, expected: Tensor, tolerance: float) -> None:
    gap = (found - expected).abs()
    assert gap.max() <= tolerance, f"largest difference {gap.max():.3g}, mean {gap.mean():.3g}"
