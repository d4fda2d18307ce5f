"""Checkpoints: a folder of safetensors files and one checkpoint.json that names them, with a SHA-256 of each.

checkpoint.json is replaced last and atomically, and tensor files carry their hash in their name: whenever the machine stops,
the folder holds the old checkpoint or the new one, whole. Nothing in it unpickles.
"""

from __future__ import annotations

import base64
import hashlib
import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load as tensors_from_bytes
from safetensors.torch import save as tensors_to_bytes
from torch import Tensor

from utils import BadOption, write_atomically

FORMAT = "neighbor attention checkpoint, version 1"
INDEX = "checkpoint.json"


# ---------------------------------------------------------------- files


def write_json(path: Path, content: Any) -> None:
    write_atomically(path, (json.dumps(content, indent=1) + "\n").encode())


# ---------------------------------------------------------------- save and load


def save(folder: Path, tensors: Mapping[str, Mapping[str, Tensor]], facts: Mapping[str, Any]) -> None:
    """Groups of tensors ("model", "training", ...) and facts that JSON can hold, as the new content of `folder`."""
    files = {}
    for group, named in tensors.items():
        content = tensors_to_bytes({k: v.detach().cpu().contiguous().clone() for k, v in named.items()})
        digest = hashlib.sha256(content).hexdigest()
        files[group] = {"file": f"{group}-{digest[:12]}.safetensors", "sha256": digest}
        write_atomically(folder / files[group]["file"], content)  # also over one of that name: it may have been damaged since
    body = json.loads(json.dumps({"format": FORMAT, "files": files, "facts": facts}))  # as it will be read: keys become text
    write_json(folder / INDEX, {**body, "sha256": _digest(body)})
    kept = {INDEX, *(f["file"] for f in files.values())}
    for stale in folder.iterdir():  # the files of the checkpoint that was replaced, and temporaries of a killed process
        if stale.name not in kept and (stale.suffix == ".tmp" or stale.suffix == ".safetensors"):
            stale.unlink()


def load(folder: Path, *groups: str) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """The named groups (all, if none is named) and the facts; every byte is checked first."""
    index = _read_index(folder)
    tensors = {}
    for group, entry in index["files"].items():
        if groups and group not in groups:
            continue
        try:
            content = (folder / entry["file"]).read_bytes()
        except OSError as error:
            raise BadOption("checkpoint", f"lacks its file {entry['file']} ({error.strerror})", str(folder)) from None
        if hashlib.sha256(content).hexdigest() != entry["sha256"]:
            raise BadOption("checkpoint", f"is damaged: {entry['file']} does not have the SHA-256 that {INDEX} names", str(folder))
        tensors[group] = tensors_from_bytes(content)
    return tensors, index["facts"]


def file_of(folder: Path, group: str) -> Path:
    """The file that holds a group."""
    return folder / _read_index(folder)["files"][group]["file"]


def _read_index(folder: Path) -> dict[str, Any]:
    try:
        index = json.loads((folder / INDEX).read_bytes())
    except OSError as error:
        raise BadOption("checkpoint", f"must hold {INDEX} ({error.strerror})", str(folder)) from None
    except (ValueError, RecursionError):
        raise BadOption("checkpoint", f"is damaged: {INDEX} is not whole", str(folder)) from None
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        raise BadOption("checkpoint", f"must be a '{FORMAT}'", str(folder))
    digest = index.pop("sha256", "")
    if digest != _digest(index):
        raise BadOption("checkpoint", f"is damaged: {INDEX} does not match its own SHA-256", str(folder))
    return index


def _digest(body: Any) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def find(path: str | Path, prefer: str = "best", flag: str = "checkpoint") -> Path:
    """The checkpoint folder that a user means by a run, a checkpoint folder, or a file in one."""
    given = Path(path)
    if not given.exists():
        raise BadOption(flag, "must be a run or a checkpoint that exists", str(path))
    if given.is_file():
        if given.name == INDEX or (given.suffix == ".safetensors" and (given.parent / INDEX).exists()):
            return given.parent
        raise BadOption(flag, f"must be a run, a folder in its checkpoints, or the {INDEX} in one", str(path))
    names = [prefer, *({"best", "last"} - {prefer})]
    for folder in (given, *(given / "checkpoints" / n for n in names), *(given / n for n in names)):
        if (folder / INDEX).exists():
            return folder
        if folder.name == prefer and folder != given and folder.is_dir():  # NOTE: silently, other weights would be taken for these
            raise BadOption(flag, f"lacks {(folder / INDEX).relative_to(given)}", str(path))
    raise BadOption(flag, f"must hold a checkpoint (checkpoints/{prefer}/{INDEX})", str(path))


# ---------------------------------------------------------------- what is not a named tensor


def pack_optimizer(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """An optimizer's state as named tensors and JSON."""
    state = optimizer.state_dict()
    tensors, plain = {}, {}
    for number, entry in state["state"].items():
        for key, value in entry.items():
            if isinstance(value, Tensor):
                tensors[f"optimizer.{number}.{key}"] = value
            else:
                plain[f"{number}.{key}"] = value
    return tensors, {"plain": plain, "groups": state["param_groups"]}


def unpack_optimizer(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    state: dict[int, dict[str, Any]] = {}
    named = {k.removeprefix("optimizer."): v for k, v in tensors.items() if k.startswith("optimizer.")}
    for name, value in {**named, **facts["plain"]}.items():
        number, _, key = name.partition(".")
        state.setdefault(int(number), {})[key] = value
    groups = [{k: tuple(v) if isinstance(v, list) and k == "betas" else v for k, v in g.items()} for g in facts["groups"]]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def pack_rng() -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The state of every random generator."""
    tensors = {"rng.torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors |= {f"rng.cuda.{i}": s for i, s in enumerate(torch.cuda.get_rng_state_all())}
    if torch.backends.mps.is_available():
        tensors["rng.mps"] = torch.mps.get_rng_state()
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    numpy = [name, base64.b64encode(np.asarray(keys, np.uint32).tobytes()).decode(), position, has_gauss, cached]
    return tensors, {"python": [version, list(words), gauss], "numpy": numpy}


def unpack_rng(tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    torch.set_rng_state(tensors["rng.torch"])
    cuda = [v for k, v in sorted(tensors.items()) if k.startswith("rng.cuda.")]
    if cuda and torch.cuda.device_count() == len(cuda):
        torch.cuda.set_rng_state_all(cuda)
    if "rng.mps" in tensors and torch.backends.mps.is_available():
        torch.mps.set_rng_state(tensors["rng.mps"])
    version, words, gauss = facts["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, *rest = facts["numpy"]
    np.random.set_state((name, np.frombuffer(base64.b64decode(keys), np.uint32), *rest))
