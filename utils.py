"""What every part of the toolkit shares. Nothing here imports torch on loading: the command line answers before torch is read."""

from __future__ import annotations

import ast
import contextlib
import difflib
import inspect
import os
import random
import re
import signal
import stat
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

T = TypeVar("T")
PLUGIN = "plugin_"  # of the names under which users' files are imported
WARNINGS: list[str] = []  # of the run that this process makes


# ---------------------------------------------------------------- errors and messages


class BadOption(ValueError):
    """A value that a user can mend. It reads: option, rule, value ("K must be at most 16, got 25").

    Options carry the names of the flags, so the command line only has to put "--" before them.
    """

    def __init__(self, option: str, rule: str, value: Any = None) -> None:
        self.option, self.rule, self.value = option, rule, value
        super().__init__(f"{option} {rule}" + ("" if value is None else f", got {shown(value)}"))

    def __reduce__(self) -> tuple[Any, ...]:
        return BadOption, (self.option, self.rule, self.value)


def shown(value: Any) -> str:
    """A value in a message, cut where it would fill the screen."""
    if isinstance(value, int) and value.bit_length() > 10_000:  # Python does not write them
        return f"a number of {value.bit_length() * 3 // 10:,} digits"
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= 1000 else f"{text[:500]} ... {text[-500:]}"


class Halt(RuntimeError):
    """A run that ended before its time, with something to say and an exit code."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Diverged(Halt):
    """The loss or the gradient is not finite, and the optimizer has not stepped on it; or the model's outputs are NaN."""


class Stopped(Halt):
    """A run that ended before its last epoch, on a signal or on request; saved, to be resumed."""


class Interrupted(KeyboardInterrupt):
    """A signal that ends the program: Ctrl-C, or SIGTERM, which must end it as well-behaved."""

    def __init__(self, number: int = signal.SIGINT) -> None:
        super().__init__()
        self.name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        self.exit_code = 128 + number


@contextlib.contextmanager
def interruptible() -> Iterator[list[Interrupted]]:
    """SIGTERM raises as Ctrl-C does; which of them it was, for those who are only told that something did."""

    def interrupt(number: int, frame: object) -> None:
        if os.getpid() != process:  # a forked worker: its parent sees to the end
            os._exit(128 + number)
        signals.append(Interrupted(number))
        raise signals[-1]

    signals = [Interrupted()]
    process, numbers = os.getpid(), (signal.SIGINT, signal.SIGTERM)
    if threading.current_thread() is not threading.main_thread():  # Python allows handlers nowhere else
        yield signals
        return
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def understood(option: str, value: str) -> Iterator[None]:
    """What a checkpoint holds is put to use: where it does not fit together, that is a mistake in the checkpoint, said in one line."""
    try:
        yield
    except (BadOption, Halt, OSError, MemoryError):
        raise
    except Exception as error:
        frame = error.__traceback__
        while frame is not None:
            if str(frame.tb_frame.f_globals.get("__name__", "")).startswith(PLUGIN):  # its author wants to know the line
                raise
            frame = frame.tb_next
        raise BadOption(option, f"holds what does not fit together ({type(error).__name__}: {shortened(error, 120)})", value) from error


@contextlib.contextmanager
def doing(what: str) -> Iterator[None]:
    """What an error that nobody expected is said to have come from: the innermost."""
    try:
        yield
    except BaseException as error:
        if not hasattr(error, "doing"):
            error.doing = what  # type: ignore[attr-defined]
        raise


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """' (did you mean X?)' for a name that is nearly one of `known`, else ''."""
    folded = {k.lower(): k for k in known}
    match = difflib.get_close_matches(name.lower(), folded, n=1, cutoff=0.5)
    return f" (did you mean {folded[match[0]]!r}?)" if match else ""


def shortened(text: object, most: int) -> str:
    """Text, or an error's message, on one line of at most `most` visible characters; too long, it ends after a word, with "..."."""
    words = "".join(c for c in " ".join(str(text).split()) if c.isprintable())
    if len(words) <= most:
        return words
    room = words[: most - 2]  # one character more than there is room for: a space there ends a word that just fits
    kept = room.rpartition(" ")[0] or room[:-1]  # one endless word is cut where it must be
    return kept.rstrip(" ,;:.(") + "..."


SPEAKS = [True]  # of several processes that do the same, one says it


def say(message: str) -> None:
    """What was chosen, and why: one line on standard error."""
    if SPEAKS[0]:
        print(message, file=sys.stderr, flush=True)


def warn(message: str) -> None:
    """What bears on how far the numbers of a run can be trusted: said, and kept for its results."""
    say(f"warning: {message}")
    if message not in WARNINGS:
        WARNINGS.append(message)


def processes() -> int:
    """How many torchrun has started for one run, by what it leaves in the environment."""
    return int(os.environ["WORLD_SIZE"]) if {"WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT"} <= set(os.environ) else 1


