"""`main.py list`, as a user calls it."""

from __future__ import annotations

from pathlib import Path

import pytest

from main import main


def test_list_names_every_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plugin = tmp_path / "mine.py"
    plugin.write_text("from layers import LAYERS, Attention\n\n@LAYERS.register()\nclass Mine(Attention):\n    '''My own.'''\n")
    words = ["--d_hidden", "12", "--image_size", "28", "--patch_size", "7", "--batch_size", "1", "--plugin", str(plugin)]
    assert main(["list", *words, "--filter", "test_vit"]) == 0
    out = capsys.readouterr().out
    names = "Attention ConvNNAttention KvtAttention LocalAttention NeighborhoodAttention SparseAttention SampledKnnAttention BranchConv "
    names += "BranchAttention Mine vit mlp linear digits cifar10 npz:FILE timm/test_vit"
    for name in names.split():
        assert f"  {name}: " in out, name
    assert "Mine: My own." in out
    assert "K=9" in out
    assert "ms forward" in out


def test_list_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "layer"]) == 2
    line = "error: WHAT must be one of layers, models, heads, datasets, all (did you mean 'layers'?), got 'layer'"
    assert capsys.readouterr().err.splitlines() == [line]
