"""What survives: runs that are killed, that find the disk full, and that meet another process, each gone on with and compared bit for
bit with one that nothing happened to.

    python -m benchmarks.crash [--kills 200] [--quick]

A try ends `same` (it went on to the numbers of the undisturbed run), or `refused` where that is what should happen (two processes
want one directory). Everything else is a fault: `lost` (it could not go on, or somebody's file is gone), `silent` (other numbers without
a word), `traceback`, `hang`.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import os
import random
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("OMP_NUM_THREADS", "1")  # processes are forked, and the numbers must be the same

import torch

from benchmarks import forked
from evaluation import cost
from evaluation.results import read
from inputs import store
from main import main as command
from run.directory import MARKER, state_of
from tests.faults import killing, layer, nothing

GOOD, BAD = ("same", "refused"), ("lost", "silent", "traceback", "hang")
# Dropout, MixUp, averaged weights, accumulation, a bank: everything that could remember something.
TINY = shlex.split(
    "--dataset 'fake(train=61,test=23,size=8,classes=3)' --num_layers 1 --num_heads 1 --d_hidden 6 --d_mlp 7 --patch_size 4 "
    "--batch_size 16 --num_epochs 3 --lr 0.01 --dropout 0.1 --augment --mixup_alpha 0.3 --ema_decay 0.9 --accumulate 2 "
    "--warmup_epochs 1 --deterministic --head linear+knn --embed_dim 4 --k_train 3 --calibrate temperature --val_fraction 0.3 "
    "--select nll --device cpu"
)


def run_in_child(words: list[str], folder: Path, watch: Any = None, after: float = math.inf) -> tuple[int, str]:
    """Exit code and what was said. `watch`: a layer; `after`: seconds until SIGKILL."""
    return forked.run(words, folder.parent / f"{folder.name}-said.txt", layer(folder, *(watch or (nothing,))), after)


# ---------------------------------------------------------------- what a try came to


def numbers_of(folder: Path) -> dict[str, Any]:
    """All that two equal runs must share, bit for bit."""
    found: dict[str, Any] = {}
    for name in ("last", "best"):
        tensors, facts = store.load(folder / "checkpoints" / name)
        found |= {f"{name}/{group}/{key}": t.numpy().tobytes() for group, named in tensors.items() for key, t in named.items()}
        found[f"{name}/rest"] = {k: v for k, v in facts.get("training", {}).items() if k != "place"}
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found["lines"] = [{k: v for k, v in line.items() if k not in ("seconds", "images_per_second")} for line in lines]
    results = read(folder / "results.json")
    return found | {k: results[k] for k in ("test", "test_calibrated", "val")} | {k: results["about"][k] for k in ("epoch", "data")}


def verdict(code: int, said: str, folder: Path, wanted: dict[str, Any]) -> str:
    if code == forked.HANG:
        return "hang"
    if code == forked.CAME_THROUGH or "Traceback" in said or "the traceback is in" in said:
        return "traceback"
    if code != 0:
        return "lost"
    left = [p for p in folder.rglob("*") if p.name.endswith(".tmp") or p.name == ".lock"]
    if left or command_says_damaged(folder):
        return "lost"
    return "same" if numbers_of(folder) == wanted else "silent"


def command_says_damaged(folder: Path) -> bool:
    from run.verify import verify_run

    return verify_run(folder).state != "whole"


def gone_on(folder: Path, wanted: dict[str, Any]) -> str:
    """What a stopped run came to: by --resume where there is a run, by the original command where there is none yet."""
    if state_of(folder) == "done":
        return verdict(0, "", folder, wanted)
    words = ["--resume", str(folder)] if (folder / MARKER).exists() else [*TINY, "--output_dir", str(folder)]
    code, said = run_in_child(words, folder)
    return verdict(code, said, folder, wanted)


# ---------------------------------------------------------------- the tries


class Table:
    def __init__(self) -> None:
        self.rows: dict[str, Counter[str]] = {}

    def add(self, what: str, outcome: str, where: Path, note: str = "") -> None:
        self.rows.setdefault(what, Counter())[outcome] += 1
        if outcome in BAD:
            print(f"{outcome}: {what}, {note}; kept in {where}", file=sys.stderr, flush=True)
        else:
            shutil.rmtree(where, ignore_errors=True)

    def __str__(self) -> str:
        columns = ("tries", *GOOD, *BAD)
        lines = [f"{'':<44}" + "".join(f"{name:>11}" for name in columns)]
        for what, counts in self.rows.items():
            cells = [counts.total(), *(counts[name] for name in (*GOOD, *BAD))]
            lines.append(f"{what:<44}" + "".join(f"{n:>11,}" for n in cells))
        return "\n".join(lines)

    @property
    def faults(self) -> int:
        return sum(counts[name] for counts in self.rows.values() for name in BAD)


class Bench:
    def __init__(self, place: Path) -> None:
        self.place, self.table, self.tried = place, Table(), 0
        cost.rows_per_second = forked.at_once
        with contextlib.redirect_stdout(None), contextlib.redirect_stderr(io.StringIO()):  # what it imports, no child has to
            assert command([*TINY, "--output_dir", str(place / "first")]) == 0
        whole = place / "whole"
        operations = place / "operations"
        code, said = run_in_child([*TINY, "--output_dir", str(whole)], whole, (counting(operations),))
        assert code == 0, said
        self.operations = int(operations.read_text())
        self.wanted = numbers_of(whole)
        self.bytes = sum(p.stat().st_size for p in whole.rglob("*") if p.is_file())
        begun = time.monotonic()
        run_in_child([*TINY, "--output_dir", str(place / "timed")], place / "timed")
        self.seconds = time.monotonic() - begun

    def folder(self) -> Path:
        self.tried += 1
        return self.place / f"try-{self.tried}" / "run"

    def kill_after_operation(self, at: int) -> None:
        folder = self.fresh()
        run_in_child([*TINY, "--output_dir", str(folder)], folder, (killing(at),))
        self.table.add("SIGKILL after a file operation", gone_on(folder, self.wanted), folder.parent, f"operation {at}")

    def kill_twice(self, first: int, second: int) -> None:
        folder = self.fresh()
        run_in_child([*TINY, "--output_dir", str(folder)], folder, (killing(first),))
        if (folder / MARKER).exists():
            run_in_child(["--resume", str(folder)], folder, (killing(second),))
        outcome = gone_on(folder, self.wanted)
        self.table.add("SIGKILL, and again in the resumed run", outcome, folder.parent, f"operations {first} and {second}")

    def kill_at_random(self, seconds: float) -> None:
        folder = self.fresh()
        run_in_child([*TINY, "--output_dir", str(folder)], folder, None, seconds)
        self.table.add("SIGKILL at a random moment", gone_on(folder, self.wanted), folder.parent, f"after {seconds:.2f} s")

    def fresh(self) -> Path:
        folder = self.folder()
        folder.parent.mkdir()
        return folder

    def full_disk(self, size: int, mounted: bool) -> None:
        """A disk of so many bytes: the run ends in one line, and goes on once there is room."""
        folder = self.fresh()
        what = "disk full, on a tmpfs" if mounted else "disk full, by the layer"
        with tmpfs(folder.parent, size) if mounted else untouched() as room:
            code, said = run_in_child([*TINY, "--output_dir", str(folder)], folder, None if mounted else (nothing, size))
            lines = [line for line in said.splitlines() if line.startswith("error: ")]
            if code == 0:
                outcome = verdict(code, said, folder, self.wanted)
            elif code != 1 or len(lines) != 1:
                outcome = "traceback" if "raceback" in said else "lost"
            else:
                room()
                outcome = gone_on(folder, self.wanted)
        self.table.add(what, outcome, folder.parent, f"{size} bytes")

    def meet(self, kinds: tuple[str, str], at: int) -> None:
        """The first process stands still after an operation; the second begins or resumes meanwhile; then the first goes on."""
        folder = self.fresh()
        if "resume" in kinds:
            run_in_child([*TINY, "--output_dir", str(folder), "--stop_after", "1"], folder)
        commands = {"begin": [*TINY, "--output_dir", str(folder)], "resume": ["--resume", str(folder)]}
        (arrived, tell), (wait, go) = os.pipe(), os.pipe()

        def standing(number: int, name: str) -> None:
            if number == at:
                os.write(tell, b"x")
                os.read(wait, 1)

        first_said = folder.parent / "first.txt"
        first = forked.start(commands[kinds[0]], first_said, layer(folder, standing))
        os.close(tell)
        os.read(arrived, 1)  # or its end
        code, said = run_in_child(commands[kinds[1]], folder)
        os.write(go, b"x")
        first_code = os.waitstatus_to_exitcode(os.waitpid(first, 0)[1])
        for handle in (arrived, wait, go):
            os.close(handle)
        outcome = self.of_two(folder, {first_code, code}, first_said.read_text() + said)
        self.table.add(f"two processes: {kinds[0]} meets {kinds[1]}", outcome, folder.parent, f"at operation {at}")

    def of_two(self, folder: Path, codes: set[int], said: str) -> str:
        if forked.HANG in codes:
            return "hang"
        if forked.CAME_THROUGH in codes or "raceback" in said:
            return "traceback"
        if not codes <= {0, 2}:
            return "lost"
        outcome = gone_on(folder, self.wanted)
        return "refused" if outcome == "same" and 2 in codes else outcome


def counting(path: Path) -> Callable[[int, str], None]:
    def after(number: int, name: str) -> None:
        path.write_text(str(number))

    return after


@contextmanager
def untouched() -> Any:
    yield lambda: None


@contextmanager
def tmpfs(folder: Path, size: int) -> Any:
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={max(size, 4096)}", "tmpfs", str(folder)], check=True)
    try:
        yield lambda: subprocess.run(["mount", "-o", "remount,size=64m", str(folder)], check=True)
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def can_mount() -> bool:
    with tempfile.TemporaryDirectory() as folder:
        try:
            with tmpfs(Path(folder), 4096):
                return True
        except (OSError, subprocess.CalledProcessError):
            return False


def all_tries(bench: Bench, kills: int, seed: int, *, mounted: bool) -> None:
    draws, total = random.Random(seed), bench.operations
    shares = [kills // 2, kills // 4, kills - kills // 2 - kills // 4]
    for at in spread(total, shares[0]):
        bench.kill_after_operation(at)
    for _ in range(shares[1]):
        bench.kill_at_random(draws.uniform(0, bench.seconds))
    for _ in range(shares[2]):
        bench.kill_twice(draws.randint(1, total), draws.randint(1, total))
    step = 4096 if kills >= 100 else bench.bytes // 2
    for size in range(0 if kills >= 100 else step, bench.bytes + step, max(step, bench.bytes // 60)):
        bench.full_disk(size, mounted)
    for kinds in (("begin", "begin"), ("resume", "resume"), ("begin", "resume"), ("resume", "begin")):
        for at in spread(total // (2 if "resume" in kinds else 1), max(2, kills // 20)):
            bench.meet(kinds, at)


def spread(total: int, count: int) -> list[int]:
    """So many whole numbers from 1 to `total`, evenly."""
    return sorted({1 + round(i * (total - 1) / max(1, count - 1)) for i in range(min(count, total))})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="a few of each")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    memory = Path("/dev/shm")  # where there is one: a disk is slow to say that it has written
    place = Path(tempfile.mkdtemp(prefix="crash-", dir=memory if memory.is_dir() else None))
    bench = Bench(place)
    size = f"{bench.operations} file operations, {bench.bytes:,} bytes, {bench.seconds:.1f} s"
    print(f"torch {torch.__version__}; a run has {size}; seed {arguments.seed}", flush=True)
    all_tries(bench, 4 if arguments.quick else arguments.kills, arguments.seed, mounted=can_mount())
    print(bench.table)
    if not bench.table.faults:
        shutil.rmtree(place)
    return 1 if bench.table.faults else 0


if __name__ == "__main__":
    sys.exit(main())
