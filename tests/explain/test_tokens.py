"""`main.py explain --what tokens`: the command as a user types it, and what it refuses."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import models
from explain.draw_tokens import draw_tokens
from explain.selection import Depth, Grid
from explain.tokens import look
from layers import TokenMixer
from main import main

SMALL = ["--num_layers", "2", "--num_heads", "3", "--d_hidden", "15", "--d_mlp", "7", "--num_epochs", "1", "--batch_size", "16"]
FAKE = ["--dataset", "fake(train=40, test=11, size=8, classes=3)", "--patch_size", "2", *SMALL]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def explained(words: list[str], run: Path | str = "run", name: str = "0", folder: Path | None = None) -> dict[str, Any]:
    """The record of a successful command; its picture is a whole PNG."""
    assert main(["explain", "--checkpoint", str(run), *words]) == 0
    path = (folder or Path(run)) / f"explain-tokens-{name}.png"
    with Image.open(path) as picture:
        picture.load()
        assert picture.format == "PNG"
        assert min(picture.size) > 300
    assert "(at random: " in path.with_suffix(".txt").read_text()
    return json.loads(path.with_suffix(".json").read_text())


# ---------------------------------------------------------------- the command


@pytest.mark.parametrize(
    ("layer", "shown"),
    [("ConvNNAttention(K=5)", 5), ("Attention", 9), ("NeighborhoodAttention(K=3,window_dims=2)", 9), ("BranchConv(K=4)", 4)],
)
def test_the_command(layer: str, shown: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*FAKE, "--layer", layer, "--output_dir", "run"]) == 0
    capsys.readouterr()
    record = explained(["--image", "7", "--queries", "0,0; 3,2"], name="7")
    assert record["grid"] == [4, 4]
    assert record["images_in_mean"] == 11
    assert [d["shown"] for d in record["depths"]] == [shown] * 2
    assert [d["cut"] for d in record["depths"]] == [layer == "Attention"] * 2
    for d in record["depths"]:
        assert [q["patch"] for q in d["queries"]] == [[0, 0], [3, 2]]
        for head in d["queries"][0]["heads"]:
            assert 0 < len(head) <= shown
            assert sum(s["weight"] for s in head) <= 1 + 1e-4
            assert [s["weight"] for s in head] == sorted((s["weight"] for s in head), reverse=True)
    assert 0 <= record["depths"][1]["mean"]["agreement"] <= 1
    assert "agreement" not in record["depths"][0]["mean"]
    text = capsys.readouterr().out
    assert "Mean over 11 test images" in text
    assert ("largest weights that are shown" in text) == (layer == "Attention")
    assert ("of 5 channels a head select" in text) == layer.startswith("Branch")
    if layer.startswith("Neighborhood"):
        assert record["depths"][1]["mean"]["agreement"] == 1
        corner = {tuple(s["patch"]) for s in record["depths"][0]["queries"][0]["heads"][2]}
        assert corner == {(r, c) for r in range(3) for c in range(3)}


def test_what_is_drawn_follows_the_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default the mean over heads; --all, every head and depth; --head, those that it names."""
    deep = [*FAKE[:4], "--num_layers", "8", *SMALL[2:], "--layer", "KvtAttention(K=5)"]
    assert main([*deep, "--output_dir", "run"]) == 0
    drawn: list[dict[str, Any]] = []

    def kept(path: Path, **parts: Any) -> None:
        drawn.append(parts)
        draw_tokens(path, **parts)

    monkeypatch.setattr("explain.tokens.draw_tokens", kept)
    record = explained([])
    for words in (["--all"], ["--head", "all"], ["--head", "2,0"], ["--all", "--head", "1"]):
        explained(words)
    assert [(list(of["heads"]), len(of["columns"])) for of in drawn] == [([0], 6), ([0, 1, 2], 8), ([0, 1, 2], 6), ([2, 0], 6), ([1], 8)]
    assert [of["title"][1].rpartition("; ")[2] for of in drawn[::4]] == ["mean over heads", "head 1"]
    row = drawn[0]["queries"][1][0] * 4 + drawn[0]["queries"][1][1]
    kept = drawn[0]["depths"][3].index[0, row].tolist()
    of_heads = drawn[1]["depths"][3].weight[:, row].mean(0)  # (P,)
    assert set(of_heads[kept].tolist()) == set(of_heads.sort(descending=True).values[:5].tolist())
    mean = record["depths"][3]["queries"][1]["mean"]
    assert [r * 4 + c for r, c in (patch["patch"] for patch in mean)] == kept
    assert [patch["weight"] for patch in mean] == pytest.approx(of_heads[kept].tolist(), abs=1e-6)


