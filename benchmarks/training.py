"""Every head trained alone, end to end, against the linear head in the same setting. Prints the tables of docs/results.md.

    python benchmarks/training.py [TABLE ...] [--seeds 5] [--data DIR] [--out DIR] [--jobs 2] [--only LABEL]

| TABLE | |
|---|---|
| digits, fashion, cifar | each head over neighbors, with three sizes of the embedding, against the linear head |
| fifths | as digits, and each seed is tested on another fifth of the rows: 359 of them are few |
| grid | dropout x MixUp x averaging x learning rate on digits, one seed |
| forms | what keeps heads from collapsing, alone and together, one seed |
| longtail, neighbors | every predictor of every head as trained and calibrated, by the recipes (`--seeds 3` in docs/results.md) |

DIR has fashion-mnist.npz and cifar10.npz (x_train, y_train, x_test, y_test), and for `neighbors` cifar10n.npz (aggre, worse: a label a
training row) and tf_efficientnet_lite0.safetensors. Each cell is a run of main.py in a directory of its own under --out, with one thread;
a cell that is there already is not trained again.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

MAIN = Path(__file__).resolve().parent.parent / "main.py"
sys.path.insert(0, str(MAIN.parent))

from evaluation.results import read  # noqa: E402

RECIPES = MAIN.parent / "recipes"
HEADS = ("attn-knn", "knn", "linear+attn-knn", "linear+knn")
TRAINED = ("linear", "knn", "attn-knn", "linear+attn-knn")  # heads that train a backbone in the tables of predictors
ARMS = {"linear": ["--head", "linear"]} | {
    f"{head}, embed_dim {dim}": ["--head", head, "--embed_dim", str(dim)] for head, dim in itertools.product(HEADS, (0, 32, 256))
}
# What heads over neighbors have by default, for the linear head.
ALONE = {"linear, head_epochs 10": ["--head", "linear", "--head_epochs", "10"]}
RAMPED = {"linear, dropout_ramp": ["--head", "linear", "--dropout_ramp"]}
RAMPED |= {"linear, both": ["--head", "linear", "--head_epochs", "10", "--dropout_ramp"]}
FASHION = ["--config", str(RECIPES / "neighbors_fashion.yaml"), "--dropout", ".1"]
CIFAR = ["--model", "timm/resnet18", "--num_epochs", "4", "--batch_size", "64", "--lr", "1e-3", "--augment", "--use_amp", "--resize", "16"]


class Cell(NamedTuple):
    group: str  # settings that are compared with each other
    arm: str
    seed: int
    flags: list[str]

    @property
    def folder(self) -> str:
        """Where its run is, under --out."""
        return f"{self.group}/{self.arm}/{self.seed}".replace(", ", "-").replace(" ", "_").replace("%", "percent")


def cells_of(table: str, seeds: int, data: Path, out: Path) -> list[Cell]:
    """By seed first, so that an interrupted table has whole seeds."""
    if table in ("grid", "forms"):
        return grid() if table == "grid" else forms()
    if table in ("longtail", "neighbors"):
        settings = longtail(data) if table == "longtail" else neighbors(data, out)
        return [
            Cell(f"{table}/{label}", head, seed, ["--config", str(RECIPES / recipe), *flags, "--head", head])
            for seed in range(seeds)
            for label, (recipe, flags, heads) in settings.items()
            for head in heads
        ]
    common = {"fashion": FASHION, "cifar": CIFAR}.get(table, [])
    arms = ARMS | {"fifths": {}, "cifar": ALONE}.get(table, ALONE | RAMPED)  # a ResNet has no dropout inside
    if table in ("fashion", "cifar"):
        common = [*common, "--dataset", f"npz:{part_of(data, table, out)}"]
    rows = [["--test_seed", str(seed)] if table == "fifths" else [] for seed in range(seeds)]
    return [Cell(table, arm, seed, [*common, *flags, *rows[seed]]) for seed in range(seeds) for arm, flags in arms.items()]


def grid() -> list[Cell]:
    """Dropout x MixUp x averaging x learning rate on digits, 15 epochs."""
    found = []
    for dropout, mixup, average, lr in itertools.product((0, 0.1, 0.3), (0, 0.3), (0, 0.995), (5e-4, 2e-3)):
        group = f"grid/dropout {dropout} mixup {mixup} average {average} lr {lr}"
        settings = {"num_epochs": 15, "dropout": dropout, "mixup_alpha": mixup, "ema_decay": average, "lr": lr}
        flags = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
        found += [Cell(group, head, 0, ["--head", head, *flags]) for head in ("linear", *HEADS)]
    return found


def forms() -> list[Cell]:
    """What keeps heads from collapsing, alone and together, in the cell of the grid that is hardest for them."""
    hard = ["--num_epochs", "15", "--dropout", ".3", "--mixup_alpha", ".3", "--ema_decay", ".995", "--lr", "2e-3"]
    found: list[Cell] = []
    standardizing, ramps = ("--standardize", "--no-standardize"), ("--dropout_ramp", "--no-dropout_ramp")
    for standardize, ramp, weight in itertools.product(standardizing, ramps, ("1", "0")):
        group = f"forms/{standardize[2:]} {ramp[2:]} {'proxies' if weight == '1' else 'no-proxies'}"
        flags = [standardize, ramp, "--proxy_weight", weight, *hard]
        found += [Cell(group, head, 0, ["--head", head, *flags]) for head in ("attn-knn", "knn", "linear+attn-knn")]
    centered = ["--head", "centered-attn-knn", "--plugin", str(MAIN.parent / "benchmarks" / "centering.py"), "--proxy_weight", "0"]
    for ramp in ramps:
        found.append(Cell(f"forms/center {ramp[2:]} no-proxies", "attn-knn", 0, [*centered, ramp, *hard]))
    return found


Setting = tuple[str, list[str], tuple[str, ...]]  # recipe, flags over it, heads


def longtail(data: Path) -> dict[str, Setting]:
    """The last class has a hundredth of the rows of the first; validation and test rows are balanced."""
    file = f"npz:{data / 'fashion-mnist.npz'}"
    return {"Fashion-MNIST, long tail .01": ("neighbors_fashion.yaml", ["--dataset", file, "--imbalance", ".01"], TRAINED)}


def neighbors(data: Path, out: Path) -> dict[str, Setting]:
    """Do neighbors help? Clean labels, noisy labels, and noisy labels of the validation rows too."""
    found: dict[str, Setting] = {"digits": ("neighbors_digits.yaml", [], TRAINED)}
    part = ["--dataset", f"npz:{part_of(data, 'fashion', out)}"]
    frozen = ["--dataset", f"npz:{data / 'cifar10.npz'}", "--pretrained", str(data / "tf_efficientnet_lite0.safetensors")]
    frozen += ["--feature_cache", str(out / "features")]  # the same for all labels
    noises = {"": [], ", 30 % symmetric noise": ["--label_noise", ".3"]}
    for label, noise in with_noisy_validation(noises).items():
        found[f"Fashion-MNIST, 6,000 rows{label}"] = ("neighbors_fashion.yaml", [*part, *noise], TRAINED)
    people = {f", noise of people ({key})": ["--label_noise", f"{data / 'cifar10n.npz'}:{key}"] for key in ("aggre", "worse")}
    for label, noise in with_noisy_validation({"": [], **people}).items():
        heads = ("linear", "linear+attn-knn")  # nothing trains a backbone here: attn-knn and knn alone are among their predictors
        found[f"CIFAR-10, frozen backbone{label}"] = ("neighbors_cifar10.yaml", [*frozen, *noise], heads)
    return found


def with_noisy_validation(noises: dict[str, list[str]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for label, flags in noises.items():
        found |= {label: flags} | ({f"{label}, validation rows too": [*flags, "--noisy_val"]} if flags else {})
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
    return read(out / cell.folder / "results.json")


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
    """A line a setting; last, the head that ends lowest under the linear head of its setting."""
    heads = list(by_arm(cells))
    print(f"\n## grid\n\n| dropout | MixUp | averaging | lr | {' | '.join(heads)} |\n|{'---|' * (4 + len(heads))}")
    gaps: dict[tuple[str, str], float] = {}
    for group, members in itertools.groupby(cells, key=lambda cell: cell.group):
        settings = group.split()[1::2]
        accuracy = {cell.arm: 100 * scores(cell, out)["test"]["accuracy"] for cell in members}
        gaps |= {(group.partition("/")[2], arm): value - accuracy["linear"] for arm, value in accuracy.items() if arm != "linear"}
        print(f"| {' | '.join([*settings, *(f'{accuracy[head]:.1f}' for head in heads)])} |")
    (where, arm), gap = min(gaps.items(), key=lambda pair: pair[1])
    print(f"\nMost under the linear head with the same settings: {arm}, {gap:+.1f} points ({where}).")


def show_forms(cells: list[Cell], out: Path) -> None:
    print("\n## forms\n\n| | attn-knn | knn | linear+attn-knn |\n|---|---|---|---|")
    for group, members in itertools.groupby(cells, key=lambda cell: cell.group):
        accuracy = [f"{scores(cell, out)['test']['accuracy']:.1%}" for cell in members]
        print(f"| {' | '.join([group.partition('/')[2], *accuracy, *['-'] * (3 - len(accuracy))])} |")


def show_predictors(table: str, cells: list[Cell], out: Path) -> None:
    """A line a predictor of a head: mean and standard deviation over seeds. Below, each head's own against the linear head alone."""
    columns = "| | head | predictor | accuracy | NLL / ECE as trained | accuracy, calibrated | NLL / ECE calibrated |"
    print(f"\n## {table}\n\n{columns}\n|---|---|---|---|---|---|---|")
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(cell.group, []).append(cell)
    rivals: list[str] = []
    for group, members in groups.items():
        label, arms = group.partition("/")[2], by_arm(members)
        shown = label
        for arm, of_arm in arms.items():
            head = arm
            results = [scores(cell, out) for cell in of_arm]
            for name in results[0]["predictors"]["scores"]:
                of_seeds = [r["predictors"]["scores"][name] for r in results]
                print(f"| {shown} | {head} | {name} | {' | '.join(predictor_cells(of_seeds))} |")
                shown = head = ""
            if arm != "linear" and "linear" in arms:
                linear = [scores(cell, out) for cell in arms["linear"]]
                rivals.append(f"| {label} | {arm} | {' | '.join(gains(results, linear))} |")
    print("\n| its own predictor minus the linear head alone | head | accuracy | NLL as trained | accuracy, calibrated | NLL calibrated |")
    print("\n".join(["|---|---|---|---|---|---|", *rivals]))


