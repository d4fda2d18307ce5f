"""What a comparison is: written to plan.json before anything runs, with a hash of all of it. What joins later is exploratory."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import config as flags
from experiments.cells import folder_name
from experiments.grid import Arm, alternatives, arms_of, check_names, value_of
from experiments.metrics import METRICS
from inputs.files import read_plain
from inputs.yaml_file import read_mapping, read_yaml
from utils import BadOption, did_you_mean, one_of, whole_numbers

FILE, MOST = "plan.json", 1 << 26  # bytes
DECLARED = ("seeds", "baseline", "metric", "margin", "looks", "calibrated", "within", "threads", "conditions")
KEYS = ("arms", "common", "backbone", "published", "about", *DECLARED)  # of a YAML plan
FOLLOWING = ("family", "margin_means")  # of plan.json: told for people, from the rest
BACKBONE = "shared backbone"  # as an arm, of which every other one takes the weights
OURS = ("output_dir", "seed", "feature_cache")  # what the comparison gives to each cell


@dataclass(frozen=True, kw_only=True)
class Plan:
    arms: tuple[Arm, ...]
    seeds: tuple[int, ...]
    baseline: str
    metric: str = "accuracy"
    margin: float | None = None  # None: the metric's own
    looks: tuple[int, ...] = ()  # numbers of seeds after which it may end
    calibrated: bool = False
    within: tuple[str, ...] = ()  # predictors inside each run that are arms of their own
    threads: int = 1  # of a run: they change weights
    backbone: Mapping[str, Any] = field(default_factory=dict)  # flags of a run a seed, from whose weights all arms start
    conditions: str = ""  # of the published numbers
    later_seeds: tuple[int, ...] = ()  # that joined a plan which had begun

    def arm(self, name: str) -> Arm:
        return next(arm for arm in self.arms if arm.name == name)

    @property
    def family(self) -> list[str]:
        """The arms whose comparison with the baseline was declared before anything ran."""
        declared = [arm for arm in self.arms if not arm.exploratory]
        return [name for name in shown_arms(declared, self.within, len(self.arms)) if name != self.baseline]

    @property
    def plugins(self) -> list[str]:
        """Files with code that runs load, each once."""
        every = (self.backbone, *(arm.flags for arm in self.arms))
        return list(dict.fromkeys(str(given["plugin"]) for given in every if given.get("plugin")))

    @property
    def declared_seeds(self) -> tuple[int, ...]:
        return self.seeds[: len(self.seeds) - len(self.later_seeds)]

    @property
    def verdicts_after(self) -> tuple[int, ...]:
        """Numbers of seeds at which verdicts are made: the looks, and all that were declared. None: at any number."""
        return tuple(sorted({*self.looks, len(self.declared_seeds)})) if self.looks else ()

    @property
    def margin_means(self) -> str:
        return METRICS[self.metric].margin_in_words(self.margin)

    @property
    def trackers(self) -> list[str]:
        """Those that runs use, each once."""
        return list(dict.fromkeys(name for arm in self.arms if (name := str(arm.flags.get("tracker", "none"))) != "none"))

    def body(self) -> dict[str, Any]:
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "arms"}
        values |= {name: getattr(self, name) for name in FOLLOWING}
        plain = json.loads(json.dumps({"arms": [dataclasses.asdict(arm) for arm in self.arms], **values}))
        return {**plain, "sha256": digest_of(plain)}


def digest_of(body: Any) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def checked(plan: Plan) -> Plan:
    """Refuses what can't be compared."""
    one_of("metric", plan.metric, METRICS)
    check_names([arm.name for arm in plan.arms])
    names = shown_arms(plan.arms, plan.within)
    if plan.backbone and (taken := [arm.name for arm in plan.arms if arm.name == BACKBONE or "pretrained" in arm.flags]):
        raise BadOption("plan", f"has a backbone, from which all arms start: no --pretrained in arm {taken[0]!r}, and none of its name")
    if plan.baseline not in names:
        raise BadOption("baseline", f"must be one of the arms {', '.join(names)}{did_you_mean(plan.baseline, names)}", plan.baseline)
    if len(set(plan.seeds)) < len(plan.seeds):
        raise BadOption("seeds", "must name each seed once", ",".join(map(str, plan.seeds)))
    folders: dict[str, str] = {}
    for arm in plan.arms:
        if (other := folders.setdefault(folder_name(arm.name).lower(), arm.name)) != arm.name:
            raise BadOption("compare", f"must give arms names that differ in letters or digits: {other!r} and {arm.name!r} do not")
    most = len(plan.declared_seeds)
    if plan.looks and (list(plan.looks) != sorted(set(plan.looks)) or plan.looks[0] < 2 or plan.looks[-1] > most):
        rule = f"must be rising numbers of seeds from 2 to {most}"
        raise BadOption("looks", rule, ",".join(map(str, plan.looks)))
    return plan


