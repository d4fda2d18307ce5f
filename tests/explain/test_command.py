"""`main.py explain`: its help, which answers before anything slow is read, and the one prediction that its pictures are titled with."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from main import main
from run.loaded import load


def test_help_names_every_kind(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--help"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "(--what tokens)" in said
    assert "(--what neighbors)" in said
    assert "--mistakes" in said


def test_help_reads_neither_torch_nor_matplotlib() -> None:
    code = "import sys, main; main.main(['explain', '--help']); print(sorted({'torch', 'matplotlib'} & set(sys.modules)))"
    root = Path(__file__).parents[2]
    shown = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True).stdout
    assert shown.splitlines()[-1] == "[]"


@pytest.mark.parametrize("head", ["linear", "attn-knn --embed_dim 12 --k_train 7", "linear+knn --k_train 7"])
def test_both_kinds_name_the_same_prediction(head: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "--num_layers",
        "1",
        "--num_heads",
        "3",
        "--d_hidden",
        "15",
        "--d_mlp",
        "7",
        "--num_epochs",
        "2",
        "--batch_size",
        "16",
        "--patch_size",
        "3",
        "--lr",
        "3e-3",
    ]
    data = ["--dataset", "fake(train=83, test=29, size=6, classes=5)"]
    run, row = tmp_path / "run", 13
    assert main([*data, *words, "--head", *head.split(), "--output_dir", str(run)]) == 0
    titles = []
    for what in ("tokens", "neighbors"):
        assert main(["explain", "--what", what, "--checkpoint", str(run), "--image", str(row)]) == 0
        text = (run / f"explain-{what}-{row}.txt").read_text()
        (line,) = re.findall(rf"^row {row} of the test split.*$", text, re.MULTILINE)[:1]
        titles.append(re.findall(r"predicted (.+) \((.+)\)$", line)[0])
    capsys.readouterr()
    loaded = load(str(run), {})
    mean, std = (torch.tensor(loaded.data.fitted[name]).view(1, -1, 1, 1) for name in ("mean", "std"))
    probs = loaded.model.predict((torch.from_numpy(loaded.data.test.x[[row]]) / 255 - mean) / std)[0]
    assert titles == [(loaded.data.classes[int(probs.argmax())], f"{float(probs.max()):.1%}")] * 2
