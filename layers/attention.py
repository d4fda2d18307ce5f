"""Standard softmax attention: every token reads every token."""

from __future__ import annotations

from torch import Tensor

from layers.base import TokenMixer
from layers.dropout import attention


class Attention(TokenMixer):
    """Softmax attention over all tokens, through scaled_dot_product_attention."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, dropout=self.attention_dropout)
