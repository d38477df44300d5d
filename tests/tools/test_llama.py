"""Our GPT is the Llama of transformers: the same logits there and back, and what is not the same is refused."""

import copy
import dataclasses
import json
import re
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import transformers
from common import UserError, manifest
from common.state import checkpoint
from common.train import initial
from common.workloads import gpt, gpt_names, moe, moe_names
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tools.checkpoint import files as exchange
from tools.llama import convert as llama

from tests.harness import runner
from tests.harness.states import make_saver

pytestmark = [
    pytest.mark.usefixtures("group"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),  # as the commands mean it
]

SHAPES = {
    "grouped": gpt.Shape(19, num_layers=3, num_heads=4, width=24, num_kv_heads=2, mlp_width=20),
    "tied": gpt.Shape(19, num_layers=2, num_heads=3, width=12, mlp_width=16, tied=True),
}
# Logits are about 1, and transformers takes norms and angles in float32, also of a model in float64. A mutant differs
# by WRONG at least.
TOLERANCE, WRONG = 5e-5, 1e-2


def random_weights(state: dict[str, torch.Tensor], dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    """So large, and norms so unequal, that every term matters."""
    generator = torch.Generator().manual_seed(1)
    return {
        name: (torch.randn(tensor.shape, generator=generator, dtype=torch.float64) * 0.3 + (tensor.ndim == 1)).to(dtype)
        for name, tensor in state.items()
    }


def make_ours(shape: gpt.Shape, dtype: torch.dtype = torch.float64) -> gpt.GPT:
    model = gpt.GPT(shape).to(dtype)
    model.load_state_dict(random_weights(model.state_dict(), dtype))
    return model


def save_run(run: Path, model: gpt.GPT) -> Path:
    """What a recipe leaves: its flags, and a checkpoint of step 7 with an optimizer's state."""
    run.mkdir(exist_ok=True)
    sizes = dataclasses.asdict(model.shape)
    flags = {key: sizes[key] for key in (*gpt_names.SIZES, *gpt_names.OPTIONS)} | {"seq_len": 16, "lr": 0.1}
    (run / "config.json").write_text(json.dumps({"args": flags}))
    state = model.state_dict() | {"optimizer.embed.weight.step": torch.tensor(7.0)}
    make_saver(run).save(7, state, 70, last=True)
    return run


def make_theirs(tied: bool = False, **changes: Any) -> Any:
    sizes = {"hidden_size": 40, "intermediate_size": 44, "num_hidden_layers": 3, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "vocab_size": 256, "rms_norm_eps": 1e-5, "tie_word_embeddings": tied}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**(sizes | changes))).double()
    state = random_weights(dict(model.named_parameters()))
    model.load_state_dict(state, strict=False)
    return model.eval()


def save_theirs(model: Any, folder: Path, **how: Any) -> Path:
    model.save_pretrained(folder, **how)
    return folder


