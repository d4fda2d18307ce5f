"""A user's own file, imported so that what it registers works by name."""

from __future__ import annotations

import hashlib
import importlib.util
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from utils import PLUGIN, BadOption, warn


def load_plugin(path: str | None) -> None:
    """Imports a user's file, once, so that what it registers works by name."""
    if not path:
        return
    file = Path(path).resolve()
    name = f"{PLUGIN}{re.sub(r'[^0-9A-Za-z]', '_', str(file))}"
    if name in sys.modules:
        return
    if not file.is_file():
        raise BadOption("plugin", "must be a Python file that exists", path)
    specification = importlib.util.spec_from_file_location(name, file)
    if specification is None or specification.loader is None:
        raise BadOption("plugin", "must be a Python file (.py)", path)
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module
    try:
        specification.loader.exec_module(module)
    except BadOption:
        raise
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit too
        del sys.modules[name]
        in_file = (f.tb_lineno for f in _frames(error) if f.tb_frame.f_code.co_filename == str(file))
        line = getattr(error, "lineno", None) or next(in_file, 0)
        raise BadOption("plugin", f"could not be imported ({type(error).__name__}: {error}, line {line})", path) from None


def load_plugin_of(facts: Mapping[str, Any], typed: str | None) -> None:
    """The plugin that a saved run needs: imported only where it was typed in this command.

    NOTE: what a checkpoint names is a stranger's wish, and its digests find damage, not malice.
    """
    wanted, digest = facts["config"].get("plugin"), facts.get("plugin_sha256")
    if not typed:
        if wanted:
            known = f", SHA-256 {digest}" if digest else ""
            rule = f"must be typed: the run needs {Path(str(wanted)).name}{known}, and no code runs because a checkpoint names it"
            raise BadOption("plugin", rule)
        return
    if digest and Path(typed).is_file() and (other := digest_of(typed)) != digest:  # said before it runs
        warn(f"plugin: {Path(typed).name} (SHA-256 {other}) is not the file that the run was made with ({digest})")
    load_plugin(typed)


def digest_of(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def plugin_frame(error: BaseException) -> str:
    """Where in a user's file an error was raised, or passed through last: "sharp.py, line 14, in mix"; "" if in none."""
    ours = {getattr(module, "__file__", None) for name, module in sys.modules.items() if name.startswith(PLUGIN)}
    frames = (f for f in _frames(error) if f.tb_frame.f_code.co_filename in ours)
    last = next(frames, None)
    return f"{Path(last.tb_frame.f_code.co_filename).name}, line {last.tb_lineno}, in {last.tb_frame.f_code.co_name}" if last else ""


def _frames(error: BaseException) -> list[Any]:
    frames, frame = [], error.__traceback__
    while frame:
        frames.append(frame)
        frame = frame.tb_next
    return frames[::-1]