def wrong_return(method: Any, must: str, returned: Any) -> BadOption:
    """What to tell the author of a part whose method returned something else: where it stands, what it must return and what it did."""
    code = method.__func__.__code__
    where = f"{Path(code.co_filename).name}, line {code.co_firstlineno}"
    shape = getattr(returned, "shape", None)
    got = f"{type(returned).__name__}" if shape is None else f"a tensor of {tuple(shape)}"
    return BadOption(f"{type(method.__self__).__name__}.{method.__name__} ({where})", f"must return {must}, and returned {got}")


# ---------------------------------------------------------------- checks of values


def one_of(option: str, value: str, choices: Iterable[str]) -> str:
    if value not in choices:
        raise BadOption(option, f"must be one of {', '.join(choices)}{did_you_mean(str(value), choices)}", value)
    return value


def whole_number(option: str, value: Any, least: int, most: int | None = None) -> int:
    """A whole number within bounds. Text is none: what was typed goes through `parse_whole_number`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least or (most is not None and value > most):
        bounds = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise BadOption(option, f"must be a whole number {bounds}", value)
    return value


def parse_whole_number(option: str, text: str, least: int, most: int | None = None) -> int:
    try:
        return whole_number(option, int(text) if text.isdecimal() and len(text) < 20 else text, least, most)
    except BadOption as error:
        raise BadOption(option, error.rule, text) from None


def whole_numbers(option: str, value: Any) -> tuple[int, ...]:
    """Whole numbers of at least 1 from "5,10,20", a number, or a sequence; none from None."""
    if value is None:
        return ()
    words = value.split(",") if isinstance(value, str) else [value] if isinstance(value, int) else list(value)
    if not words or not all(re.fullmatch(r"\s*0*[1-9]\d{0,8}\s*", str(word)) for word in words):
        raise BadOption(option, "must be whole numbers of at least 1 with commas between", value)
    return tuple(int(word) for word in words)


def check_file(option: str, path: str | Path) -> None:
    """That a path names a plain file: opening a pipe would wait for ever, and a device may have no end."""
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError) as error:  # the second: a zero in the name
        raise BadOption(option, f"must be a file that can be read ({getattr(error, 'strerror', error)})", str(path)) from None
    if not stat.S_ISREG(mode):
        kind = "Is a directory" if stat.S_ISDIR(mode) else "it is a pipe" if stat.S_ISFIFO(mode) else "it is a device or a socket"
        raise BadOption(option, f"must be a file that can be read ({kind})", str(path))


# ---------------------------------------------------------------- parts by name


@dataclass(frozen=True)
class Call:
    """`Name(option=value, ...)`, as typed."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        inside = ", ".join(f"{k}={v!r}" for k, v in self.options.items())
        return f"{self.name}({inside})" if inside else self.name


def parse_call(text: str, flag: str) -> Call:
    """One `Name` or `Name(option=value)`; values are Python literals, nothing is evaluated."""
    name, bracket, rest = text.strip().partition("(")
    rule = "must read Name(option=value, ...), values being numbers, 'text', True, False or None"
    if not bracket:
        return Call(name)
    try:
        node = ast.parse(f"f({rest}", mode="eval").body
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.args:
            raise ValueError
        rule = next((f"needs quotes: {k.arg}='{k.value.id}'" for k in node.keywords if k.arg and isinstance(k.value, ast.Name)), rule)
        options = {str(k.arg): ast.literal_eval(k.value) for k in node.keywords}
        if None in (k.arg for k in node.keywords) or len(options) < len(node.keywords):  # **options, or one given twice
            raise ValueError
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        raise BadOption(flag, rule, text) from None
    return Call(name.strip(), options)


def parse_parts(text: str, flag: str, depth: int | None = None) -> list[tuple[Call, int]]:
    """The calls of a pattern and how often each stands there: "A*6,B(K=9)*6". `depth`: the number of blocks, where it is known."""
    parts: list[tuple[Call, int]] = []
    for part in _split_outside_brackets(text):
        call, star, count = part.rpartition("*") if ")" not in part.rpartition("*")[2] else ("", "", part)
        if star and (not count.strip().isdecimal() or len(count.strip()) > 9 or not 1 <= int(count) <= (depth or int(count))):
            blocks = "the number of blocks" if depth is None else f"the number of blocks ({depth})"
            raise BadOption(flag, f"must read Name*COUNT, with a count from 1 to {blocks}", part)
        parts.append((parse_call(call if star else part, flag), int(count) if star else 1))
    return parts