def edit(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    changed = {key: value for key, value in (config | changes).items() if value != "absent"}
    (folder / "config.json").write_text(json.dumps(changed))


@torch.no_grad()
def difference(ours: Any, theirs: Any, length: int = 13) -> float:
    rows = torch.randint(ours.shape.vocab_size, (2, length), generator=torch.Generator().manual_seed(2))
    wanted = theirs(rows).logits
    assert 0.1 < wanted.std() < 100
    return float((ours(rows) - wanted).abs().max())


def imported(start: Path, dtype: torch.dtype = torch.float64) -> gpt.GPT:
    """Our model with the sizes and weights of what was imported."""
    path, _ = checkpoint.choose(start)
    flags = json.loads((start / "config.json").read_text())["args"]
    assert flags.pop("balance_loss", 0.003) == 0.003
    routing = {field.name: flags.pop(field.name, 1) for field in dataclasses.fields(moe.Routing)}
    model = moe.with_experts(gpt.GPT(gpt.Shape(**flags)), moe.Routing(**routing)).to(dtype)
    checkpoint.check_fits(path, model)
    checkpoint.load(path, model.state_dict())
    return model


# --- there ---


def save_run_with_experts(run: Path) -> tuple[gpt.GPT, Path]:
    """What moe_gpt leaves of a model with random weights."""
    routing = moe.Routing(experts=3, top_k=2)
    model = moe.with_experts(gpt.GPT(next(iter(SHAPES.values()))), routing).double()
    model.load_state_dict(random_weights(model.state_dict()))
    save_run(run, model)
    flags = json.loads((run / "config.json").read_text())["args"]
    flags |= dataclasses.asdict(routing) | {"balance_loss": 0.02}
    (run / "config.json").write_text(json.dumps({"args": flags}))
    return model, run


def test_experts_are_exported_as_mixtral(tmp_path: Path) -> None:
    ours, run = save_run_with_experts(tmp_path / "run")
    llama.export(run, tmp_path / "out")
    theirs, told = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True, experts_implementation="eager"
    )
    assert not any(told.values()), "nothing missing, left over or of another shape"
    assert isinstance(theirs, transformers.MixtralForCausalLM)
    assert theirs.config.router_aux_loss_coef == 0.01
    assert difference(ours, theirs) < TOLERANCE


@pytest.mark.parametrize(
    ("flag", "value"), [("router", "sigmoid"), ("shared_experts", 1), ("capacity_factor", 1.25), ("qkv_bias", True)]
)
def test_experts_that_mixtral_has_not_are_refused(flag: str, value: Any, tmp_path: Path) -> None:
    _, run = save_run_with_experts(tmp_path / "run")
    flags = json.loads((run / "config.json").read_text())["args"]
    shape = gpt.Shape(256, 3, 4, 40)
    assert moe_names.to_config(shape, 3, flags)["model_type"] == "mixtral"
    with pytest.raises(UserError, match=f"--{flag.replace('_', '-')} {value} has no equal in transformers' Mixtral"):
        moe_names.to_config(shape, 3, flags | {flag: value})


def test_model_without_experts_refuses_those_with() -> None:
    with pytest.raises(
        UserError, match="'mixtral', with a mixture of experts: it must be one of llama, mistral, qwen2"
    ):
        make_ours(SHAPES["tied"]).names_in({"model_type": "mixtral"})


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_what_is_exported_computes_the_same(shape: gpt.Shape, dtype: torch.dtype, tmp_path: Path) -> None:
    ours = make_ours(shape, dtype)
    llama.export(save_run(tmp_path / "run", ours), tmp_path / "out")
    theirs, told = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(told.values()), "nothing missing, left over or of another shape"
    assert theirs.dtype == dtype
    assert theirs.config.max_position_embeddings == 16
    assert theirs.config.eos_token_id is None
    assert difference(ours, theirs) < TOLERANCE
    about_tokens = ["generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["config.json", *about_tokens]
    assert ("lm_head.weight" in load_file(tmp_path / "out" / "model.safetensors")) != shape.tied
    again = tmp_path / "again"
    llama.import_(tmp_path / "out", again)
    back = imported(again, dtype)
    assert all(torch.equal(tensor, ours.state_dict()[name]) for name, tensor in back.state_dict().items())
    llama.export(again, tmp_path / "twice")  # what was imported is as good as a run
    twice = load_file(tmp_path / "twice" / "model.safetensors")
    assert all(
        torch.equal(tensor, twice[name]) for name, tensor in load_file(tmp_path / "out/model.safetensors").items()
    )


SIZES = {"hidden_size": 40, "intermediate_size": 44, "num_hidden_layers": 3, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "vocab_size": 256}
STRETCHED = {"rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0}
STRETCHED |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 3, "router_aux_loss_coef": 0.001}
FAMILY = {
    "Llama 2": transformers.LlamaConfig(**SIZES | {"num_key_value_heads": 4}),
    "Llama 3": transformers.LlamaConfig(**SIZES, rope_parameters=STRETCHED, rms_norm_eps=1e-5),
    "positions divided by 4": transformers.LlamaConfig(
        **SIZES, rope_parameters={"rope_type": "linear", "rope_theta": 1e6, "factor": 4.0}, head_dim=12
    ),
    "SmolLM 2": transformers.LlamaConfig(
        **SIZES, rope_parameters={"rope_type": "default", "rope_theta": 1e5}, tie_word_embeddings=True
    ),
    "Mistral": transformers.MistralConfig(**SIZES, sliding_window=None, head_dim=16),
    "Qwen 2.5": transformers.Qwen2Config(**SIZES, tie_word_embeddings=True),
    "Qwen 3": transformers.Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True),
    "Mixtral": transformers.MixtralConfig(**SIZES, **EXPERTS, rms_norm_eps=1e-6),
    "Qwen 3 MoE": transformers.Qwen3MoeConfig(
        **SIZES, **EXPERTS, head_dim=16, moe_intermediate_size=28, norm_topk_prob=True, tie_word_embeddings=True
    ),
}