# ---------------------------------------------------------------- from what was typed


SEEDS = "must be how many (5), or several with commas between (3,7,11)"


def seeds_of(text: str) -> tuple[int, ...]:
    """ "5" is 0 to 4; "3,7,11" are these."""
    words = [word.strip() for word in text.split(",")]
    if len(words) > 1:
        return these_seeds(words, text)
    if not re.fullmatch(r"\d{1,18}", words[0]) or not 1 <= int(words[0]) <= 10_000:
        raise BadOption("seeds", SEEDS, text)
    return tuple(range(int(words[0])))


def these_seeds(words: Sequence[Any], given: Any) -> tuple[int, ...]:
    if not words or not all(re.fullmatch(r"\d{1,18}", str(word)) for word in words):
        raise BadOption("seeds", SEEDS, given)
    return tuple(int(word) for word in words)


def sources_of(text: str) -> tuple[str, ...]:
    """ "linear | attention.calibrated", or with commas."""
    words = tuple(word.strip() for word in text.replace("|", ",").split(",") if word.strip())
    if len(words) < 2 or len(set(words)) < len(words):
        raise BadOption("within", "must name at least two predictors, each once, with commas between", text)
    return words


def shown_arms(arms: Sequence[Arm], within: Sequence[str], count: int | None = None) -> list[str]:
    """Arms by name; predictors inside them are arms of their own. `count`: how many arms there are in all."""
    if not within:
        return [arm.name for arm in arms]
    return [source if (count or len(arms)) == 1 else f"{arm.name}: {source}" for arm in arms for source in within]


def arms_typed(given: Mapping[str, str], config: str | None = None) -> list[Arm]:
    """The grid of the flags on the command line. `config`: a YAML file of defaults for all arms."""
    if "seed" in given:
        raise BadOption("seed", "is given to each run by the comparison: use --seeds", given["seed"])
    in_file = read_yaml(config) if config else {}
    if in_file.get("plugin") and "plugin" not in given:
        raise BadOption("plugin", f"must be typed: {config} names {in_file['plugin']}, and no code runs because a file names it")
    shared = {name: value for name, value in in_file.items() if name not in ("seed", "output_dir") and name not in given}
    arms = [dataclasses.replace(arm, flags={**shared, **arm.flags}) for arm in arms_of(given)]
    for arm in arms:
        flags.check(arm.flags)
    return arms


def absolute(arms: Sequence[Arm]) -> list[Arm]:
    """With files as they are found from anywhere: the plan may be gone on with from another directory."""
    from run.saved import with_absolute_paths  # late: torch takes its time

    return [dataclasses.replace(arm, flags=with_absolute_paths(arm.flags)) for arm in arms]


