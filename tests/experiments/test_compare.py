"""A comparison from the command line: it runs once what is to run, survives what stops it, and ends with the same tables."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from experiments import plan as plans
from experiments.cells import Place, claimed, holder, place_of
from experiments.command import Making
from experiments.live import Progress
from experiments.plan import BACKBONE
from main import main
from tests.experiments.sweeps import FAKE, FRAGILE, THREE, begun, check_runs, numbers, until
from utils import BadOption


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three arms, two seeds, run in one go."""
    folder = tmp_path_factory.mktemp("alone") / "sweep"
    process = begun(folder, *THREE, "--jobs", "2")
    out, err = process.communicate()
    assert process.returncode == 0, err[-3000:]
    assert "KvtAttention(K=3) against Attention" in out
    lines = err.splitlines()
    planned = next(i for i, line in enumerate(lines) if line.startswith("2 seeds find, with 80 % power, paired differences of"))
    assert planned < next(i for i, line in enumerate(lines) if line.startswith("done: "))
    assert len([line for line in lines if re.match(r"paired differences of seeds deviate by .* points: 2 seeds will find", line)]) == 1
    return folder


@pytest.fixture
def copy(alone: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(alone, tmp_path / "sweep"))


def test_every_arm_has_its_runs_and_files(alone: Path) -> None:
    for arm in ("Attention", "KvtAttention_K=2", "KvtAttention_K=3"):
        for seed in (0, 1):
            run = alone / "cells" / arm / f"seed{seed}"
            assert json.loads((run / "results.json").read_text())["about"]["config"]["paired_init"]
            assert f"--seed {seed}" in (run / "args.txt").read_text()
    plan = json.loads((alone / "plan.json").read_text())
    assert (plan["baseline"], plan["family"], plan["seeds"]) == ("Attention", ["KvtAttention(K=2)", "KvtAttention(K=3)"], [0, 1])
    assert {"table.csv", "table.md", "table.tex", "comparison.json", "results.csv"} <= {f.name for f in alone.iterdir()}