@pytest.mark.parametrize("kind", FAMILY)
def test_family_there_and_back(kind: str, tmp_path: Path) -> None:
    """The same logits, far enough from the start that stretched positions matter, and the same bits there and back."""
    theirs = transformers.AutoModelForCausalLM.from_config(FAMILY[kind], experts_implementation="eager").eval()
    theirs.load_state_dict(random_weights(dict(theirs.named_parameters()), torch.float32), strict=False)
    first = save_theirs(theirs, tmp_path / "theirs")
    llama.import_(first, tmp_path / "start")
    ours = imported(tmp_path / "start", torch.float32)
    close = 1e-5 if isinstance(ours.blocks["0"].mlp, gpt.Mlp) else TOLERANCE  # each token has a sum over experts
    assert difference(ours, theirs, 200) < close
    llama.export(tmp_path / "start", tmp_path / "out")
    bits = load_file(first / "model.safetensors")
    back = load_file(tmp_path / "out" / "model.safetensors")
    assert bits.keys() == back.keys()
    assert all(torch.equal(bits[name], back[name]) for name in bits)
    again, told = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True, experts_implementation="eager"
    )
    assert not any(told.values())
    assert difference(ours, again, 200) < close
    if "rope_scaling" in json.loads((tmp_path / "out" / "config.json").read_text()):
        edit(first, rope_parameters={"rope_type": "default", "rope_theta": 500_000.0})  # a mutant
        llama.import_(first, tmp_path / "mutant")
        assert difference(imported(tmp_path / "mutant", torch.float32), theirs, 200) > WRONG


def test_older_spelling_of_scaled_positions(tmp_path: Path) -> None:
    """As in Llama 3.1's own config.json: "rope_scaling", and "rope_theta" beside it."""
    first = save_theirs(make_theirs(rope_parameters=STRETCHED), tmp_path / "theirs")
    scaling = {key: value for key, value in STRETCHED.items() if key != "rope_theta"}
    edit(first, rope_parameters="absent", rope_scaling=scaling, rope_theta=500_000.0)
    llama.import_(first, tmp_path / "start")
    shape = imported(tmp_path / "start").shape
    assert (shape.rope_base, shape.rope_scaling) == (500_000.0, "llama3:8.0:1.0:4.0:64.0")


def test_no_model_has_biases_and_norms(tmp_path: Path) -> None:
    run = save_run(tmp_path / "run", make_ours(gpt.Shape(19, 1, 2, 8, qkv_bias=True, qk_norm=True)))
    with pytest.raises(UserError, match="both --qkv-bias and --qk-norm has no equal in transformers"):
        llama.export(run, tmp_path / "out")


