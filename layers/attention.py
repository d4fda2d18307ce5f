"""Standard softmax attention: every token reads every token."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from layers.base import TokenMixer


class Attention(TokenMixer):
    """Softmax attention over all tokens, through scaled_dot_product_attention."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=self.attention_dropout)
