"""`--install-completion`: what TAB offers behind `python main.py` in bash, zsh and fish.

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
STARTED_BY = {"bash": ".bashrc", "zsh": ".zshrc"}  # fish reads a folder
SHELLS = (*STARTED_BY, "fish")
FOR_ZSH = '[ -n "$ZSH_VERSION" ] && autoload -U +X compinit bashcompinit && compinit -u && bashcompinit\n'
# NOTE: flags are taken with dashes, too, and zsh and fish show only what begins with what was typed.
SCRIPT = """\
# TAB behind `python main.py`. Made by: python main.py --install-completion
{zsh}{name}() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" last="${{COMP_WORDS[COMP_CWORD-1]}}" words=""
  COMPREPLY=()
  [[ "${{COMP_WORDS[1]}}" == *main.py && $COMP_CWORD -ge 2 ]] || return 0
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
    case "$word" in --*-*) words="${{words//_/-}}";; esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o bashdefault -o default -F {name} python python3
"""
FISH = """\
# TAB behind `python main.py`. Made by: python main.py --install-completion fish
function {name}
    set -l before (commandline -opc)
    set -l word (commandline -ct)
    set -l last $before[-1]
    set -l words
    string match -q -- '*main.py' "$before[2]"; or return 1
    string match -q -- '--*' $last; and set last --(string replace -a -- - _ (string sub -s 3 -- $last))
    switch $last
{values}
    end
    if test (count $words) -eq 0
        string match -q -- '-*' "$word"; or test (count $before) -eq 2; or return 1
        switch "$before[3]"
{of_commands}
            case '*'
                set words {flags}
                test (count $before) -eq 2; and set -a words {commands}
        end
        string match -q -- '--*-*' "$word"; and set words (string replace -a -- _ - $words)
    end
    printf '%s\\n' $words
end
for python in python python3
    complete -c $python -n '{name} >/dev/null' -f -a '({name})'
end
"""


def names_of_parts() -> dict[str, list[str]]:
    """What flags take that name a part; torch is read for it."""
    import layers
    import models
    from classifiers import HEADS
    from classifiers.weights import WEIGHTS
    from dataset import DATASETS

    return {"layer": [*layers.LAYERS], "head": [*HEADS], "dataset": [*DATASETS], "model": [*models.MODELS], "vote": [*WEIGHTS]}


def script(shell: str, commands: Mapping[str, Iterable[str]]) -> str:
    """`commands` and their flags."""
    values = {name: list(field.metadata["choices"]) for name, field in flags.FIELDS.items() if field.metadata["choices"]}
    values |= names_of_parts()
    own = {name: [f"--{flag}" for flag in sorted(of)] for name, of in commands.items()}
    every = [word for name in flags.FIELDS for word in _flags_of(name)] + ["--help", "--help_all"]
    names = [*commands, "help"]
    if shell == "fish":
        return FISH.format(
            name=NAME,
            values="\n".join(f"        case --{name}\n            set words {shlex.join(words)}" for name, words in values.items()),
            of_commands="\n".join(f"            case {name}\n                set words {shlex.join(of)}" for name, of in own.items()),
            flags=shlex.join(every),
            commands=shlex.join(names),
        )
    return SCRIPT.format(
        zsh=FOR_ZSH,
        name=NAME,
        values="\n".join(f"    --{name}) words={_quoted(words)};;" for name, words in values.items()),
        of_commands="\n".join(f"    {name}) words={_quoted(of)};;" for name, of in own.items()),
        flags=_quoted(every),
        commands=_quoted(names),
    )


def _quoted(words: Iterable[str]) -> str:
    return shlex.quote(" ".join(words))


def _flags_of(name: str) -> list[str]:
    yes_no = flags.kind_of(flags.FIELDS[name]) is bool and name in flags.TOPIC_OF
    return [f"--{name}", *([f"--no_{name}"] if yes_no else [])]


def shell_of(typed: str | None) -> str:
    """The one that was named, or that of the user."""
    shell = typed or Path(os.environ.get("SHELL", "")).name
    if shell not in SHELLS:
        raise BadOption("install_completion", f"must be one of {', '.join(SHELLS)}", shell)
    return shell


def install(shell: str, commands: Mapping[str, Iterable[str]]) -> str:
    """Writes the script and has the shell read it when it starts; says where."""
    home = Path.home()
    if shell == "fish":
        file = Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config") / "fish" / "conf.d" / "neighbor-attention.fish"
    else:
        file = home / ".local" / "share" / "neighbor-attention" / "completion.sh"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(script(shell, commands))
    if shell == "fish":
        return f"completion: written to {file}; start a new fish"
    line, startup = f"source {shlex.quote(str(file))}", home / STARTED_BY[shell]
    before = startup.read_text() if startup.exists() else ""
    if line not in before.splitlines():
        startup.write_text(f"{before}{'' if not before or before.endswith(chr(10)) else chr(10)}{line}\n")
    return f"completion: written to {file}, which {startup} reads; start a new {shell}"
