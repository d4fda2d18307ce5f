"""The embedder: length 1 whatever goes in, and no gradient that poisons a batch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from classifiers.embedder import Embedder, Standardize, unit
from utils import BadOption

B, FEATURES, D = 13, 11, 7


def case(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(B, FEATURES, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)


def module(embed_dim: int = D, **options) -> Embedder:
    torch.manual_seed(0)
    return Embedder(FEATURES, embed_dim, **options)


def test_unit_by_hand():
    x = torch.tensor([[3.0, 4.0], [0.0, 0.0], [0.0, -1e-10], [5e15, 12e15], [1e-20, 0.0]])
    wanted = torch.tensor([[0.6, 0.8], [0, 0], [0, -1], [5 / 13, 12 / 13], [0, 0]])
    assert torch.allclose(unit(x), wanted)


def test_layers_one_at_a_time():
    embedder = module().eval()
    parameters = dict(embedder.named_parameters())
    assert {name: tuple(p.shape) for name, p in parameters.items()} == {
        "project.0.weight": (2 * D, FEATURES),
        "project.0.bias": (2 * D,),
        "project.1.weight": (2 * D,),
        "project.1.bias": (2 * D,),
        "project.4.weight": (D, 2 * D),
        "project.4.bias": (D,),
    }
    hidden = case() @ parameters["project.0.weight"].T + parameters["project.0.bias"]
    hidden = (hidden - hidden.mean(1, keepdim=True)) / (hidden.var(1, correction=0, keepdim=True) + 1e-5).sqrt()
    out = F.gelu(hidden) @ parameters["project.4.weight"].T + parameters["project.4.bias"]
    assert torch.allclose(embedder(case()), out / out.norm(dim=1, keepdim=True), atol=1e-6)


@pytest.mark.parametrize(("embed_dim", "dim"), [(0, FEATURES), (D, D)])
def test_length_one_in_float32_also_under_autocast(embed_dim, dim):
    embedder = module(embed_dim)
    assert embedder.dim == dim
    wanted = embedder(1e3 * case())
    with torch.autocast("cpu", torch.bfloat16):
        found = embedder(1e3 * case()), embedder(1e3 * case(torch.bfloat16))
    for z, tolerance in ((wanted, 0), (found[0], 0.02), (found[1], 0.05)):
        assert z.dtype == torch.float32
        assert z.shape == (B, dim)
        assert torch.allclose(z.norm(dim=1), torch.ones(B), atol=1e-6)
        assert (z - wanted).abs().max() <= tolerance


def test_without_a_projection_nothing_is_learned():
    embedder = module(0)
    assert list(embedder.parameters()) == []
    x = case()
    assert torch.allclose(embedder(x), F.normalize((x - x.mean(0)) / (x.var(0, unbiased=False) + 1e-5).sqrt(), dim=1), atol=1e-6)


def test_features_are_standardized_over_the_batch_and_later_over_running_statistics():
    layer = Standardize(FEATURES)
    assert layer.running_mean is not None
    x = case() * 3 + 5
    found = layer(x)
    assert torch.allclose(found.mean(0), torch.zeros(FEATURES), atol=1e-5)
    assert torch.allclose(found.var(0, unbiased=False), torch.ones(FEATURES), atol=1e-3)
    assert torch.allclose(layer.eval()(x), (x - x.mean(0)) / (x.var(0) + 1e-5).sqrt(), atol=1e-5)  # one batch: its own
    layer.train()(x + 1)
    assert torch.allclose(layer.running_mean, x.mean(0) + 0.5, atol=1e-5)  # two: their mean
    for _ in range(40):
        layer(x + 2)
    assert torch.allclose(layer.running_mean, x.mean(0) + 2, atol=0.1)  # many: the latest count
    layer.eval()
    assert torch.allclose(layer(x[:1]), layer(x)[:1], atol=1e-6)
    assert torch.equal(layer.train()(x[:1]), layer.eval()(x[:1]))  # one row has no variance


def test_what_all_rows_share_is_taken_away():
    """Rows that point nearly the same way: their embeddings do not."""
    x = 10 + 0.1 * case()
    shared = F.normalize(x, dim=1)
    assert (shared @ shared.T).min() > 0.99
    z = F.normalize(Standardize(FEATURES)(x), dim=1)
    assert (z @ z.T - torch.eye(B)).mean().abs() < 0.1


def test_the_form_of_older_checkpoints():
    """Nothing is standardized, and dropout lies between the layers: their weights load, and it draws what it drew."""
    older = module(standardize=False, dropout=0.3)
    assert not list(older.buffers())
    x = case()
    torch.manual_seed(1)
    found = older(x)
    torch.manual_seed(1)
    assert isinstance(older.project, torch.nn.Sequential)
    first, norm, last = older.project[0], older.project[1], older.project[4]
    assert torch.allclose(found, F.normalize(last(F.dropout(F.gelu(norm(first(x))), 0.3)), dim=1))
    older.eval()
    assert torch.equal(module(0, standardize=False)(x), unit(x))


def test_the_hidden_layer_is_no_bottleneck_and_one_of_an_older_run_stays_as_it_is():
    def hidden(embedder):
        return len(embedder.project[0].weight)

    assert [hidden(Embedder(features, dim)) for features, dim in ((512, 32), (512, 256), (40, 8), (40, 32))] == [128, 512, 40, 64]
    saved = Embedder(512, 32).state_dict()
    narrow = torch.nn.Linear(512, 64)
    saved["project.0.weight"], saved["project.0.bias"] = narrow.weight.detach(), narrow.bias.detach()
    saved["project.1.weight"], saved["project.1.bias"] = torch.ones(64), torch.zeros(64)
    saved["project.4.weight"] = torch.randn(32, 64)
    older = Embedder(512, 32)
    older.load_state_dict(saved)
    assert hidden(older) == 64
    assert older.eval()(torch.randn(3, 512)).shape == (3, 32)
    older.load_state_dict(Embedder(512, 32).state_dict())
    assert hidden(older) == 128


def test_a_zero_row_has_no_gradient_and_leaves_those_of_the_others():
    features = case()
    features[3] = 0
    direction = torch.randn(B, FEATURES, generator=torch.Generator().manual_seed(1))
    rest = torch.arange(B) != 3
    wanted = features[rest].clone().requires_grad_()
    (unit(wanted) * direction[rest]).sum().backward()
    (unit(features.requires_grad_()) * direction).sum().backward()
    assert features.grad is not None
    assert wanted.grad is not None
    assert (features.grad[3] == 0).all()
    assert torch.allclose(features.grad[rest], wanted.grad)


def test_a_projection_to_zero_has_finite_gradients():
    embedder = module()
    assert isinstance(embedder.project, torch.nn.Sequential)
    for parameter in embedder.project[4].parameters():
        torch.nn.init.zeros_(parameter)
    z = embedder(case())
    assert (z == 0).all()
    z.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in embedder.parameters())


@pytest.mark.parametrize("embed_dim", [0, D])
def test_gradients_by_differences(embed_dim):
    embedder, features = module(embed_dim).double(), case(torch.float64).requires_grad_()
    assert embedder(features).dtype == torch.float64
    assert torch.autograd.gradcheck(embedder, features)


def test_refusals():
    with pytest.raises(BadOption, match=r"embed_dim must be 0 \(the features themselves\) or more, got -1"):
        Embedder(FEATURES, -1)
