"""Damaged files and random command lines: `python -m benchmarks.fuzz [--mutations 1000] [--commands 2000] [--seed 0] [--json FILE]`.

Every kind of file that is read back is mutated, bytes of it flipped, cut, doubled or written over, and numbers in JSON changed with the
digests signed again; each is then read as a command would read it. Random command lines of a tiny model train one epoch or end in one
line. The table counts tries, refusals in one line, numbers that stayed the same (files) or runs that trained (command lines), and what must
be 0: `silent` (other numbers without a word), `traceback`, `hang` and `lost` (a file of the user's that is gone or changed).
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import io
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch and FAISS load: processes are forked

import numpy as np
import torch
from PIL import Image

import config as flags
from benchmarks import forked
from dataset import load
from evaluation import cost
from inputs import store
from inputs.yaml_file import read_yaml
from main import main
from utils import BadOption, Halt

FAKE = "fake(train=24, test=9, size=8, classes=3)"
TINY = ["--dataset", FAKE, "--num_layers", "1", "--num_heads", "2", "--d_hidden", "8", "--d_mlp", "8", "--patch_size", "4"]
TINY += ["--num_epochs", "1", "--batch_size", "8", "--warmup_epochs", "0", "--no-baselines"]
WARM = ("torch._inductor", "matplotlib.pyplot", "timm", "faiss")  # loading is most of what a short run does
COLUMNS = ("tries", "refused", "same", "lost", "silent", "traceback", "hang")


class Hang(BaseException):
    """Not an Exception: nothing on the way may take it for an error of its own."""


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """By the time that it computes, and by much more time in which it does nothing: on a busy machine everything takes long."""

    def ring(*_: Any) -> None:
        raise Hang

    limits = {signal.SIGPROF: (signal.ITIMER_PROF, forked.CPU_SECONDS), signal.SIGALRM: (signal.ITIMER_REAL, forked.SECONDS)}
    before = {number: signal.signal(number, ring) for number in limits}
    for timer, seconds in limits.values():
        signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        for number, (timer, _) in limits.items():
            signal.setitimer(timer, 0)
            signal.signal(number, before[number])


def outcome(read: Read, wanted: Any, shown: list[str], what: str) -> str:
    """One of COLUMNS: what came of reading a file that should give `wanted` or be refused."""
    try:
        with limited(), contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            found = read()
    except (BadOption, Halt):
        return "refused"
    except Hang:
        shown.append(f"hang: {what}")
        return "hang"
    except Exception:
        shown.append(f"traceback: {what}: {traceback.format_exc().strip().splitlines()[-1][:300]}")
        return "traceback"
    if found != wanted and wanted is not None:
        shown.append(f"silent: {what}")
        return "silent"
    return "same"


# ---------------------------------------------------------------- files


Read = Callable[[], Any]
Change = Callable[[bytes, random.Random], bytes]


def mutated(content: bytes, rng: random.Random) -> bytes:
    """One to three changes of bytes."""
    data = bytearray(content)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(data) + 1)
        length = rng.choice((1, 1, 4, 64))
        kind = rng.choice(("flip", "flip", "cut", "drop", "double", "write", "zero"))
        if kind == "flip" and at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        elif kind == "cut":
            del data[at:]
        elif kind == "drop":
            del data[at : at + length]
        elif kind == "double":
            data[at:at] = data[at : at + length]
        else:
            data[at : at + length] = rng.randbytes(length) if kind == "write" else bytes(length)
        if not data:
            break
    return bytes(data)


STRANGE: tuple[Any, ...] = (None, -1, 0, 1, 3, 2**31, 2**63, 10**30, 1e308, -1e308, 1e-300, True)
STRANGE += ("", "x", "../x", "/dev/zero", [], [1], {}, {"a": 1})


def with_another_value(content: Any, rng: random.Random) -> Any:
    """JSON with one value, at any depth, exchanged or left out."""
    places: list[tuple[Any, Any]] = []

    def walk(part: Any) -> None:
        for key in part if isinstance(part, dict) else range(len(part)) if isinstance(part, list) else ():
            places.append((part, key))
            walk(part[key])

    walk(content)
    part, key = rng.choice(places)
    if isinstance(part, dict) and rng.random() < 0.2:
        del part[key]
    else:
        part[key] = rng.choice(STRANGE)
    return content


def signed(index: bytes, rng: random.Random) -> bytes:
    """checkpoint.json with another value in its facts, and its digest made anew: what a stranger can do."""
    body = json.loads(index)
    body.pop("sha256", None)
    body["facts"] = with_another_value(body["facts"], rng)
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return (json.dumps({**body, "sha256": digest}, indent=1) + "\n").encode()


def rows_of(name: str) -> Any:
    """What a data set holds, for comparing."""
    data = load(name, val_fraction=0)
    return data.summary["sha256"], data.classes


def make_files(folder: Path) -> dict[str, tuple[Path, Read]]:
    """Every kind of data file: the file, and how it is read."""
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (12, 5, 5), np.uint8), np.arange(12) % 3
    for name, pack in (("stored.npz", np.savez), ("packed.npz", np.savez_compressed)):
        pack(folder / name, x_train=x, y_train=y, x_test=x[:6], y_test=y[:6])
    (folder / "rows.csv").write_text("a,b,y\n" + "".join(f"{n},{'uvw'[n % 3]},{'pq'[n % 2]}\n" for n in range(30)))
    for n in range(6):
        (folder / "photos" / "ab"[n % 2]).mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (9, 9, 3), np.uint8)).save(folder / "photos" / "ab"[n % 2] / f"{n}.png")
    yaml = "dataset: digits\nlr: 0.001\nk_eval: [1, 5]\nhead: attn-knn\naugment: false\nlayer: ConvNNAttention(K=4)\n"
    (folder / "run.yaml").write_text(yaml)
    return {
        "npz, stored": (folder / "stored.npz", lambda: rows_of(f"npz:{folder / 'stored.npz'}")),
        "npz, compressed": (folder / "packed.npz", lambda: rows_of(f"npz:{folder / 'packed.npz'}")),
        # Text has no checksum: another number is another table. What must not happen is a traceback.
        "csv": (folder / "rows.csv", lambda: rows_of(f"csv:{folder / 'rows.csv'}:y") and None),
        "image file": (folder / "photos" / "a" / "0.png", lambda: rows_of(f"folder:{folder / 'photos'}") and None),
        "yaml": (folder / "run.yaml", lambda: read_yaml(str(folder / "run.yaml")) and None),
    }


def scores(folder: Path) -> Any:
    """Of the test that --test_only makes of a run."""
    out = folder.parent / "tested"
    shutil.rmtree(out, ignore_errors=True)
    code = main(["--test_only", "--checkpoint", str(folder), "--output_dir", str(out)])
    if code:
        raise BadOption("checkpoint", f"exit code {code}")
    found = json.loads((out / "results.json").read_text())
    return {part: found[part] for part in ("test", "test_calibrated") if part in found}


def make_run(folder: Path) -> dict[str, tuple[Path, Read]]:
    out = folder / "run"
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        if main([*TINY, "--head", "knn", "--output_dir", str(out)]):
            raise SystemExit("the run that is damaged could not be made")
    best = out / "checkpoints" / "best"
    kinds = {file.name.split("-")[0]: file for file in sorted(best.iterdir())}
    return {f"checkpoint, {kind}": (file, lambda: scores(out)) for kind, file in kinds.items()}


def try_files(mutations: int, seed: int, table: dict[str, Counter[str]], shown: list[str], folder: Path) -> None:
    kinds = {**make_files(folder), **make_run(folder)}
    index = folder / "run" / "checkpoints" / "best" / store.INDEX
    work: list[tuple[str, Path, Read, Change]] = [(kind, file, read, mutated) for kind, (file, read) in kinds.items()]
    work.append(("checkpoint, signed again", index, lambda: scores(folder / "run") and None, signed))
    for kind, file, read, change in work:
        rng, original = random.Random(f"{seed} {kind}"), file.read_bytes()
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            wanted = read()
        for number in range(mutations):
            content = change(original, rng)
            file.write_bytes(content)
            table.setdefault(kind, Counter())["tries"] += 1
            table[kind][outcome(read, wanted, shown, f"{kind} #{number}")] += 1
            table[kind]["lost"] += not file.exists() or file.read_bytes() != content
        file.write_bytes(original)


# ---------------------------------------------------------------- command lines


NUMBERS = ("0", "1", "2", "3", "5", "-1", "1e9", "1e308", "-1e308", "1e-300", "nan", "inf", "9" * 11, "9" * 30, "0.5", "x", "")
TEXTS: tuple[str, ...] = ("", "x", "auto", "knn", "attn-knn", "linear+knn", "KvtAttention(K=2)", "ConvNNAttention(K=1,num_samples=1)")
TEXTS += ("A(((", "1,2", "HNSW0", "softmax-cosine(temperature=0)", "Flat", "uniform", "/dev/zero", "\x01", "fake(size=0)")
TEXTS += ("digits", "mlp", "vit", "timm/", "é" * 9)
# Not tried: places that are written to, processes of their own, what takes long by itself.
SKIPPED = {"output_dir", "feature_cache", "data_path", "plugin", "tracker", "workers", "use_compiled", "compile_mode", "device"}


def value_for(field: Any, rng: random.Random) -> str:
    meta, kind = field.metadata, flags.kind_of(field)
    if meta["choices"] and rng.random() < 0.9:
        return str(rng.choice(meta["choices"]))
    return rng.choice(NUMBERS if kind in (int, float) else TEXTS)


def command(rng: random.Random, out: Path) -> list[str]:
    """A tiny model with one to four random options."""
    typed = list(TINY)
    for name in rng.sample(sorted(set(flags.TOPIC_OF) - SKIPPED - {"num_epochs"}), rng.randint(1, 4)):
        field = flags.FIELDS[name]
        typed += [f"--{rng.choice(('', 'no-'))}{name}"] if flags.kind_of(field) is bool else [f"--{name}", value_for(field, rng)]
    return [*typed, "--output_dir", str(out)]


def warm_up(folder: Path) -> None:
    """Loads what command lines load, and trains a model that searches nothing, so that no command line has to."""
    for name in WARM:
        importlib.import_module(name)
    cost.rows_per_second = forked.at_once
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        if main([*TINY, "--head", "linear", "--output_dir", str(folder / "warm")]):
            raise SystemExit("the tiny model can't be trained")


def try_commands(count: int, seed: int, table: dict[str, Counter[str]], shown: list[str], folder: Path) -> None:
    rng, found = random.Random(seed), table.setdefault("command line", Counter())
    warm_up(folder)
    for number in range(count):
        out = folder / "out"
        shutil.rmtree(out, ignore_errors=True)
        typed = command(rng, out)
        code, said = forked.run(typed, folder / "said.txt")
        kind = came_to(code, said, out)
        found["tries"] += 1
        found[kind] += 1
        if kind not in ("same", "refused"):
            shown.append(f"{kind}: #{number} {' '.join(typed[len(TINY) :])}: exit code {code}: {said.strip()[-300:]}")


def came_to(code: int, said: str, out: Path) -> str:
    """One of COLUMNS; a process that a signal ended counts as a traceback."""
    if code == forked.HANG:
        return "hang"
    if code < 0 or code == forked.CAME_THROUGH or "Traceback" in said or "the traceback is in" in said:
        return "traceback"
    if code == 2 and out.exists():  # nothing is written where an option is wrong
        return "lost"
    error = [line for line in said.splitlines() if line.startswith("error: ")]
    whole = (out / "results.json").exists() if code == 0 else bool(error)
    return ("same" if code == 0 else "refused") if whole else "silent"


# ---------------------------------------------------------------- the table


def run(mutations: int, commands: int, seed: int) -> tuple[dict[str, Counter[str]], list[str]]:
    table: dict[str, Counter[str]] = {}
    shown: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if commands:  # first: nothing has searched yet in the process that forks
            try_commands(commands, seed, table, shown, folder)
        if mutations:
            try_files(mutations, seed, table, shown, folder)
    return table, shown


def bad(table: dict[str, Counter[str]]) -> int:
    return sum(counts[column] for counts in table.values() for column in COLUMNS[3:])


def as_text(table: dict[str, Counter[str]]) -> str:
    lines = ["".join([f"{'':28}", *(f"{column:>10}" for column in COLUMNS)])]
    lines += ["".join([f"{kind:28}", *(f"{counts[column]:>10}" for column in COLUMNS)]) for kind, counts in table.items()]
    return "\n".join(lines)


def cli() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mutations", type=int, default=1000, help="of each kind of file")
    parser.add_argument("--commands", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    table, shown = run(options.mutations, options.commands, options.seed)
    print(as_text(table))
    print(*shown[:50], sep="\n", file=sys.stderr)
    if options.json:
        store.write_json(options.json, {"seed": options.seed, "table": table, "shown": shown})
    return 1 if bad(table) else 0


if __name__ == "__main__":
    sys.exit(cli())
