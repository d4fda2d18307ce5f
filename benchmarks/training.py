"""Every head trained alone, end to end, against the linear head in the same setting. Prints the tables of docs/results.md.

    python benchmarks/training.py [digits|grid|forms|fashion|cifar ...] [--seeds 5] [--data DIR] [--out DIR] [--jobs 2] [--only LABEL]

`fashion` and `cifar` read DIR/fashion-mnist.npz and DIR/cifar10.npz (x_train, y_train, x_test, y_test). Each cell is a run of main.py in
a directory of its own under --out, with one thread; a cell that is there already is not trained again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

MAIN = Path(__file__).resolve().parent.parent / "main.py"
HEADS = ("attn-knn", "knn", "linear+attn-knn", "linear+knn")
ARMS = {"linear": ["--head", "linear"]} | {
    f"{head}, embed_dim {dim}": ["--head", head, "--embed_dim", str(dim)] for head, dim in itertools.product(HEADS, (0, 32, 256))
}
FASHION = ["--num_epochs", "8", "--dropout", ".1", "--patch_size", "4"]
CIFAR = ["--model", "timm/resnet18", "--num_epochs", "6", "--batch_size", "64", "--lr", "1e-3", "--augment"]


class Cell(NamedTuple):
    group: str  # settings that are compared with each other
    arm: str
    seed: int
    flags: list[str]

    @property
    def folder(self) -> str:
        return f"{self.group}/{self.arm}/{self.seed}".replace(", ", "-").replace(" ", "_")


def cells_of(table: str, seeds: int, data: Path, out: Path) -> list[Cell]:
    """By seed first, so that an interrupted table has whole seeds."""
    if table in ("grid", "forms"):
        return grid() if table == "grid" else forms()
    common = {"digits": [], "fashion": FASHION, "cifar": CIFAR}[table]
    if table != "digits":
        common = [*common, "--dataset", f"npz:{part_of(data, table, out)}"]
    return [Cell(table, arm, seed, [*common, *flags]) for seed in range(seeds) for arm, flags in ARMS.items()]


def grid() -> list[Cell]:
    """Dropout x MixUp x averaging x learning rate on digits, 15 epochs."""
    found = []
    for dropout, mixup, average, lr in itertools.product((0, 0.1, 0.3), (0, 0.3), (0, 0.995), (5e-4, 2e-3)):
        group = f"grid/dropout {dropout} mixup {mixup} average {average} lr {lr}"
        settings = {"num_epochs": 15, "dropout": dropout, "mixup_alpha": mixup, "ema_decay": average, "lr": lr}
        flags = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
        found += [Cell(group, head, 0, ["--head", head, *flags]) for head in ("linear", "attn-knn", "knn")]
    return found


def forms() -> list[Cell]:
    """What keeps heads from collapsing, alone and together, in the cell of the grid that is hardest for them."""
    hard = ["--num_epochs", "15", "--dropout", ".3", "--mixup_alpha", ".3", "--ema_decay", ".995", "--lr", "2e-3"]
    found = []
    for standardize, ramp in itertools.product(("--standardize", "--no-standardize"), ("--dropout_ramp", "--no-dropout_ramp")):
        group = f"forms/{standardize[2:]} {ramp[2:]}"
        found += [Cell(group, head, 0, ["--head", head, standardize, ramp, *hard]) for head in ("attn-knn", "knn", "linear+attn-knn")]
    return found


def part_of(data: Path, table: str, out: Path) -> Path:
    """A random part of a data set as a file: 6,000 + 2,000 rows of Fashion-MNIST, 5,000 + 10,000 of CIFAR-10."""
    name, train, test = {"fashion": ("fashion-mnist", 6_000, 2_000), "cifar": ("cifar10", 5_000, 10_000)}[table]
    file = out / f"{table}.npz"
    if not file.exists():
        rows = np.load(data / f"{name}.npz")
        draw = np.random.default_rng(0)
        a, b = (np.sort(draw.permutation(len(rows[y]))[:n]) for y, n in (("y_train", train), ("y_test", test)))
        out.mkdir(parents=True, exist_ok=True)
        np.savez(file, x_train=rows["x_train"][a], y_train=rows["y_train"][a], x_test=rows["x_test"][b], y_test=rows["y_test"][b])
    return file


def train(cell: Cell, out: Path) -> None:
    folder = out / cell.folder
    if (folder / "results.json").exists():
        return
    resumes = (folder / "checkpoints" / "last").exists()
    words = ["--resume", str(folder)] if resumes else [*cell.flags, "--seed", str(cell.seed), "--output_dir", str(folder), "--overwrite"]
    done = subprocess.run([sys.executable, str(MAIN), *words], capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    if done.returncode:
        sys.exit(f"{cell.folder}: {done.stderr.strip()}")
    print(f"{cell.folder}: {scores(cell, out)['test']['accuracy']:.2%}", file=sys.stderr, flush=True)


def scores(cell: Cell, out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / cell.folder / "results.json").read_text())
    return found


def show(table: str, cells: list[Cell], out: Path) -> None:
    """A line an arm: accuracy as trained over the seeds, its difference to the linear head's (same seeds), and NLL."""
    print(f"\n## {table}\n\n| head | test accuracy | lowest | minus linear | NLL as trained | NLL calibrated |\n|---|---|---|---|---|---|")
    for arm, group in by_arm(cells).items():
        results = [scores(cell, out) for cell in group]
        accuracy = [100 * r["test"]["accuracy"] for r in results]
        linear = [100 * scores(cell._replace(arm="linear"), out)["test"]["accuracy"] for cell in group]
        nll = [[r[name]["nll"] for r in results] for name in ("test", "test_calibrated")]
        gain = [a - b for a, b in zip(accuracy, linear, strict=True)]
        print(f"| {arm} | {spread(accuracy, 1)} | {min(accuracy):.1f} | {spread(gain, 1)} | {spread(nll[0], 3)} | {spread(nll[1], 3)} |")


