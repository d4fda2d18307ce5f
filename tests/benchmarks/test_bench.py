"""`bench`: every part runs at tiny sizes and all its numbers are finite. Never a timing: how fast something is, a test can't know."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from benchmarks import bank, bench, data, heads, layers, loop, models, startup, timing
from benchmarks.plot import draw
from benchmarks.tables import as_json, table
from benchmarks.targets import LAYERS, Target, target_of
from benchmarks.timing import CPU, Ask, Effort, Group, Line, Spread, Watch, measured
from layers.compiled import native
from main import main

ASK = Ask(threads=1, clock="cpu", device=CPU, rounds=2)
SMALL = {"patch_size": 16, "num_layers": 1, "num_heads": 1, "d_hidden": 16, "d_mlp": 16, "resize": 32}
FAKE = ["--dataset", "fake(train=60, test=20, size=8)", "--patch_size", "4", "--num_layers", "1", "--d_hidden", "8", "--num_heads", "1"]
TINY: dict[ModuleType, Any] = {
    layers: layers.Sizes({50: (7, 7), 65: (8, 8)}, {50: 1, 65: 1}, ("float32", "bfloat16"), ("eager",)),
    models: models.Sizes(("Attention", "KvtAttention"), {**SMALL, "resize": 64}, 2),
    loop: loop.Sizes({"a small model": ("fake(train=60, test=10, size=32)", {**SMALL, "batch_size": 8})}, 2),
    bank: bank.Sizes(300, (8,), kinds=True, queries=16),
    heads: heads.Sizes(200, dim=12, embed_dim=8, queries=16, batch=4),
    data: data.Sizes(16, side=40),
    startup: startup.Sizes(("import torch", "--help", "first training step"), FAKE),
}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_every_part_is_here() -> None:
    assert {part.__name__.removeprefix("benchmarks.") for part in TINY} == set(bench.PARTS)
    assert all(name == part.PART for part, name in zip(TINY, bench.PARTS, strict=True))


@pytest.mark.parametrize("part", list(TINY), ids=lambda part: part.PART)
def test_a_part_runs_and_its_numbers_are_finite(part: ModuleType, tmp_path: Path) -> None:
    ask = Ask(threads=1, clock="wall", device=CPU, rounds=1) if part is startup else ASK
    kept: list[Line] = []
    for group in part.groups(ask, TINY[part]):
        lines = measured(group, ask.clock)
        assert not {name: why for name, why in group.absent.items() if "not installed" not in why and "AVX-512" not in why}
        assert {line.name for line in lines} == set(group.sides)
        for line in lines:
            assert all(math.isfinite(value) and value > 0 for value in (*line.ratio, *line.seconds)), line
            assert line.rounds == ask.rounds
            assert line.peak_mb is None or (math.isfinite(line.peak_mb) and line.peak_mb >= 0)
            json.dumps(as_json(line), allow_nan=False)
        assert all(line.ratio == (1, 1, 1) for line in lines if line.name == line.base)
        assert all(f"| {name}" in table(group, lines) for name in group.sides)
        kept += lines
    if part is layers:
        assert draw(kept, tmp_path / "layers.png", "tiny")
        assert (tmp_path / "layers.png").read_bytes().startswith(b"\x89PNG")
        assert not draw([line for line in kept if line.facts["tokens"] == 50], tmp_path / "none.png", "one length is no curve")


# ---------------------------------------------------------------- the core, with hand-made times


def told(values: Sequence[float]) -> timing.Side:
    """A side that takes what it is told to."""
    left = iter(values)
    return lambda watch: watch.took(next(left))


def group_of(**sides: Sequence[float]) -> Group:
    made = {name: told(values) for name, values in sides.items()}
    return Group("bank", "by hand", ("search",), ("a", "b"), made, Effort(4, 1.0), memory=False)


def test_ratios_are_those_of_a_round() -> None:
    """The first time warms up. The machine is twice as slow in the last round, for both: the ratio stays."""
    lines = {line.name: line for line in measured(group_of(a=[9, 4, 4, 4, 8], b=[9, 5, 5, 5, 10], c=[9, 2, 2, 2, 4]), "wall")}
    assert lines["c"].base == "a"  # the faster of both
    assert lines["c"].ratio == (0.5, 0.5, 0.5)
    assert lines["b"].ratio == (1.25, 1.25, 1.25)
    assert lines["c"].seconds == (2, 2, 2.5)
    assert lines["c"].rounds == 4


def test_sides_take_turns_and_nobody_always_comes_after_the_same_one() -> None:
    names = "abcde"
    for short in (False, True):
        order: list[str] = []

        def side(name: str, order: list[str] = order) -> timing.Side:
            def run(watch: Watch) -> None:
                order.append(name)
                watch.took(len(order))

            return run

        group = Group("layers", "", ("forward",), ("a",), {name: side(name) for name in names}, Effort(9, 60.0, warm_up=0), short=short)
        taken = timing.in_turn(group, "wall")
        calls = 2 if short else 1
        rounds = [order[i : i + 5 * calls] for i in range(0, len(order), 5 * calls)]
        assert [sorted(one) for one in rounds] == [sorted(names * calls)] * 9
        assert not short or all(one[::2] == one[1::2] for one in rounds)  # each twice in a row
        assert all(order[int(call) - 1] == name for name, times in taken.items() for (call,) in times)
        assert not short or all(call % 2 == 0 for times in taken.values() for (call,) in times)  # the second is what counts
        once = order[::calls]
        assert all(len({before for before, name in itertools.pairwise(once) if name == one}) > 2 for one in names)


def test_wall_clock_times_of_two_threads_tell_how_far_apart_their_cores_were() -> None:
    def nothing(watch: Watch) -> None:
        watch.lap()
        watch.lap()

    def group() -> Group:
        return Group("p", "s", ("x",), ("a",), {"a": nothing}, Effort(5, 60), facts={"tokens": 7})

    torch.set_num_threads(2)
    there = native.distance() is not None  # a compiler, and two cores
    (told,), (of_cpu,) = measured(group(), "wall"), measured(group(), "cpu")
    torch.set_num_threads(1)
    (alone,) = measured(group(), "wall")
    assert of_cpu.facts == alone.facts == {"tokens": 7}
    assert ("ns_between_cores" in told.facts) == there
    if there:
        low, median, high = told.facts["ns_between_cores"]
        assert 0 < low <= median <= high
        assert f"; a line of memory took {median} ns ({low}-{high}) from one core to the other." in table(group(), [told])


def test_rounds_end_with_the_time_but_not_before_there_are_three() -> None:
    group = group_of(a=[1.0] * 99, b=[1.0] * 99)
    group.effort = Effort(90, 0.0)
    assert {len(times) for times in timing.in_turn(group, "wall").values()} == {3}


def test_quartiles() -> None:
    assert Spread.of([3.0]) == (3, 3, 3)
    assert Spread.of([1.0, 2.0, 3.0, 4.0, 5.0]) == (2, 3, 4)


def test_a_rival_that_fails_is_named_and_the_base_must_run() -> None:
    def fails(watch: Watch) -> None:
        raise RuntimeError("no kernel for this")

    group = group_of(a=[1.0] * 9)
    group.sides["b"] = fails
    assert [line.name for line in measured(group, "wall")] == ["a"]
    assert group.absent == {"b": "RuntimeError: no kernel for this"}
    group.base = ("b",)
    with pytest.raises(RuntimeError, match="no kernel"):
        measured(group, "wall")


def test_peak_memory_counts_what_a_call_takes() -> None:
    """64 MB for a moment, of which nothing is left."""
    group = group_of(a=[1.0])

    def takes(watch: Watch) -> None:
        torch.ones(2**24).sum()

    peak = timing.peak_memory_mb(group, "wall", takes)
    assert peak is None or 60 <= peak <= 80


# ---------------------------------------------------------------- targets


def line_of(name: str, phase: str, ratio: float, **facts: Any) -> Line:
    spread = Spread(ratio, ratio, ratio)
    return Line("layers", "", name, phase, "base", spread, Spread(0.1, 0.1, 0.1), 3, None, {"dtype": "float32", "mode": "eager", **facts})


def test_targets_stand_beside_what_was_found() -> None:
    met, missed = (line_of("KvtAttention", "forward + backward", ratio, tokens=197) for ratio in (0.70, 0.71))
    assert target_of(met) == target_of(missed) == Target(0.70)
    group = Group("layers", "s", ("forward + backward",), ("base",), {}, Effort(1, 1))
    assert "| 0.70 (0.70-0.70)   | 0.70, met |" in table(group, [met])
    assert "| 0.71 (0.71-0.71)   | 0.70, missed |" in table(group, [missed])
    assert Target(0.70).reached(line_of("KvtAttention", "forward", 0.7049, tokens=197))  # shown as 0.70
    assert not Target(0.70).reached(line_of("KvtAttention", "forward", 0.7051, tokens=197))
    assert as_json(missed)["target"] == {"most": 0.7, "of": "ratio"}


def test_no_target_where_none_is_set() -> None:
    assert target_of(line_of("KvtAttention", "forward", 1.0, tokens=198)) is None
    assert target_of(line_of("KvtAttention", "forward", 1.0, tokens=197, dtype="bfloat16")) is None
    assert target_of(line_of("timm's Attention", "forward", 1.0, tokens=197)) is None
    assert Target(0.2, in_seconds=True).reached(line_of("--help", "process", 9.0)) is True  # 0.1 s, whatever the ratio


def test_targets_are_of_layers_that_are_measured() -> None:
    assert set(LAYERS) <= set(layers.MAIN)
    assert {tokens for by_tokens in LAYERS.values() for tokens in by_tokens} <= set(layers.FULL.grids)


# ---------------------------------------------------------------- the command


def test_the_command_writes_what_it_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "data", "--quick", "--rounds", "1", "--threads", "1", "--clock", "cpu", "--device", "cpu"]
    assert main([*words, "--json", str(tmp_path / "own.json"), "--output_dir", str(tmp_path / "results")]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"1 thread, CPU time of the process", shown)
    assert sorted(path.name for path in (tmp_path / "results").iterdir()) == ["data-quick.json", "data-quick.md"]
    found = json.loads((tmp_path / "own.json").read_text())
    assert json.loads((tmp_path / "results" / "data-quick.json").read_text()) == found
    assert {line["name"] for line in found["lines"]} == {data.OURS, data.TORCHVISION}
    assert found["about"]["versions"]["torch"] == torch.__version__.partition("+")[0]
    tables = (tmp_path / "results" / "data-quick.md").read_text()
    assert all(line in shown.splitlines() for line in tables.splitlines() if line.startswith("|"))


def test_a_bank_of_a_trained_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its embeddings, as many as it has training rows; a run without a bank is refused."""
    short = [*FAKE, "--num_epochs", "1", "--val_fraction", "0", "--calibrate", "none"]
    assert main([*short, "--head", "knn", "--k_train", "5", "--output_dir", str(tmp_path / "run")]) == 0
    x, labels = bank.of_run(str(tmp_path / "run"))
    assert (len(x), len(labels)) == (60, 60)
    assert torch.allclose(x.norm(dim=1), torch.ones(60), atol=1e-5)
    ask = dataclasses.replace(ASK, checkpoint=str(tmp_path / "run"))
    (group, *_) = bank.groups(ask, bank.Sizes(300, (8,), kinds=False, queries=16))
    assert group.setting.startswith("60 embeddings of a trained run")
    assert main([*short, "--no-baselines", "--output_dir", str(tmp_path / "bare")]) == 0
    assert main(["bench", "bank", "--checkpoint", str(tmp_path / "bare")]) == 2
    assert "--checkpoint must be of a run with a bank" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("bench layer", "WHAT must be one of layers, models"),
        ("bench layers --tokens 66", "--tokens must be one of 65, 197"),
        ("bench layers --modes fast", "--modes must be one of eager, compiled"),
        ("bench loop --threads 0", "--threads must be a whole number of at least 1"),
        ("bench loop --clock sun", "--clock must be one of wall, cpu"),
        ("bench bank --checkpoint none", "--checkpoint must be a run or a checkpoint that exists"),
        ("bench data --quick --rounds 1 --checkpoint none", "--checkpoint must be a run or a checkpoint that exists"),
        ("bench data --quick --rounds 1 --json folder", "--json must be a file, and names a directory"),
        ("bench data --quick --rounds 1 --json file/data.json", "--json must be a directory that can be written"),
        ("bench data --quick --rounds 1 --output_dir file", "--output_dir must be a directory that can be written"),
    ],
)
def test_what_is_refused(
    words: str, line: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And before anything is measured."""
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("file").touch()
    assert main(words.split()) == 2
    shown = capsys.readouterr()
    assert line in shown.err
    assert "|" not in shown.out


def test_a_flag_of_another_part_is_said_to_be_ignored(capsys: pytest.CaptureFixture[str]) -> None:
    bench.tell_unused(bench.Typed("data", None, "wall", "cpu", None, "65", "float32", None, None, None, None, None, True))
    assert capsys.readouterr().err == "ignored because of data: --tokens, --dtypes\n"
    bench.tell_unused(bench.Typed("all", None, "wall", "cpu", None, "65", "float32", None, None, None, None, None, True))
    bench.tell_unused(bench.Typed("models", None, "wall", "cpu", None, None, "float32", None, "4", None, None, None, True))
    assert not capsys.readouterr().err
