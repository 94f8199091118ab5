"""Write a small MLA model with random weights and its tokenizer: `python make_model.py OUT [options]`.

Runs inside the serving environment (it needs torch, safetensors and tokenizers, nothing of this toolkit). The same
arguments give the same bytes. Written are two models in Hugging Face form:

    OUT/target  DeepseekV3ForCausalLM: DeepSeek V3's attention (multi-head latent attention, arXiv:2412.19437) with its
                real head sizes (latent 512, rope 64), few layers, dense MLPs, a vocabulary of 512
    OUT/draft   DeepseekV2ForCausalLM with the target's first layers only: a draft model for STANDALONE speculation
                which agrees with the target often but not always, so that trees are really pruned

Weights are scaled so that logits are sharp: greedy decoding of purely random weights would sit on ties.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

VOCABULARY = 512
CORPUS = (
    "the quick brown fox jumps over the lazy dog and runs into the forest",
    "once upon a time there was a small model which spoke in short sentences",
    '{"name": "lookup", "arguments": {"city": "Paris", "days": 3, "units": "metric"}}',
    "def add(left, right): return left + right  # the sum of two numbers",
)
CHAT_TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"


@dataclass(frozen=True)
class Shape:
    """Sizes of the model; the head sizes are DeepSeek V3's unless told otherwise."""

    heads: int
    layers: int
    hidden: int
    latent: int
    rope: int
    nope: int
    value: int
    context: int
    dtype: str

    @property
    def query_rank(self) -> int:
        return self.hidden

    @property
    def intermediate(self) -> int:
        return 2 * self.hidden


def main() -> None:
    options = _arguments()
    shape = Shape(
        heads=options.heads,
        layers=options.layers,
        hidden=options.hidden,
        latent=options.latent,
        rope=options.rope,
        nope=options.nope,
        value=options.value,
        context=options.context,
        dtype=options.dtype,
    )
    weights = random_weights(shape, options.seed)
    draft_layers = options.draft_layers or max(shape.layers - 1, 1)
    for name, architecture, layers in (
        ("target", "DeepseekV3ForCausalLM", shape.layers),
        ("draft", "DeepseekV2ForCausalLM", draft_layers),
    ):
        folder = options.out / name
        folder.mkdir(parents=True, exist_ok=True)
        write_tokenizer(folder, shape)
        (folder / "config.json").write_text(json.dumps(config(shape, architecture, layers), indent=1))
        write_weights(folder, weights, layers)


def config(shape: Shape, architecture: str, layers: int) -> dict:
    """Hugging Face configuration. Scaling of type yarn is what SGLang's CPU engine asks of MLA models."""
    scaling = {
        "type": "yarn",
        "rope_type": "yarn",
        "factor": 40,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": max(shape.context // 40, 64),
        "rope_theta": 10000.0,
    }
    return {
        "architectures": [architecture],
        "model_type": "deepseek_v3" if "V3" in architecture else "deepseek_v2",
        "vocab_size": VOCABULARY,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "moe_intermediate_size": shape.hidden,
        "num_hidden_layers": layers,
        "first_k_dense_replace": layers,  # no expert layers
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads,
        "q_lora_rank": shape.query_rank,
        "kv_lora_rank": shape.latent,
        "qk_rope_head_dim": shape.rope,
        "qk_nope_head_dim": shape.nope,
        "v_head_dim": shape.value,
        "n_shared_experts": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc" if "V3" in architecture else "greedy",
        "scoring_func": "sigmoid" if "V3" in architecture else "softmax",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "moe_layer_freq": 1,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "max_position_embeddings": shape.context,
        "rope_theta": 10000.0,
        "rope_scaling": scaling,
        "torch_dtype": shape.dtype,
        "use_cache": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }


def random_weights(shape: Shape, seed: int) -> dict:
    """Every tensor of the target by its checkpoint name, from one generator in a fixed order."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, shape.dtype)

    def matrix(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) * (gain / columns**0.5)).to(dtype)

    def ones(length: int) -> torch.Tensor:
        return torch.ones(length, dtype=dtype)

    hidden, heads = shape.hidden, shape.heads
    weights = {
        "model.embed_tokens.weight": matrix(VOCABULARY, hidden, hidden**0.5),
        "model.norm.weight": ones(hidden),
        "lm_head.weight": matrix(VOCABULARY, hidden, 3.0),
    }
    for layer in range(shape.layers):
        block, attention = f"model.layers.{layer}.", f"model.layers.{layer}.self_attn."
        weights |= {
            block + "input_layernorm.weight": ones(hidden),
            block + "post_attention_layernorm.weight": ones(hidden),
            attention + "q_a_proj.weight": matrix(shape.query_rank, hidden),
            attention + "q_a_layernorm.weight": ones(shape.query_rank),
            attention + "q_b_proj.weight": matrix(heads * (shape.nope + shape.rope), shape.query_rank, 2.0),
            attention + "kv_a_proj_with_mqa.weight": matrix(shape.latent + shape.rope, hidden),
            attention + "kv_a_layernorm.weight": ones(shape.latent),
            attention + "kv_b_proj.weight": matrix(heads * (shape.nope + shape.value), shape.latent),
            attention + "o_proj.weight": matrix(hidden, heads * shape.value, 4.0),
            block + "mlp.gate_proj.weight": matrix(shape.intermediate, hidden),
            block + "mlp.up_proj.weight": matrix(shape.intermediate, hidden),
            block + "mlp.down_proj.weight": matrix(hidden, shape.intermediate),
        }
    return weights


def write_weights(folder: Path, weights: dict, layers: int) -> None:
    from safetensors.torch import save_file

    dropped = tuple(f"model.layers.{layer}." for layer in range(layers, 1000))
    kept = {name: tensor for name, tensor in weights.items() if not name.startswith(dropped)}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


def write_tokenizer(folder: Path, shape: Shape) -> None:
    """A byte-level BPE, so that text of any language and any JSON has tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": shape.context,
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    (folder / "generation_config.json").write_text(json.dumps(ids))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--draft-layers", type=int, default=0, help="0: one less than --layers")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--latent", type=int, default=512)
    parser.add_argument("--rope", type=int, default=64)
    parser.add_argument("--nope", type=int, default=128)
    parser.add_argument("--value", type=int, default=128)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--seed", type=int, default=1234)
    return parser.parse_args()


if __name__ == "__main__":
    main()
