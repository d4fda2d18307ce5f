"""--executor: read, checked, and what it means for the plan. The clusters themselves: test_clusters.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.executors import wanted as module
from experiments.executors.on_ray import EVERY, Ray
from experiments.executors.on_ray import Options as RayOptions
from experiments.executors.on_slurm import Options, Slurm
from experiments.executors.wanted import wanted
from utils import BadOption

THERE = {"local": "", "ray": "json", "slurm": "json"}  # packages that are surely installed


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("slrm", r"^executor must be one of local, ray, slurm \(did you mean 'slurm'\?\), got 'slrm'$"),
        ("local(jobs=2)", r"^executor local has no options, got 'local\(jobs=2\)'$"),
        ("slurm(partition=gpu)", r"^executor needs quotes: partition='gpu', got 'slurm\(partition=gpu\)'$"),
        ("slurm(partitoin='gpu')", r"^slurm has no option 'partitoin' \(did you mean 'partition'\?\); it has partition, account, "),
        ("slurm(time='4 hours')", r"^time must be a whole number, got '4 hours'$"),
        ("ray(num_cpus='two')", r"^num_cpus must be a number, got 'two'$"),
        ("ray(adress='auto')", r"^ray has no option 'adress' \(did you mean 'address'\?\); it has address, num_cpus, num_gpus, "),
    ],
)
def test_wrong_executors_are_refused_by_name(text: str, rule: str) -> None:
    with pytest.raises(BadOption, match=rule):
        wanted(text, None)


@pytest.mark.parametrize("name", ["ray", "slurm"])
def test_a_missing_package_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(module.PACKAGES, name, "no_such_package_7")
    with pytest.raises(BadOption, match=rf"^executor needs an optional package: pip install no_such_package_7, got '{name}'$"):
        wanted(name, 2)


def test_values_of_no_plain_type_are_refused_by_name() -> None:
    with pytest.raises(BadOption, match=r"^setup must be commands, as \['module load cuda'\], got module load cuda|'module load cuda'$"):
        Slurm(Path("here"), 1, None, Options(setup="module load cuda"))
    with pytest.raises(BadOption, match=r"^additional_parameters must be names with values"):
        Slurm(Path("here"), 1, None, Options(additional_parameters=["reservation"]))
    with pytest.raises(BadOption, match=r"^cluster must be one of slurm, local \(did you mean 'local'\?\), got 'locl'$"):
        Slurm(Path("here"), 1, None, Options(cluster="locl"))
    with pytest.raises(BadOption, match=r"^resources must be names with numbers"):
        Ray(Path("here"), 1, None, RayOptions(resources="tpu"))


def test_threads_and_the_command_that_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PACKAGES", THERE)
    monkeypatch.setattr(module.os, "sched_getaffinity", lambda process: set(range(7)), raising=False)
    local, ray, slurm = wanted(None, 3), wanted("ray(num_cpus=2.5)", None), wanted("slurm( gres = 'gpu:1' )", 11)
    assert [each.threads for each in (wanted(None, None), local, ray, slurm, wanted("slurm(cpus_per_task=5)", 2))] == [7, 2, 2, 1, 5]
    assert [each.forecast for each in (wanted("local", None), local, ray, slurm)] == [1, 3, None, 11]
    assert local.words == " --jobs 3"
    assert ray.words == " --executor 'ray(num_cpus=2.5)'"
    assert slurm.words == """ --jobs 11 --executor 'slurm(gres='"'"'gpu:1'"'"')'"""


def test_how_many_runs_a_node_of_ray_has_room_for() -> None:
    """Needed: 2 CPUs, half a GPU, 3 GB, 1 of its own kind."""
    ray = Ray(Path("here"), 2, None, RayOptions(num_gpus=0.5, memory_gb=3, resources={"tpu": 1}))
    node = {"CPU": 13.0, "GPU": 2.0, "memory": 5 * 3 * 2.0**30, "tpu": 7.0}
    assert [ray.fit(node), ray.fit({**node, "GPU": 1.9}), ray.fit({**node, "tpu": 0.0}), ray.fit({"CPU": 13.0})] == [4, 3, 0, 0]
    assert (ray.at_once, Ray(Path("here"), 2, 5, RayOptions()).at_once) == (EVERY, 5)
    assert Ray(Path("here"), 2, 5, RayOptions(num_cpus=3)).fit(node) == 4


def test_what_submitit_is_asked_for(tmp_path: Path) -> None:
    """By the names that all its executors know, or with "slurm_" before those that Slurm alone has."""
    options = Options(partition="gpu", time=90, gpus_per_node=1, mem="16GB", setup=["module load cuda"], additional_parameters={"a": "b"})
    found = options.parameters(tmp_path / "sweep", 3, 17)
    assert {name: value for name, value in found.items() if value is not None} == {
        "name": "sweep",
        "timeout_min": 90,
        "gpus_per_node": 1,
        "cpus_per_task": 3,
        "slurm_partition": "gpu",
        "slurm_mem": "16GB",
        "slurm_setup": ["module load cuda"],
        "slurm_additional_parameters": {"requeue": True, "a": "b"},
        "slurm_signal_delay_s": 90,
        "slurm_array_parallelism": 17,
    }
