"""A GPT with experts in the files of Hugging Face's Mixtral and Qwen 3 MoE, which compute the same; see `gpt_names`."""

from collections.abc import Callable, Mapping
from typing import Any

from common import UserError
from common.workloads import gpt_names
from common.workloads.gpt_shape import Shape

# What config.json lacks if it is the default of transformers; see `gpt_names`.
FAMILY: dict[str, dict[str, Any]] = {
    "mixtral": {
        "num_key_value_heads": 8,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-5,
        "num_experts": 8,
        "num_experts_per_tok": 2,
    },
    "qwen3_moe": gpt_names.OF_QWEN
    | {
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": False,
    },
}
# Weights of chosen experts add up to one, each layer has experts, and its input reaches the router as it is.
FIXED = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "router_jitter_noise": 0.0}
ARCHITECTURES = {"mixtral": "MixtralForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}
LAYER = {"mixtral": "block_sparse_moe", "qwen3_moe": "mlp"}
EXPERT = {
    "mixtral": {"gate": "w1", "down": "w2", "up": "w3"},
    "qwen3_moe": {part: f"{part}_proj" for part in ("gate", "up", "down")},
}


def names(shape: Shape, experts: int) -> dict[str, str]:
    """Their name of each tensor, by our name."""
    kind = _kind(shape)
    found = {ours: theirs for ours, theirs in gpt_names.names(shape).items() if ".mlp." not in ours}
    for i in range(shape.num_layers):
        theirs = f"model.layers.{i}.{LAYER[kind]}"
        found[f"blocks.{i}.mlp.router.weight"] = f"{theirs}.gate.weight"
        for expert in range(experts):
            for part, name in EXPERT[kind].items():
                found[f"blocks.{i}.mlp.experts.{expert}.{part}.weight"] = f"{theirs}.experts.{expert}.{name}.weight"
    return found


def _kind(shape: Shape) -> str:
    return "qwen3_moe" if shape.qk_norm else "mixtral"


def to_config(shape: Shape, experts: int, args: dict[str, Any]) -> dict[str, Any]:
    """The part of config.json that says what the model computes.

    Args:
        shape: of the model.
        experts: of each layer.
        args: the run's flags.

    Raises:
        UserError: neither Mixtral nor Qwen 3 MoE computes that; names the flags.
    """
    plain = {"router": "softmax", "shared_experts": 0, "capacity_factor": 0.0, "qkv_bias": False}
    if wrong := [f"--{name.replace('_', '-')} {args[name]}" for name, value in plain.items() if args[name] != value]:
        raise UserError(f"a model with experts and {', '.join(wrong)} has no equal in transformers' Mixtral or Qwen 3")
    kind = _kind(shape)
    config = gpt_names.to_config(shape) | {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        "num_experts_per_tok": args["top_k"],
        "router_aux_loss_coef": args["balance_loss"] / args["top_k"],  # transformers' loss is top_k times ours
        "sliding_window": None,
    }
    if kind == "mixtral":
        return config | {"num_local_experts": experts}
    return config | {"num_experts": experts, "moe_intermediate_size": shape.mlp_width, "norm_topk_prob": True}


def from_config(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments of `Shape`, and flags of the experts, of our model that is equal to one with this config.json.

    Args:
        config: of a kind in `FAMILY`.

    Raises:
        UserError: our model cannot be equal to it; names each value that differs.
        KeyError, TypeError, AttributeError: it is not a config.json of transformers.
    """
    told: dict[str, Any] = FIXED | FAMILY[config["model_type"]] | dict(config)
    told["mlp_only_layers"] = told["mlp_only_layers"] or []
    told["num_experts"] = told.get("num_local_experts", told["num_experts"])
    told["intermediate_size"] = told.get("moe_intermediate_size", told["intermediate_size"])
    for key in ("num_experts", "num_experts_per_tok"):
        if type(told[key]) is not int or told[key] < 1:
            raise UserError(f"config.json has {key} {told[key]!r:.40}, which a model cannot have")
    sizes = gpt_names.from_config(told, FAMILY, gpt_names.FIXED | FIXED)
    ours = {"experts": told["num_experts"], "top_k": told["num_experts_per_tok"]}
    return sizes, ours | {"router": "softmax", "shared_experts": 0}


def names_in(
    dense: Callable[[Mapping[str, Any]], dict[str, str]], shape: Shape, routing: Any, config: Mapping[str, Any]
) -> dict[str, str]:
    """As `gpt.GPT.names_in`, of a model with experts.

    Args:
        dense: that of a model without; its folders have all but the experts.
        shape: of the model.
        routing: a `moe.Routing`.
        config: what config.json holds.
    """
    if config.get("model_type") not in FAMILY:
        return dense(config)
    sizes, experts = from_config(config)
    gpt_names.check_flags(vars(shape) | vars(routing), vars(Shape(**sizes)) | experts)
    return {theirs: ours for ours, theirs in names(shape, routing.experts).items()}
