"""A GPT with experts in the files of Hugging Face's Mixtral, which computes the same; see `gpt_names`."""

from typing import Any

from common import UserError
from common.workloads import gpt_names
from common.workloads.gpt_shape import Shape

EXPERT = {"gate": "w1", "down": "w2", "up": "w3"}


def names(shape: Shape, experts: int) -> dict[str, str]:
    """Their name of each tensor, by our name."""
    found = {ours: theirs for ours, theirs in gpt_names.names(shape).items() if ".mlp." not in ours}
    for i in range(shape.num_layers):
        theirs = f"model.layers.{i}.block_sparse_moe"
        found[f"blocks.{i}.mlp.router.weight"] = f"{theirs}.gate.weight"
        for expert in range(experts):
            for part, name in EXPERT.items():
                found[f"blocks.{i}.mlp.experts.{expert}.{part}.weight"] = f"{theirs}.experts.{expert}.{name}.weight"
    return found


def to_config(shape: Shape, experts: int, args: dict[str, Any]) -> dict[str, Any]:
    """The part of config.json that says what the model computes.

    Args:
        shape: of the model.
        experts: of each layer.
        args: the run's flags.

    Raises:
        UserError: Mixtral does not compute that; names the flags.
    """
    plain = {"router": "softmax", "shared_experts": 0, "capacity_factor": 0.0, "qkv_bias": False, "qk_norm": False}
    if wrong := [f"--{name.replace('_', '-')} {args[name]}" for name, value in plain.items() if args[name] != value]:
        raise UserError(f"a model with experts and {', '.join(wrong)} has no equal in transformers' Mixtral")
    return gpt_names.to_config(shape) | {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": experts,
        "num_experts_per_tok": args["top_k"],
        "router_aux_loss_coef": args["balance_loss"] / args["top_k"],  # transformers' loss is top_k times ours
        "sliding_window": None,
    }
