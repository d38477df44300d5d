"""The command `python -m tools.llama`: a GPT of ours as the Llama of Hugging Face, and back.

The two compute the same, from tensors of the same layout, so only names change.
"""

import json
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from common import UserError
from common.workloads import gpt
from tools.checkpoint import Source, Tensors, beside, read, run, weights, write_start

LAYER = {
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
# Sizes of the model: our flags, and what a Llama's config.json calls them.
SIZES = {
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "width": "hidden_size",
    "mlp_width": "intermediate_size",
    "tied": "tie_word_embeddings",
}
# What makes a Llama a model of ours.
FIXED: dict[str, Any] = {
    "model_type": "llama",
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "rope_type": "default",
    "rope_theta": gpt.Shape.rope_base,
    "rms_norm_eps": gpt.Shape.norm_eps,
}
# What a config.json means that does not say it.
UNSAID = FIXED | {"model_type": "", "rms_norm_eps": 1e-6, "num_key_value_heads": 0, "tie_word_embeddings": False}


def names(shape: gpt.Shape) -> dict[str, str]:
    """Our name of each tensor to Llama's."""
    found = {"embed": "model.embed_tokens", "norm": "model.norm"} | ({} if shape.tied else {"head": "lm_head"})
    for i in range(shape.num_layers):
        found |= {f"blocks.{i}.{ours}": f"model.layers.{i}.{theirs}" for ours, theirs in LAYER.items()}
    return {f"{ours}.weight": f"{theirs}.weight" for ours, theirs in found.items()}


def renamed(tensors: Tensors, new: dict[str, str]) -> Tensors:
    """The tensors under their new names, of which none may be missing, nor one be left over."""
    odd = [f"{name} is missing" for name in new.keys() - tensors.keys()]
    odd += [f"{name} has no place" for name in tensors.keys() - new.keys()]
    if odd:
        raise UserError(f"these are not the tensors that config.json tells of: {', '.join(sorted(odd)[:5])}")
    return {new[name]: tensor for name, tensor in tensors.items()}


def to_config(shape: gpt.Shape, seq_len: int, dtype: str) -> dict[str, Any]:
    """The config.json that transformers reads.

    Args:
        shape: of the model.
        seq_len: that it was trained with; its weights know no limit.
        dtype: of the weights, such as "float32".
    """
    return {
        "architectures": ["LlamaForCausalLM"],
        **{key: value for key, value in FIXED.items() if key != "rope_type"},
        **{theirs: getattr(shape, ours) for ours, theirs in SIZES.items()},
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": seq_len,
        "torch_dtype": dtype,
        "bos_token_id": None,  # none of our tokens is special, or generating would stop at one
        "eos_token_id": None,
    }


def from_config(config: dict[str, Any]) -> gpt.Shape:
    """The shape of our model that computes what a Llama's config.json asks for.

    Raises:
        UserError: there is none; names each value that is another one here.
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    found = UNSAID | config | rope | ({"rope_type": rope["type"]} if "type" in rope else {})
    odd = [f"{key} {found[key]!r} (here {value!r})" for key, value in FIXED.items() if found[key] != value]
    if odd:
        raise UserError(f"the models here do not compute what config.json asks for: {', '.join(odd)}")
    shape = gpt.Shape(found["vocab_size"], **{ours: found[theirs] for ours, theirs in SIZES.items()})
    if (found.get("head_dim") or shape.width // shape.num_heads) != shape.width // shape.num_heads:
        raise UserError(f"heads of {found['head_dim']} are not here: {shape.width} / {shape.num_heads} would be")
    return shape


def export(path: Source, out: Path) -> None:
    """Write the newest whole checkpoint of a GPT as a folder that transformers.LlamaForCausalLM loads.

    The weights do not tell the number of heads, so the run's config.json must be where the run has it.

    Args:
        path: a run's folder, or one of its checkpoints.
        out: the folder to create.
    """
    with beside(out) as partial:
        folder, step, tensors = weights(path)
        file = folder.parent.parent / "config.json"
        try:
            args = json.loads(file.read_text())["args"]
            embedding = tensors["embed.weight"]
            shape = gpt.Shape(len(embedding), **{key: args[key] for key in SIZES})
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{folder} must be of a GPT, and {file} tell its number of heads: {error!r}") from error
        tensors = renamed(tensors, names(shape))
        config = to_config(shape, args.get("seq_len", 2048), str(embedding.dtype).removeprefix("torch."))
        partial.mkdir()
        (partial / "config.json").write_text(json.dumps(config, indent=1))
        save_file(tensors, partial / "model.safetensors", metadata={"format": "pt", "step": str(step)})
    print(f"{out}: {len(tensors)} tensors of step {step} of {folder}")


def import_(path: Source, out: Path) -> None:
    """Make a checkpoint of step 0, for --resume, from a Llama's folder of config.json and model*.safetensors.

    Args:
        path: the folder.
        out: the folder to create; its config.json, for --config, has the sizes of the model.
    """
    with beside(out) as partial:
        file = path / "config.json"
        try:
            shape = from_config(json.loads(file.read_text()))
            ours = {theirs: name for name, theirs in names(shape).items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{file} is not the config.json of a Llama: {error!r}") from error
        found = read(*(sorted(path.glob("model*.safetensors")) or [path / "model.safetensors"]))
        found = {name: tensor for name, tensor in found.items() if not name.endswith("rotary_emb.inv_freq")}  # computed
        tensors = renamed(found, ours)
        flags = {key: getattr(shape, key) for key in SIZES}
        write_start(partial, tensors, path.name)
        (partial / "config.json").write_text(json.dumps({"args": flags}, indent=1))
    told = ", ".join(f"{key} {value}" for key, value in flags.items())
    print(f"{out}: {len(tensors)} tensors; {told}, vocabulary {shape.vocab_size}")
    print(f"train from them: recipes/ddp_gpt --resume {out} --config {out}/config.json --seq-len N --tokenizer FILE")


if __name__ == "__main__":
    run({"export": export, "import": import_}, "tools.llama", __doc__)
