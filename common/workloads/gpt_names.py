"""A GPT's sizes and tensors in the files of Hugging Face's Llama, Mistral, Qwen 2 and Qwen 3.

These models compute the same from tensors of the same layout, so only names change.
"""

import math
from collections.abc import Mapping
from typing import Any

from common import UserError
from common.workloads.gpt_shape import Shape

LAYER = {
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.query_norm": "self_attn.q_norm",
    "attention.key_norm": "self_attn.k_norm",
    "attention.output": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
WITH_BIAS = ("attention.query", "attention.key", "attention.value")
# Sizes and constants of the model: our flags to keys of config.json.
SIZES = {
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "width": "hidden_size",
    "mlp_width": "intermediate_size",
    "tied": "tie_word_embeddings",
    "rope_base": "rope_theta",
    "norm_eps": "rms_norm_eps",
    "head_width": "head_dim",
}
# Flags that are no key: a model_type has the first two or has them not, and the third is a dict.
OPTIONS = ("qkv_bias", "qk_norm", "rope_scaling")
# Values in config.json that a model must have to be ours.
FIXED: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "partial_rotary_factor": 1.0,
}
# Defaults of transformers for keys that a config.json lacks.
DEFAULTS = FIXED | {
    "rope_theta": 10_000.0,
    "rms_norm_eps": 1e-6,
    "num_key_value_heads": None,
    "head_dim": None,
    "tie_word_embeddings": False,
    "sliding_window": None,
    "use_sliding_window": True,
    "max_window_layers": 0,  # layers of a Qwen before the first one with a window
}
OF_QWEN = {"num_key_value_heads": 32, "sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 28}
FAMILY: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": OF_QWEN,
    "qwen3": OF_QWEN | {"head_dim": 128},
}
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
# What others do that our model cannot.
OTHERS = {
    "gpt2": "learned positions, LayerNorm, and an MLP without a gate",
    "gpt_neox": "LayerNorm, and an MLP without a gate",
    "gemma": "scaled embeddings, norms of weight + 1, and a GELU",
    "gemma2": "scaled embeddings, norms after each part, and capped logits",
    "gemma3_text": "scaled embeddings, norms after each part, and sliding windows",
    "phi3": "one matrix for query, key and value, and one for gate and up",
    "mixtral": "a mixture of experts",
    "qwen2_moe": "a gate on its shared expert",
    "qwen3_moe": "a mixture of experts",
    "llama4_text": "a mixture of experts",
    "smollm3": "layers without positions",
}
CONTEXT = "original_max_position_embeddings"
# The numbers of each kind of `Shape.rope_scaling`, by the keys that they have in config.json.
SCALINGS = {
    "default": [],
    "linear": ["factor"],
    "llama3": ["factor", "low_freq_factor", "high_freq_factor", CONTEXT],
}


def names(shape: Shape) -> dict[str, str]:
    """Their name of each tensor, by our name."""
    found = {"embed.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight"}
    if not shape.tied:
        found["head.weight"] = "lm_head.weight"
    for i in range(shape.num_layers):
        for ours, theirs in LAYER.items():
            if shape.qk_norm or ours not in ("attention.query_norm", "attention.key_norm"):
                found[f"blocks.{i}.{ours}.weight"] = f"model.layers.{i}.{theirs}.weight"
            if shape.qkv_bias and ours in WITH_BIAS:
                found[f"blocks.{i}.{ours}.bias"] = f"model.layers.{i}.{theirs}.bias"
    return found


def to_config(shape: Shape) -> dict[str, Any]:
    """The part of config.json that says what the model computes.

    Raises:
        UserError: no model of transformers computes that.
    """
    if shape.qkv_bias and shape.qk_norm:
        raise UserError("a model with both --qkv-bias and --qk-norm has no equal in transformers")
    model_type = "qwen3" if shape.qk_norm else "qwen2" if shape.qkv_bias else "llama"
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[model_type]],
        "model_type": model_type,
        "hidden_act": "silu",
        "vocab_size": shape.vocab_size,
        **{theirs: getattr(shape, ours) for ours, theirs in SIZES.items()},
    }
    kind, *numbers = shape.rope_scaling.split(":")
    if kind:
        scaling = dict(zip(SCALINGS[kind], map(float, numbers), strict=True))
        config["rope_scaling"] = {"rope_type": kind, **scaling}
    if kind == "llama3":
        config["rope_scaling"][CONTEXT] = int(scaling[CONTEXT])  # a number of tokens, which must be whole
    return config