def parse_pattern(text: str, depth: int, flag: str) -> list[Call]:
    """A pattern over depth: "A*6,B(K=9)*6" for 12 blocks. A pattern shorter than the depth repeats if it fits."""
    calls = [call for call, count in parse_parts(text, flag, depth) for _ in range(count)]
    if not calls or depth % len(calls):
        raise BadOption(flag, f"must name as many layers as there are blocks ({depth}) or a divisor of it ({len(calls)} named)", text)
    return calls * (depth // len(calls))


def _split_outside_brackets(text: str) -> list[str]:
    parts, level = [""], 0
    for char in text:
        level += (char in "([{") - (char in ")]}")
        if char == "," and level == 0:
            parts.append("")
        else:
            parts[-1] += char
    return [p.strip() for p in parts if p.strip()]


class Registry(Generic[T]):
    """Names to parts. Refuses duplicates, lists what exists, suggests the nearest name."""

    def __init__(self, flag: str, kind: str) -> None:
        self.flag, self.kind = flag, kind
        self._parts: dict[str, T] = {}

    def register(self, name: str | None = None) -> Callable[[T], T]:
        def add(part: T) -> T:
            key = name or getattr(part, "__name__")  # noqa: B009  (T need not have a name)
            if key in self._parts:
                raise ValueError(f"a {self.kind} named {key!r} is registered already")
            self._parts[key] = part
            return part

        return add

    def __getitem__(self, name: str) -> T:
        if name not in self._parts:
            raise BadOption(self.flag, f"must be one of {', '.join(self._parts)}{did_you_mean(name, self._parts)}", name)
        return self._parts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __contains__(self, name: str) -> bool:
        return name in self._parts


def options_of(part: Callable[..., Any]) -> dict[str, Any]:
    """The keyword-only options of a part and their defaults."""
    return {name: parameter.default for name, parameter in _parameters(part).items()}


def _parameters(part: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Read from the signature of a part, and of its bases through **options."""
    found: dict[str, inspect.Parameter] = {}
    owners = [vars(c)["__init__"] for c in part.__mro__ if "__init__" in vars(c)] if inspect.isclass(part) else [part]
    for owner in owners:
        parameters = inspect.signature(owner).parameters.values()
        found |= {p.name: p for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in found}
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            break
    return found


def check_options(name: str, part: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Every option must be one that the part has, and of the type that it is annotated with, where that is a plain one."""
    known = _parameters(part)
    for option, value in options.items():
        if option not in known:
            raise BadOption(name, f"has no option {option!r}{did_you_mean(option, known)}; it has {', '.join(known) or 'none'}")
        hint = known[option].annotation
        words = {w.strip() for w in (hint if isinstance(hint, str) else getattr(hint, "__name__", "")).split("|")}
        if value is None and "None" in words:
            continue
        if words - {"None"} <= set(PLAIN) and not any(_is_a(value, word) for word in words - {"None"}):
            raise BadOption(option, f"must be {' or '.join(PLAIN[word] for word in sorted(words - {'None'}))}", value)
        if any(word.startswith("Callable") for word in words) and not callable(value):
            raise BadOption(option, "takes a function, from Python only", value)


PLAIN = {"int": "a whole number", "float": "a number", "bool": "True or False", "str": "text"}


def _is_a(value: Any, word: str) -> bool:
    if isinstance(value, bool):
        return word == "bool"
    kinds: dict[str, Any] = {"int": int, "float": (int, float), "bool": bool, "str": str}
    return isinstance(value, kinds[word])


def first_line(part: Any) -> str:
    return (inspect.getdoc(part) or "").partition("\n")[0]


# ---------------------------------------------------------------- randomness


def fold_in(*words: int) -> int:
    """Integers to one 63-bit seed: a stream of its own for each (seed, epoch, ...)."""
    state = 0
    for word in words:
        state = (state ^ (word & 0xFFFFFFFFFFFFFFFF)) + 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state >> 1


def uniforms(seed: int, rows: Any, draws: int) -> Any:
    """(rows, draws) numbers in [0, 1), each a function of (seed, row, draw) alone.

    Not a generator that runs: the same row gets the same numbers whatever came before it, so neither the batch size,
    nor the workers, nor a stop in the middle of an epoch changes them.
    """
    import numpy as np

    counter: np.ndarray = np.asarray(rows, np.uint64)[:, None] * np.uint64(draws) + np.arange(draws, dtype=np.uint64)  # (rows, draws)
    state: np.ndarray = (counter + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) ^ np.uint64(fold_in(seed))
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        state = (state ^ (state >> np.uint64(shift))) * np.uint64(factor)
    return ((state ^ (state >> np.uint64(31))) >> np.uint64(40)).astype(np.float32) / np.float32(1 << 24)


def seed_everything(seed: int, deterministic: bool = False) -> None:
    """Seeds Python, NumPy and torch; call it before the model is built."""
    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.benchmark = False
    if deterministic or torch.are_deterministic_algorithms_enabled():  # the call alone imports the compiler: a second and 100 MB
        torch.use_deterministic_algorithms(deterministic)