def declared_in(rest: Mapping[str, Any]) -> dict[str, Any]:
    """What a YAML plan declares, as values."""
    found = {name: str(rest[name]) for name in ("baseline", "metric", "conditions") if name in rest}
    values: dict[str, Any] = dict(found)
    if "seeds" in rest:
        seeds = rest["seeds"]
        values["seeds"] = these_seeds(seeds, seeds) if isinstance(seeds, list) else seeds_of(str(seeds))
    if "backbone" in rest:
        values["backbone"] = absolute([Arm(BACKBONE, rest["backbone"])])[0].flags
    if "margin" in rest:
        try:
            values["margin"] = float(rest["margin"])
        except (TypeError, ValueError):
            raise BadOption("margin", "must be a number", str(rest["margin"])) from None
    if "looks" in rest:
        values["looks"] = whole_numbers("looks", rest["looks"])
    if "within" in rest:
        within = rest["within"]
        values["within"] = sources_of(",".join(map(str, within)) if isinstance(within, list) else str(within))
    if "calibrated" in rest:
        if not isinstance(rest["calibrated"], bool):
            raise BadOption("calibrated", "must be true or false", rest["calibrated"])
        values["calibrated"] = rest["calibrated"]
    return values


def read_plan(path: str, typed: Mapping[str, str]) -> tuple[list[Arm], dict[str, Any]]:
    """Arms of a YAML plan, each with the flags that all have in common and those typed, which win; and what else the plan sets."""
    body = read_mapping(path, "plan")
    if not isinstance(body.get("arms"), dict) or not body["arms"]:
        raise BadOption("plan", "must hold 'arms:' with a name and flags for each", path)
    for key in body:
        if key not in KEYS:
            raise BadOption("plan", f"has {key!r}, which is none of {', '.join(KEYS)}{did_you_mean(str(key), KEYS)}", path)
    published = published_in(path, body)
    arms = [
        Arm(str(name), flags_in(path, str(name), body.get("common"), own, typed), published=published.get(name) or {})
        for name, own in body["arms"].items()
    ]
    rest = {key: body[key] for key in DECLARED if body.get(key) is not None}
    if body.get("backbone"):
        rest["backbone"] = flags_in(path, BACKBONE, body.get("common"), body["backbone"], typed)
    return arms, rest