def predictor_cells(of_seeds: list[dict[str, Any]]) -> list[str]:
    """Accuracy and NLL / ECE, as trained and calibrated."""
    found = []
    for variant in ("raw", "calibrated"):
        found.append(spread([100 * s[variant]["accuracy"] for s in of_seeds], 1))
        found.append(" / ".join(spread([s[variant][key] for s in of_seeds], 3) for key in ("nll", "ece")))
    return found


def gains(results: list[dict[str, Any]], linear: list[dict[str, Any]]) -> list[str]:
    """Differences of the same seeds: points of accuracy, and NLL."""
    found = []
    for variant, (key, factor, digits) in itertools.product(("test", "test_calibrated"), (("accuracy", 100, 1), ("nll", 1, 3))):
        pairs = zip(results, linear, strict=True)
        found.append(spread([factor * (ours[variant][key] - theirs[variant][key]) for ours, theirs in pairs], digits))
    return found


def by_arm(cells: list[Cell]) -> dict[str, list[Cell]]:
    found: dict[str, list[Cell]] = {}
    for cell in cells:
        found.setdefault(cell.arm, []).append(cell)
    return found


def spread(values: list[float], digits: int) -> str:
    """Mean and standard deviation over seeds."""
    mean = f"{statistics.mean(values):.{digits}f}"
    return f"{mean} ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else mean


