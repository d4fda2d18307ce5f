"""`--install-completion`: what TAB offers behind `python main.py` in bash and zsh.

The words are written into the script, so that TAB answers at once: starting Python for each of them would take a second.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path

import config as flags
from utils import BadOption

NAME = "_neighbor_attention"
STARTED_BY = {"bash": ".bashrc", "zsh": ".zshrc"}
FOR_ZSH = '[ -n "$ZSH_VERSION" ] && autoload -U +X compinit bashcompinit && compinit -u && bashcompinit\n'
SCRIPT = """\
# TAB behind `python main.py`. Made by: python main.py --install-completion
{zsh}{name}() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" last="${{COMP_WORDS[COMP_CWORD-1]}}" words=""
  COMPREPLY=()
  [[ "${{COMP_WORDS[1]}}" == *main.py && $COMP_CWORD -ge 2 ]] || return 0
  case "$word" in --*) word="${{word#--}}"; word="--${{word//-/_}}";; esac
  case "$last" in --*) last="${{last#--}}"; last="--${{last//-/_}}";; esac
  case "$last" in
{values}
  esac
  if [[ -z "$words" ]]; then
    [[ "$word" == -* || $COMP_CWORD -eq 2 ]] || return 0
    case "${{COMP_WORDS[2]}}" in
{of_commands}
    *) words={flags}; [[ $COMP_CWORD -eq 2 ]] && words="$words "{commands};;
    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o bashdefault -o default -F {name} python python3
"""


def names_of_parts() -> dict[str, list[str]]:
    """What flags take that name a part; torch is read for it."""
    import layers
    import models
    from classifiers import HEADS
    from classifiers.weights import WEIGHTS
    from dataset import DATASETS

    return {"layer": [*layers.LAYERS], "head": [*HEADS], "dataset": [*DATASETS], "model": [*models.MODELS], "vote": [*WEIGHTS]}


def script(commands: Mapping[str, Iterable[str]]) -> str:
    """`commands` and their flags."""
    values = {name: list(field.metadata["choices"]) for name, field in flags.FIELDS.items() if field.metadata["choices"]}
    values |= names_of_parts()
    every = [word for name in flags.FIELDS for word in _flags_of(name)] + ["--help", "--help_all"]

    def quoted(words: Iterable[str]) -> str:
        return shlex.quote(" ".join(words))

    return SCRIPT.format(
        zsh=FOR_ZSH,
        name=NAME,
        values="\n".join(f"    --{name}) words={quoted(words)};;" for name, words in values.items()),
        of_commands="\n".join(f"    {name}) words={quoted(f'--{flag}' for flag in sorted(own))};;" for name, own in commands.items()),
        flags=quoted(every),
        commands=quoted([*commands, "help"]),
    )


def _flags_of(name: str) -> list[str]:
    yes_no = flags.kind_of(flags.FIELDS[name]) is bool and name in flags.TOPIC_OF
    return [f"--{name}", *([f"--no_{name}"] if yes_no else [])]


def install(shell: str | None, commands: Mapping[str, Iterable[str]]) -> str:
    """Writes the script and has the shell read it when it starts; says where."""
    shell = shell or Path(os.environ.get("SHELL", "")).name
    if shell not in STARTED_BY:
        raise BadOption("install_completion", "must be bash or zsh", shell)
    home = Path.home()
    file, startup = home / ".local" / "share" / "neighbor-attention" / "completion.sh", home / STARTED_BY[shell]
    line = f"source {shlex.quote(str(file))}"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(script(commands))
    before = startup.read_text() if startup.exists() else ""
    if line not in before.splitlines():
        startup.write_text(f"{before}{'' if not before or before.endswith(chr(10)) else chr(10)}{line}\n")
    return f"completion: written to {file}, which {startup} reads; start a new {shell}"
