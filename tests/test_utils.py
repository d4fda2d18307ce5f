"""Errors, parts by name, seeds, and the small objects a run is made of."""

from __future__ import annotations

import json
import os
import pickle
import random
import signal

import numpy as np
import pytest
import torch

import utils
from training import progress
from utils import (
    BadOption,
    Call,
    Registry,
    check_options,
    did_you_mean,
    fold_in,
    options_of,
    parse_call,
    parse_pattern,
    shortened,
    uniforms,
)

# ---------------------------------------------------------------- errors


def test_bad_option_reads_option_rule_value():
    assert str(BadOption("K", "must be at most 16", 25)) == "K must be at most 16, got 25"
    assert str(BadOption("layer", "must be one of A", "B")) == "layer must be one of A, got 'B'"
    assert str(BadOption("dataset", "needs at least two classes")) == "dataset needs at least two classes"
    assert str(BadOption("dropout", "must be below 1", 0)) == "dropout must be below 1, got 0"


def test_bad_option_survives_pickling():
    """Worker processes send it to the parent."""
    error = pickle.loads(pickle.dumps(BadOption("dataset", "has an image that can't be read", "a.png")))
    assert type(error) is BadOption
    assert (error.option, error.rule, error.value) == ("dataset", "has an image that can't be read", "a.png")
    assert str(error) == "dataset has an image that can't be read, got 'a.png'"


def test_nearest_ignores_case_and_keeps_quiet_about_strangers():
    assert did_you_mean("attention", ["Attention", "Convolution"]) == " (did you mean 'Attention'?)"
    assert did_you_mean("zzz", ["Attention", "Convolution"]) == ""
    assert did_you_mean("x", []) == ""


@pytest.mark.parametrize(
    ("text", "most", "wanted"),
    [
        ("try again", 9, "try again"),
        ("try  again\n later", 15, "try again later"),
        ("try again later", 14, "try again..."),
        ("try again later", 12, "try again..."),
        ("try again later", 11, "try..."),
        ("connection (refused) by the host", 15, "connection..."),
        ("no, never", 8, "no..."),
        ("/a/path/without/an/end", 10, "/a/path..."),
        ("", 5, ""),
    ],
)
def test_shortened_ends_after_a_word(text, most, wanted):
    assert shortened(text, most) == wanted
    assert len(shortened(ValueError(text), most)) <= most


# ---------------------------------------------------------------- parts by name


def test_registry_finds_lists_and_suggests():
    parts: Registry[object] = Registry("layer", "layer")
    first, second = object(), object()
    assert parts.register("Attention")(first) is first
    parts.register("Convolution")(second)
    assert parts["Convolution"] is second
    assert list(parts) == ["Attention", "Convolution"]
    assert "Attention" in parts
    assert "attention" not in parts
    with pytest.raises(BadOption, match=r"^layer must be one of Attention, Convolution \(did you mean 'Attention'\?\), got 'Atention'$"):
        parts["Atention"]


def test_registry_refuses_a_second_part_of_one_name():
    parts: Registry[type] = Registry("head", "head")

    @parts.register()
    class Linear:
        pass

    assert parts["Linear"] is Linear
    with pytest.raises(ValueError, match="a head named 'Linear' is registered already"):
        parts.register("Linear")(int)
    assert parts["Linear"] is Linear


@pytest.mark.parametrize(
    ("text", "name", "options"),
    [
        ("Attention", "Attention", {}),
        ("  Attention ", "Attention", {}),
        ("A()", "A", {}),
        ("A(K=9)", "A", {"K": 9}),
        ("A(K=-9, x=1e-3, s='random', t=(3, 5), on=True, none=None)", "A", dict(K=-9, x=1e-3, s="random", t=(3, 5), on=True, none=None)),
        ("A(s='a(b),c*2')", "A", {"s": "a(b),c*2"}),
    ],
)
def test_parse_call(text, name, options):
    assert parse_call(text, "layer") == Call(name, options)


@pytest.mark.parametrize(
    "text",
    [
        "A(", "A(K=9", "A(K=9))", "A(9)", "A(K=9, 9)", "A(**{'K': 9})", "A(K=__import__('os'))", "A(**open)", "A(K=9)(x=1)",
        "A(K=9).f(x=1)", "A(K=9, K=3)", "A(K={[1]: 2})", "A(K=9) + 1", "A(K=" + "(" * 500, "A(K=" + "-" * 99_999 + "1)", "A(\0K=1)",
    ],
    ids=range(16),
)  # fmt: skip
def test_parse_call_takes_nothing_but_literals(text):
    with pytest.raises(BadOption, match=r"^layer must read Name\(option=value"):
        parse_call(text, "layer")