def test_killed_twice_resumed_with_help_it_ends_with_the_same_tables(alone: Path, tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    first = begun(folder, *THREE, "--jobs", "2")
    until(first, "done")
    first.kill()  # its runs are told to save, and stop
    first.wait()
    second = begun(folder, "--jobs", "1")
    until(second, "done")
    runs = [place_of(folder, arm, seed) for arm in ("Attention", "KvtAttention(K=2)", "KvtAttention(K=3)") for seed in (0, 1)]
    second.kill()
    for place in runs:
        if (who := holder(place)) and who["process"]:
            with contextlib.suppress(ProcessLookupError):  # it may have ended meanwhile
                os.kill(who["process"], signal.SIGKILL)  # these can save nothing
    second.wait()
    third, helper = begun(folder, "--jobs", "2", "--retry", "failed"), begun(folder, "--jobs", "1", "--retry", "failed")
    said = [process.communicate() for process in (third, helper)]
    assert [third.returncode, helper.returncode] == [0, 0], said[0][1][-2000:] + said[1][1][-2000:]
    assert numbers(folder) == numbers(alone)
    check_runs(folder, alone, epochs=3)


def test_nothing_runs_twice(copy: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = {f: f.stat().st_mtime_ns for f in copy.glob("cells/*/*/results.json")}
    assert main(["compare", "--output_dir", str(copy)]) == 0
    assert {f: f.stat().st_mtime_ns for f in copy.glob("cells/*/*/results.json")} == before
    assert "Attention" in capfd.readouterr().out


def test_what_the_seeds_will_find_waits_for_a_run_that_has_results_and_still_ends(copy: Path) -> None:
    plan = plans.read(copy)
    assert plan is not None
    notes = {arm.name: json.loads(place_of(copy, arm.name, 0).note.read_text()) for arm in plan.arms}
    making = Making(plan, copy, {name: note["made_with"] for name, note in notes.items()}, {}, {})
    lines: list[str] = []
    told: list[bool] = []
    progress: Any = SimpleNamespace(line=lines.append)
    with claimed(place_of(copy, plan.arms[-1].name, 1)):
        making.tell_power(told, progress)
    assert (lines, told) == ([], [])
    for _ in range(2):
        making.tell_power(told, progress)
    (line,) = lines
    assert line.startswith("paired differences of seeds deviate by")


@pytest.mark.parametrize(("number", "name"), [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM")])
def test_a_signal_saves_and_prints_the_command_that_goes_on(number: int, name: str, tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    process = begun(folder, *THREE, "--jobs", "2")
    until(process, "done")
    process.send_signal(number)
    said = process.communicate()[1]
    assert process.returncode == 128 + number
    assert f"stopped by {name}; what was done is saved. Go on with: python main.py compare --output_dir {folder} --jobs 2" in said
    # What a run that was only just begun wrote into its lock may be left there; the lock itself is free.
    assert not [lock for lock in folder.glob("cells/*/*.lock") if holder(Place("", 0, lock.with_suffix("")))]


def test_logs_and_locks_are_not_written_through_a_link(tmp_path: Path) -> None:
    place = place_of(tmp_path, "Attention", 0)
    place.lock.parent.mkdir(parents=True)
    (tmp_path / "mine").write_text("mine")
    for path in (place.lock, place.log):
        path.symlink_to(tmp_path / "mine")
        with pytest.raises(BadOption, match="must not hold a symlink in the place of a file"), claimed(place):
            pass
        path.unlink()
    assert (tmp_path / "mine").read_text() == "mine"
    with claimed(place) as ours:
        assert ours


def test_the_table_of_a_terminal(alone: Path) -> None:
    from rich.console import Console

    places = [place_of(alone, arm, seed) for arm in ("Attention", "KvtAttention(K=2)") for seed in (0, 1, 7)]
    made_with = json.loads(places[0].note.read_text())["made_with"]
    other = json.loads(places[3].note.read_text())["made_with"]
    now, later = {"Attention": made_with, "KvtAttention(K=2)": {**other, "code": "newer"}}, (7, "KvtAttention(K=2)")
    progress = Progress(places, now, "accuracy", jobs=2, later=later)
    with (console := Console(width=120)).capture() as seen:
        console.print(progress.table())
    lines = [" ".join(re.split(r"[│┃|]|\s{2,}", line)) for line in seen.get().splitlines()]
    assert any(re.search(r"2 of 6 runs done, .* left; accuracy of the test rows", line) for line in lines)  # those of other code are not
    assert any(re.search(r"arm .*seed 0 .*seed 1 .*seed 7 \(exploratory\)", line) for line in lines)
    assert any("KvtAttention(K=2) (exploratory)" in line for line in lines)
    assert any(re.search(r"Attention .*\d+\.\d+ .*\d+\.\d+ .*pending", line) for line in lines)


def test_in_a_low_terminal_the_arms_at_work_are_shown(tmp_path: Path) -> None:
    from rich.console import Console

    arms = [f"arm{number}" for number in range(30)]
    progress = Progress([place_of(tmp_path, arm, 0) for arm in arms], {arm: {} for arm in arms}, "accuracy", jobs=1)
    progress.live = SimpleNamespace(console=Console(width=80, height=12))
    place_of(tmp_path, "arm17", 0).note.parent.mkdir(parents=True)
    place_of(tmp_path, "arm17", 0).note.write_text(json.dumps({"made_with": {}, "failed": {"line": "error", "code": 1}}))
    assert [str(name) for name in progress.table().columns[0].cells] == ["arm0", "arm1", "arm2", "arm17"]


def test_a_missing_seed_is_counted_and_common_pairs_are_compared(copy: Path, capfd: pytest.CaptureFixture[str]) -> None:
    place = place_of(copy, "KvtAttention(K=2)", 1)
    (place.run / "results.json").unlink()
    place.note.write_text(json.dumps({**json.loads(place.note.read_text()), "failed": {"line": "error: no memory", "code": 1}}))
    assert main(["compare", "--output_dir", str(copy)]) == 1  # it has failed, and --retry was not asked
    said = capfd.readouterr().err
    assert f"failed: KvtAttention(K=2), seed 1: error: no memory (log: {place.log})" in said
    assert "1 of 6 runs have no result" in said
    by_arm = {c["arm"]: c for c in json.loads((copy / "comparison.json").read_text())["comparisons"]}
    assert [len(by_arm[f"KvtAttention(K={k})"]["seeds"]) if isinstance(by_arm[f"KvtAttention(K={k})"]["seeds"], list)
            else by_arm[f"KvtAttention(K={k})"]["seeds"] for k in (2, 3)] == [1, 2]  # fmt: skip
    assert main(["compare", "--output_dir", str(copy), "--retry", "failed"]) == 0
    assert (place.run / "results.json").exists()


def test_more_arms_and_seeds_join_as_exploratory(copy: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = [word for word in THREE if word != "2"][:-1]  # without --seeds 2
    words[words.index("--layer") + 1] = "KvtAttention(K=3) | KvtAttention(K=1)"
    assert main(["compare", *words, "--output_dir", str(copy), "--dry_run"]) == 0
    said = capfd.readouterr().out
    assert re.search(r"KvtAttention\(K=1\) +2 pending; about .*\(exploratory\)", said)
    assert main(["compare", "--seeds", "3", "--output_dir", str(copy), "--dry_run"]) == 0
    assert "seeds: 0, 1, 2 (exploratory)" in capfd.readouterr().out
    assert not (copy / "cells" / "KvtAttention_K=1").exists()
    assert main(["compare", *words, "--output_dir", str(copy)]) == 0
    plan = json.loads((copy / "plan.json").read_text())
    assert [arm["name"] for arm in plan["arms"] if arm["exploratory"]] == ["KvtAttention(K=1)"]
    assert plan["family"] == ["KvtAttention(K=2)", "KvtAttention(K=3)"]
    assert "exploratory" in (copy / "table.md").read_text()


def test_other_code_makes_results_stale(copy: Path, capfd: pytest.CaptureFixture[str]) -> None:
    place = place_of(copy, "Attention", 0)
    note = json.loads(place.note.read_text())
    place.note.write_text(json.dumps({**note, "made_with": {**note["made_with"], "code": "older"}}))
    assert main(["compare", "--output_dir", str(copy)]) == 0
    assert "stale: 1 results were made with another code" in capfd.readouterr().err
    states = [cell["state"] for cell in json.loads((copy / "comparison.json").read_text())["cells"]]
    assert sorted(states) == ["done"] * 5 + ["stale"]
    assert main(["compare", "--output_dir", str(copy), "--retry", "stale"]) == 0
    assert json.loads(place.note.read_text())["made_with"] == note["made_with"]


# ---------------------------------------------------------------- arms of every kind

PLUGIN = f"""{FRAGILE}
@LAYERS.register()
class Mine(Attention):
    pass
"""


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """Arms of a plugin, one of which fails while it trains, and one configuration under two names; what was said."""
    folder = tmp_path_factory.mktemp("mixed")
    (folder / "mine.py").write_text(PLUGIN)
    words = [*FAKE, "--num_epochs", "1", "--layer", "Attention | Mine | Fragile | KvtAttention(K=2) | KvtAttention", "--K", "2"]
    words += ["--seeds", "1"]
    process = begun(folder / "sweep", *words, "--plugin", str(folder / "mine.py"), "--jobs", "2")
    out, err = process.communicate()
    assert process.returncode == 1, err[-3000:]
    return folder / "sweep", out, err


def test_one_failure_stops_nothing(mixed: tuple[Path, str, str]) -> None:
    folder, out, err = mixed
    log = folder / "cells" / "Fragile" / "seed0.log"
    line = f"failed: Fragile, seed 0: error: plugin mine.py, line 8, in mix: RuntimeError: it broke (log: {log})"
    assert err.count(line) == 2  # when it happened, and at the end
    assert "it broke" in log.read_text()
    assert f"Go on with: python main.py compare --output_dir {folder} --jobs 2 --plugin {folder.parent / 'mine.py'} --retry failed" in err
    assert {f.parent.parent.name for f in folder.glob("cells/*/*/results.json")} == {"Attention", "Mine", "KvtAttention_K=2"}
    assert "Mine against Attention" in out


def test_the_command_that_goes_on_adds_no_arm_and_its_plugin_is_needed(
    mixed: tuple[Path, str, str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder, _, err = mixed
    again = shlex.split(err.rpartition("Go on with: python main.py ")[2].splitlines()[0])
    before = (folder / "plan.json").read_bytes()
    process = begun(folder, *(word for word in again if word not in ("compare", "--output_dir", str(folder), "--retry", "failed")))
    assert process.communicate()[0].startswith("arm ")
    assert (folder / "plan.json").read_bytes() == before
    (tmp_path / "mine.py").write_text(PLUGIN)
    for words in ([], ["--plugin", str(tmp_path / "mine.py")]):
        assert main(["compare", "--output_dir", str(folder), *words]) == 2
        line = f"--plugin must be typed: the plan names {folder.parent / 'mine.py'}, and no code runs because a file names it"
        assert line in capfd.readouterr().err


def test_fail_fast_starts_nothing_after_a_failure(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text(PLUGIN)
    folder = tmp_path / "sweep"
    words = [*FAKE, "--num_epochs", "1", "--layer", "Fragile | Attention | Mine", "--seeds", "1", "--plugin", str(tmp_path / "mine.py")]
    assert main(["compare", *words, "--fail_fast", "--output_dir", str(folder)]) == 1
    said = capfd.readouterr().err
    go_on = f"python main.py compare --output_dir {folder} --jobs 1 --plugin {tmp_path / 'mine.py'} --retry failed"
    assert f"error: stopped because a run failed (--fail_fast). Go on with: {go_on}" in said
    assert "Fragile, seed 0: error: plugin mine.py, line 8, in mix: RuntimeError: it broke" in said
    assert [f.parent.parent.name for f in folder.glob("cells/*/*/args.txt")] == ["Fragile"]


@pytest.mark.parametrize(("margin", "seeds"), [("1e5", [0, 1]), ("0.001", [0, 1, 2])])
def test_a_look_ends_what_is_decided_and_nothing_else(
    margin: str, seeds: list[int], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """With so wide a margin all arms are equivalent, after two seeds already; within a thousandth nothing is decided."""
    words = [*FAKE, "--num_epochs", "1", "--layer", "Attention | KvtAttention(K=2)", "--seeds", "3", "--looks", "2", "--margin", margin]
    assert main(["compare", *words, "--output_dir", str(tmp_path)]) == 0
    said, (found,) = capfd.readouterr(), json.loads((tmp_path / "comparison.json").read_text())["comparisons"]
    assert ("looks: decided after 2 seeds, as the plan allows" in said.err) == (margin == "1e5")
    assert sorted(int(f.parent.name[4:]) for f in tmp_path.glob("cells/Attention/*/results.json")) == seeds
    assert found["verdict"] == ("equivalent" if margin == "1e5" else "undecided")
    assert (found["seeds"], found["level"]) == ((2, pytest.approx(0.05 * 2 / 3)) if margin == "1e5" else (3, pytest.approx(0.05 / 3)))
    if margin == "1e5":
        return
    assert main(["compare", "--output_dir", str(tmp_path), "--seeds", "4"]) == 0  # an added seed counts too, and is told from the others
    (found,) = json.loads((tmp_path / "comparison.json").read_text())["comparisons"]
    assert (found["seeds"], found["level"], found["exploratory"], found["declared_seeds_alone"]) == (4, 0.05, True, "undecided")
    assert "4 (1 exploratory)" in capfd.readouterr().out


def test_two_names_for_one_configuration_run_once(mixed: tuple[Path, str, str]) -> None:
    _, out, err = mixed
    assert "same: KvtAttention is KvtAttention(K=2) by another name, and runs once" in err
    assert len(re.findall(r"^KvtAttention(?:\(K=2\))? against Attention", out, re.MULTILINE)) == 2


def test_finished_runs_by_path(alone: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    cells = alone / "cells"
    runs = [str(cells / arm / f"seed{seed}") for arm in ("Attention", "KvtAttention_K=3") for seed in (0, 1)]
    assert main(["compare", *runs, "--output_dir", str(tmp_path / "here")]) == 0
    assert "KvtAttention(K=3) against Attention" in capfd.readouterr().out
    ours, theirs = (json.loads((f / "comparison.json").read_text())["comparisons"] for f in (tmp_path / "here", alone))
    of_plan = next(c for c in theirs if c["arm"] == "KvtAttention(K=3)")
    assert {k: ours[0][k] for k in ("arm", "difference")} == {k: of_plan[k] for k in ("arm", "difference")}


def test_predictors_inside_a_run(tmp_path: Path, alone: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = alone / "cells" / "Attention" / "seed0"
    assert main(["compare", str(run), "--within", "linear.raw,linear.calibrated", "--metric", "nll", "--output_dir", str(tmp_path)]) == 0
    assert "linear.calibrated" in capfd.readouterr().out
    found = json.loads((tmp_path / "comparison.json").read_text())
    assert [(c["arm"], c["baseline"], c["metric"]) for c in found["comparisons"]] == [("linear.calibrated", "linear.raw", "nll")]
    scores = json.loads((run / "results.json").read_text())
    assert found["comparisons"][0]["difference"] == pytest.approx(scores["test_calibrated"]["nll"] - scores["test"]["nll"], abs=1e-6)


SHARED = """
seeds: 1
threads: 1
common: {dataset: "fake(train=60, test=30, size=8, classes=3)", patch_size: 4, num_layers: 1, num_heads: 1, d_hidden: 8, d_mlp: 8,
  num_epochs: 1, batch_size: 16, baselines: false}
backbone: {layer: Attention}
arms:
  linear: {freeze_backbone: true}
  smoothed: {freeze_backbone: true, label_smoothing: 0.1}
published:
  smoothed: {accuracy: 77.5, f1: 0.5}
conditions: from nowhere
"""


def test_shared_work_is_done_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "plan.yaml").write_text(SHARED)
    folder = tmp_path / "sweep"
    assert main(["compare", "--plan", str(tmp_path / "plan.yaml"), "--output_dir", str(folder), "--jobs", "2"]) == 0
    out = capfd.readouterr().out
    logs = "".join(log.read_text() for log in folder.glob("cells/*/*.log"))
    assert logs.count("rows of train through the backbone") == 1
    weights = folder / "cells" / "shared_backbone" / "seed0" / "checkpoints" / "best"
    for arm in ("linear", "smoothed"):
        config = json.loads((folder / "cells" / arm / "seed0" / "results.json").read_text())["about"]["config"]
        assert Path(config["pretrained"]).parent == weights
    assert re.search(r"^smoothed +\d+\.\d\d +77\.5", out, re.MULTILINE)  # ours, and what was published
    assert "published: from nowhere" in out
    assert "| smoothed |" in (folder / "published.md").read_text()


def test_a_backbone_that_fails_is_missed_by_its_own_seed_alone(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Seed 0 has no backbone at first: the arms of seed 1 run. Once it has one, all there is still counts."""
    (tmp_path / "plan.yaml").write_text(SHARED.replace("seeds: 1", "seeds: 2"))
    folder = tmp_path / "sweep"
    place = place_of(folder, BACKBONE, 0)
    place.note.parent.mkdir(parents=True)
    place.note.write_text(json.dumps({"made_with": {}, "failed": {"line": "error: no memory", "code": 1}}))
    words = ["compare", "--plan", str(tmp_path / "plan.yaml"), "--output_dir", str(folder)]
    assert main(words) == 1
    said = capfd.readouterr().err
    assert said.count("failed: shared backbone, seed 0: error: no memory") == 1
    assert "no arm can start without it" in said
    assert "2 of 4 runs have no result" in said
    done = sorted(folder.glob("cells/*/*/results.json"))
    assert [f.parent.name for f in done] == ["seed1"] * 3
    before = [f.stat().st_mtime_ns for f in done]
    assert main([*words, "--retry", "failed"]) == 0
    assert [f.stat().st_mtime_ns for f in done] == before
    assert {cell["state"] for cell in json.loads((folder / "comparison.json").read_text())["cells"]} == {"done"}
