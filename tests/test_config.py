"""Flags: their checks, the presets of the data sets, and the YAML that repeats a run."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import time
from typing import Any

import pytest

from config import FIELDS, FREE_IN_RESUME, FREE_IN_TEST, TOPIC_OF, TOPICS, Action, Config, check, free_in_test, kind_of, to_yaml
from inputs.yaml_file import read_yaml
from run.complete import with_defaults
from run.presets import PRESETS, patch_size_for
from utils import BadOption

CIFAR, DIGITS, ROWS = (3, 32, 32), (1, 8, 8), (13,)


def resolve(given: dict[str, Any], shape: tuple[int, ...]) -> Config:
    """What was given, with presets and defaults, for rows of a shape."""
    return Config.of(with_defaults(given, shape, {"train": 97}))


# ---------------------------------------------------------------- checks


@pytest.mark.parametrize(
    ("option", "value", "rule"),
    [
        ("batch_size", 0, "must be at least 1, got 0"),
        ("batch_size", 7.0, "must be a whole number, got 7.0"),
        ("batch_size", True, "must be a whole number, got True"),
        ("batch_size", "7", "must be a whole number, got '7'"),
        ("lr", -0.1, "must be above 0, got -0.1"),
        ("lr", 0, "must be above 0, got 0"),
        ("lr", False, "must be a number, got False"),
        ("lr", math.nan, "must be a number, got nan"),
        ("lr", math.inf, "must be a number, got inf"),
        ("dropout", 1, "must be at least 0 and below 1, got 1"),
        ("branch_ratio", 1.1, "must be between 0 and 1, got 1.1"),
        ("imbalance", 0, "must be above 0 and at most 1, got 0"),
        ("seed", -1, "must be from 0 to 2^63 - 1, got -1"),
        ("seed", 2**63, f"must be from 0 to 2^63 - 1, got {2**63}"),
        ("augment", 1, "must be true or false, got 1"),
        ("layer", 3, "must be text, got 3"),
        ("pretrained", "", "must not be empty, got ''"),  # trained from scratch, without a word
        ("optimizer", "adamm", "must be one of adam, sgd, adamw (did you mean 'adam'?), got 'adamm'"),
        ("criterion", "crossentropy", "must be one of CrossEntropy, MSE (did you mean 'CrossEntropy'?), got 'crossentropy'"),
        ("batchsize", 3, "is not an option (did you mean 'batch_size'?)"),
        ("K ", 3, "is not an option"),
        ("stop_after", 0, "must be at least 1, got 0"),
        ("num_epochs", 2**63, f"must be from -2^63 to 2^63 - 1, got {2**63}"),
        ("workers", 100_000_000, "must be from 0 to 1024, got 100000000"),
        ("lr", 10**400, "must be from -2^63 to 2^63 - 1, got 1000000"),
        ("memory_update_freq", 1e308, "must be from 1e-6 to 1e6, got 1e+308"),
        ("memory_update_freq", 5e-324, "must be from 1e-6 to 1e6, got 5e-324"),
    ],
)
def test_a_wrong_value_is_named_with_its_rule(option, value, rule):
    with pytest.raises(BadOption) as caught:
        check({"num_epochs": 3, option: value}, *TOPICS.values(), Action)
    assert str(caught.value).startswith(f"{option} {rule}")


def test_a_number_that_python_does_not_write_is_refused_all_the_same():
    with pytest.raises(BadOption, match=r"^num_epochs must be from .* got a number of 11,99"):
        check({"num_epochs": 16**9999})


def test_the_edges_of_the_rules_are_allowed():
    check(dict(batch_size=1, lr=1e-9, dropout=0, branch_ratio=1, imbalance=1, seed=2**63 - 1, label_smoothing=0.0, K=None))
    check({"stop_after": 1, "overwrite": True}, Action)


def test_an_option_of_another_owner_is_unknown():
    with pytest.raises(BadOption, match=r"^resume is not an option"):
        check({"resume": "run"})


def test_every_flag_has_a_topic_a_help_and_a_default_that_passes_its_own_rule():
    for owner in (*TOPICS.values(), Action):
        for field in dataclasses.fields(owner):
            assert field.metadata["help"]
            if owner is not Action:
                assert TOPICS[TOPIC_OF[field.name]] is owner
            if field.default is not dataclasses.MISSING:
                check({field.name: field.default}, owner)
    without = {name for name, field in FIELDS.items() if field.default is dataclasses.MISSING}
    later = {"k_train", "proxy_weight", "head_epochs", "baselines", "dropout_ramp", "standardize"}
    assert without == {name for name, field in FIELDS.items() if field.metadata["preset"]} | later
    assert len(FIELDS) == sum(len(dataclasses.fields(owner)) for owner in (*TOPICS.values(), Action))  # no name twice


def test_kinds_are_those_of_the_annotations():
    assert [kind_of(FIELDS[n]) for n in ("K", "lr", "lr_backbone", "layer", "pretrained", "softmax_topk_val", "augment")] == [
        int, float, float, str, str, bool, bool,
    ]  # fmt: skip


# ---------------------------------------------------------------- presets


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "imagenet"])
def test_the_published_vit_tiny(name):
    config = resolve({"dataset": name}, shape=CIFAR)
    model = config.model
    size = (model.model, model.patch_size, config.data.resize, model.num_layers, model.num_heads, model.d_hidden, model.d_mlp)
    assert size == ("vit", 16, 224, 12, 3, 192, 768)
    assert (model.dropout, model.attention_dropout) == (0.1, 0.1)


def test_every_preset_and_every_kind_of_rows_leaves_nothing_open():
    cases: list[tuple[dict[str, str], tuple[int, ...]]]
    cases = [({"dataset": name}, DIGITS if name == "digits" else CIFAR) for name in PRESETS]
    cases += [({"dataset": "npz:some.npz"}, (2, 37, 41)), ({"dataset": "csv:some.csv:y"}, ROWS), ({"dataset": "iris"}, (4,))]
    for given, shape in cases:
        config = resolve(given, shape=shape)
        values, model = config.flat(), config.model
        check(values)
        assert not {name for name, value in values.items() if FIELDS[name].metadata["preset"] and value is None}, given
        assert model.d_hidden % model.num_heads == 0
        assert model.model == ("mlp" if len(shape) == 1 else "vit")
        side = (config.data.resize, config.data.resize) if config.data.resize else shape[1:]
        assert all(s % model.patch_size == 0 for s in side)


def test_what_is_given_wins_over_the_data_set_and_that_over_the_kind():
    given = resolve({"dataset": "cifar10", "patch_size": 7, "lr": 0.5, "K": 5}, shape=CIFAR)
    assert (given.model.patch_size, given.training.lr, given.layers.K) == (7, 0.5, 5)
    training = given.training
    assert (training.num_epochs, training.batch_size, training.scheduler) == (150, 256, "none")  # the data set's
    plain = resolve({"dataset": "folder:photos"}, shape=CIFAR)
    training = plain.training
    assert (training.num_epochs, training.batch_size, training.scheduler, plain.data.resize) == (20, 128, "cosine", 0)  # the kind's
    assert resolve({}, shape=DIGITS) == resolve({"dataset": "digits"}, shape=DIGITS)  # the default


def test_options_in_brackets_keep_the_preset():
    for name in ("fake", "fake(train=31)"):
        assert resolve({"dataset": name}, shape=CIFAR).training.num_epochs == 2


def test_the_patch_suits_the_size_that_the_model_sees():
    assert resolve({"dataset": "fake"}, shape=CIFAR).model.patch_size == 4
    assert resolve({"dataset": "fake", "resize": 224}, shape=CIFAR).model.patch_size == 16


def test_a_timm_model_decides_its_own_size_unless_told():
    assert resolve({"dataset": "cifar10", "model": "timm/resnet18"}, shape=CIFAR).data.resize == 0  # not the 224 of the data set
    assert resolve({"dataset": "fake", "model": "timm/vit_tiny_patch16_224"}, shape=CIFAR).data.resize == 224
    assert resolve({"dataset": "cifar10", "model": "timm/resnet18", "resize": 64}, shape=CIFAR).data.resize == 64


@pytest.mark.parametrize(
    ("height", "width", "patch"),
    [
        (32, 32, 4), (224, 224, 16), (8, 8, 1), (28, 28, 4), (14, 14, 2), (15, 15, 3), (64, 64, 8), (96, 96, 8), (64, 80, 8),
        (384, 384, 32), (48, 80, 8),
        (37, 37, 37),  # a prime side: one patch
        (31, 37, 1),  # nothing but 1 divides both
        (62, 74, 2), (1, 1, 1),
    ],
)  # fmt: skip
def test_patch_size_for(height, width, patch):
    assert patch_size_for(height, width) == patch
    assert height % patch == width % patch == 0


# ---------------------------------------------------------------- YAML


def test_yaml_repeats_a_run(tmp_path):
    file = tmp_path / "config.yaml"
    config = resolve(
        dict(dataset="fake", layer="A*3,B(K=9, s='x')*3", lr=1e-5, weight_decay=1e-12, label_noise="0.2:asymmetric", seed=2**63 - 1, K=7,
             softmax_topk_val=False, augment=True, data_path="runs/a b: #c", noise=1 / 3, ema_decay=0.999),
        shape=CIFAR,
    )  # fmt: skip
    file.write_text(to_yaml(config))
    assert resolve(read_yaml(str(file)), shape=CIFAR) == config
    file.write_text(to_yaml(config.but(output_dir="runs/a")))  # repeated beside the run, not over it
    assert resolve(read_yaml(str(file)), shape=CIFAR) == config


def test_yaml_numbers_as_people_write_them(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("lr: 1e-3\nweight_decay: 1\nlabel_noise: 0.2\nK: 9\naugment: yes\npretrained: null\nscheduler: none\n")
    values = read_yaml(str(file))
    assert values == {"lr": 0.001, "weight_decay": 1, "label_noise": "0.2", "K": 9, "augment": True, "scheduler": "none"}
    check(values)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("lr: fast", "lr must be a number, got 'fast'"),
        ("lr: .inf", "lr must be a number, got inf"),
        ("lr: 1e999", "lr must be a number, got inf"),
        ("batch_size: 2.5", "batch_size must be a whole number, got 2.5"),
        ("batch_size: 2020-01-02", "batch_size must be a whole number, got '2020-01-02'"),
        ("batch-sizes: 3", "batch-sizes is not an option (did you mean 'batch_size'?)"),
        ("resume: run", "resume is not an option"),
        ("7: 3", "7 is not an option"),
        ("layer: [A, B]", "layer must be text, got ['A', 'B']"),
        ("- lr\n- 3", "config must hold 'option: value' lines"),
        ("", "config must hold 'option: value' lines"),
        ("lr: [", "config must be a YAML file"),
        ("lr: !!python/object/apply:os.getcwd []", "config must be a YAML file"),
        (b"\xff\xfe\x00\x01\x80", "config must be a YAML file"),
    ],
)
def test_wrong_yaml_is_one_line(text, rule, tmp_path):
    file = tmp_path / "config.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(BadOption) as caught:
        read_yaml(str(file))
    start, got, value = rule.partition(", got")
    assert str(caught.value).startswith(start)
    assert str(caught.value).endswith(got + value)
    assert str(file) in str(caught.value)  # which file of several it is


def test_yaml_as_people_write_lists_and_quotes(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("k_eval: [16, 1]\nk_ensemble: 5,10\nK: '9'\nnum_epochs: \"3\"\n")
    assert read_yaml(str(file)) == {"k_eval": "16,1", "k_ensemble": "5,10", "K": 9, "num_epochs": 3}


def test_what_may_change_later():
    """Validation measures with k, and picks the epoch; the cap of a bank changes what a head is, but for one that grows."""
    assert not {"k_eval", "k_ensemble", "adaptive_k", "bank_cap"} & FREE_IN_RESUME
    assert {"k_eval", "k_ensemble", "adaptive_k"} <= FREE_IN_TEST
    assert free_in_test({"continual": False}, {}) == FREE_IN_TEST == free_in_test({"continual": True}, {"continual": False})
    assert free_in_test({"continual": False}, {"continual": True}) - FREE_IN_TEST == {"bank_cap", "bank_evict"}


def test_yaml_that_is_not_there(tmp_path):
    with pytest.raises(BadOption, match=r"^config must be a file that can be read \(No such file or directory\)"):
        read_yaml(str(tmp_path / "none.yaml"))
    with pytest.raises(BadOption, match=r"^config must be a file that can be read \(Is a directory\)"):
        read_yaml(str(tmp_path))


BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(f"{b}: &{b} [{','.join(['*' + a] * 9)}]\n" for a, b in itertools.pairwise("abcdefghi"))


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("lr: !!int abc", "config must be a YAML file"),
        ("augment: !!bool perhaps", "config must be a YAML file"),
        ("lr: !!python/object/apply:os.getcwd []", "config must be a YAML file (could not determine a constructor"),
        ("lr: 2020-01-02", "lr must be a number, in "),
        ("dataset: 2020-01-02\nlr: 2020-01-02 10:00:00", "lr must be a number, in "),
        ("num_epochs: " + "9" * 5000, "config must be a YAML file (Exceeds the limit"),
        ("num_epochs: 0x" + "f" * 5000, "num_epochs must be from -2^63 to 2^63 - 1, in "),
        ("lr: " + "9" * 300 + ".e+99", "lr must be a number"),
        ("K: " + "[" * 5000, "config must be a YAML file (at most 4 brackets within each other"),
        ("K: " + "[" * 5000 + "]" * 5000, "config must be a YAML file (at most 4 brackets within each other"),
        ("K:\n" + "".join("  " * (i + 1) + "a:\n" for i in range(200)), "config must be a YAML file (at most 4 brackets"),
        (BOMB, "config must be a YAML file (at most 4 brackets within each other, and 16 references)"),
        ("&a a: *a\n" * 6000, "config must be a YAML file"),
        ("lr: &a [1, *a]", "lr must be a number, in "),
        ("lr: {a: [1]}", "lr must be a number, in "),
        ("? [a]\n: 1", "config must be a YAML file"),
        ("lr: 0.5\nK: 3\nlr: 0.1", "config must be a YAML file ('lr' is there twice)"),
        ("".join(f"a{i}: 1\n" for i in range(9000)) + "a1: 1", "config must be a YAML file ('a1' is there twice)"),
        ("lr: 1\x00", "config must be a YAML file"),
        ("#" * 100_001, "config must have at most 100,000 bytes (100,001 found)"),
    ],
)
def test_a_yaml_file_that_would_harm_ends_in_a_line_at_once(text, rule, tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text(text)
    started = time.perf_counter()
    with pytest.raises(BadOption) as caught:
        read_yaml(str(file))
    assert str(caught.value).startswith(rule)
    assert len(str(caught.value)) < 2000
    assert time.perf_counter() - started < 5  # the bombs took 25 s and gigabytes


def test_references_and_dates_as_text_are_read(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text("base: &b {lr: 0.5, K: 3}\n".replace("base: &b", "<<: &b") + "model: &m vit\nhead: *m\ndataset: 2020-01-02\n")
    assert read_yaml(str(file)) == {"lr": 0.5, "K": 3, "model": "vit", "head": "vit", "dataset": "2020-01-02"}


def test_a_pipe_as_a_file_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BadOption, match=r"^config must be a file that can be read \(it is a pipe\)"):
        read_yaml(str(tmp_path / "pipe"))
