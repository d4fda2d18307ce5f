"""Attention swapped in place, in any timm model: the old projections, norms and drops move into the new layer."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

import layers
from utils import BadOption, Call, check_options, options_of, parse_pattern, say

# Classes known to compute softmax(q k^T / sqrt(D)) v over (B, N, C), and nothing else. By exact name, so that neither a
# subclass nor a look-alike gets through. A plain attention of one's own is added with PLAIN.add("package.module.Class").
PLAIN = {
    "timm.layers.attention.Attention",
    "timm.models.vision_transformer.Attention",  # where older timm has it
    "timm.models.convit.MHSA",
    "timm.models.davit.WindowAttention",
    "timm.models.metaformer.Attention",
}
MOVED = ("qkv", "q_norm", "k_norm", "attn_drop", "norm", "proj", "proj_drop")
# Options of every layer that the model has settled: the modules that they would make are the model's.
SETTLED = ("head_dim", "qkv_bias", "proj_bias", "qk_norm", "attention_dropout", "dropout")

HEADS = ("num_heads", "heads")
PROJECTIONS = ("qkv", "qk", "q", "kv", "wq", "q_proj", "query", "in_proj", "in_proj_weight")
CLUES = {
    r"rel_?pos|relative_position|attention_bias|rel_ind|cpb|crpe|meta_mlp": "relative-position bias",
    r"rope|rotary|^rot_": "rotary position embedding",
    r"^proj_[lw]$|talking": "talking heads",
    r"^gat(e|ing)": "gating",
    r"^lambda": "differential attention",
    r"temperature|logit_scale": "a learned temperature",
    r"pool|stride|^sr$|^size$|^ws$": "pooled or windowed tokens",
}


def swap_attention(model: nn.Module, layer_spec: str, *, blocks: Sequence[int] | None = None, **options: Any) -> list[str]:
    """Puts layers in the place of a model's attention; returns the names of the modules that were swapped.

    `layer_spec` is a layer ("KvtAttention(K=9)") or a pattern over depth ("Attention*6,KvtAttention(K=9)*6"). Depth counts
    the model's attention modules in order, or those numbered in `blocks`; the others stay as they are. `options` go to the
    layers that have them; one that no layer of the pattern has is said to be unused. The weights are the very same tensors
    under the same state-dict names; a layer's own (`conv.*`) are made anew and are the only new names. Everything is checked
    first: if any chosen module computes more than plain attention, BadOption names it and the model is unchanged.
    """
    found = find_attention(model)
    if not found:
        raise BadOption("layer", f"{layer_spec} needs attention to replace, and {type(model).__name__} has none that can be told")
    chosen = _choose(list(found), blocks)
    calls = parse_pattern(layer_spec, len(chosen), "layer")
    _check_spec(calls, options)
    _refuse_what_is_not_plain(model, found, dict(zip(chosen, calls, strict=True)))

    contexts = {path: token_context(model, path) for path in chosen}
    new = {id(found[path]): _convert(found[path], call, contexts[path], options) for path, call in zip(chosen, calls, strict=True)}
    _announce_context(model, calls, contexts, options)
    for parent in list(model.modules()):  # not by name: a module that is shared stands under several
        for name, child in parent._modules.items():
            if id(child) in new:
                parent._modules[name] = new[id(child)]
    return chosen


def find_attention(model: nn.Module) -> dict[str, nn.Module]:
    """Path to module of everything that attends from tokens to tokens, plain or not, in depth order. Attention pools do not."""
    found: dict[str, nn.Module] = {}
    outer = None
    for path, module in model.named_modules():
        if outer is not None and path.startswith(outer):
            continue  # a part of the attention found last
        if _attends(module):
            found[path] = module
            outer = f"{path}." if path else ""
    return found


def token_context(model: nn.Module, path: str) -> dict[str, Any]:
    """`grid` and `num_prefix_tokens` at an attention module; empty where the model does not tell.

    Only models with one stack of `blocks` over one grid tell: in a pyramid, patch_embed.grid_size holds for the first stage.
    """
    parts = path.split(".")
    for depth in reversed([i for i, part in enumerate(parts) if part == "blocks"]):
        owner = model.get_submodule(".".join(parts[:depth]))
        grid = getattr(getattr(owner, "patch_embed", None), "grid_size", None)
        prefix = getattr(owner, "num_prefix_tokens", None)
        if grid is not None and prefix is not None:
            return {"grid": (int(grid[0]), int(grid[1])), "num_prefix_tokens": int(prefix)}
    return {}


def _attends(module: nn.Module) -> bool:
    if isinstance(module, layers.TokenMixer):
        return True
    if "pool" in type(module).__module__.rpartition(".")[2]:  # timm.layers.attention_pool and its like: tokens to one vector
        return False
    tensors = module._modules | module._parameters
    return any(hasattr(module, name) for name in HEADS) and any(tensors.get(name) is not None for name in PROJECTIONS)


def _choose(paths: list[str], blocks: Sequence[int] | None) -> list[str]:
    if blocks is None:
        return paths
    for index in blocks:
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < len(paths):
            raise BadOption("blocks", f"must be numbers from 0 to {len(paths) - 1}", index)
    if not blocks or len(set(blocks)) < len(blocks):
        raise BadOption("blocks", "must name at least one block, and each once", list(blocks))
    return [paths[index] for index in sorted(blocks)]


def _check_spec(calls: list[Call], options: dict[str, Any]) -> None:
    """Options in a call must be that layer's, shared ones some layer's, and neither the model's. Shared ones may go unused."""
    for call in calls:
        check_options(call.name, layers.LAYERS[call.name], call.options)
    for name in [*options, *(name for call in calls for name in call.options)]:
        if name in SETTLED:
            raise BadOption(name, "cannot be given for a swap: the modules that it describes are kept from the model")
    for name, value in options.items():
        if not any(name in options_of(layers.LAYERS[layer]) for layer in layers.LAYERS):
            check_options(calls[0].name, layers.LAYERS[calls[0].name], {name: value})  # raises, naming the nearest
    if unused := layers.unused_options(calls, options):
        say(f"ignored by {' and '.join(dict.fromkeys(call.name for call in calls))}: {', '.join(unused)}")


