"""The Vision Transformer of the ConvNN paper (arXiv 2511.14137), for any token mixer and any image size."""

from __future__ import annotations

from collections.abc import Callable

import torch
from einops import rearrange
from torch import Tensor, nn

import layers
from layers import TokenMixer
from layers.dropout import shuffled
from models.registry import MODELS, ModelSpec
from models.weights import with_weights
from utils import BadOption, parse_pattern


class VisionTransformer(nn.Module):
    """Patch convolution and LayerNorm, class token, fixed sinusoidal positions, pre-norm blocks. Images to features (B, dim).

    `make_layer(block, grid, num_prefix_tokens)` gives the token mixer of each block.
    """

    num_prefix_tokens = 1
    pos_embed: Tensor

    def __init__(
        self,
        make_layer: Callable[[int, tuple[int, int], int], TokenMixer],
        *,
        image_size: tuple[int, int],
        channels: int = 3,
        patch_size: int = 16,
        depth: int = 12,
        dim: int = 192,
        d_mlp: int = 768,
        dropout: float = 0.0,
        token_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        height, width = image_size
        if height % patch_size or width % patch_size:
            raise BadOption("patch_size", f"must divide the image size ({height} x {width})", patch_size)
        self.num_features = dim
        self.grid = (height // patch_size, width // patch_size)
        self.patch_embed = nn.Conv2d(channels, dim, patch_size, patch_size)
        self.patch_norm = nn.LayerNorm(dim)
        self.cls_token = nn.Parameter(torch.randn(1, 1, dim) * 0.02)
        positions = sinusoidal_positions(self.num_prefix_tokens + self.grid[0] * self.grid[1], dim)
        self.register_buffer("pos_embed", positions, persistent=False)
        self.pos_drop = nn.Dropout(dropout)
        self.token_drop = TokenDropout(token_dropout, self.num_prefix_tokens)
        self.blocks = nn.ModuleList(Block(make_layer(i, self.grid, self.num_prefix_tokens), dim, d_mlp, dropout) for i in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.apply(_initialize)

    def tokens(self, x: Tensor) -> Tensor:
        """The input of the first block: (B, 1 + h * w, dim); with token dropout, fewer in training."""
        patches = self.patch_norm(rearrange(self.patch_embed(x), "b c h w -> b (h w) c"))
        cls = self.cls_token.expand(x.shape[0], -1, -1)
        return self.token_drop(self.pos_drop(torch.cat((cls, patches), 1) + self.pos_embed))

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.tokens(x)
        for block in self.blocks:
            tokens = block(tokens)
        return self.norm(tokens[:, 0])


def some_patches(x: Tensor, p: float, num_prefix_tokens: int) -> Tensor:
    """Without a random share `p` of the patches of each image."""
    prefix, patches = x[:, :num_prefix_tokens], x[:, num_prefix_tokens:]  # (B, P, C), (B, N, C)
    batch, count, _ = patches.shape
    kept = shuffled(batch, count, x.device)[:, : max(1, round(count * (1 - p)))]
    return torch.cat((prefix, patches.take_along_dim(kept[..., None], 1)), 1)


class TokenDropout(nn.Module):
    """In training, each image loses another random share `p` of its patches (PatchDropout, arXiv 2208.07220); class tokens stay."""

    def __init__(self, p: float, num_prefix_tokens: int) -> None:
        super().__init__()
        self.p, self.num_prefix_tokens = p, num_prefix_tokens

    def forward(self, x: Tensor) -> Tensor:
        if not (self.training and self.p):
            return x
        return some_patches(x, self.p, self.num_prefix_tokens)

    def extra_repr(self) -> str:
        return f"p={self.p}"


class Block(nn.Module):
    """x + mixer(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, layer: TokenMixer, dim: int, d_mlp: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = layer
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = Mlp(dim, d_mlp, dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Mlp(nn.Module):
    def __init__(self, dim: int, d_mlp: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(dim, d_mlp), nn.GELU(), nn.Linear(d_mlp, dim)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.fc2(self.drop(self.act(self.fc1(x)))))


def sinusoidal_positions(length: int, dim: int) -> Tensor:
    """(1, length, dim): sines in the even channels, cosines in the odd ones, wavelengths from 2 pi to 20,000 pi (arXiv 1706.03762)."""
    angle = torch.arange(length)[:, None] * 10_000.0 ** (-torch.arange(0, dim, 2) / dim)  # (length, ceil(dim / 2))
    table = torch.empty(length, dim)
    table[:, 0::2] = angle.sin()
    table[:, 1::2] = angle.cos()[:, : dim // 2]
    return table[None]


def _initialize(module: nn.Module) -> None:
    """Xavier-uniform, as in the first ViT (arXiv 2010.11929); normal with std 0.02 starts far slower at small widths."""
    if isinstance(module, nn.Linear):
        nn.init.xavier_uniform_(module.weight)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


@MODELS.register("vit")
def paper_vit(spec: ModelSpec) -> nn.Module:
    """The ViT of the ConvNN paper: patch convolution + LayerNorm, class token, fixed sinusoidal positions, pre-norm blocks."""
    image_size = spec.image_size
    calls = parse_pattern(spec.layer, spec.depth, "layer")
    layers.check_token_dropout(calls, spec.token_dropout)
    options = {**spec.layer_options, "dropout": spec.dropout, "attention_dropout": spec.attention_dropout}

    def make_layer(block: int, grid: tuple[int, int], num_prefix_tokens: int) -> TokenMixer:
        own = layers.pick_options(calls[block].name, options)
        return layers.build(calls[block], dim=spec.dim, num_heads=spec.num_heads, grid=grid, num_prefix_tokens=num_prefix_tokens, **own)

    model = VisionTransformer(
        make_layer,
        image_size=image_size,
        channels=spec.shape[0],
        patch_size=spec.patch_size,
        depth=spec.depth,
        dim=spec.dim,
        d_mlp=spec.d_mlp,
        dropout=spec.dropout,
        token_dropout=spec.token_dropout,
    )
    return with_weights(model, spec.pretrained)
