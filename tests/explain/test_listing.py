"""`main.py list`, as a user calls it."""

from __future__ import annotations

from pathlib import Path

import pytest

from main import main


def test_list_names_every_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plugin = tmp_path / "mine.py"
    plugin.write_text("from layers import LAYERS, Attention\n\n@LAYERS.register()\nclass Listed(Attention):\n    '''My own.'''\n")
    words = ["--d_hidden", "12", "--image_size", "28", "--patch_size", "7", "--batch_size", "1", "--plugin", str(plugin)]
    assert main(["list", *words, "--filter", "test_vit"]) == 0
    out = capsys.readouterr().out
    names = "Attention ConvNNAttention KvtAttention LocalAttention NeighborhoodAttention SparseAttention SampledKnnAttention BranchConv "
    names += "BranchAttention Listed vit mlp linear digits cifar10 npz:FILE timm/test_vit"
    for name in names.split():
        assert f"  {name}: " in out, name
    assert "Listed: My own." in out
    assert "K=9" in out
    assert "ms forward" in out


def test_list_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "layer"]) == 2
    line = "error: WHAT must be one of layers, models, heads, datasets, all (did you mean 'layers'?), got 'layer'"
    assert capsys.readouterr().err.splitlines() == [line]


def test_list_says_what_a_plugin_adds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plugin = tmp_path / "added.py"
    plugin.write_text(
        "from classifiers.weights import WEIGHTS, uniform\nfrom dataset import DATASETS, iris\nfrom layers import LAYERS, Attention\n"
        "@WEIGHTS.register('first')\ndef first(query, neighbors, sq_distance, labels, mask=None, *, sharp=2.0):\n    'The first alone.'\n"
        "@DATASETS.register('flowers')\ndef flowers(root, *, petals=5):\n    'Flowers.'\n"
        "class Base(Attention):\n    'No part.'\n"
    )
    assert main(["list", "datasets", "--plugin", str(plugin)]) == 0
    out = capsys.readouterr().out
    wanted = ["PLUGIN added.py adds", "  vote first: The first alone.", "    sharp=2.0", "  data set flowers: Flowers.", "    petals=5", ""]
    assert out.splitlines()[:6] == wanted
    assert "  flowers: Flowers." in out
    (tmp_path / "nothing.py").write_text("x = 1\n")
    assert main(["list", "datasets", "--plugin", str(tmp_path / "nothing.py")]) == 0
    assert capsys.readouterr().out.startswith("PLUGIN nothing.py adds nothing: no part is registered in it\n")
