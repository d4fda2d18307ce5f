"""The command line: what a user types, and what they see when it is wrong."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from config import FIELDS, RENAMED
from layers import LAYERS
from main import NAMES, flags_of, main
from utils import options_of

ROOT = Path(__file__).parent.parent
SMALL = ["--num_layers", "1", "--num_heads", "1", "--d_hidden", "6", "--d_mlp", "7", "--num_epochs", "1", "--batch_size", "32"]
FAKE = ["--dataset", "fake(train=40, test=20, size=8, classes=3)", "--patch_size", "4", *SMALL]


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a wrong command ends with."""
    before = written()
    assert main(words) == 2
    captured = capsys.readouterr()
    lines = [line for line in captured.err.splitlines() if not line.startswith(("device:", "resize:"))]
    assert len(lines) == 1, captured.err
    assert lines[0].startswith("error: ")
    assert captured.out == ""
    assert written() == before
    return lines[0]


def written() -> list[Path]:
    """What there is here but Python's own cache of a plugin."""
    return sorted(path for path in Path().rglob("*") if "__pycache__" not in path.parts)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def trained(here: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    assert main([*FAKE, "--output_dir", "run"]) == 0
    capsys.readouterr()
    return here / "run"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--layer Atention", r"--layer must be one of .*\(did you mean 'Attention'\?\), got 'Atention'"),
        ("--layer Attention(K=3)", "Attention has no option 'K'"),
        ("--layer Attention(", r"--layer must read Name\(option=value, \.\.\.\).*, got 'Attention\('"),
        ("--layer Attention*3", r"--layer must name as many layers as there are blocks \(4\) or a divisor of it \(3 named\)"),
        ("--d_hidden 65", r"--d_hidden must be divisible by num_heads \(4\), got 65"),
        ("--patch_size 3", r"--patch_size must divide the image size \(8 x 8\), got 3"),
        ("--batch_size 0", "--batch_size must be at least 1, got 0"),
        ("--lr -1", "--lr must be above 0, got -1.0"),
        ("--lr abc", "--lr must be a number, got 'abc'"),
        ("--lr nan", "--lr must be a number, got nan"),
        ("--num_epochs 1.5", "--num_epochs must be a whole number, got '1.5'"),
        ("--laer Attention", r"No such option:? '?--laer"),
        ("--optimizer adamm", r"--optimizer must be one of adam, sgd, adamw \(did you mean 'adam'\?\), got 'adamm'"),
        ("--head linaer", r"--head must be one of .*\(did you mean 'linear'\?\), got 'linaer'"),
        ("--model vitt", r"--model must be one of .*\(did you mean 'vit'\?\), got 'vitt'"),
        ("--model timm/resnet19", r"--model must be a model that timm has \(did you mean"),
        ("--model mlp", "--model must be one for images"),
        ("--dataset digit", r"--dataset must be one of .*\(did you mean 'digits'\?\), got 'digit'"),
        ("--dataset iris --model vit", r"--model must be one for table rows \(mlp; identity for ready-made features\)"),
        ("--dataset npz:none.npz", r"--dataset must be a file that can be read \(No such file or directory\), got '.*none.npz'"),
        ("--dataset folder:none", "--dataset must hold CLASS/"),
        ("--dataset fake(sizes=3)", "fake has no option 'sizes' \\(did you mean 'size'\\?\\)"),
        ("--label_noise 2", r"--label_noise must read RATE\[:symmetric\|asymmetric\]"),
        ("--imbalance 0", "--imbalance must be above 0 and at most 1, got 0.0"),
        ("--val_fraction 1", "--val_fraction must be at least 0 and below 1, got 1.0"),
        ("--val_fraction 0 --patience 3", r"--patience needs validation rows \(--val_fraction above 0\), got 3"),
        ("--val_fraction 0 --scheduler plateau", "--scheduler needs validation rows"),
        ("--test_only", "--test_only needs --checkpoint RUN"),
        ("--test_only --checkpoint none", "--checkpoint must be a run or a checkpoint that exists, got 'none'"),
        ("--checkpoint none", "--checkpoint goes with --test_only"),
        ("--test_only --checkpoint run --resume run", "--resume trains on: it does not go with --test_only.*, got 'run'"),
        ("--resume none", "--resume must be a run that holds"),
        ("--config none.yaml", "--config must be a file that can be read"),
        ("--plugin none.py", "--plugin must be a Python file that exists, got 'none.py'"),
        ("--pretrained none.safetensors", r"--pretrained must be hub or an undamaged .safetensors file \(does not exist\)"),
        ("--pretrained hub", "--pretrained hub has weights for timm/NAME models only"),
        ("--output_dir /proc/none", "--output_dir must be a directory that can be written"),
        ("--K 0", "--K must be at least 1, got 0"),
        ("--tracker wandb", "--tracker needs an optional package: pip install wandb"),
        ("nonsense", "No such command"),
        ("--lr 3 list", "--lr goes with training, or behind list, got '3'"),
        ("--layer Attention(qkv_bias='x')", "qkv_bias must be True or False, got 'x'"),
        ("--layer Attention(dropout=2)", "dropout must be at least 0 and below 1, got 2"),
        ("--layer Attention(qk_norm=3)", "qk_norm takes a function"),
        ("--layer ConvNNAttention(K='9')", "K must be a whole number, got '9'"),
        ("--layer ConvNNAttention(softmax_topk_val='no')", "softmax_topk_val must be True or False, got 'no'"),
    ],
)
def test_bad_flags(words: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    parts = re.findall(r"--\S+|\S+\([^)]*\)|\S+", words)
    assert re.search(line, refused(parts, capsys))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--device must be one that is here (no CUDA device found), got 'cuda'" in refused(["--device", "cuda"], capsys)


def test_bad_config_files(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text, line in (
        ("learning_rate: 1", "--learning_rate|learning_rate is not an option"),
        ("batchsize: 7", r"batchsize is not an option \(did you mean 'batch_size'\?\), in c.yaml"),
        ("lr: fast", "--lr must be a number, in c.yaml, got 'fast'"),
        ("num_epochs: 2.5", "--num_epochs must be a whole number, in c.yaml, got 2.5"),
        ("- 1", "--config must hold 'option: value' lines"),
        ("a: [", "--config must be a YAML file"),
    ):
        (here / "c.yaml").write_text(text)
        assert re.search(line, refused(["--config", "c.yaml"], capsys))


def test_command_line_wins_over_the_file(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "c.yaml").write_text("dataset: fake(train=40, test=20, size=8, classes=3)\nlr: 1e-2\nnum_epochs: 3\n")
    assert main(["--config", "c.yaml", *SMALL, "--patch-size", "4", "--output-dir", "run"]) == 0
    config = json.loads((here / "run" / "results.json").read_text())["about"]["config"]
    assert (config["lr"], config["num_epochs"], config["patch_size"]) == (0.01, 1, 4)


def test_bad_npz(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    x, y = np.zeros((6, 4, 4), np.uint8), np.arange(6) % 2
    np.savez(here / "short.npz", x_train=x, y_train=y[:5], x_test=x, y_test=y)
    np.savez(here / "object.npz", x_train=np.array([None, 1], object), y_train=y, x_test=x, y_test=y)
    (here / "cut.npz").write_bytes((here / "short.npz").read_bytes()[:300])
    assert "needs one label a row" in refused(["--dataset", "npz:short.npz"], capsys)
    assert "no object arrays" in refused(["--dataset", "npz:object.npz"], capsys)
    assert "undamaged npz" in refused(["--dataset", "npz:cut.npz"], capsys)


def test_output_dir_that_holds_a_run(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    again = [*FAKE, "--output_dir", "run"]
    assert "--output_dir holds a finished run (--overwrite replaces it), got 'run'" in refused(again, capsys)
    (trained / "results.json").unlink()
    assert "--output_dir holds a run that did not finish (--resume continues it" in refused(again, capsys)
    (trained / "other").write_text("a user's own file")
    line = "--output_dir can't be overwritten: the run that it holds has not listed other as its own, got 'run'"
    assert line in refused([*again, "--overwrite"], capsys)
    (trained / "other").unlink()
    assert main([*again, "--overwrite"]) == 0
    assert (trained / "results.json").exists()


def test_output_dir_that_is_a_file(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "file").write_text("")
    assert "--output_dir must be a directory that can be written" in refused(["--output_dir", "file/run"], capsys)


def test_bad_checkpoints(trained: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    test = ["--test_only", "--checkpoint"]
    (here / "text.txt").write_text("hello")
    assert "--checkpoint must be a run" in refused([*test, "text.txt"], capsys)
    (here / "empty").mkdir()
    assert "--checkpoint must hold a checkpoint" in refused([*test, "empty"], capsys)
    assert "is for 3 classes" in refused([*test, "run", "--dataset", "fake(train=40, test=20, size=8, classes=4)"], capsys)
    assert "--d_hidden contradicts --checkpoint, which has 6, got 8" in refused([*test, "run", "--d_hidden", "8"], capsys)
    tensors = next((trained / "checkpoints" / "best").glob("*.safetensors"))
    whole = tensors.read_bytes()
    tensors.write_bytes(whole[:-5])
    assert "--checkpoint is damaged" in refused([*test, "run"], capsys)
    tensors.unlink()
    assert "--checkpoint lacks its file" in refused([*test, "run"], capsys)


def test_bad_pretrained_weights(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file({"other.weight": torch.zeros(3)}, str(here / "other.safetensors"))
    assert "tensors match by name and shape" in refused([*FAKE, "--pretrained", "other.safetensors"], capsys)
    (here / "cut.safetensors").write_bytes((here / "other.safetensors").read_bytes()[:20])
    assert "undamaged .safetensors" in refused([*FAKE, "--pretrained", "cut.safetensors"], capsys)


def test_plugin_with_a_mistake(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "broken.py").write_text("x = 1\ny = x / 0\n")
    assert "--plugin could not be imported (ZeroDivisionError: division by zero, line 2)" in refused(["--plugin", "broken.py"], capsys)


def test_ignored_layer_flags_are_named(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*FAKE, "--K", "3", "--magnitude_type", "cosine", "--output_dir", "run"]) == 0
    assert "ignored because of --layer Attention: --K, --magnitude_type" in capsys.readouterr().err.splitlines()


@pytest.mark.parametrize("layer", list(LAYERS))
def test_every_layer_trains_with_the_flags_of_all(layer: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the flags of all layers at once, as a sweep over --layer has them. (tests/run/test_alone.py: with none of its own.)"""
    fake = [*FAKE, "--patch_size", "2"]  # 17 tokens
    sweep = ["--K", "3", "--sampling_type", "spatial", "--num_samples", "3", "--branch_ratio", "0.5", "--kernel_size", "3"]
    sweep += ["--sparse_mode", "strided", "--sparse_context_window", "2", "--convolution_type", "standard", "--no-softmax_topk_val"]
    assert main([*fake, "--layer", layer, *sweep, "--similarity_type", "Loc", "--aggregation_type", "Col", "--output_dir", "sweep"]) == 0
    said = capsys.readouterr().err
    assert "--similarity_type: ignored" in said
    assert "--aggregation_type: ignored" in said
    ignored = next((line for line in said.splitlines() if line.startswith("ignored because of --layer")), "")
    known = options_of(LAYERS[layer])
    for name in ("K", "sampling_type", "branch_ratio", "sparse_mode"):
        assert (f"--{name}" in re.findall(r"--\w+", ignored)) == (name not in known)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("ConvNNAttention --K 18", r"K must be at most the number of .*17.*, got 18"),
        ("KvtAttention --K 0", "--K must be at least 1, got 0"),
        ("ConvNNAttention(K=0)", "K must be .*1, got 0"),
        ("ConvNNAttention --magnitude_type dot", "--magnitude_type must be one of matmul, cosine, euclidean.*, got 'dot'"),
        ("ConvNNAttention --sampling_type spatial", "num_samples must be at least 1 with sampling_type spatial, got -1"),
        ("NeighborhoodAttention(dilation=2,K=9)", r"dilation times K \(9\) must be at most the number of tokens \(16\), got 2"),
        ("LocalAttention(window=0)", "window must be .*1, got 0"),
        ("NeighborhoodAttention(window_dims=2,K=5)", r"K must .*4.*, got 5"),
        ("BranchConv --kernel_size 4", "kernel_size must be .*odd.*, got 4"),
        ("KvtAttention(k=3)", "KvtAttention has no option 'k'"),
    ],
)
def test_bad_layer_options(words: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert re.search(line, refused(["--layer", *words.split()], capsys))


def test_published_command_line_reads(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It gets as far as the images that are not here."""
    line = (
        "--layer Attention --num_layers 12 --num_heads 3 --d_hidden 192 --d_mlp 768 --dataset cifar10 --optimizer adamw --lr 1e-3 "
        "--num_epochs 150 --output_dir ./Output/ViT/Attention"
    )
    assert "--data_path must hold cifar-10-batches-py/data_batch_1" in refused(line.split(), capsys)


def test_final_table(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--test_only", "--checkpoint", "run"]) == 0
    out = capsys.readouterr().out
    words = ("accuracy", "top-5", "F1-macro", "NLL", "ECE", "Brier", "parameters", "GFLOPs", "images/s", "peak memory", "written to run")
    for word in words:
        assert word in out


def shown(*words: str) -> list[str]:
    """What a fresh process prints at 80 columns; torch is not loaded for it."""
    environment = {**os.environ, "COLUMNS": "80", "TERMINAL_WIDTH": "80", "NO_COLOR": "1"}
    code = f"import sys, main; code = main.main({list(words)}); print('torch' in sys.modules or 'timm' in sys.modules); sys.exit(code)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    *lines, loaded = done.stdout.splitlines()
    assert loaded == "False"
    assert max(map(len, lines)) <= 80
    return lines


def test_help_fits_a_screen() -> None:
    """What it does, the flags that people start with, five examples, the commands, and where the rest is."""
    lines = shown("--help")
    assert 24 <= len(lines) <= 40
    text = "\n".join(lines)
    assert lines[0].startswith("Neighbor attention in Vision Transformers")
    assert len(re.findall(r"^  --\w+ [A-Z]+ +\S", text, re.MULTILINE)) == 10
    assert len(re.findall(r"^  python main\.py", text, re.MULTILINE)) == 5
    for name in NAMES:
        assert re.search(rf"^  {name} +\S", text, re.MULTILINE), name
    assert "--help-all" in text
    assert "--install-completion" in text
    assert shown("help") == shown("--lr", "3", "-h") == lines


def test_all_flags_are_in_their_topics_and_none_is_cut() -> None:
    text = "\n".join(shown("--help-all"))
    for topic in ("Model", "Layers", "Head", "Data", "Training", "Evaluation", "System", "Output"):
        page = "\n".join(shown("help", topic.lower()))
        assert page.startswith(topic)
        assert page in text
    for flag in FLAGS.split():
        assert re.search(rf"(^  |, ){flag}\b", text, re.MULTILINE), flag
    for name in FIELDS:
        assert re.search(rf"^  --{name}\b", text, re.MULTILINE), name
    assert "…" not in text


@pytest.mark.parametrize("name", list(NAMES))
def test_help_of_a_command_cuts_no_name(name: str) -> None:
    lines = shown(name, "--help")
    text = "\n".join(lines)
    assert shown("help", name) == lines
    own = flags_of(NAMES[name]) - ({*FIELDS, *RENAMED} if name == "compare" else set())
    for flag in own - {"more", "runs", "WHAT"}:
        assert re.search(rf"--{flag}\b", text), flag


def test_help_of_one_flag_and_of_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", "--label-noise"]) == 0
    line = " ".join(capsys.readouterr().out.split())
    assert line == "--label_noise TEXT RATE[:symmetric|asymmetric] or FILE.npz:KEY, training split only"
    assert "help must name a topic (model, layers, " in refused(["help", "dat"], capsys)


@pytest.mark.parametrize(
    ("typed", "line"),
    [
        ("predct", "No such command 'predct' (did you mean 'predict'?); there are list, "),
        ("Explain", "No such command 'Explain' (did you mean 'explain'?); there are list, "),
        ("train", "No such command 'train': without a command, main.py trains (python main.py --dataset digits)"),
    ],
)
def test_a_command_that_is_none(typed: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert refused([typed], capsys).startswith(f"error: {line}")


def test_a_download_that_failed_names_another_way(here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import torchvision.datasets as tv

    def unreachable(*_: object, **__: object) -> None:
        raise RuntimeError("no network")

    monkeypatch.setattr(tv, "FashionMNIST", unreachable)
    line = refused(["--dataset", "fashion-mnist"], capsys)
    assert "--data_path must hold FashionMNIST/raw/train-images-idx3-ubyte" in line
    assert "(no network); arrays of your own do as well: --dataset npz:FILE" in line


FLAGS = """
--layer --patch_size --num_layers --num_heads --d_hidden --d_mlp --dropout --attention_dropout --convolution_type --softmax_topk_val
--no-softmax_topk_val --K --sampling_type --num_samples --sample_padding --magnitude_type --coordinate_encoding --branch_ratio
--kernel_size --sparse_mode --sparse_context_window --dataset --data_path --resize --augment --noise --batch_size --num_epochs
--use_amp --use_compiled --compile_mode --clip_grad_norm --criterion --optimizer --lr --weight_decay --momentum --scheduler --lr_step
--lr_gamma --device --seed --output_dir --test_only --model --head --config --warmup_epochs --label_smoothing --mixup_alpha
--cutmix_alpha --ema_decay --accumulate --patience --val_fraction --label_noise --imbalance --workers --deterministic --resume
--checkpoint --plugin --tracker --overwrite --pretrained
"""