SHOW = {"grid": lambda _, cells, out: show_grid(cells, out), "forms": lambda _, cells, out: show_forms(cells, out)}
SHOW |= {"longtail": show_predictors, "neighbors": show_predictors}
TABLES = ("digits", "fifths", "fashion", "cifar", "grid", "forms", "longtail", "neighbors")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("tables", nargs="*", default=["digits", "grid"], help=", ".join(TABLES))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--out", type=Path, default=Path("runs/training"))
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", default="", help="arms whose label has this text, beside linear")
    args = parser.parse_args()
    if unknown := set(args.tables) - set(TABLES):
        parser.error(f"no table is called {', '.join(sorted(unknown))}; there are {', '.join(TABLES)}")
    for table in args.tables:
        cells = cells_of(table, args.seeds, args.data.resolve(), args.out.resolve())
        if table not in ("grid", "forms"):
            cells = [cell for cell in cells if args.only in cell.arm or cell.arm == "linear"]
        for cell in cells:  # alone: two at once would both fill the cache of features
            if "--feature_cache" in cell.flags:
                train(cell, args.out)
                break
        with ThreadPoolExecutor(args.jobs) as pool:
            list(pool.map(lambda cell: train(cell, args.out), cells))
        SHOW.get(table, show)(table, cells, args.out)


if __name__ == "__main__":
    main()