def test_text_without_quotes_is_shown_with_them():
    with pytest.raises(BadOption, match=r"^layer needs quotes: kind='random', got 'A\(K=9, kind=random\)'$"):
        parse_call("A(K=9, kind=random)", "layer")


def test_a_call_prints_as_it_is_typed():
    assert str(Call("A")) == "A"
    call = Call("A", {"K": 9, "s": "random"})
    assert str(call) == "A(K=9, s='random')"
    assert parse_call(str(call), "layer") == call


@pytest.mark.parametrize(
    ("text", "depth", "wanted"),
    [
        ("A", 3, ["A", "A", "A"]),
        ("A*2,B(K=9)*3", 5, ["A", "A", "B(K=9)", "B(K=9)", "B(K=9)"]),
        (" A * 2 , B ", 3, ["A", "A", "B"]),
        ("A,B*2", 6, ["A", "B", "B", "A", "B", "B"]),
        ("A(K=3, n=5),B(t=(2, 3))", 2, ["A(K=3, n=5)", "B(t=(2, 3))"]),
        ("B(s='x*3')", 2, ["B(s='x*3')", "B(s='x*3')"]),
        ("B(s='x*3')*2,A", 3, ["B(s='x*3')", "B(s='x*3')", "A"]),
    ],
)
def test_parse_pattern(text, depth, wanted):
    assert [str(call) for call in parse_pattern(text, depth, "layer")] == wanted


@pytest.mark.parametrize("text", ["A*0", "A*-1", "A*x", "A*", "A*²", "A*6", "A*99999999999"])
def test_parse_pattern_refuses_counts(text):
    with pytest.raises(BadOption, match=r"^layer must read Name\*COUNT, with a count from 1 to the number of blocks \(5\), got '"):
        parse_pattern(text, 5, "layer")


@pytest.mark.parametrize(("text", "named"), [("A,B", 2), ("A*2,B*2", 4), ("", 0), (" , ", 0)])
def test_parse_pattern_refuses_what_does_not_fill_the_depth(text, named):
    with pytest.raises(BadOption, match=rf"as many layers as there are blocks \(5\) or a divisor of it \({named} named\)"):
        parse_pattern(text, 5, "layer")


class Base:
    def __init__(self, dim: int, heads: int = 8, *, dropout: float = 0.0, bias: bool = False) -> None: ...


class Middle(Base):
    def __init__(self, dim: int, *, K: int = 9, dropout: float = 0.5, **base: object) -> None: ...


class Bottom(Middle):
    pass


class Closed(Base):
    def __init__(self, dim: int, *, only: int = 1) -> None: ...


def test_options_come_from_the_signatures():
    assert options_of(Base) == {"dropout": 0.0, "bias": False}
    assert options_of(Middle) == {"K": 9, "dropout": 0.5, "bias": False}  # its own default wins over the base's
    assert options_of(Bottom) == options_of(Middle)
    assert options_of(Closed) == {"only": 1}  # it takes no **options, so the base's are out of reach
    assert options_of(lambda root, *, size=32: None) == {"size": 32}
    assert options_of(object) == {}


def test_check_options_names_the_nearest():
    check_options("Middle", Middle, {"K": 3, "bias": True})
    with pytest.raises(BadOption, match=r"^Middle has no option 'droput' \(did you mean 'dropout'\?\); it has K, dropout, bias$"):
        check_options("Middle", Middle, {"droput": 3})
    with pytest.raises(BadOption, match="it has none"):
        check_options("object", object, {"K": 3})


# ---------------------------------------------------------------- randomness


def test_mix_gives_every_address_a_seed_of_its_own():
    seeds = {fold_in(seed, stream, epoch) for seed in range(11) for stream in range(7) for epoch in range(101)}
    assert len(seeds) == 11 * 7 * 101
    assert fold_in(1, 2) != fold_in(2, 1)
    assert fold_in(0) != fold_in(0, 0)
    assert fold_in(3, 5) == fold_in(3, 5)
    assert all(0 <= fold_in(n, -n) < 2**63 for n in (0, 1, 2**63 - 1, 2**64, 10**30))


def test_mix_has_no_weak_bits():
    """Neighboring addresses differ in about half of the 63 bits."""
    flips = [bin(fold_in(0, n) ^ fold_in(0, n + 1)).count("1") for n in range(1009)]
    assert 30.5 < np.mean(flips) < 32.5
    ones = np.array([[fold_in(n) >> bit & 1 for bit in range(63)] for n in range(1009)]).mean(0)
    assert np.abs(ones - 0.5).max() < 0.08  # 5 standard deviations


