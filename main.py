"""The command line: flags in, run out. The flags themselves are in config.py."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

import config as flags
from utils import BadOption, Halt, say

METAVARS = {int: "INT", float: "FLOAT", str: "TEXT", bool: None}


def option(field: dataclasses.Field[Any], *, both_ways: bool) -> inspect.Parameter:
    """A flag as a parameter. Its default is None for Typer: what was not given is left to presets and layers."""
    meta, kind = field.metadata, flags.kind_of(field)
    text = meta["help"]
    if meta["choices"]:
        text += f": {', '.join(meta['choices'])}"
    if meta["preset"]:
        text += " (by data set)"
    elif field.default is not None and kind is not bool:
        text += f" (default: {field.default})"
    names = f"--{field.name}/--no-{field.name}" if kind is bool and both_ways else f"--{field.name}"
    info = typer.Option(names, help=text, rich_help_panel=meta["topic"], show_default=False, metavar=METAVARS[kind])
    # Numbers arrive as text, so that a wrong one gets our line: flag, rule and value.
    annotation = Annotated[bool | None, info] if kind is bool else Annotated[str | None, info]
    return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def train(context: typer.Context, **values: Any) -> None:
    """Neighbor attention in Vision Transformers: any layer, in any ViT, under any head, in one loop.

    Without a command, trains and evaluates one run. Hyphens in flags are as good as underscores.
    """
    if context.invoked_subcommand is not None:
        return
    given = {name: flags.parse(name, value) for name, value in values.items() if value is not None}
    actions = {f.name: given.pop(f.name) for f in dataclasses.fields(flags.Action) if f.name in given}
    from experiments.run import run  # late: torch takes its time, and --help should not

    run(given, flags.Action(**actions))


def build_app() -> typer.Typer:
    app = typer.Typer(
        add_completion=False,
        context_settings={"token_normalize_func": lambda token: token.replace("-", "_")},
    )
    parameters = [
        inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context),
        *(option(f, both_ways=True) for f in dataclasses.fields(flags.Config)),
        *(option(f, both_ways=False) for f in dataclasses.fields(flags.Action)),
    ]
    train.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    train.__annotations__ = {p.name: p.annotation for p in parameters}
    app.callback(invoke_without_command=True)(train)
    return app


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; every mistake of the user's is one line and exit code 2."""
    try:
        return build_app()(args=list(sys.argv[1:] if arguments is None else arguments), standalone_mode=False) or 0
    except BadOption as error:
        return fail(f"--{error}" if error.option in flags.FIELDS else str(error))
    except Halt as halt:
        say(str(halt))
        return halt.exit_code
    except KeyboardInterrupt:
        return fail("stopped by Ctrl-C", 130)
    except OSError as error:  # a full disk, a lost network drive: what was saved before is whole
        return fail(f"{error.strerror or error}: {error.filename or ''}", 1)
    except Exception as error:
        if hasattr(error, "format_message"):  # Typer could not read the command line
            return fail(error.format_message())
        raise


def fail(message: str, code: int = 2) -> int:
    say(f"error: {' '.join(message.split())}")
    return code


if __name__ == "__main__":
    sys.exit(main())