def test_a_frame_leaves_the_image_visible() -> None:
    """No pixel inside a frame is painted over: the patch that is read looks as in the image."""
    grid = Grid(8, 8)
    weight = torch.zeros(1, 64, 64)
    weight[0, :, 27] = 1
    depth = Depth("Own", weight, torch.full((1, 64, 1), 27), torch.ones(1, 64, 1, dtype=torch.bool), cut=False, channels=(5, 5))
    pixels = np.full((64, 64, 3), (0.2, 0.8, 0.4))
    draw_tokens(Path("p.png"), pixels=pixels, title=("$a_{", "b"), grid=grid, depths=[depth], columns=[0], queries=[(0, 0)], heads={0: ""})
    picture = np.asarray(Image.open("p.png").convert("RGB")).astype(int)
    same = (abs(picture - np.array([51, 204, 102])) <= 1).all(-1)
    assert same.sum() > 0.85 * 2 * (1.4 * 150 * 0.95) ** 2  # of the image and of the small picture, in pixels


def test_flags_and_a_file_of_ones_own() -> None:
    """Grayscale runs see files in gray; hyphens and underscores both work; the run itself can stay untouched."""
    rng = np.random.default_rng(0)
    images: dict[str, Any] = {f"x_{part}": rng.integers(0, 256, (rows, 6, 10), np.uint8) for part, rows in (("train", 30), ("test", 5))}
    np.savez("gray.npz", y_train=np.arange(30) % 2, y_test=np.arange(5) % 2, **images)
    assert main(["--dataset", "npz:gray.npz", "--patch_size", "2", *SMALL, "--layer", "KvtAttention(K=3)", "--output_dir", "run"]) == 0
    before = sorted(Path("run").iterdir())
    Image.fromarray(rng.integers(0, 256, (50, 31, 3), np.uint8)).save("my photo.png")
    words = ["--image", "my photo.png", "--K", "2", "--head", "2,0", "--output-dir", "out", "--data-path", "elsewhere"]
    record = explained(words, name="my_photo", folder=Path("out"))
    assert record["grid"] == [3, 5]
    assert [d["shown"] for d in record["depths"]] == [2, 2]
    assert sorted(Path("run").iterdir()) == before
    explained(["--image", "4", "--checkpoint", "run/checkpoints/last"], name="4")  # beside the run, not in the checkpoint


def test_image_files_are_cropped_as_in_the_evaluation(here: Path) -> None:
    rng = np.random.default_rng(0)
    for part, count in (("train", 4), ("val", 3)):
        for label in "ab":
            (here / "set" / part / label).mkdir(parents=True)
            for i in range(count):
                Image.fromarray(rng.integers(0, 256, (20, 26, 3), np.uint8)).save(here / "set" / part / label / f"{i}.png")
    assert main(["--dataset", "folder:set", "--resize", "16", "--patch_size", "4", *SMALL, "--workers", "0", "--output_dir", "run"]) == 0
    by_row, by_file = explained(["--image", "1"], name="1"), explained(["--image", "set/val/a/1.png"], name="1")
    assert by_row["depths"][0]["this_image"] == by_file["depths"][0]["this_image"]


def test_a_timm_model_is_seen_through_our_layer(capsys: pytest.CaptureFixture[str]) -> None:
    data = ["--dataset", "fake(train=40, test=7, size=64, classes=3)", "--resize", "64", "--num_epochs", "1", "--batch_size", "20"]
    assert main(["--model", "timm/test_vit", *data, "--output_dir", "run"]) == 0
    assert main(["--model", "timm/test_resnet", *data, "--output_dir", "resnet"]) == 0
    capsys.readouterr()
    record = explained([])
    assert "timm/test_vit: its attention is seen through the layer Attention, with the same weights" in capsys.readouterr().err
    assert {d["layer"] for d in record["depths"]} == {"Attention"}
    refuses(
        "explain --checkpoint resnet", "--checkpoint must be a model with attention between tokens, and timm/test_resnet has none", capsys
    )


def test_a_plugin_layer_of_no_more_than_its_mix(here: Path) -> None:
    (here / "own.py").write_text(
        "import torch\n"
        "from layers import LAYERS, TokenMixer\n"
        "@LAYERS.register('ReadsTheNext')\n"
        "class ReadsTheNext(TokenMixer):\n"
        "    def mix(self, q, k, v):\n"
        "        return v.roll(-1, 2)\n"
    )
    assert main([*FAKE, "--plugin", "own.py", "--layer", "ReadsTheNext", "--output_dir", "run"]) == 0
    record = explained(["--queries", "1,2;3,3", "--plugin", "own.py"])
    assert [[s["patch"] for s in head] for head in record["depths"][1]["queries"][0]["heads"]] == [[[1, 3]]] * 3
    assert record["depths"][1]["queries"][1]["heads"] == [[]] * 3  # after the last patch comes the class token
    assert record["depths"][1]["mean"]["agreement"] == 1