# ---------------------------------------------------------------- what can be swapped


def _refuse_what_is_not_plain(model: nn.Module, found: dict[str, nn.Module], chosen: dict[str, Call]) -> None:
    reasons = {path: why for path in chosen if (why := _why_not(model, path, found[path]))}
    if not reasons:
        return
    path, why = next(iter(reasons.items()))
    more = f", and {len(reasons) - 1} more" if len(reasons) > 1 else ""
    fit = [i for i, p in enumerate(found) if not _why_not(model, p, found[p])]
    advice = f"; blocks={fit} can be swapped" if fit else ""
    rule = f"{chosen[path].name} cannot take the place of {path or 'the model itself'}{more}: it {why}; nothing was changed{advice}"
    raise BadOption("layer", rule)


def _why_not(model: nn.Module, path: str, module: nn.Module) -> str:
    """Why a module cannot be replaced with its meaning kept; '' if it can."""
    kind = f"{type(module).__module__}.{type(module).__qualname__}"
    ours = isinstance(module, layers.TokenMixer) and type(module).forward is layers.TokenMixer.forward
    if not path:
        return f"is {kind}, with no place to put another: give the model that holds it"
    if kind not in PLAIN and not ours:
        return f"is {kind}, not known to be plain attention over (B, N, C){_clues(module)}"
    held = {name.partition(".")[0] for name, _ in [*module.named_parameters(), *module.named_buffers()]}
    if extra := sorted(held - set(MOVED)):
        return f"holds {', '.join(extra)} besides plain attention{_clues(module)}"
    if "forward" in vars(module) or any(True for _ in _hooks(module)):
        return "has a forward or hooks of its own, which would be lost"
    return _why_not_shape(module) or _why_not_masked(model, path)