def published_in(path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of a YAML plan: the numbers to print beside ours, by arm."""
    published = body.get("published") or {}
    if not isinstance(published, dict) or not all(isinstance(numbers, dict) for numbers in published.values()):
        raise BadOption("plan", "must hold 'published:' as an arm and 'score: number' for each", path)
    for name in published:
        if name not in body["arms"]:
            raise BadOption("plan", f"has published numbers of an arm {name!r} that it does not have", path)
    return published


def flags_in(path: str, name: str, common: Any, own: Any, typed: Mapping[str, str]) -> dict[str, Any]:
    """The flags of an arm of a YAML plan."""
    if not isinstance(own, dict | None) or not isinstance(common, dict | None):
        raise BadOption("plan", f"must give arm {name!r} as 'flag: value' lines", path)
    values = flags.with_new_names({**(common or {}), **(own or {}), **typed})
    if wrong := [n for n in values if n in OURS and n not in typed]:
        raise BadOption("plan", f"must leave --{wrong[0]} to the comparison", path)
    if values.get("plugin") and "plugin" not in typed:
        raise BadOption("plugin", f"must be typed: {path} names {values['plugin']}, and no code runs because a file names it")
    parsed = {n: value_of(n, v) if n in flags.FIELDS else v for n, v in values.items()}
    try:
        flags.check(parsed)
    except BadOption as error:
        raise BadOption(error.option, f"{error.rule}, in arm {name!r} of {path}", error.value) from None
    return {n: v for n, v in parsed.items() if v is not None}


# ---------------------------------------------------------------- plan.json


def read(folder: Path) -> Plan | None:
    """The plan of a comparison that has one."""
    try:
        body = json.loads(read_plain(folder / FILE, MOST))
        claimed = body.pop("sha256")
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError, OSError, RecursionError):
        raise BadOption("output_dir", f"must hold a whole {FILE}", str(folder)) from None
    if digest_of(body) != claimed:
        raise BadOption("output_dir", f"holds a {FILE} that was changed since it was written", str(folder))
    arms = body["arms"] if isinstance(body.get("arms"), list) and all(isinstance(arm, dict) for arm in body["arms"]) else [{}]
    strange = set(body) - {f.name for f in dataclasses.fields(Plan)} - set(FOLLOWING)
    strange |= {name for arm in arms for name in arm} - {f.name for f in dataclasses.fields(Arm)}
    if strange:
        raise BadOption("output_dir", f"holds a {FILE} of a version with other entries ({', '.join(sorted(strange))})", str(folder))
    values: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in body.items() if n not in (*FOLLOWING, "arms")}
    try:
        return sane(Plan(arms=tuple(Arm(**arm) for arm in arms), **values))
    except TypeError:  # an entry is missing, or of another kind
        raise BadOption("output_dir", f"must hold a whole {FILE}", str(folder)) from None


def sane(plan: Plan) -> Plan:
    """NOTE: a digest finds damage, not malice: every entry must be of its kind."""
    for part in (plan, *plan.arms):
        for name, hint in typing.get_type_hints(type(part)).items():
            if not fits(getattr(part, name), hint):
                raise TypeError(name)
    if not plan.arms or not plan.seeds or plan.threads < 1 or not all(0 <= seed < 2**63 for seed in plan.seeds):
        raise TypeError
    return plan


def fits(value: Any, hint: Any) -> bool:
    """Whether a value of JSON is of the kind that an annotation names."""
    if typing.get_origin(hint) is tuple:
        return isinstance(value, tuple) and all(fits(item, typing.get_args(hint)[0]) for item in value)
    if isinstance(hint, types.UnionType):
        return any(fits(value, kind) for kind in typing.get_args(hint))
    if hint is float:
        return type(value) in (int, float) and math.isfinite(value)
    return type(value) is int if hint is int else isinstance(value, typing.get_origin(hint) or hint)


def permit(old: Plan, typed: Mapping[str, str]) -> None:
    """That a plan may be gone on with: its flags are checked as if they were typed. NOTE: no code runs because a file names it, and a plan
    is a file."""
    given = {str(Path(path).resolve()) for path in alternatives("plugin", typed["plugin"])} if "plugin" in typed else set()
    if missing := [path for path in old.plugins if path not in given]:
        raise BadOption("plugin", f"must be typed: the plan names {missing[0]}, and no code runs because a file names it")
    try:
        for arm in (*old.arms, Arm(BACKBONE, old.backbone)):
            flags.check(arm.flags)
    except BadOption as error:
        raise BadOption(error.option, f"{error.rule}, in {FILE}", error.value) from None


def extended(old: Plan, arms: Sequence[Arm], typed: Mapping[str, Any]) -> Plan:
    """A plan that has begun, with arms and seeds that join it; all else is as it was declared."""
    for name in ("baseline", "metric", "margin", "looks", "calibrated", "within", "backbone"):
        if name in typed and typed[name] != getattr(old, name):
            now = getattr(old, name)
            raise BadOption(name, f"contradicts the plan, which has {'the default' if now is None else now}", typed[name])
    known = {arm.name: arm for arm in old.arms}
    for arm in arms:
        if arm.name in known and dict(arm.flags) != dict(known[arm.name].flags):
            before, now = known[arm.name].flags, arm.flags
            differ = sorted(n for n in {*before, *now} if before.get(n) != now.get(n))
            rule = f"has arm {arm.name!r} with another --{differ[0]} ({before.get(differ[0], 'the default')}): take another directory"
            raise BadOption("output_dir", rule, now.get(differ[0], "the default"))
    joined = tuple(dataclasses.replace(arm, exploratory=True) for arm in arms if arm.name not in known)
    more = tuple(seed for seed in typed.get("seeds", ()) if seed not in old.seeds)
    return dataclasses.replace(old, arms=old.arms + joined, seeds=old.seeds + more, later_seeds=old.later_seeds + more)
