"""Local attention: windows side by side, each reading its own and the next ones (the `local-attention` package)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from layers.base import TokenMixer
from layers.functional import full_precision
from utils import BadOption, one_of, whole_number

# "published" is what the ViT-Tiny runs of the ConvNN paper used: the package's defaults, and heads of 64 channels whatever d_hidden is.
PRESETS: dict[str, dict[str, Any]] = {
    "short": {"window": 16, "look_backward": 1, "look_forward": 1, "exact_window": True, "rotary": False, "head_dim": None},
    "published": {"window": 128, "look_backward": 1, "look_forward": 1, "exact_window": True, "rotary": True, "head_dim": 64},
}


class LocalAttention(TokenMixer):
    """Attention in windows side by side; options that are not given come from the preset ("short" or "published").

    Tokens are cut into windows, and a token reads its own window, `look_backward` before and `look_forward` after it;
    with `exact_window`, no further than that many windows' lengths from itself.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        *,
        preset: str = "short",
        window: int | None = None,
        look_backward: int | None = None,
        look_forward: int | None = None,
        exact_window: bool | None = None,
        rotary: bool | None = None,
        head_dim: int | None = None,
        **base: Any,
    ) -> None:
        one_of("preset", preset, tuple(PRESETS))
        given = {"window": window, "look_backward": look_backward, "look_forward": look_forward, "exact_window": exact_window}
        given |= {"rotary": rotary, "head_dim": head_dim}
        chosen = PRESETS[preset] | {name: value for name, value in given.items() if value is not None}
        super().__init__(dim, num_heads, head_dim=chosen.pop("head_dim"), **base)
        for name, least in (("window", 1), ("look_backward", 0), ("look_forward", 0)):
            whole_number(name, chosen[name], least)
        if chosen["rotary"] and self.head_dim % 2:
            raise BadOption("rotary", f"turns pairs of channels: heads must be of even width, they are {self.head_dim} wide", True)
        self.chosen = chosen
        self.windows: Any = self._windows()

    def _windows(self) -> nn.Module:
        from local_attention import LocalAttention as Windows

        windows = Windows(
            window_size=self.chosen["window"],
            look_backward=self.chosen["look_backward"],
            look_forward=self.chosen["look_forward"],
            exact_windowsize=self.chosen["exact_window"],
            dim=self.head_dim if self.chosen["rotary"] else None,
            autopad=True,
        )
        if windows.rel_pos is not None:  # its constants are no weights: other layers' state dicts must load here
            windows.rel_pos.register_buffer("inv_freq", windows.rel_pos.inv_freq, persistent=False)
        return windows

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        b, _, n, _ = q.shape
        self.windows.dropout.p = self.attn_drop.p  # not when it is made: a swap brings the model's dropout afterwards
        self.windows.window_size = min(self.chosen["window"], n)  # one window holds them all: the same without the padding
        # NOTE without a mask the package lets tokens read the zeros with which it fills up the last window
        real = torch.ones(b, n, dtype=torch.bool, device=q.device)
        return self.windows(full_precision(q), full_precision(k), full_precision(v), mask=real).to(v.dtype)

    def extra_repr(self) -> str:
        return ", ".join([super().extra_repr(), *(f"{name}={value}" for name, value in self.chosen.items())])