def _why_not_shape(module: Any) -> str:
    qkv, proj, heads = module.qkv, module.proj, module.num_heads
    if not isinstance(qkv, nn.Linear) or not isinstance(proj, nn.Linear):
        return f"has projections that are not Linear ({type(qkv).__name__}, {type(proj).__name__})"
    inner = qkv.out_features // 3
    if qkv.out_features != 3 * inner or inner % heads or (proj.in_features, proj.out_features) != (inner, qkv.in_features):
        widths = f"{qkv.in_features} to {qkv.out_features}, {proj.in_features} to {proj.out_features}, {heads} heads"
        return f"has an output of another width than its input, or uneven heads ({widths})"
    if abs(float(module.scale) * (inner // heads) ** 0.5 - 1) > 1e-6:
        return f"scales logits by {module.scale}, not by 1/sqrt({inner // heads})"
    return ""


def _why_not_masked(model: nn.Module, path: str) -> str:
    parts = path.split(".")
    for depth in range(len(parts)):
        owner = model.get_submodule(".".join(parts[:depth]))
        if "patch_valid" in inspect.signature(owner.forward).parameters:
            return f"is masked by {type(owner).__name__}, which packs images of several sizes into one batch"
    return ""


def _clues(module: nn.Module) -> str:
    """': it has gating (gate), ...', from the names of what the module holds and of what its forward takes. A help, not the check."""
    held = {**vars(module), **module._modules, **module._parameters, **module._buffers}
    names = [n for n, part in held.items() if part is not None and part is not False and not n.startswith("_")]
    names += [n for n in inspect.signature(module.forward).parameters if n not in names]
    seen: dict[str, list[str]] = {}
    if not isinstance(held.get("qkv"), nn.Linear):
        seen["no single Linear qkv"] = [n for n in PROJECTIONS if held.get(n) is not None]
    for name in names:
        for pattern, meaning in CLUES.items():
            if re.search(pattern, name):
                seen.setdefault(meaning, []).append(name)
    return ": it has " + ", ".join(f"{meaning} ({', '.join(which)})" for meaning, which in seen.items()) if seen else ""


def _hooks(module: nn.Module) -> Iterator[Any]:
    for kind in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
        yield from getattr(module, kind).values()


# ---------------------------------------------------------------- the swap of one module


def _convert(old: Any, call: Call, context: dict[str, Any], options: dict[str, Any]) -> nn.Module:
    """The new layer around the old one's own modules. The model is not touched yet."""
    wanted = options_of(layers.LAYERS[call.name])
    mine = {name: value for name, value in {**context, **options}.items() if name in wanted}
    qkv, proj = old.qkv, old.proj
    if qkv.out_features != 3 * qkv.in_features:
        mine["head_dim"] = qkv.out_features // (3 * old.num_heads)
    layer = layers.build(call, dim=qkv.in_features, num_heads=old.num_heads, **mine)
    if type(layer).forward is not layers.TokenMixer.forward:
        raise BadOption("layer", "must use the shared projections, or trained ones cannot be moved into it", call.name)
    for name, part in (("qkv", qkv), ("proj", proj)):
        if getattr(layer, name).weight.shape != part.weight.shape:
            raise BadOption("layer", f"must have {name} of shape {tuple(part.weight.shape)} for this model", str(call))
    # Before the moved modules come in: they keep their own device, type and mode.
    layer.to(device=qkv.weight.device, dtype=qkv.weight.dtype).train(old.training)
    for name in MOVED:
        if isinstance(part := old._modules.get(name), nn.Module):
            setattr(layer, name, part)
    return layer


def _announce_context(model: nn.Module, calls: list[Call], contexts: dict[str, dict[str, Any]], options: dict[str, Any]) -> None:
    for call, (path, context) in zip(calls, contexts.items(), strict=True):
        given = {**options, **call.options}
        asked = [n for n in layers.CONTEXT if n in options_of(layers.LAYERS[call.name]) and n not in given]
        if missing := [n for n in asked if n not in context]:
            say(f"{path}: the model does not tell {' and '.join(missing)}; {call.name} takes its defaults")
            return
        if "grid" in asked and any(getattr(m, "dynamic_img_size", False) for m in model.modules()):
            say(f"grid of {call.name}: {context['grid']} (the model takes images of any size; the layer is for this one)")
            return