def test_export_carries_its_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """So that AutoTokenizer, which other programs begin with, takes the folder as it is."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"one": 0, "two": 1, "three": 2}, unk_token="one"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "words.json"))
    run = save_run(tmp_path / "run", make_ours(SHAPES["tied"]))
    config = json.loads((run / "config.json").read_text())
    config["args"]["tokenizer"] = str(tmp_path / "words.json")
    (run / "config.json").write_text(json.dumps(config))
    llama.export(run, tmp_path / "out")
    assert "note" not in capsys.readouterr().out
    found = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert found("two three one")["input_ids"] == [1, 2, 0]
    assert found.model_max_length == 16
    (tmp_path / "words.json").unlink()
    llama.export(run, tmp_path / "without")
    assert f"--tokenizer {tmp_path}/words.json is not there" in capsys.readouterr().out


def swap_query_and_key(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = gpt_names.LAYER | {"attention.query": "self_attn.k_proj", "attention.key": "self_attn.q_proj"}
    monkeypatch.setattr(gpt_names, "LAYER", layer)


def swap_gate_and_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpt_names, "LAYER", gpt_names.LAYER | {"mlp.gate": "mlp.up_proj", "mlp.up": "mlp.gate_proj"})


def swap_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = gpt_names.LAYER | {"attention_norm": "post_attention_layernorm", "mlp_norm": "input_layernorm"}
    monkeypatch.setattr(gpt_names, "LAYER", layer)


def interleave(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rotate neighbours, as Meta's own files want it, instead of halves."""
    rotate = gpt.rotate

    def rotated(x: torch.Tensor, *how: Any) -> torch.Tensor:
        halves = torch.cat([x[..., ::2], x[..., 1::2]], dim=3)
        real, imaginary = rotate(halves, *how).chunk(2, dim=3)
        return torch.stack([real, imaginary], dim=4).flatten(3)

    monkeypatch.setattr(gpt, "rotate", rotated)