def test_mix_is_put_back_when_the_model_fails() -> None:
    spec = models.ModelSpec(name="vit", shape=(3, 8, 8), num_classes=3, patch_size=4, depth=2, dim=6, num_heads=1, d_mlp=7)
    model: Any = models.build(spec).eval()

    def fail(*inputs: Any) -> None:
        raise RuntimeError("a layer that fails")

    hook = model.blocks[1].attn.proj.register_forward_hook(fail)  # after the second mix
    with pytest.raises(RuntimeError, match="a layer that fails"):
        look(model, torch.zeros(1, 3, 8, 8))
    hook.remove()
    mixers = [m for m in model.modules() if isinstance(m, TokenMixer)]
    assert len(mixers) == 2
    assert not any("mix" in vars(m) for m in mixers)
    assert [q.shape for _, q, _ in look(model, torch.zeros(1, 3, 8, 8))] == [(1, 1, 5, 6)] * 2
    assert not any("mix" in vars(m) for m in mixers)


# ---------------------------------------------------------------- what is refused


def refuses(command: str | list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    before = sorted(Path().rglob("*"))
    assert main(command.split() if isinstance(command, str) else command) == 2
    captured = capsys.readouterr()
    said = [text for text in captured.err.splitlines() if not text.startswith(("device:", "timm/"))]
    assert len(said) == 1, captured.err
    assert said[0].startswith("error: ")
    assert line in said[0]
    assert captured.out == ""
    assert sorted(Path().rglob("*")) == before  # nothing was written


def test_refusals(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*FAKE, "--output_dir", "run"]) == 0
    assert main(["--dataset", "iris", "--num_epochs", "1", "--output_dir", "table"]) == 0
    (here / "broken.png").write_bytes(b"\x89PNG no more")
    os.mkfifo(here / "pipe.png")  # who opens it waits for ever
    capsys.readouterr()
    for words, line in (
        ("--what nothing --checkpoint run", "--what must be one of tokens, neighbors, got 'nothing'"),
        ("", "--checkpoint must name the run to explain"),
        ("--checkpoint none", "--checkpoint must be a run or a checkpoint that exists, got 'none'"),
        ("--checkpoint table", "--checkpoint must be a model of images: the rows of a table have no tokens, got 'table'"),
        ("--checkpoint run --image 11", "--image must be a row of the test split (0 to 10) or an image file, got '11'"),
        ("--checkpoint run --image -1", "--image must be a row of the test split (0 to 10) or an image file, got '-1'"),
        ("--checkpoint run --image pipe.png", "--image must be a row of the test split (0 to 10) or an image file that exists"),
        ("--checkpoint run --image no.png", "--image must be a row of the test split (0 to 10) or an image file that exists, got 'no.png'"),
        (
            "--checkpoint run --image broken.png",
            "--image must be an image file that can be read (UnidentifiedImageError), got 'broken.png'",
        ),
        ("--checkpoint run --K 0", "--K must be a whole number of at least 1, got '0'"),
        ("--checkpoint run --K many", "--K must be a whole number of at least 1, got 'many'"),
        ("--checkpoint run --queries 1", "--queries must be patches 'row,column;row,column', rows 0 to 3 and columns 0 to 3, got '1'"),
        ("--checkpoint run --queries 1,4", "--queries must be patches 'row,column;row,column', rows 0 to 3 and columns 0 to 3"),
        ("--checkpoint run --head 3", "--head must be mean, all, or heads by number, 0 to 2, with commas between, got '3'"),
        ("--checkpoint run --device tpu", "--device must be one of auto, cpu, cuda, mps"),
        ("--checkpoint run --output_dir /proc/none", "--output_dir must be a directory that can be written"),
        ("--checkpoint run --heads 3", "No such option: --heads"),
    ):
        refuses(["explain", *words.split()], line, capsys)


def test_attention_that_cannot_be_seen(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Relative-position bias is not ours to leave out, and a layer that never mixes reads nothing."""
    data = ["--dataset", "fake(train=20, test=5, size=64, classes=2)", "--resize", "64", "--num_epochs", "1", "--batch_size", "10"]
    assert main(["--model", "timm/test_vit_relpos", *data, "--output_dir", "bias"]) == 0
    capsys.readouterr()
    refuses(
        "explain --checkpoint bias",
        "--checkpoint must be a model whose attention can be seen: Attention cannot take the place of blocks.0.attn",
        capsys,
    )
    (here / "own.py").write_text(
        "from layers import LAYERS, TokenMixer\n"
        "@LAYERS.register('NeverMixes')\n"
        "class NeverMixes(TokenMixer):\n"
        "    def forward(self, x):\n"
        "        return self.proj(x)\n"
    )
    assert main([*FAKE, "--plugin", "own.py", "--layer", "NeverMixes", "--output_dir", "run"]) == 0
    capsys.readouterr()
    refuses("explain --checkpoint run --plugin own.py", "(tokens seen: none: no layer called its mix), got 'vit'", capsys)
