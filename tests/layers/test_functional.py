"""The pure functions, on examples worked out by hand."""

import pytest
import torch

from layers import functional as L
from tests.layers.reference import assert_same

CPU = torch.device("cpu")


def rows(mask: torch.Tensor) -> list[str]:
    return ["".join("x" if m else "." for m in row) for row in mask.tolist()]


def test_local_mask() -> None:
    assert rows(L.local_mask(5, 3, CPU)) == ["xx...", "xxx..", ".xxx.", "..xxx", "...xx"]
    assert torch.equal(L.local_mask(5, 4, CPU), L.local_mask(5, 5, CPU))  # |i - j| <= window // 2
    assert L.local_mask(5, 9, CPU).all()


def test_strided_mask() -> None:
    assert rows(L.strided_mask(5, 2, CPU)) == ["x.x.x", ".x.x.", "x.x.x", ".x.x.", "x.x.x"]
    assert L.strided_mask(5, 1, CPU).all()


def test_neighborhood_window_moves_inside_at_the_borders() -> None:
    assert rows(L.neighborhood_mask(5, 3, 1, CPU)) == ["xxx..", "xxx..", ".xxx.", "..xxx", "..xxx"]
    assert rows(L.neighborhood_mask(5, 2, 2, CPU)) == ["x.x..", ".x.x.", "x.x..", ".x.x.", "..x.x"]
    assert (L.neighborhood_mask(23, 5, 3, CPU).sum(1) == 5).all()


def test_prefix_tokens_read_everything_and_are_read_by_everything() -> None:
    assert rows(L.open_to_prefix(L.local_mask(3, 1, CPU), 2)) == ["xxxxx", "xxxxx", "xxx..", "xx.x.", "xx..x"]


def test_spaced_tokens() -> None:
    assert L.spaced_tokens(17, 5).tolist() == [0, 4, 8, 12, 16]
    assert L.spaced_tokens(17, 4, padding=2).tolist() == [2, 6, 10, 14]
    assert L.spaced_tokens(17, 1).tolist() == [0]


@pytest.mark.parametrize(
    ("grid", "samples", "padding", "wanted"),
    [((14, 14), 32, 0, (4, 8)), ((14, 14), 11, 0, (3, 3)), ((5, 7), 35, 0, (5, 7)), ((3, 20), 5, 0, (1, 5)), ((6, 6), 9, 1, (3, 3))],
)
def test_grid_samples(grid: tuple[int, int], samples: int, padding: int, wanted: tuple[int, int]) -> None:
    assert L.grid_samples(grid, samples, padding) == wanted


def test_grid_tokens() -> None:
    assert L.grid_tokens((3, 9), 3, 0, num_prefix_tokens=2).tolist() == [2 + 9 + 1, 2 + 9 + 4, 2 + 9 + 7]
    assert L.grid_tokens((5, 7), 35, 0, num_prefix_tokens=1).tolist() == list(range(1, 36))
    assert L.grid_tokens((5, 5), 1, 2, num_prefix_tokens=0).tolist() == [12]


def test_drawn_tokens() -> None:
    fixed = [L.drawn_tokens(197, 31, True, CPU) for _ in range(2)]
    assert torch.equal(*fixed)
    assert fixed[0].unique().tolist() == fixed[0].tolist()  # ascending, none twice
    torch.manual_seed(0)
    first, second = (L.drawn_tokens(197, 31, False, CPU) for _ in range(2))
    assert not torch.equal(first, second)
    torch.manual_seed(0)
    assert torch.equal(first, L.drawn_tokens(197, 31, False, CPU))


def test_the_fixed_draw_is_spread_like_a_random_one() -> None:
    place = L.scrambled(10_007, CPU).double() / 2**32
    assert abs(place.mean() - 0.5) < 0.01
    assert abs(place.std() - 12**-0.5) < 0.01
    assert abs(torch.corrcoef(torch.stack([place[1:], place[:-1]]))[0, 1]) < 0.03


def test_coordinates() -> None:
    assert L.line_coordinates(5, CPU).flatten().tolist() == [-1, -0.5, 0, 0.5, 1]
    plane = L.plane_coordinates((2, 3), 1, CPU)
    assert plane.tolist() == [[0, 0], [-1, -1], [-1, 0], [-1, 1], [1, -1], [1, 0], [1, 1]]
    assert L.plane_coordinates((1, 3), 0, CPU).tolist() == [[0, -1], [0, 0], [0, 1]]
    assert L.append_coordinates(torch.zeros(2, 3, 7, 5), plane).shape == (2, 3, 7, 7)


@pytest.mark.parametrize("magnitude", L.MAGNITUDES)
def test_comparable_and_similarity(magnitude: str) -> None:
    q, k = torch.randn(2, 3, 7, 5, dtype=torch.float64), torch.randn(2, 3, 7, 5, dtype=torch.float64) + 100
    a, b = L.comparable(q, k, magnitude)
    got = L.similarity(a @ b.transpose(-1, -2), a, magnitude, 0.5)
    wanted = {
        "matmul": lambda: 0.5 * q @ k.transpose(-1, -2),
        "cosine": lambda: torch.cosine_similarity(q[:, :, :, None], k[:, :, None], dim=-1),
        "euclidean": lambda: -(q[:, :, :, None] - k[:, :, None]).norm(dim=-1),
    }[magnitude]()
    assert_same(got, wanted, 1e-10)


def test_rank_weights() -> None:
    score = torch.tensor([2.0, 1.0, 0.0])
    missing = torch.tensor([False, False, True])
    assert_same(L.rank_weights(score, "matmul", True, missing), torch.tensor([0.7310586, 0.2689414, 0.0]), 1e-6)
    assert L.rank_weights(score, "matmul", False, missing).tolist() == [2, 1, 0]
    assert_same(L.rank_weights(torch.tensor([-0.5, -4.0]), "euclidean", False), torch.tensor([2.0, 0.25]), 1e-6)


def test_a_thing_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    L.say_once.cache_clear()
    for _ in range(3):
        L.say_once("chosen: this, because of that")
    assert capsys.readouterr().err == "chosen: this, because of that\n"