@pytest.mark.parametrize("mutant", [swap_query_and_key, swap_gate_and_up, swap_norms, interleave])
def test_mutants_compute_something_else(mutant: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = make_ours(gpt.Shape(19, num_layers=2, num_heads=2, width=16, mlp_width=16))
    run = save_run(tmp_path / "run", ours)
    llama.export(run, tmp_path / "right")
    assert difference(ours, transformers.LlamaForCausalLM.from_pretrained(tmp_path / "right")) < TOLERANCE
    mutant(monkeypatch)
    llama.export(run, tmp_path / "mutant")
    assert difference(ours, transformers.LlamaForCausalLM.from_pretrained(tmp_path / "mutant")) > WRONG


# --- back ---


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("how", [{}, {"max_shard_size": "60KB"}], ids=["one file", "shards"])
def test_what_is_imported_computes_the_same(
    tied: bool, how: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = make_theirs(tied)
    folder = save_theirs(theirs, tmp_path / "hf", **how)
    assert (len(list(folder.glob("*.safetensors"))) > 2) == bool(how)
    llama.import_(folder, tmp_path / "start")
    assert f"--resume {tmp_path}/start --config {tmp_path}/start/config.json" in capsys.readouterr().out
    assert difference(imported(tmp_path / "start"), theirs) < TOLERANCE


@pytest.mark.parametrize(("tied", "dtype"), [(False, torch.bfloat16), (True, torch.float32)], ids=str)
def test_training_goes_on_from_what_was_imported(
    tied: bool, dtype: torch.dtype, tmp_path: Path, small_text: Path
) -> None:
    """Its first loss is theirs on the same tokens, also of weights that are kept in bfloat16."""
    theirs = make_theirs(tied)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(parameter.to(dtype))
    llama.import_(save_theirs(copy.deepcopy(theirs).to(dtype), tmp_path / "hf"), tmp_path / "start")
    flags = ["--out", str(tmp_path), "--name", "run", "--data", str(small_text), "--seq-len", "16", "--log-every", "1"]
    flags += ["--resume", str(tmp_path / "start"), "--config", str(tmp_path / "start" / "config.json")]
    flags += ["--max-steps", "1", "--global-batch-size", "8", "--dtype", "float64", "--eval-every", "5"]
    result = runner.run_recipe("ddp_gpt", 2, *flags)
    assert result.ok, str(result)
    assert "has weights but no optimizer state: the optimizer starts fresh" in result.outputs[0]
    from common.train import sampler
    from common.workloads import text

    train, _ = text.load(str(small_text), 16)
    first = sampler.permutation(len(train), 0, 0)[:8]
    rows, targets = train.read(first * 0, first)
    logits = theirs(rows).logits
    wanted = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).item()
    assert runner.records(tmp_path / "run", "train/loss") == {1: pytest.approx(wanted, rel=1e-6)}
    trained = checkpoint.choose(tmp_path / "run")[0]
    assert manifest.verify(trained)[0]["step"] == 1


def test_old_files_bring_what_is_computed(tmp_path: Path) -> None:
    """Their configs say less, and they hold the rates of the rotary positions."""
    theirs = make_theirs()
    folder = save_theirs(theirs, tmp_path / "hf")
    state = load_file(folder / "model.safetensors")
    state |= {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(5) for i in range(3)}
    save_file(state, folder / "model.safetensors")
    edit(folder, rope_parameters="absent", head_dim="absent", attention_bias="absent", mlp_bias="absent")
    llama.import_(folder, tmp_path / "start")
    assert difference(imported(tmp_path / "start"), theirs) < TOLERANCE


# --- refusals ---


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_theirs(make_theirs(), tmp_path_factory.mktemp("hf") / "model")


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        (
            {"model_type": "gpt2"},
            "model_type 'gpt2', with learned positions, LayerNorm, and an MLP without a gate: it must be one of ",
        ),
        ({"model_type": "gemma"}, "model_type 'gemma', with scaled embeddings, norms of weight + 1, and a GELU: it"),
        ({"model_type": "qwen2_moe"}, "model_type 'qwen2_moe', with a gate on its shared expert: it must be one of"),
        (
            {"model_type": "mixtral", "sliding_window": 512, "hidden_act": "gelu", "router_jitter_noise": 0.1},
            "a mixtral that our GPT cannot be: hidden_act 'gelu' (must be 'silu'), router_jitter_noise 0.1 (must be "
            "0.0), sliding_window 512 (must be null, or at least max_position_embeddings 2048)",
        ),
        (
            {"model_type": "qwen3_moe", "mlp_only_layers": [0], "decoder_sparse_step": 2},
            "a qwen3_moe that our GPT cannot be: norm_topk_prob False (must be True), decoder_sparse_step 2 (must be "
            "1), mlp_only_layers [0] (must be [])",
        ),
        ({"model_type": "mixtral", "num_local_experts": "8"}, "config.json has num_experts '8', which a model cannot"),
        ({"model_type": "mixtral"}, "block_sparse_moe.experts.0.w1.weight is missing, "),
        ({"model_type": "new"}, "model_type 'new': it must be one of llama, mistral, qwen2, qwen3"),
        ({"model_type": "absent"}, "model_type '': it must be one of"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' (must be 'silu')"),
        ({"attention_bias": True, "mlp_bias": True}, "attention_bias True (must be False), mlp_bias True (must be"),
        ({"rope_parameters": STRETCHED | {"rope_type": "yarn"}}, "rope_type 'yarn' (must be one of default, linear, "),
        ({"rope_parameters": None, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic' (must be"),
        ({"rope_parameters": {"rope_type": "linear"}}, "config.json is not a model's config.json: KeyError('factor')"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 (must be 1.0)"),
        (
            {"model_type": "mistral", "sliding_window": 512},
            "our GPT cannot be: sliding_window 512 (must be null, or at least max_position_embeddings 2048)",
        ),
        ({"model_type": "mistral", "num_key_value_heads": "absent"}, "must be a multiple of --num-kv-heads 8"),
        (
            {
                "model_type": "qwen2",
                "use_sliding_window": True,
                "max_window_layers": 2,
                "max_position_embeddings": 5000,
            },
            "sliding_window 4096 (must be null, or at least max_position_embeddings 5000)",
        ),
        ({"head_dim": 16}, "blocks.0.attention.query.weight: (40, 40) in the checkpoint, (64, 40) in the model"),
        ({"head_dim": 9}, "--head-width 9 must be even"),
        ({"hidden_size": "absent"}, "config.json is not a model's config.json: KeyError('hidden_size')"),
        ({"num_hidden_layers": "3"}, "config.json has num_hidden_layers '3', which a model cannot have"),
        ({"num_hidden_layers": 4}, "do not match config.json: model.layers.3.input_layernorm.weight is missing, "),
        ({"tie_word_embeddings": True}, "do not match config.json: lm_head.weight is unexpected"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_models_that_are_not_ours_are_refused(
    changes: dict[str, Any], refusal: str, folder: Path, tmp_path: Path
) -> None:
    copied = Path(shutil.copytree(folder, tmp_path / "hf"))
    edit(copied, **changes)
    with pytest.raises(UserError, match=re.escape(refusal)):
        llama.import_(copied, tmp_path / "start")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"], "nothing is left behind"


def test_biases_are_named(tmp_path: Path) -> None:
    folder = save_theirs(make_theirs(attention_bias=True), tmp_path / "hf")
    edit(folder, attention_bias=False)
    with pytest.raises(UserError, match=r"model\.layers\.0\.self_attn\.k_proj\.bias is unexpected"):
        llama.import_(folder, tmp_path / "start")


def test_missing_files_are_named(folder: Path, tmp_path: Path) -> None:
    for name, refusal in (
        ("config.json", r"config\.json is not a model's config\.json: FileNotFoundError"),
        ("model.safetensors", r"model\.safetensors is not a safetensors file"),
    ):
        copied = Path(shutil.copytree(folder, tmp_path / f"without {name}"))
        (copied / name).unlink()
        with pytest.raises(UserError, match=refusal):
            llama.import_(copied, tmp_path / "start")
    sharded = save_theirs(make_theirs(), tmp_path / "shards", max_shard_size="60KB")
    min(sharded.glob("*.safetensors")).unlink()
    with pytest.raises(UserError, match="is missing"):
        llama.import_(sharded, tmp_path / "start")


def fill_the_disk(_: object, path: Path, **__: object) -> NoReturn:
    path.write_bytes(b"some")
    raise SafetensorError("No space left on device")


def test_what_cannot_be_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = save_run(tmp_path / "run", make_ours(SHAPES["tied"]))
    (tmp_path / "there").mkdir()
    with pytest.raises(UserError, match=r"--out .*/there exists"):
        llama.export(run, tmp_path / "there")
    for export in (llama.export, exchange.export):
        with pytest.raises(UserError, match=r"^--out \S+/nowhere/x: there is no folder \S+/nowhere$"):
            export(run, tmp_path / "nowhere" / "x")
    with monkeypatch.context() as patch:
        patch.setattr(exchange, "save_file", fill_the_disk)
        with pytest.raises(SafetensorError):
            exchange.export(run, tmp_path / "model.safetensors")
    assert not list(tmp_path.glob("model.safetensors*")), "nothing is left of it"
    config = json.loads((run / "config.json").read_text())
    config["args"]["num_layers"] = 1
    (run / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"blocks\.1\.attention\.key\.weight is unexpected"):
        llama.export(run, tmp_path / "out")
    (run / "config.json").unlink()
    with pytest.raises(UserError, match=r"its number of heads in \S+run/config\.json: FileNotFoundError"):
        llama.export(run, tmp_path / "out")
    make_saver(tmp_path / "resnet").save(1, {"conv1.weight": torch.ones(2)}, 1, last=True)
    (tmp_path / "resnet" / "config.json").write_text(json.dumps({"args": {"model": "resnet18"}}))
    with pytest.raises(UserError, match=r"must be a checkpoint of a GPT.*KeyError\('embed\.weight'\)"):
        llama.export(tmp_path / "resnet", tmp_path / "out")
    assert not (tmp_path / "out").exists()


# --- the plain files of `python -m tools.checkpoint` ---


def commands(given: list[list[str]]) -> None:
    """Run them as `python -m` would; an error is printed and the next one follows."""
    for module, *argv in given:
        sys.argv = [module, *argv]
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        except SystemExit as error:
            print(error)


def test_commands(tmp_path: Path) -> None:
    run, file, start = save_run(tmp_path / "run", make_ours(SHAPES["grouped"])), tmp_path / "file", tmp_path / "start"
    given = [
        ["tools.checkpoint", "export", str(run), "--out", str(file)],
        ["tools.checkpoint", "export", str(run), "--out", str(file)],
        ["tools.checkpoint", "import", str(file), "--out", str(start)],
        ["tools.llama", "export", str(run), "--out", str(tmp_path / "llama")],
        ["tools.llama", "import", str(tmp_path / "llama"), "--out", str(tmp_path / "back")],
    ]
    result = runner.spawn(commands, [(given,)])
    assert result.ok, str(result)
    for told in (
        f"{file}: 30 tensors of step 7 of {run}/checkpoints/step_00000007\n",
        f"error: --out {file} exists: use another name, or remove it\n",
        f"{start}: 30 tensors; to train from them, add --resume {start}\n",
        f"{tmp_path}/llama: 30 tensors of step 7 of {run}/checkpoints/step_00000007, as LlamaForCausalLM\n",
        "vocab_size 19, num_layers 3, num_heads 4, num_kv_heads 2, width 24, mlp_width 20, tied False, "
        "rope_base 10000.0, norm_eps 1e-05, head_width 6, qkv_bias False, qk_norm False\n",
    ):
        assert told in result.outputs[0], result.outputs[0]


def test_export_and_import_of_plain_files(tmp_path: Path) -> None:
    ours = make_ours(SHAPES["grouped"])
    file, start = tmp_path / "model.safetensors", tmp_path / "start"
    exchange.export(save_run(tmp_path / "run", ours), file)
    (tmp_path / "plain").touch()
    assert file.stat().st_mode == (tmp_path / "plain").stat().st_mode, "colleagues may read it"
    exchange.import_(file, start)
    path, facts = checkpoint.choose(start)
    assert (facts["step"], facts["samples"], facts["source"]) == (0, 0, "model.safetensors")
    model = initial.materialize(gpt.GPT(ours.shape), 0, torch.device("cpu"), torch.float64)
    checkpoint.load(path, model.state_dict())
    assert all(torch.equal(tensor, ours.state_dict()[name]) for name, tensor in model.state_dict().items())
    torch.save(ours.state_dict(), tmp_path / "model.pt")
    with pytest.raises(UserError, match=r"model\.pt is not a safetensors file .* Pickles .* can run code"):
        exchange.import_(tmp_path / "model.pt", tmp_path / "other")
    wrapped = {f"_orig_mod.module.{name}": tensor for name, tensor in ours.state_dict().items()}
    save_file(wrapped, tmp_path / "wrapped.safetensors")
    exchange.import_(tmp_path / "wrapped.safetensors", tmp_path / "unwrapped")
    assert checkpoint.tensors_in(checkpoint.choose(tmp_path / "unwrapped")[0]).keys() == ours.state_dict().keys()
    assert sorted(path.name for path in tmp_path.glob("*.tmp*")) == []
