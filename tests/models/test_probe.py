"""Hard top-K put to a trained model without touching it."""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as taken_by_name

import models.probe
from models.probe import KRow, accuracy_by_k, neighbor_probe, topk_attention
from models.swap import swap_attention
from utils import BadOption

B, H, L, S, E, V = 2, 3, 5, 7, 11, 13


class Attend(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return F.scaled_dot_product_attention(*args, **kwargs)


def qkv(heads: int = H, kv_heads: int = H, length: int = L, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    shapes = (B, heads, length, E), (B, kv_heads, S, E), (B, kv_heads, S, V)
    q, k, v = (torch.randn(shape, dtype=dtype) * 2 for shape in shapes)
    return q, k, v


def by_hand(
    q: Tensor, k: Tensor, v: Tensor, K: int, mode: str, allowed: Any = None, bias: Any = None, scale: float | None = None
) -> Tensor:
    """One query at a time, in Python numbers."""
    out = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=q.dtype)
    group = q.shape[1] // k.shape[1]
    for b, h, i in ((b, h, i) for b in range(q.shape[0]) for h in range(q.shape[1]) for i in range(q.shape[2])):
        logits = {}
        for j in range(k.shape[2]):
            if allowed is None or bool(allowed[i, j]):
                dot = sum(x * y for x, y in zip(q[b, h, i].tolist(), k[b, h // group, j].tolist(), strict=True))
                logits[j] = dot * (q.shape[-1] ** -0.5 if scale is None else scale) + (0.0 if bias is None else float(bias[b, 0, i, j]))
        kept = sorted(logits, key=lambda j: -logits[j])[:K]
        total = sum(math.exp(logits[j]) for j in (kept if mode == "topk" else logits))
        for j in kept:
            out[b, h, i] += math.exp(logits[j]) / total * v[b, h // group, j]
    return out


def assert_close(found: Tensor, expected: Tensor, tolerance: float = 1e-12) -> None:
    gap = (found - expected).abs()
    assert gap.max() <= tolerance, f"largest difference {gap.max():.3g}, mean {gap.mean():.3g}"


ALLOWED = torch.tensor([[1] * 7, [0, 1, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 1, 1], [1, 0, 0, 0, 0, 0, 0], [0] * 7]).bool()
BIAS = torch.linspace(-3, 3, B * L * S, dtype=torch.float64).reshape(B, 1, L, S).sin() * 4


@pytest.mark.parametrize("mode", ["topk", "mass"])
@pytest.mark.parametrize("K", [1, 3, 6])
@pytest.mark.parametrize("budget", [1, 100, 1 << 25])  # one query at a time, some, all
class TestAgainstALoop:
    @pytest.fixture(autouse=True)
    def slices(self, budget, monkeypatch):
        monkeypatch.setattr(models.probe, "BUDGET", budget)

    def probed(self, K: int, mode: str, *args: Any, **kwargs: Any) -> Tensor:
        model = Attend()
        with neighbor_probe(model, K, mode) as probe:
            out: Tensor = model(*args, **kwargs)
        assert (probe.calls, probe.one_token_calls) == (1, 0)
        return out

    def test_plain(self, K, mode):
        assert_close(self.probed(K, mode, *qkv()), by_hand(*qkv(), K, mode))

    def test_boolean_mask(self, K, mode):
        """With rows that have fewer than K allowed keys, and none: those give 0, as torch does."""
        found = self.probed(K, mode, *qkv(), attn_mask=ALLOWED)
        assert_close(found, by_hand(*qkv(), K, mode, allowed=ALLOWED))
        assert found[:, :, 4].abs().max() == 0
        assert_close(self.probed(K, mode, *qkv(), ALLOWED[:2][1:]), by_hand(*qkv(), K, mode, allowed=ALLOWED[1].expand(L, S)))

    def test_additive_mask(self, K, mode):
        assert_close(self.probed(K, mode, *qkv(), BIAS), by_hand(*qkv(), K, mode, bias=BIAS))
        forbidden = BIAS.masked_fill(~ALLOWED, -math.inf)
        assert_close(self.probed(K, mode, *qkv(), forbidden), by_hand(*qkv(), K, mode, allowed=ALLOWED, bias=BIAS))

    def test_causal(self, K, mode):
        lower = torch.ones(L, S, dtype=torch.bool).tril()
        assert_close(self.probed(K, mode, *qkv(), is_causal=True), by_hand(*qkv(), K, mode, allowed=lower))

    def test_scale(self, K, mode):
        assert_close(self.probed(K, mode, *qkv(), scale=0.17), by_hand(*qkv(), K, mode, scale=0.17))

    def test_grouped_queries(self, K, mode):
        found = self.probed(K, mode, *qkv(6, 3), enable_gqa=True)
        assert_close(found, by_hand(*qkv(6, 3), K, mode))


def test_exactly_k_are_read_when_logits_tie():
    """Equal keys, and values that show who was read: a threshold would let all seven through."""
    with neighbor_probe(Attend(), 3):
        read = F.scaled_dot_product_attention(torch.ones(1, 1, L, E), torch.ones(1, 1, S, E), torch.eye(S)[None, None])
    assert torch.equal((read > 0).sum(-1), torch.full((1, 1, L), 3))
    assert_close(read.sum(-1), torch.ones(1, 1, L), 1e-6)


def test_half_precision_chooses_by_float32_logits():
    q, k, v = (t.bfloat16() for t in qkv(dtype=torch.float32))
    with neighbor_probe(Attend(), 3), torch.autocast("cpu", torch.bfloat16):
        found = F.scaled_dot_product_attention(q, k, v)
    assert found.dtype is torch.bfloat16
    assert_close(found.double(), by_hand(q.double(), k.double(), v.double(), 3, "topk"), 0.04)  # bf16 has 8 bits, values reach 6


def test_dropout_is_applied_to_the_weights():
    q, k, _ = qkv()
    values = torch.eye(S, dtype=torch.float64).expand(B, H, S, S)
    torch.manual_seed(1)
    kept = topk_attention(q, k, values, dropout_p=0.5, K=3)
    full = topk_attention(q, k, values, K=3)
    assert torch.equal(kept[kept > 0], 2 * full[kept > 0])
    assert 0 < (kept > 0).sum() < (full > 0).sum()


def test_gradients_flow():
    q, k, v = (t[:1, :1, :, :2].clone().requires_grad_() for t in qkv())
    for mode in models.probe.MODES:
        assert torch.autograd.gradcheck(lambda q, k, v, mode=mode: topk_attention(q, k, v, K=3, mode=mode), (q, k, v))


# ---------------------------------------------------------------- what is left alone


def vit(**options: Any) -> Any:
    torch.manual_seed(0)
    options = {"img_size": 80, "embed_dim": 33, "num_heads": 3, "depth": 2, "num_classes": 7, **options}
    model = timm.create_model("vit_tiny_patch16_224", **options)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(10)
    return model.eval()


IMAGES = torch.randn(3, 3, 80, 80, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("K", ["all", 26, 1000])
@pytest.mark.parametrize("mode", ["topk", "mass"])
def test_all_tokens_is_the_untouched_model_bit_for_bit(K, mode):
    model = vit()
    with torch.no_grad():
        before = model(IMAGES)
        with neighbor_probe(model, K, mode) as probe:
            assert torch.equal(model(IMAGES), before)
    assert probe.calls == 2


@pytest.mark.parametrize("K", [1, 5, 25])
def test_the_probe_agrees_with_the_layer_that_does_the_same(K):
    model = vit()
    with torch.no_grad():
        with neighbor_probe(model, K):
            probed = model(IMAGES)
        swap_attention(model, f"KvtAttention(K={K})")
        assert_close(model(IMAGES), probed, 1e-4)


def test_fewer_tokens_is_another_answer_and_then_all_is_as_before():
    model = vit()
    with torch.no_grad():
        before = model(IMAGES)
        with neighbor_probe(model, 2):
            assert (model(IMAGES) - before).abs().max() > 0.01
        assert torch.equal(model(IMAGES), before)


def test_queries_of_one_token_stay_dense_unless_asked():
    q, k, v = qkv(length=1)
    model = vit(global_pool="map", class_token=False)
    with torch.no_grad(), neighbor_probe(model, 3) as probe:
        model(IMAGES)
        assert (probe.calls, probe.one_token_calls) == (2, 1)
        assert_close(F.scaled_dot_product_attention(q, k, v), by_hand(q, k, v, S, "topk"))
    with neighbor_probe(model, 3, cut_one_token=True) as probe:
        assert_close(F.scaled_dot_product_attention(q, k, v), by_hand(q, k, v, 3, "topk"))
    assert (probe.calls, probe.one_token_calls) == (0, 1)


def test_no_attention_seen_is_an_error():
    model = nn.Linear(3, 5)
    with pytest.raises(RuntimeError, match="called scaled_dot_product_attention not once"), neighbor_probe(model, 3):
        model(torch.ones(2, 3))
    with pytest.raises(RuntimeError, match="seen: 1 calls with one query token"), neighbor_probe(model, 3):
        F.scaled_dot_product_attention(*qkv(length=1))


class ByHand(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT).softmax(-1) @ v


def test_attention_that_cannot_be_cut_is_told(capsys):
    with pytest.raises(RuntimeError, match="2 softmaxes computed by hand"), neighbor_probe(ByHand(), 3):
        torch.softmax(ByHand()(*qkv()), -1)
    with neighbor_probe(ByHand(), 3) as probe:
        ByHand()(*qkv())
        F.scaled_dot_product_attention(*qkv())
    assert (probe.calls, probe.by_hand) == (1, 1)
    assert "1 softmaxes were computed outside scaled_dot_product_attention" in capsys.readouterr().err
    with neighbor_probe(ByHand(), "all"):
        ByHand()(*qkv())


@pytest.mark.parametrize(("K", "mode", "option"), [(0, "topk", "K"), (True, "topk", "K"), ("al", "topk", "K"), (3, "tpok", "mode")])
def test_bad_options(K, mode, option):
    with pytest.raises(BadOption, match=f"{option} must"), neighbor_probe(nn.Identity(), K, mode):
        pass


# ---------------------------------------------------------------- reaching the attention


def test_functions_taken_by_name_and_raw_operators_are_seen():
    with neighbor_probe(nn.Identity(), 3) as probe:
        for attend in (taken_by_name, torch._C._nn.scaled_dot_product_attention, torch.ops.aten.scaled_dot_product_attention.default):
            assert_close(attend(*qkv()), by_hand(*qkv(), 3, "topk"))
        assert_close(torch.ops.aten.scaled_dot_product_attention(*qkv()), by_hand(*qkv(), 3, "topk"))
        assert_close(F.scaled_dot_product_attention(query=qkv()[0], key=qkv()[1], value=qkv()[2]), by_hand(*qkv(), 3, "topk"))
    assert probe.calls == 5


def test_timm_modules_that_compute_by_hand_are_switched_over_and_back():
    model = vit()
    with torch.no_grad():
        with neighbor_probe(model, 4):
            expected = model(IMAGES)
        model.blocks[1].attn.fused_attn = False
        untouched = model(IMAGES)
        with neighbor_probe(model, 4) as probe:
            assert torch.equal(model(IMAGES), expected)
        assert (probe.calls, probe.by_hand) == (2, 0)
        with neighbor_probe(model, "all"):
            assert torch.equal(model(IMAGES), untouched)
    assert [block.attn.fused_attn for block in model.blocks] == [True, False]


def mha_by_hand(attention: nn.MultiheadAttention, x: Tensor, K: int) -> Tensor:
    b, n, c = x.shape
    assert attention.in_proj_weight is not None
    projected = x @ attention.in_proj_weight.T + attention.in_proj_bias
    q, k, v = projected.reshape(b, n, 3, attention.num_heads, -1).permute(2, 0, 3, 1, 4)
    return attention.out_proj(by_hand(q, k, v, K, "topk").transpose(1, 2).reshape(b, n, c))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
def test_torch_multi_head_attention(training, need_weights):
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(33, 3, batch_first=True).double().train(training)
    x = torch.randn(2, 5, 33, dtype=torch.float64) * 3
    with torch.no_grad(), neighbor_probe(attention, 2) as probe:
        found, weights = attention(x, x, x, need_weights=need_weights, average_attn_weights=False)
    assert probe.calls == 1
    assert_close(found, mha_by_hand(attention, x, 2))
    if need_weights:
        assert torch.equal((weights > 0).sum(-1), torch.full((2, 3, 5), 2))


@pytest.mark.parametrize("padding", [False, True])
def test_the_fast_path_of_torch_encoders_is_not_taken(padding):
    torch.manual_seed(0)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(22, 2, 13, batch_first=True, dropout=0.0, dtype=torch.float64), 2)
    x = torch.randn(2, 5, 22, dtype=torch.float64) * 3
    ignored = torch.tensor([[False] * 5, [False] * 4 + [True]]) if padding else None
    with neighbor_probe(encoder, 2):
        expected = encoder.train()(x, src_key_padding_mask=ignored)
    encoder.eval()
    with torch.inference_mode():
        dense = encoder(x, src_key_padding_mask=ignored)
        with neighbor_probe(encoder, 2) as probe:
            found = encoder(x, src_key_padding_mask=ignored)
    assert probe.calls == 2
    real = ~ignored if ignored is not None else torch.ones(2, 5, dtype=torch.bool)
    assert_close(found[real], expected[real])
    assert (found - dense)[real].abs().max() > 0.01


def test_an_exception_passes_and_leaves_nothing_behind():
    model = vit()
    model.blocks[0].attn.fused_attn = False
    model.head = nn.Linear(2, 2)  # too narrow
    with pytest.raises(RuntimeError, match="mat1 and mat2"), neighbor_probe(model, 2):
        model(IMAGES)
    with pytest.raises(KeyError), neighbor_probe(model, 2):  # not "no attention was seen"
        raise KeyError
    assert torch._C._len_torch_function_stack() == 0
    assert not model.blocks[0].attn.fused_attn
    assert_close(F.scaled_dot_product_attention(*qkv()), by_hand(*qkv(), S, "topk"))


def test_other_threads_are_not_probed():
    found = []
    dense = by_hand(*qkv(), S, "topk")
    with neighbor_probe(Attend(), 1) as probe:
        thread = threading.Thread(target=lambda: found.append(F.scaled_dot_product_attention(*qkv())))
        thread.start()
        thread.join()
        F.scaled_dot_product_attention(*qkv())
    assert_close(found[0], dense)
    assert probe.calls == 1


# ---------------------------------------------------------------- accuracy against K


class Vote(nn.Module):
    """Each of 3 tokens is (logit, class 0, class 1); the image's scores are the classes that attention reads."""

    def forward(self, tokens: Tensor) -> Tensor:
        self.seen = getattr(self, "seen", 0) + 1
        assert not self.training
        query = torch.ones(len(tokens), 2, 1)
        return F.scaled_dot_product_attention(query, tokens[..., :1], tokens[..., 1:], scale=1.0).mean(1)


def image(*logits: float) -> list[list[float]]:
    """The first token speaks for class 0, the others for class 1."""
    return [[logit, float(i == 0), float(i > 0)] for i, logit in enumerate(logits)]


def test_accuracy_is_counted_over_all_rows_in_one_pass():
    # A weak lead: the nearest token says 0, the other two outvote it. A strong lead: 0 both ways. Behind: 1 both ways.
    weak, strong, behind = image(1.0, 0.9, 0.9), image(9.0, 0.0, 0.0), image(0.0, 1.0, 1.0)
    rows = [(weak, 0), (weak, 1), (strong, 0), (behind, 1), (weak, 1), (strong, 1), (weak, 1)]
    loads = []

    def batches() -> Any:
        for start in (0, 3, 6):  # 3, 3 and 1 rows
            loads.append(start)
            part = rows[start : start + 3]
            yield torch.tensor([r[0] for r in part]), torch.tensor([r[1] for r in part]), torch.arange(start, start + len(part))

    model = Vote().train()
    found = accuracy_by_k(model, batches(), [1, 2, 3, "all"], "topk", "cpu")
    # Dense: weak 1, strong 0, behind 1: right on all but the first and the sixth. K=1: weak 0, so rows 2, 5 and 7 fall and
    # the first rises. K=2: the leader beats one other.
    assert found == [KRow(1, 3 / 7, 3 / 7, 7), KRow(2, 3 / 7, 3 / 7, 7), KRow(3, 5 / 7, 1.0, 7), KRow("all", 5 / 7, 1.0, 7)]
    assert loads == [0, 3, 6]
    assert model.seen == 3 * 4  # three batches; dense, which is "all", and three K
    assert model.training


def test_accuracy_by_k_asks_for_rows_and_attention():
    with pytest.raises(ValueError, match="no rows"):
        accuracy_by_k(Vote(), [], [1])
    linear = nn.Linear(3, 2).train()
    with pytest.raises(RuntimeError, match="not once"):
        accuracy_by_k(linear, [(torch.ones(5, 3), torch.zeros(5, dtype=torch.long))], [1])
    assert linear.training
    with pytest.raises(BadOption, match="K must"):
        accuracy_by_k(linear, [], [1, 0])
