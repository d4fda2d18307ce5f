"""Neighbor attention: the published outputs, a brute force, and what must never happen."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from classifiers.neighbor_attention import Bounded, NeighborAttention, agreement
from utils import BadOption

GOLDEN = Path(__file__).parents[1] / "golden"
CASES = {name: options for name, options in json.loads((GOLDEN / "cases.json").read_text()).items() if name.startswith("neighbor")}
NAMES = {  # state-dict names of the arrays
    "q_weight": "q_proj.weight",
    "q_bias": "q_proj.bias",
    "k_weight": "k_proj.weight",
    "k_bias": "k_proj.bias",
    "log_tau": "log_tau",
    **{f"dist{n}_{part}": f"dist_bias.{n}.{part}" for n in (0, 2, 4) for part in ("weight", "bias")},
    "prototypes": "prototypes",
    "proto_scale": "proto_scale",
    "sa_qkv_weight": "self_attn.qkv.weight",
    "sa_qkv_bias": "self_attn.qkv.bias",
    "sa_out_weight": "self_attn.out_proj.weight",
    "sa_out_bias": "self_attn.out_proj.bias",
    "sa_norm_weight": "self_attn.norm.weight",
    "sa_norm_bias": "self_attn.norm.bias",
}
EVERYTHING: dict[str, Any] = dict(self_attention=True, prototypes=True, label_bias=True)
B, K, D, H, C = 5, 7, 33, 3, 11


def case(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    query = F.normalize(torch.randn(B, D, generator=generator), dim=1)
    neighbors = F.normalize(torch.randn(B, K, D, generator=generator), dim=2)
    distance = (query[:, None] - neighbors).square().sum(2)
    labels = torch.randint(C, (B, K), generator=generator)
    mask = torch.rand(B, K, generator=generator) > 0.3
    mask[0], mask[1], mask[2] = True, False, torch.arange(K) == 4
    return query, neighbors, distance, labels, mask


def module(seed: int = 0, **options) -> NeighborAttention:
    torch.manual_seed(seed)
    attention = NeighborAttention(D, num_heads=H, num_classes=C, **options)
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return attention


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("masked", [False, True])
def test_published_output(name, masked):
    options = dict(CASES[name])
    options["temperature_bounds"] = tuple(options["temperature_bounds"])
    arrays = {key: torch.from_numpy(array) for key, array in np.load(GOLDEN / f"{name}.npz").items()}
    query, neighbors, distance, labels, wanted = (arrays.pop(k) for k in ("query", "neighbors", "sq_distance", "labels", "weights"))
    attention = NeighborAttention(query.shape[1], num_classes=5, **options)
    attention.load_state_dict({NAMES[key]: array for key, array in arrays.items()})  # strict: these names and no others
    mask = torch.ones_like(labels, dtype=torch.bool) if masked else None
    for training in (True, False):
        found = attention.train(training)(query, neighbors, distance, labels, mask)
        error = (found - wanted).abs()
        assert error.max() < 1e-5, (error.max().item(), error.mean().item())


def brute_force(a: NeighborAttention, query, neighbors, distance, labels, mask) -> torch.Tensor:
    """A query, a head and a neighbor at a time; neighbors that are masked are left out before anything is computed."""
    weights = torch.zeros(B, K, dtype=torch.float64)
    tau = a.log_tau.double().exp().clamp(math.exp(a.log_bounds[0]), math.exp(a.log_bounds[1]))
    width = D // H
    for b in range(B):
        there = mask[b].nonzero()[:, 0]
        if not len(there):
            continue
        n = neighbors[b, there].double()
        if a.self_attn is not None:
            q, k, v = a.self_attn.qkv.double()(n).split(D, 1)
            heads = []
            for h in range(H):
                part = slice(h * width, (h + 1) * width)
                heads.append((q[:, part] @ k[:, part].T / math.sqrt(width)).softmax(1) @ v[:, part])
            n = a.self_attn.norm.double()(n + a.self_attn.out_proj.double()(torch.cat(heads, 1)))
        q, k = a.q_proj.double()(query[b].double()), a.k_proj.double()(n)
        for h in range(H):
            logits = []
            for j, row in enumerate(there):
                part = slice(h * width, (h + 1) * width)
                logit = q[part] @ k[j, part] / math.sqrt(width) / tau[h]
                if a.dist_bias is not None:
                    logit = logit + a.dist_bias.double()(distance[b, row].double()[None])[h]
                if a.prototypes is not None and a.proto_scale is not None:
                    logit = logit + a.proto_scale.double()[0] * F.cosine_similarity(n[j], a.prototypes.double()[labels[b, row]], dim=0)
                if a.label_bias is not None:
                    fellows = [o for o in there if o != row]
                    share = sum(int(labels[b, o] == labels[b, row]) for o in fellows) / max(1, len(fellows))
                    leaning = a.label_bias.leaning.double()(query[b].double())[labels[b, row]]
                    logit = logit + leaning + a.label_bias.agreement[h].double() * share
                logits.append(logit)
            weights[b, there] += torch.stack(logits).softmax(0) / H
    return weights


@pytest.mark.parametrize("options", [{}, EVERYTHING, {"distance_bias": False}, {"self_attention": True}, {"label_bias": True}])
@pytest.mark.parametrize("seed", [0, 1])
def test_by_brute_force(options, seed):
    inputs, attention = case(seed), module(seed, **options)
    found = attention(*inputs)
    error = (found - brute_force(attention, *inputs)).abs()
    assert error.max() < 1e-5, (error.max().item(), error.mean().item())


def test_missing_neighbors_weigh_nothing_whatever_stands_for_them():
    query, neighbors, distance, labels, mask = case()
    attention = module(**EVERYTHING)
    wanted = attention(query, neighbors, distance, labels, mask)
    assert (wanted[~mask] == 0).all()
    assert (wanted[1] == 0).all()
    assert wanted[2, 4] == 1
    assert torch.allclose(wanted.sum(1), mask.any(1).float(), atol=1e-6)
    nonsense = neighbors.masked_fill(~mask[..., None], torch.nan).requires_grad_(), distance.masked_fill(~mask, torch.inf)
    found = attention(query, *nonsense, labels.masked_fill(~mask, -1), mask)
    assert (found == wanted).all()
    (found * torch.randn(B, K)).sum().backward()
    for name, parameter in [*attention.named_parameters(), ("neighbors", nonsense[0])]:
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


def test_gradients_reach_everything_from_the_first_step():
    query, neighbors, distance, labels, _ = case()
    torch.manual_seed(0)
    attention = NeighborAttention(D, num_heads=H, num_classes=C, **EVERYTHING)
    given = query.requires_grad_(), neighbors.requires_grad_(), distance.requires_grad_()
    (attention(*given, labels) * torch.randn(B, K)).sum().backward()
    for name, tensor in [*attention.named_parameters(), *zip(("query", "neighbors", "distance"), given, strict=True)]:
        assert tensor.grad is not None, name
        assert tensor.grad.isfinite().all(), name
        assert tensor.grad.abs().sum() > 0, name


def test_query_equal_to_a_neighbor_has_finite_gradients():
    query, neighbors, _, labels, _ = case()
    query = query.requires_grad_()
    neighbors = torch.cat([query[:, None], neighbors[:, 1:]], 1)
    distance = (query[:, None] - neighbors).square().sum(2)
    module(**EVERYTHING)(query, neighbors, distance, labels)[:, 0].sum().backward()
    assert query.grad is not None
    assert query.grad.isfinite().all()


def test_gradients_by_differences():
    query, neighbors, distance, labels, mask = case()
    attention = module(**EVERYTHING)
    direction = torch.randn(B, K, generator=torch.Generator().manual_seed(3))
    weight = attention.k_proj.weight

    def loss() -> torch.Tensor:
        return (attention(query, neighbors, distance, labels, mask) * direction).sum()

    loss().backward()
    assert weight.grad is not None
    step = 1e-2 * weight.grad / weight.grad.norm()
    with torch.no_grad():
        weight += step
        above = loss()
        weight -= 2 * step
        below = loss()
    assert ((above - below) / 2).item() == pytest.approx(1e-2 * weight.grad.norm().item(), rel=2e-2)


@pytest.mark.parametrize("part", ["leaning", "agreement"])
def test_label_bias_changes_the_weights(part):
    """A bias that is the same for all neighbors would cancel: here it favors a label over another within one query."""
    query, neighbors, distance, labels, _ = case()
    labels = torch.tensor([0, 0, 0, 0, 1, 2, 3]).expand(B, K)
    attention = module(label_bias=True)
    assert attention.label_bias is not None
    with torch.no_grad():
        attention.label_bias.leaning.weight.zero_()
        attention.label_bias.leaning.bias.zero_()
        attention.label_bias.agreement.zero_()
        without = attention(query, neighbors, distance, labels)
        if part == "leaning":
            attention.label_bias.leaning.bias[0] = 1.0
        else:
            attention.label_bias.agreement.fill_(2.0)  # labels are shared by 3 of 6 fellows, or by none
        found = attention(query, neighbors, distance, labels)
    assert (found[:, :4] > without[:, :4]).all()
    assert (found[:, 4:] < without[:, 4:]).all()
    with torch.no_grad():  # each head's weights of label 0 gained a factor e against the others
        one_head = NeighborAttention(D, num_heads=1, num_classes=C, label_bias=True, distance_bias=False)
        before = one_head(query, neighbors, distance, labels)
        assert one_head.label_bias is not None
        one_head.label_bias.leaning.bias[0] += 1
        after = one_head(query, neighbors, distance, labels)
    ratio = (after / before)[:, :4].mean(1) / (after / before)[:, 4:].mean(1)
    assert torch.allclose(ratio, torch.full((B,), math.e), rtol=1e-4)


def test_agreement_by_hand():
    labels = torch.tensor([[1, 1, 2, 1], [1, 1, 2, 1], [5, 5, 5, 5]])
    mask = torch.tensor([[True, True, True, True], [True, False, True, True], [False, True, False, False]])
    wanted = torch.tensor([[2 / 3, 2 / 3, 0, 2 / 3], [1 / 2, 0, 0, 1 / 2], [0, 0, 0, 0]])
    assert torch.allclose(agreement(labels, mask), wanted)


def test_temperature_stays_in_bounds_and_comes_back():
    attention = NeighborAttention(D, num_heads=H, num_classes=C, temperature_bounds=(0.1, 0.5))
    assert torch.allclose(attention.temperature, torch.full((H,), 0.5))
    with torch.no_grad():
        attention.log_tau.copy_(torch.tensor([-9.0, -1.0, 9.0]))
    assert attention.temperature.tolist() == pytest.approx([0.1, math.exp(-1), 0.5], rel=1e-6)
    for gradient, wanted in (([1.0, 1, 1], [0.0, 1, 1]), ([-1.0, -1, -1], [-1.0, -1, 0])):
        x = torch.tensor([-9.0, 0.0, 9.0], requires_grad=True)
        (Bounded.apply(x, -1.0, 1.0) * torch.tensor(gradient)).sum().backward()
        assert x.grad is not None
        assert x.grad.tolist() == wanted  # descent subtracts it: back in is allowed, further out is not


def test_in_bfloat16_and_under_autocast():
    inputs, attention = case(), module(**EVERYTHING)
    wanted = attention(*inputs)
    with torch.autocast("cpu", torch.bfloat16):
        found = attention(*inputs)
    assert found.dtype == torch.float32
    assert (found - wanted).abs().max() < 0.05
    assert torch.allclose(found.sum(1), inputs[4].any(1).float(), atol=1e-6)


def test_order_of_neighbors_does_not_matter():
    query, neighbors, distance, labels, mask = case()
    attention, order = module(**EVERYTHING), torch.randperm(K)
    wanted = attention(query, neighbors, distance, labels, mask)[:, order]
    found = attention(query, neighbors[:, order], distance[:, order], labels[:, order], mask[:, order])
    assert torch.allclose(found, wanted, atol=1e-6)


def test_refusals():
    with pytest.raises(BadOption, match=r"embed_dim must be a multiple of the number of attention heads \(3\), got 32"):
        NeighborAttention(32, num_heads=3, num_classes=2)
    with pytest.raises(BadOption, match="temperature_bounds must be two numbers, 0 < low <= high"):
        NeighborAttention(33, num_heads=3, num_classes=2, temperature_bounds=(0.0, 1.0))
