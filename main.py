"""The command line: flags in, run out. The flags themselves are in config.py."""

from __future__ import annotations

import dataclasses
import inspect
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from typing import Annotated, Any, get_type_hints

import typer
from typer.models import OptionInfo

import config as flags
from explain import page
from utils import BadOption, Halt, interruptible, parse_whole_number, processes, say, shortened

# Read when torch loads. Threads that wait by spinning for long are a little faster alone, and many times slower where another
# process wants the cores too.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

IGNORED = ("similarity_type", "aggregation_type")


def option(field: dataclasses.Field[Any], *, both_ways: bool) -> inspect.Parameter:
    """A flag as a parameter. Its default is None for Typer: what was not given is left to presets and layers."""
    kind = flags.kind_of(field)
    names = f"--{field.name}/--no-{field.name}" if kind is bool and both_ways else f"--{field.name}"
    info = typer.Option(names, help=page.described(field), show_default=False, metavar=page.METAVARS[kind] or None)
    # Numbers arrive as text, so that a wrong one gets our line: flag, rule and value.
    annotation = Annotated[bool | None, info] if kind is bool else Annotated[str | None, info]
    return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def renamed(old: str, field: dataclasses.Field[Any]) -> inspect.Parameter:
    """A flag by the name that it had in older command lines."""
    yes_no = flags.kind_of(field) is bool
    info = typer.Option(f"--{old}/--no-{old}" if yes_no else f"--{old}", hidden=True)
    annotation = Annotated[bool | None, info] if yes_no else Annotated[str | None, info]
    return inspect.Parameter(old, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def train(context: typer.Context, **values: Any) -> None:
    """Neighbor attention in Vision Transformers: any layer, in any ViT, under any head, in one loop.

    Without a command, trains and evaluates one run. Hyphens in flags are as good as underscores.
    """
    if context.invoked_subcommand is not None:
        if typed := [name for name, value in values.items() if value is not None]:
            raise BadOption(typed[0], f"goes with training, or behind {context.invoked_subcommand}", values[typed[0]])
        if (count := processes()) > 1:
            raise BadOption(context.invoked_subcommand, f"runs in one process; torchrun, which started {count}, is for training")
        return
    for name in IGNORED:
        if values.pop(name) is not None:
            say(f"--{name}: ignored; older command lines have it, no layer uses it")
    named = flags.with_new_names({name: value for name, value in values.items() if value is not None})
    given = {name: flags.parse(name, value) for name, value in named.items()}
    actions = {f.name: given.pop(f.name) for f in dataclasses.fields(flags.Action) if f.name in given}
    if "test_only" in actions and "resume" in actions:
        raise BadOption("resume", "trains on: it does not go with --test_only, which names its run by --checkpoint", actions["resume"])
    from run.run import run  # late: torch takes its time, and --help should not

    run(given, flags.Action(**actions))


# Options of the commands are text, as above; None is left to the run or the data set.
Text = str | None
Plugin = Annotated[Text, typer.Option(help=flags.FIELDS["plugin"].metadata["help"], metavar="TEXT")]


def list_(
    WHAT: Annotated[str, typer.Argument(help="layers, models, heads, datasets, or all of them", metavar="WHAT")] = "all",
    d_hidden: Annotated[str, typer.Option("--d_hidden", help="width of a token", metavar="INT")] = "192",
    num_heads: Annotated[str, typer.Option("--num_heads", help="attention heads", metavar="INT")] = "3",
    image_size: Annotated[str, typer.Option("--image_size", help="image side", metavar="INT")] = "224",
    patch_size: Annotated[str, typer.Option("--patch_size", help="side of a patch", metavar="INT")] = "16",
    batch_size: Annotated[str, typer.Option("--batch_size", help="rows of the measured forward pass", metavar="INT")] = "8",
    filter: Annotated[str, typer.Option(help="timm models whose name fits: 'vit_tiny*'", metavar="TEXT")] = "",
    plugin: Plugin = None,
) -> None:
    """What there is: layers, models, heads and data sets, with options, parameters and measured cost."""
    sizes = dict(d_hidden=d_hidden, num_heads=num_heads, image_size=image_size, patch_size=patch_size, batch_size=batch_size)
    numbers = {name: parse_whole_number(name, text, 1) for name, text in sizes.items()}
    from explain.listing import show

    show(WHAT, filter, plugin, **numbers)


def probe(
    K: Annotated[str, typer.Option("--K", help="neighbors a token may read: whole numbers and 'all'", metavar="LIST")] = "1,4,9,16,32,all",
    model: Annotated[Text, typer.Option(help="timm/NAME, with --pretrained", metavar="TEXT")] = None,
    pretrained: Annotated[str, typer.Option(help="hub, or FILE.safetensors", metavar="TEXT")] = "hub",
    checkpoint: Annotated[Text, typer.Option(help="RUN to probe instead", metavar="TEXT")] = None,
    dataset: Annotated[Text, typer.Option(help=flags.FIELDS["dataset"].metadata["help"], metavar="TEXT")] = None,
    data_path: Annotated[Text, typer.Option("--data_path", help="where data sets are", metavar="TEXT")] = None,
    mode: Annotated[str, typer.Option(help="topk: softmax over the K; mass: their share of the softmax over all", metavar="TEXT")] = "topk",
    batch_size: Annotated[Text, typer.Option("--batch_size", help="rows a batch", metavar="INT")] = None,
    output_dir: Annotated[Text, typer.Option("--output_dir", help="for probe.json and .png (default: the run)", metavar="TEXT")] = None,
    device: Annotated[Text, typer.Option(help="where to compute: auto, cpu, cuda, mps", metavar="TEXT")] = None,
    plugin: Plugin = None,
) -> None:
    """What would hard top-K do to this trained model? Test accuracy against K, without training."""
    typed = dict(dataset=dataset, data_path=data_path, batch_size=batch_size, device=device, plugin=plugin, model=model)
    given = {name: flags.parse(name, value) for name, value in typed.items() if value is not None}
    flags.check(given)
    from explain.probe import run_probe

    run_probe(K, checkpoint, pretrained, mode, output_dir, given)


def explain(
    what: Annotated[str, typer.Option(help="tokens: what patches read; neighbors: how neighbors vote", metavar="TEXT")] = "tokens",
    checkpoint: Annotated[Text, typer.Option(help="RUN to look at", metavar="TEXT")] = None,
    image: Annotated[str, typer.Option(help="INDEX in the test split, or FILE", metavar="TEXT")] = "0",
    queries: Annotated[Text, typer.Option(help="patches that read: 'row,column;row,column' (default: 3)", metavar="TEXT")] = None,
    K: Annotated[Text, typer.Option("--K", help="patches shown (default: selected, or 9 of all), or neighbors (8)", metavar="INT")] = None,
    head: Annotated[Text, typer.Option(help="attention heads drawn: '0,2' or all (default: mean)", metavar="TEXT")] = None,
    everything: Annotated[bool, typer.Option("--all", help="draw every depth and head")] = False,
    mistakes: Annotated[Text, typer.Option(help="most confident mistakes shown, of neighbors (default: 4)", metavar="INT")] = None,
    output_dir: Annotated[Text, typer.Option("--output_dir", help="where the files go (default: the run)", metavar="TEXT")] = None,
    data_path: Annotated[Text, typer.Option("--data_path", help="where data sets are (default: as the run)", metavar="TEXT")] = None,
    device: Annotated[Text, typer.Option(help="where to compute (default: as the run)", metavar="TEXT")] = None,
    plugin: Plugin = None,
) -> None:
    """What a run's layers read (--what tokens), or how its neighbors vote (--what neighbors): a picture and a table."""
    from explain.command import explain as show

    shown = {"image": image, "queries": queries, "K": K, "head": head, "mistakes": mistakes, "all": everything or None}
    given = dict(output_dir=output_dir, data_path=data_path, device=device, plugin=plugin)
    show({"what": what, "checkpoint": checkpoint, **shown, **given})


def compare(
    runs: Annotated[list[str] | None, typer.Argument(help="finished runs, instead of flags that make runs", metavar="RUNS")] = None,
    seeds: Annotated[Text, typer.Option(help="how many (5: 0 to 4), or which (3,7,11) (default: 3)", metavar="TEXT")] = None,
    baseline: Annotated[Text, typer.Option(help="the arm that all others are compared with (default: the first)", metavar="TEXT")] = None,
    metric: Annotated[Text, typer.Option(help="accuracy (default), nll, brier, ece, balanced_accuracy, ...", metavar="TEXT")] = None,
    margin: Annotated[Text, typer.Option(help="differences that do not matter (default: 0.3 points, 2 % of NLL)", metavar="FLOAT")] = None,
    plan: Annotated[Text, typer.Option(help="FILE.yaml of named arms", metavar="TEXT")] = None,
    config: Annotated[Text, typer.Option(help="FILE.yaml of defaults for all arms", metavar="TEXT")] = None,
    jobs: Annotated[Text, typer.Option(help="runs at once (default: 1; on a cluster as many as fit)", metavar="INT")] = None,
    threads: Annotated[Text, typer.Option(help="of each run (default: cores / jobs, when planned)", metavar="INT")] = None,
    executor: Annotated[Text, typer.Option(help="local (default), ray or slurm: 'slurm(time=60)'", metavar="TEXT")] = None,
    retry: Annotated[Text, typer.Option(help="runs to try again: failed, stale", metavar="TEXT")] = None,
    looks: Annotated[Text, typer.Option(help="numbers of seeds after which it may end early: 3,5,10", metavar="TEXT")] = None,
    within: Annotated[Text, typer.Option(help="predictors inside each run as arms: 'linear.raw,attention.raw'", metavar="TEXT")] = None,
    output_dir: Annotated[Text, typer.Option("--output_dir", help="directory of the comparison", metavar="TEXT")] = None,
    fail_fast: Annotated[bool, typer.Option("--fail_fast", help="stop at the first run that fails")] = False,
    calibrated: Annotated[bool, typer.Option("--calibrated", help="compare calibrated probabilities, not those as trained")] = False,
    dry_run: Annotated[bool, typer.Option("--dry_run", help="show the plan and its time; run nothing")] = False,
    **values: Any,
) -> int:
    """Is A better than B? Runs arms over seeds, or takes finished runs, and gives a verdict with its price.

    Flags of training take alternatives, also inside a call: --layer "Attention | KvtAttention(K=4|9)"; see the help without a command.
    """
    from experiments.command import Asked
    from experiments.command import compare as run_comparison

    typed = flags.with_new_names({name: value for name, value in values.items() if value is not None})
    asked = dict(seeds=seeds, baseline=baseline, metric=metric, margin=margin, plan=plan, config=config, jobs=jobs, threads=threads)
    asked |= dict(executor=executor, retry=retry, looks=looks, within=within, output_dir=output_dir)
    return run_comparison(runs or [], typed, Asked(**asked, fail_fast=fail_fast, calibrated=calibrated, dry_run=dry_run))


def predict(
    more: Annotated[list[str] | None, typer.Argument(help="further inputs, as a shell expands *.jpg", metavar="[INPUT]...")] = None,
    checkpoint: Annotated[Text, typer.Option(help="RUN that predicts; its data set is not needed", metavar="TEXT")] = None,
    input: Annotated[Text, typer.Option("--input", help="a folder, image files, FILE.npz[:KEY], or FILE.csv", metavar="TEXT")] = None,
    output: Annotated[Text, typer.Option(help="FILE.csv or FILE.jsonl (default: CSV on standard output)", metavar="TEXT")] = None,
    confidence: Annotated[str, typer.Option(help="'abstain' where no class is that likely", metavar="FLOAT")] = "0",
    K: Annotated[str, typer.Option("--K", help="neighbors shown, the heaviest; 0 for none", metavar="INT")] = "5",
    batch_size: Annotated[Text, typer.Option("--batch_size", help="rows a batch", metavar="INT")] = None,
    device: Annotated[str, typer.Option(help="where to compute: auto, cpu, cuda, mps", metavar="TEXT")] = "auto",
    plugin: Plugin = None,
) -> None:
    """What a trained model says of images or table rows: class probabilities, neighbors, distance. It needs no data set."""
    from run.predict import predict as ask

    ask(checkpoint, [*([input] if input else []), *(more or [])], output, confidence, K, batch_size, device, plugin)


def export(
    checkpoint: Annotated[Text, typer.Option(help="RUN to export", metavar="TEXT")] = None,
    format: Annotated[str, typer.Option(help="onnx, torchscript or safetensors (weights alone)", metavar="TEXT")] = "onnx",
    output_dir: Annotated[Text, typer.Option("--output_dir", help="for the files (default: RUN/export-FORMAT)", metavar="TEXT")] = None,
    plugin: Plugin = None,
) -> None:
    """Backbone and embedder as one graph that runs without the toolkit, the bank beside it, and a vote in 20 lines of Python."""
    from run.export import export as write

    write(checkpoint, format, output_dir, plugin)


def check(RUN: Annotated[list[str], typer.Argument(help="runs, or folders of runs", metavar="RUN...")]) -> int:
    """Are the files of a run as it wrote them? Each is whole, unfinished or damaged; exit code 1 if one is damaged."""
    from run.verify import check as look

    return look(RUN)


def report(
    runs: Annotated[list[str] | None, typer.Argument(help="a run, several, a folder of runs, or a comparison", metavar="DIR")] = None,
    output_dir: Annotated[Text, typer.Option("--output_dir", help="for report.html and figures/ (default: DIR)", metavar="TEXT")] = None,
    watch: Annotated[bool, typer.Option("--watch", help="build it again while runs go on")] = False,
    without_pictures: Annotated[bool, typer.Option("--without_pictures", help="do not ask models for neighbors and tokens")] = False,
    data_path: Annotated[Text, typer.Option("--data_path", help="where data sets are (default: as the run)", metavar="TEXT")] = None,
    device: Annotated[Text, typer.Option(help="where to compute (default: as the run)", metavar="TEXT")] = None,
    plugin: Plugin = None,
) -> int:
    """One HTML page of a run, several, or a comparison: verdict, tables, figures; and the figures as SVG and PNG."""
    from experiments.report.command import Asked
    from experiments.report.command import report as make

    return make(Asked(runs or [], output_dir, plugin, data_path, device, watch, without_pictures))


def bench(
    WHAT: Annotated[str, typer.Argument(help="layers, models, loop, bank, heads, data, startup, or all of them", metavar="WHAT")] = "all",
    quick: Annotated[bool, typer.Option("--quick", help="a first idea, in two minutes for all")] = False,
    threads: Annotated[Text, typer.Option(help="that compute (default: all cores)", metavar="INT")] = None,
    clock: Annotated[str, typer.Option(help="wall; or cpu, with --threads 1, where the machine is busy", metavar="TEXT")] = "wall",
    device: Annotated[str, typer.Option(help="of layers, models and loop: auto, cpu, cuda", metavar="TEXT")] = "auto",
    rounds: Annotated[Text, typer.Option(help="of each measurement (default: by part and time)", metavar="INT")] = None,
    tokens: Annotated[Text, typer.Option(help="of layers: some of 65,197,785,1025,3137", metavar="LIST")] = None,
    dtypes: Annotated[Text, typer.Option(help="of layers and models: float32,bfloat16", metavar="LIST")] = None,
    modes: Annotated[Text, typer.Option(help="of layers: eager,compiled", metavar="LIST")] = None,
    batch_size: Annotated[Text, typer.Option("--batch_size", help="images, of layers and models", metavar="INT")] = None,
    checkpoint: Annotated[Text, typer.Option(help="RUN whose embeddings fill the bank", metavar="TEXT")] = None,
    json: Annotated[Text, typer.Option(help="FILE for all figures", metavar="FILE")] = None,
    output_dir: Annotated[Text, typer.Option("--output_dir", help="for WHAT.json, .md and .png", metavar="TEXT")] = None,
) -> None:
    """What things cost: each part measured beside named rivals in one run, ratios first."""
    from benchmarks.bench import Typed
    from benchmarks.bench import bench as measure

    sizes = dict(tokens=tokens, dtypes=dtypes, modes=modes, batch_size=batch_size, rounds=rounds)
    measure(Typed(WHAT, threads, clock, device, **sizes, checkpoint=checkpoint, json=json, output_dir=output_dir, quick=quick))


COMMANDS: tuple[Callable[..., Any], ...] = (list_, probe, explain, compare, report, predict, export, check, bench)
YES_NO = {"true", "false", "yes", "no", "on", "off"}


class WithAlternatives(typer.core.TyperCommand):
    """A command whose yes-no flags take a value, so that it can be "true | false"; alone they mean true, and --no-NAME false."""

    def parse_args(self, context: Any, arguments: list[str]) -> list[str]:
        words, place = [], 0
        while place < len(arguments):
            word, place = arguments[place], place + 1
            name = word.removeprefix("--").replace("-", "_")
            plain = name.removeprefix("no_")
            if not word.startswith("--") or plain not in YES_NO_FLAGS:
                words.append(word)
            elif name != plain:
                words += [f"--{plain}", "false"]
            elif place < len(arguments) and {part.strip().lower() for part in arguments[place].split("|")} <= YES_NO:
                words.append(word)
            else:
                words += [word, "true"]
        return super().parse_args(context, words)


YES_NO_FLAGS = {name for name in flags.TOPIC_OF if flags.kind_of(flags.FIELDS[name]) is bool}


def training_flags(taken: set[str]) -> list[inspect.Parameter]:
    """Those of training as hidden text, for a command that hands them on."""
    names = {**dict.fromkeys(flags.TOPIC_OF), **dict.fromkeys(flags.RENAMED)}
    kinds = {name: Annotated[str | None, typer.Option(f"--{name}", hidden=True)] for name in names if name not in taken}
    keyword = inspect.Parameter.KEYWORD_ONLY
    return [inspect.Parameter(name, keyword, default=None, annotation=kind) for name, kind in kinds.items()]


def flags_of(command: Callable[..., None]) -> set[str]:
    """What is typed behind two hyphens, without the arguments that are told by their place."""
    found: set[str] = set()
    for name, hint in get_type_hints(command, include_extras=True).items():
        for option in (part for part in getattr(hint, "__metadata__", ()) if isinstance(part, OptionInfo)):
            words = map(str, (option.default, *(option.param_decls or ())))  # in an annotation, the first word stands as the default
            found |= {word.removeprefix("--") for word in words if word.startswith("--")} or {name}
    return found


NAMES = {command.__name__.rstrip("_"): command for command in COMMANDS}
OPTIONS = set(flags.FIELDS).union(*map(flags_of, COMMANDS)) - {"runs"}


def build_app() -> typer.Typer:
    app = typer.Typer(
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"token_normalize_func": lambda token: token.replace("-", "_")},
    )
    parameters = [
        inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context),
        *(option(flags.FIELDS[name], both_ways=True) for name in flags.TOPIC_OF),
        *(option(f, both_ways=False) for f in dataclasses.fields(flags.Action)),
        *(renamed(old, flags.FIELDS[new]) for old, new in flags.RENAMED.items()),
    ]
    hidden = Annotated[str | None, typer.Option(hidden=True)]
    parameters += [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=hidden) for name in IGNORED]
    train.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    train.__annotations__ = {p.name: p.annotation for p in parameters}
    app.callback(invoke_without_command=True)(train)
    own = inspect.signature(compare, eval_str=True).parameters
    typed = [p for p in own.values() if p.kind is not p.VAR_KEYWORD]
    signature = inspect.Signature([*typed, *training_flags(set(own))])
    compare.__signature__ = signature  # type: ignore[attr-defined]
    compare.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
    for name, command in NAMES.items():
        app.command(name=name, cls=WithAlternatives if command is compare else None)(command)
    return app


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; every mistake of the user's is one line and exit code 2, and what nobody expected one line and 1."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    with interruptible() as signals:
        code = _run(words)
    return fail(f"stopped by {signals[-1].name}", signals[-1].exit_code) if code == INTERRUPTED else code