def from_config(
    config: Mapping[str, Any], family: Mapping[str, dict[str, Any]] = FAMILY, fixed: Mapping[str, Any] = FIXED
) -> dict[str, Any]:
    """The sizes and options of our model that is equal to one with this config.json: arguments of `Shape`.

    Args:
        config: what config.json holds.
        family: the kinds that our model can be, and what each has if its config.json does not say it.
        fixed: what it must have.

    Raises:
        UserError: our model cannot be equal to it; names each value that differs.
        KeyError, TypeError, AttributeError: it is not a config.json of transformers.
    """
    model_type = config.get("model_type", "")
    if model_type not in family:
        reason = OTHERS.get(model_type)
        raise UserError(
            f"config.json has model_type {model_type!r}{f', with {reason}' if reason else ''}: it must be one of "
            f"{', '.join(family)}"
        )
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    found = DEFAULTS | family[model_type] | dict(config) | rope
    _check_sizes(found)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    differences = [f"{key} {found[key]!r} (must be {value!r})" for key, value in fixed.items() if found[key] != value]
    if kind not in SCALINGS:
        differences.append(f"rope_type {kind!r} (must be one of {', '.join(SCALINGS)})")
    window = found["sliding_window"]
    longest = found.get("max_position_embeddings")
    if _slides(found) and not (longest and longest <= window):
        differences.append(f"sliding_window {window} (must be null, or at least max_position_embeddings {longest})")
    if differences:
        raise UserError(f"config.json describes a {model_type} that our GPT cannot be: {', '.join(differences)}")
    sizes = {ours: found[theirs] for ours, theirs in SIZES.items()}
    sizes["num_kv_heads"] = sizes["num_kv_heads"] or sizes["num_heads"]
    sizes["head_width"] = sizes["head_width"] or sizes["width"] // sizes["num_heads"]
    found.setdefault(CONTEXT, longest)
    numbers = [str(found[key]) for key in SCALINGS[kind]]
    return sizes | {
        "vocab_size": found["vocab_size"],
        "qkv_bias": model_type == "qwen2",
        "qk_norm": model_type.startswith("qwen3"),
        "rope_scaling": ":".join([kind, *numbers]) if numbers else "",
    }


def check_flags(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    """Refuse a model that computes something else than that of a config.json, by the names of its flags.

    Raises:
        UserError: names the flags that would be right.
    """
    faults = [
        f"--{name.replace('_', '-')} {ours[name]} must be {value}"
        for name, value in theirs.items()
        if name not in ("vocab_size", "num_layers") and ours[name] != value
    ]
    if faults:  # a model of another vocabulary or depth can take what fits
        raise UserError(f"to be the model of its config.json, {', '.join(faults)}")


def _check_sizes(found: Mapping[str, Any]) -> None:
    """Refuse sizes that are none, such as a number in quotes, 0 heads, or Infinity."""
    for ours, theirs in {**SIZES, "vocab_size": "vocab_size"}.items():
        value = found[theirs]
        if ours == "tied":
            right = isinstance(value, bool)
        elif ours in ("rope_base", "norm_eps"):
            right = type(value) in (int, float) and 0 <= value < math.inf
        else:
            right = (value is None and ours in ("num_kv_heads", "head_width")) or (type(value) is int and value > 0)
        if not right:
            raise UserError(f"config.json has {theirs} {value!r:.40}, which a model cannot have")


def _slides(config: Mapping[str, Any]) -> bool:
    """Whether a layer attends only to a window of the tokens before."""
    if not (config["sliding_window"] and config["use_sliding_window"]):
        return False
    if config.get("layer_types"):
        return "sliding_attention" in config["layer_types"]
    return config["num_hidden_layers"] > config["max_window_layers"]