def test_uniforms_are_a_function_of_the_row_alone():
    rows = np.array([5, 2, 97, 0, 13])
    together = uniforms(7, rows, 3)
    assert together.shape == (5, 3)
    assert together.dtype == np.float32
    for place, row in enumerate(rows):
        assert np.array_equal(uniforms(7, [row], 3)[0], together[place])
    assert np.array_equal(uniforms(7, rows[::-1], 3), together[::-1])
    assert not np.array_equal(uniforms(8, rows, 3), together)


def test_uniforms_look_uniform_and_independent():
    draws = uniforms(fold_in(3), np.arange(20_011), 5).astype(np.float64)  # (N, 5)
    assert draws.min() >= 0
    assert draws.max() < 1
    n = len(draws)
    assert np.abs(draws.mean(0) - 1 / 2).max() < 5 * (1 / 12 / n) ** 0.5
    assert np.abs(draws.var(0) - 1 / 12).max() < 5 * (1 / 180 / n) ** 0.5
    correlation = np.corrcoef(draws.T) - np.eye(5)
    assert np.abs(correlation).max() < 5 / n**0.5  # draws of one row
    assert np.abs(np.corrcoef(draws[:-1].T, draws[1:].T)[:5, 5:]).max() < 5 / n**0.5  # neighboring rows, all draws with all
    for seed in (1, 2, 4, 5, 7, 3 + 2**32):  # other seeds
        other = uniforms(seed, np.arange(n), 5)
        assert np.abs(np.corrcoef(uniforms(3, np.arange(n), 5).T, other.T)[:5, 5:]).max() < 5 / n**0.5
    cells = np.histogram2d(draws[:, 0], draws[:, 1], bins=10, range=[[0, 1], [0, 1]])[0]
    assert ((cells - n / 100) ** 2 / (n / 100)).sum() < 180  # chi square, 99 degrees of freedom; p = 1e-6


def test_seed_everything_seeds_three_generators():
    def draw():
        return random.random(), float(np.random.rand()), torch.rand(3).tolist()

    utils.seed_everything(5)
    first = draw()
    assert draw() != first
    utils.seed_everything(5)
    assert draw() == first
    utils.seed_everything(6)
    assert draw() != first
    utils.seed_everything(2**63 - 1)  # the largest that --seed takes


def test_seed_everything_switches_determinism_on_and_off():
    try:
        utils.seed_everything(0, deterministic=True)
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        utils.seed_everything(0)
    assert not torch.are_deterministic_algorithms_enabled()


# ---------------------------------------------------------------- a run while it runs


def test_stop_notes_a_signal_and_gives_the_handlers_back():
    before = signal.getsignal(signal.SIGTERM)
    with progress.Stop() as stop:
        assert stop.signal == 0
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.signal == signal.SIGTERM
        assert (stop.name, stop.exit_code) == ("SIGTERM", 143)
        with pytest.raises(KeyboardInterrupt):  # the second one means now
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_log_drops_lines_that_no_checkpoint_has(tmp_path):
    """A kill between an epoch's line and its checkpoint: on resuming, that epoch is written again."""
    line = {"lr": 0.1, "train": {"loss": 2.0}, "grad_norm": 1.0, "images_per_second": 3.0, "seconds": 1.0}
    for start, epochs in ((0, (1, 2, 3)), (2, (3, 4))):
        with progress.Log(tmp_path, progress.Tracker(tmp_path, {}), epochs=4, batches=5) as log:
            log.start([], start)
            for epoch in epochs:
                log.epoch({"epoch": epoch, **line, "val": {"accuracy": 0.5, "nll": float(start)}}, True)
    written = [json.loads(text) for text in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(entry["epoch"], entry["val"]["nll"]) for entry in written] == [(1, 0.0), (2, 0.0), (3, 2.0), (4, 2.0)]


def test_flat():
    assert progress.flat({"val": {"nll": 1.5, "deep": {"er": 2}}, "epoch": 3, "none": None, "text": "x"}) == {
        "val/nll": 1.5,
        "val/deep/er": 2,
        "epoch": 3,
    }


def test_a_tracker_that_is_not_installed_says_how_to_get_it(monkeypatch):
    progress.check_tracker("none")

    class Absent(progress.Tracker):
        package = "no_such_package_7"

    monkeypatch.setitem(progress.TRACKERS, "absent", Absent)
    with pytest.raises(BadOption, match=r"^tracker needs an optional package: pip install no_such_package_7, got 'absent'$"):
        progress.check_tracker("absent")
