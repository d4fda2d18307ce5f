"""What `--help` says: one screen for who begins, and the rest by topic. Loads without torch."""

from __future__ import annotations

import dataclasses
import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import config as flags
from utils import BadOption, did_you_mean, first_line, shortened

WIDTH, LEFT = 80, 26
METAVARS = {int: "INT", float: "FLOAT", str: "TEXT", bool: ""}
FIRST = {  # flags that people start with, in fewer words than elsewhere
    "dataset": "digits, cifar10, folder:PATH, npz:FILE, csv:FILE:TARGET",
    "model": "vit, mlp for tables, or timm/NAME",
    "layer": 'Attention, "KvtAttention(K=5)", over depth "A*6,B(K=9)*6"',
    "head": "linear, knn, attn-knn, linear+knn, linear+attn-knn",
    "num_epochs": "passes over the training split",
    "batch_size": "rows a step",
    "lr": "peak learning rate",
    "seed": "of weights, order and augmentation",
    "output_dir": "directory of the run (default: runs/DATE-DATASET-LAYER)",
    "config": "FILE.yaml of defaults; a run's config.yaml repeats it",
}
EXAMPLES = (
    "python main.py",
    'python main.py --layer "KvtAttention(K=5)" --output_dir runs/kvt',
    "python main.py --dataset folder:photos --head linear+attn-knn",
    "python main.py --test_only --checkpoint runs/kvt --tta 3",
    "python main.py predict --checkpoint runs/kvt --input photos/",
)
Commands = Mapping[str, Callable[..., Any]]


def answer(words: Sequence[str], commands: Commands) -> tuple[str | None, list[str]]:
    """The help that a command line asks for, or None and what is left to do. A command's own --help is left to the command."""
    normal = [word.replace("-", "_") for word in words]
    if normal[:1] == ["help"]:
        if len(words) > 1 and normal[1] in commands:
            return None, [normal[1], "--help"]
        return (topic_page(normal[1]) if len(words) > 1 else front_page(commands)), []
    own = normal[: next((n for n, word in enumerate(words) if word in commands), len(normal))]
    if "__help" in own or "_h" in own:
        return front_page(commands), []
    return (all_pages(commands), []) if "__help_all" in own else (None, list(words))


# ---------------------------------------------------------------- pages


def front_page(commands: Commands) -> str:
    lines = textwrap.wrap("Neighbor attention in Vision Transformers: any layer, in any ViT, under any head, in one loop.", WIDTH)
    lines += ["", "Usage: python main.py [FLAGS]           trains and evaluates one run"]
    lines += ["       python main.py COMMAND [FLAGS]", "", "Flags to start with"]
    lines += [f"  {f'--{name} {metavar(name)}':18} {text}" for name, text in FIRST.items()]
    lines += ["", "Examples", *(f"  {example}" for example in EXAMPLES)]
    lines += ["", "Commands (COMMAND --help tells more)", *command_lines(commands)]
    more = f"More: help TOPIC ({', '.join(flags.TOPICS)}), --help-all, --install-completion"
    return "\n".join([*lines, "", *textwrap.wrap(more, WIDTH, break_on_hyphens=False)])


def command_lines(commands: Commands) -> list[str]:
    room = max(map(len, commands)) + 3
    return [f"  {name:{room - 2}} {shortened(first_line(command), WIDTH - room - 1)}" for name, command in commands.items()]


def topic_page(topic: str) -> str:
    """The flags of a topic, or one flag."""
    name = topic.strip("_")
    if name in flags.TOPICS:
        return "\n".join(flags_of_topic(name))
    if name in flags.FIELDS:
        return "\n".join(flag_lines(flags.FIELDS[name]))
    known = [*flags.TOPICS, *flags.FIELDS]
    raise BadOption("help", f"must name a topic ({', '.join(flags.TOPICS)}), a command or a flag{did_you_mean(name, known)}", topic)


def all_pages(commands: Commands) -> str:
    """Every flag."""
    about = "Every flag, by topic. (by data set): the data set's preset sets it. Hyphens in flags are as good as underscores."
    pages = ["\n".join(textwrap.wrap(about, WIDTH)), *("\n".join(flags_of_topic(topic)) for topic in flags.TOPICS)]
    pages += ["\n".join(["What to do", *(line for field in dataclasses.fields(flags.Action) for line in flag_lines(field))])]
    return "\n\n".join([*pages, "\n".join(["Commands (COMMAND --help tells more)", *command_lines(commands)])])


def flags_of_topic(topic: str) -> list[str]:
    owner = flags.TOPICS[topic]
    about = inspect.getdoc(owner) if owner.__doc__ and not owner.__doc__.startswith(f"{owner.__name__}(") else None
    lines = [topic.capitalize() + (f": {about}" if about else "")]
    return lines + [line for field in dataclasses.fields(owner) for line in flag_lines(field)]


def flag_lines(field: dataclasses.Field[Any]) -> list[str]:
    """A flag with its meaning beside it; below it, where its name is long. No name is ever cut."""
    kind = flags.kind_of(field)
    both = kind is bool and field.name in flags.TOPIC_OF
    name = f"  --{field.name}, --no-{field.name}" if both else f"  --{field.name} {metavar(field.name)}".rstrip()
    text = textwrap.wrap(described(field), WIDTH - LEFT - 1, break_on_hyphens=False) or [""]
    if len(name) < LEFT:
        return [f"{name:{LEFT}} {text[0]}", *(" " * (LEFT + 1) + line for line in text[1:])]
    return [name, *(" " * (LEFT + 1) + line for line in text)]


def metavar(name: str) -> str:
    return METAVARS[flags.kind_of(flags.FIELDS[name])]


def described(field: dataclasses.Field[Any]) -> str:
    """The meaning of a flag, its choices and its default."""
    meta, text = field.metadata, str(field.metadata["help"])
    if meta["choices"]:
        text += f": {', '.join(meta['choices'])}"
    if meta["preset"]:
        return f"{text} (by data set)"
    default = field.default not in (None, dataclasses.MISSING) and flags.kind_of(field) is not bool
    return f"{text} (default: {field.default})" if default else text


def no_such_command(message: str, commands: Commands) -> str:
    """The parser's line for a command that is none, with what may have been meant."""
    name = message.partition("'")[2].partition("'")[0]
    if name.lower() in ("train", "fit", "run", "start"):
        return f"No such command '{name}': without a command, main.py trains (python main.py --dataset digits)"
    return f"No such command '{name}'{did_you_mean(name, [*commands, 'help'])}; there are {', '.join([*commands, 'help'])}"
