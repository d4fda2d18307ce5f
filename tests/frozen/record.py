"""Runs eight commands (and what hangs on them) in a checkout of this project and writes down every number that they give.

    python tests/frozen/record.py CHECKOUT OUT.json     then     python tests/frozen/record.py --compare A.json B.json

Scaffolding for a change of structure: the numbers before and after must be equal to the bit, on one machine, with one thread count.
"""

from __future__ import annotations

import csv
import hashlib
import json
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

SHORT = ["--deterministic", "--device", "cpu"]
# name: flags, without --output_dir
COMMANDS = {
    "linear": "--num_epochs 4 --patience 3",
    "attn-knn": "--head attn-knn --embed_dim 32 --num_epochs 3 --k_eval 16,1,5 --tta 3 --continual --entropy_reg .1 "
    "--ood 'fake(size=8, channels=1)'",
    "frozen": "--pretrained {out}/linear/checkpoints/best --freeze_backbone --head linear+attn-knn --embed_dim 32 --num_epochs 3 --augment",
    "swap": "--model timm/vit_tiny_patch16_224 --resize 32 --num_epochs 1 --batch_size 16 --layer 'KvtAttention(K=3)*6,Attention*6' "
    "--dataset 'fake(train=64, test=40)'",
    "identity": "--dataset npz:{out}/features.npz --model identity --head attn-knn --values tabr --k_ensemble 3,5 --adaptive_k "
    "--num_epochs 2",
    "csv": "--dataset csv:{out}/table.csv:label --head linear+knn --num_epochs 3 --k_train 5 --label_smoothing .1",
    "noise": "--label_noise .3 --imbalance .1 --head linear+knn --embed_dim 16 --bank_cap 200 --bank_evict class-balanced --num_epochs 2 "
    "--vote distance",
    "knn": "--head knn --embed_dim 16 --num_epochs 2 --memory_update_freq .5 --neighbor_sample .4 --calibrate temperature --index ip "
    "--contrastive_form margin",
    "layers": "--layer 'ConvNNAttention(K=5)*2,SampledKnnAttention(K=3)*2' --sampling_type random --num_samples 7 --num_epochs 2 "
    "--compare_votes",
}
AFTER = {
    "test": "--test_only --checkpoint {out}/attn-knn --k_eval 5 --tta 1 --calibrate temperature --no-continual",
    "test-linear": "--test_only --checkpoint {out}/linear --continual --noise .1 --bank_cap 500",
}
MOVING = ("seconds", "images_per_second", "peak_memory_mb", "versions", "git", "config", "warnings")


def main() -> None:
    if sys.argv[1] == "--compare":
        sys.exit(compare(*(json.loads(Path(name).read_text()) for name in sys.argv[2:4])))
    checkout = Path(sys.argv[1]).resolve()
    with tempfile.TemporaryDirectory() as folder:
        Path(sys.argv[2]).write_text(json.dumps(record(checkout, Path(folder)), indent=1) + "\n")


def record(checkout: Path, out: Path) -> dict[str, Any]:
    make_data(out)
    found: dict[str, Any] = {}

    def run(*words: str) -> None:
        filled = [word.replace("{out}", str(out)) for word in words]
        done = subprocess.run([sys.executable, str(checkout / "main.py"), *filled], cwd=out, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{filled}\n{done.stdout}\n{done.stderr}")

    for name, flags in COMMANDS.items():
        run(*shlex.split(flags), *SHORT, "--output_dir", f"{out}/{name}")
        found[name] = of_run(out / name)
        print(name, found[name]["results"]["test"], flush=True)
    run(*shlex.split(COMMANDS["attn-knn"]), *SHORT, "--output_dir", f"{out}/parts", "--stop_after", "1")
    run("--resume", f"{out}/parts")
    found["resumed"] = of_run(out / "parts")
    for name, flags in AFTER.items():
        run(*shlex.split(flags), "--output_dir", f"{out}/{name}")
        found[name] = {"results": plain(json.loads((out / name / "results.json").read_text()))}
    for what, of in (("tokens", "layers"), ("neighbors", "attn-knn")):
        run("explain", "--what", what, "--checkpoint", f"{out}/{of}", "--image", "3", "--output_dir", f"{out}/explain")
        found[f"explain-{what}"] = json.loads((out / "explain" / f"explain-{what}-3.json").read_text())
    return found


def make_data(out: Path) -> None:
    rng = np.random.default_rng(0)
    centers = rng.normal(size=(5, 12)) * 1.2

    def rows(count: int) -> tuple[np.ndarray, np.ndarray]:
        y = rng.integers(0, 5, count)
        return (centers[y] + rng.normal(size=(count, 12))).astype(np.float32), y

    (x, y), (x_test, y_test) = rows(400), rows(150)
    np.savez(out / "features.npz", x_train=x, y_train=y, x_test=x_test, y_test=y_test)
    with (out / "table.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["color", *(f"n{i}" for i in range(12)), "label"])
        writer.writerows([["red", "green", "blue"][label % 3], *map(float, row), f"class{label}"] for row, label in zip(x, y, strict=True))


def of_run(folder: Path) -> dict[str, Any]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    tensors = {}
    for part in ("best", "last"):
        index = json.loads((folder / "checkpoints" / part / "checkpoint.json").read_text())
        for group in ("model", "bank", "ema", "training"):
            if group in index["files"]:
                content = load_file(folder / "checkpoints" / part / index["files"][group]["file"])
                tensors[f"{part}.{group}"] = sorted(digest(value) for value in content.values())
    return {"results": plain(json.loads((folder / "results.json").read_text())), "metrics": plain(lines), "tensors": tensors}


def digest(value: np.ndarray) -> str:
    return hashlib.sha256(np.abs(value).tobytes() if value.ndim == 0 else value.tobytes()).hexdigest()[:12]


def plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items() if k not in MOVING}
    return [plain(v) for v in value] if isinstance(value, list) else value


# What the parts of a result are called now.
RENAMED = (
    (r"/results/votes/voters/", "/results/predictors/scores/"),
    (r"/results/votes/", "/results/predictors/"),
    (r"/predictors/calibrate$", "/predictors/calibration"),
    (r"/predictors/lambda$", "/predictors/vote_share"),
    (r"/mixture(/|$)", r"/interpolation\1"),
    (r"/(ood|continual)/voter$", r"/\1/predictor"),
    (r"^(/explain-tokens/.*)/share$", r"\1/weight"),
)


def flat(value: Any, path: str = "") -> dict[str, Any]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if items is None:
        return {path: value}
    found: dict[str, Any] = {}
    for key, part in items:
        found |= flat(part, f"{path}/{key}")
    return found


def renamed(values: dict[str, Any]) -> dict[str, Any]:
    def new(path: str) -> str:
        for old, now in RENAMED:
            path = re.sub(old, now, path)
        return path

    return {new(path): value for path, value in values.items()}


def compare(before: Any, after: Any) -> int:
    old, new = renamed(flat(before)), flat(after)
    numbers = [key for key in old if isinstance(old[key], int | float)]
    wrong = [f"{key}: {old[key]!r} is now {new.get(key)!r}" for key in old if new.get(key) != old[key]]
    print("\n".join(wrong))
    print(f"{len(old)} values ({len(numbers)} numbers), {len(wrong)} differ; new: {sorted(set(new) - set(old))[:20]}")
    return bool(wrong)


if __name__ == "__main__":
    main()