INTERRUPTED = -1  # by a signal, with nothing said yet


def _run(words: list[str]) -> int:
    try:
        text, words = page.answer(words, NAMES)
        text = text or completion(words)
        if text is not None:
            print(text)
            return 0
        code = build_app()(args=words, standalone_mode=False) or 0
        return INTERRUPTED if code == 130 else code  # Typer's word for Ctrl-C
    except BadOption as error:
        return fail(f"--{error}" if error.option in OPTIONS else str(error))
    except Halt as halt:
        say(str(halt))
        return halt.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as error:  # a full disk, a lost network drive: what was saved before is whole
        return fail(f"{error.strerror or error}: {error.filename or ''}", 1)
    except Exception as error:
        if hasattr(error, "format_message"):  # Typer could not read the command line
            message = error.format_message()
            return fail(page.no_such_command(message, NAMES) if message.startswith("No such command") else message)
        return fail(unexpected(error), 1)


def completion(words: list[str]) -> str | None:
    """The answer to --install-completion [SHELL] and --show-completion [SHELL]; None to anything else."""
    first, *rest = [word.replace("-", "_") for word in words[:2]] or [""]
    if first not in ("__install_completion", "__show_completion"):
        return None
    from explain import completion

    own = {name: flags_of(command) for name, command in NAMES.items()}
    shell = completion.shell_of(rest[0] if rest else None)
    return completion.script(shell, own) if first == "__show_completion" else completion.install(shell, own)


def unexpected(error: Exception) -> str:
    """What nobody foresaw, in one line: what was being done, and where the traceback is."""
    from run.plugin import plugin_frame

    what = f"{type(error).__name__}: {shortened(error, 300)}"
    if where := plugin_frame(error):
        return f"plugin {where}: {what}"
    kept = getattr(error, "traceback_in", "")
    if not kept:  # no run, so no file of one
        with tempfile.NamedTemporaryFile("w", prefix="neighbor-attention-error-", suffix=".txt", delete=False) as file:
            traceback.print_exception(error, file=file)
        kept = file.name
    return f"{what}, in {getattr(error, 'doing', 'reading the command line')}; the traceback is in {kept}"


def fail(message: str, code: int = 2) -> int:
    say(f"error: {' '.join(message.split())}")
    return code


if __name__ == "__main__":
    sys.exit(main())