def show_grid(cells: list[Cell], out: Path) -> None:
    print("\n## grid\n\n| dropout | MixUp | averaging | lr | linear | attn-knn | knn |\n|---|---|---|---|---|---|---|")
    for group, members in itertools.groupby(cells, key=lambda cell: cell.group):
        settings = group.split()[1::2]
        accuracy = [f"{scores(cell, out)['test']['accuracy']:.1%}" for cell in members]
        print(f"| {' | '.join([*settings, *accuracy])} |")


def show_forms(cells: list[Cell], out: Path) -> None:
    print("\n## forms\n\n| | attn-knn | knn | linear+attn-knn |\n|---|---|---|---|")
    for group, members in itertools.groupby(cells, key=lambda cell: cell.group):
        accuracy = [f"{scores(cell, out)['test']['accuracy']:.1%}" for cell in members]
        print(f"| {' | '.join([group.partition('/')[2], *accuracy])} |")


def by_arm(cells: list[Cell]) -> dict[str, list[Cell]]:
    found: dict[str, list[Cell]] = {}
    for cell in cells:
        found.setdefault(cell.arm, []).append(cell)
    return found


def spread(values: list[float], digits: int) -> str:
    """Mean and standard deviation over seeds."""
    mean = f"{statistics.mean(values):.{digits}f}"
    return f"{mean} ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else mean


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("tables", nargs="*", default=["digits", "grid"], help="digits, grid, forms, fashion, cifar")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--out", type=Path, default=Path("runs/training"))
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", default="", help="arms whose label has this text, beside linear")
    args = parser.parse_args()
    for table in args.tables:
        cells = cells_of(table, args.seeds, args.data.resolve(), args.out.resolve())
        if table not in ("grid", "forms"):
            cells = [cell for cell in cells if args.only in cell.arm or cell.arm == "linear"]
        with ThreadPoolExecutor(args.jobs) as pool:
            list(pool.map(lambda cell: train(cell, args.out), cells))
        if table == "grid":
            show_grid(cells, args.out)
        elif table == "forms":
            show_forms(cells, args.out)
        else:
            show(table, cells, args.out)


if __name__ == "__main__":
    main()
