"""Sizes with a few zeros too many end in a line with their flag, before anything is taken or written."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import timm

from main import main
from models.backbones import timm_size

TINY = ["--dataset", "fake(train=24, test=8, size=8, classes=3)", "--num_layers", "1", "--num_heads", "1", "--d_hidden", "8"]
TINY += ["--d_mlp", "8", "--patch_size", "4", "--num_epochs", "1", "--batch_size", "8", "--warmup_epochs", "0"]


@pytest.mark.parametrize(
    ("typed", "flag"),
    [
        (["--d_hidden", "100000000"], "--d_hidden"),
        (["--d_mlp", "1000000000000"], "--d_mlp"),
        (["--num_layers", "1000000000000"], "--num_layers"),
        (["--resize", "4000000"], "--resize"),
        (["--head", "knn", "--k_train", "1000000000000"], "--k_train"),
        (["--head", "knn", "--k_eval", "999999999"], "--k_eval"),
        (["--head", "attn-knn", "--embed_dim", "100000000"], "--embed_dim"),
        (["--dataset", "fake(train=100000000, size=1000)"], "--dataset"),
        (["--dataset", "fake(size=100000000000)"], "--dataset"),
        (["--model", "timm/vit_tiny_patch16_224", "--resize", "16384", "--batch_size", "24"], "--batch_size"),
        (["--dataset", "fake(train=300000, test=300000, size=4, classes=300000)"], "--dataset"),
        (["--dataset", "fake(train=600000, size=4, classes=300000)", "--val_fraction", "0.5"], "--val_fraction"),
        (["--head", "knn", "--freeze_backbone", "--augment", "--views", "1000000000000"], "--views"),
    ],
)
def test_a_size_beyond_memory_is_one_line(typed, flag, tmp_path: Path, capsys):
    out, started = tmp_path / "run", time.perf_counter()
    assert main([*TINY, *typed, "--output_dir", str(out)]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"error: {flag} asks for more memory than the "), last
    assert "takes about" in last
    assert not out.exists()
    assert time.perf_counter() - started < 60


def test_a_timm_model_is_measured_without_being_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys) -> None:
    name = "vit_tiny_patch16_224"
    parameters, seen = timm_size(f"timm/{name}", (3, 64, 48))
    made = timm.create_model(name, img_size=(64, 48), num_classes=0)
    assert parameters == sum(p.numel() for p in made.parameters())
    assert seen == 2 * 12 * 12 * 192  # 4 x 3 patches, 12 blocks of width 192; what goes in and what comes out
    assert timm_size("timm/resnet18", (3, 64, 48))[1] == 0
    monkeypatch.setattr("inputs.memory.free_memory", lambda: 4.0 * parameters)  # the weights alone would fit
    assert main([*TINY, "--model", f"timm/{name}", "--resize", "64", "--output_dir", str(tmp_path / "run")]) == 2
    assert "a model of 5,4" in (said := capsys.readouterr().err.splitlines()[-1])
    assert said.startswith("error: --model asks for more memory than the ")
