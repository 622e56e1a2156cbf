"""A small Llama with seeded random weights: its logits differ, so equal outputs prove something."""

from __future__ import annotations

import json
import math
from pathlib import Path

LAYERS = 4
HIDDEN = 256
HEADS = 4
KV_HEADS = 4
HEAD_DIM = 64
INTERMEDIATE = 512
VOCABULARY = 2048
MAX_TOKENS = 4096
TOKEN_BYTES = 2 * KV_HEADS * HEAD_DIM * 4


MLA_HEADS = 4
MLA_LAYERS = 2
MLA_LATENT = 512  # with MLA_ROPE what vLLM's kernel for the CPU takes, and nothing else
MLA_ROPE = 64
MLA_HEAD_DIM = 64


def write_model(folder: Path, *, seed: int = 1) -> Path:
    """Write config.json and model.safetensors into `folder` and return it."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": MAX_TOKENS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)

    def random(rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * (scale / math.sqrt(columns))

    def layer(number: int) -> dict[str, torch.Tensor]:
        attention, mlp = f"model.layers.{number}.self_attn", f"model.layers.{number}.mlp"
        return {
            f"{attention}.q_proj.weight": random(HEADS * HEAD_DIM, HIDDEN, 2),
            f"{attention}.k_proj.weight": random(KV_HEADS * HEAD_DIM, HIDDEN, 2),
            f"{attention}.v_proj.weight": random(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{attention}.o_proj.weight": random(HIDDEN, HEADS * HEAD_DIM),
            f"{mlp}.gate_proj.weight": random(INTERMEDIATE, HIDDEN),
            f"{mlp}.up_proj.weight": random(INTERMEDIATE, HIDDEN),
            f"{mlp}.down_proj.weight": random(HIDDEN, INTERMEDIATE),
            f"model.layers.{number}.input_layernorm.weight": torch.ones(HIDDEN),
            f"model.layers.{number}.post_attention_layernorm.weight": torch.ones(HIDDEN),
        }

    tensors = {
        "model.embed_tokens.weight": torch.randn(VOCABULARY, HIDDEN, generator=generator),
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": random(VOCABULARY, HIDDEN, 3),
    }
    for number in range(LAYERS):
        tensors.update(layer(number))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_mla_model(folder: Path, *, seed: int = 1) -> Path:
    """Write a small DeepSeek without experts, whose KV is one latent vector a token."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": MLA_LAYERS,
        "num_attention_heads": MLA_HEADS,
        "num_key_value_heads": MLA_HEADS,
        "q_lora_rank": None,
        "kv_lora_rank": MLA_LATENT,
        "qk_rope_head_dim": MLA_ROPE,
        "qk_nope_head_dim": MLA_HEAD_DIM,
        "v_head_dim": MLA_HEAD_DIM,
        "n_routed_experts": 2,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 64,
        "first_k_dense_replace": MLA_LAYERS,  # so that no layer has experts
        "vocab_size": VOCABULARY,
        "max_position_embeddings": MAX_TOKENS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)

    def random(rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * (scale / math.sqrt(columns))

    tensors = {
        "model.embed_tokens.weight": torch.randn(VOCABULARY, HIDDEN, generator=generator),
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": random(VOCABULARY, HIDDEN, 3),
    }
    for number in range(MLA_LAYERS):
        layer = f"model.layers.{number}"
        attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
        tensors |= {
            f"{attention}.q_proj.weight": random(MLA_HEADS * (MLA_HEAD_DIM + MLA_ROPE), HIDDEN, 2),
            f"{attention}.kv_a_proj_with_mqa.weight": random(MLA_LATENT + MLA_ROPE, HIDDEN, 2),
            f"{attention}.kv_a_layernorm.weight": torch.ones(MLA_LATENT),
            f"{attention}.kv_b_proj.weight": random(2 * MLA_HEADS * MLA_HEAD_DIM, MLA_LATENT),
            f"{attention}.o_proj.weight": random(HIDDEN, MLA_HEADS * MLA_HEAD_DIM),
            f"{mlp}.gate_proj.weight": random(INTERMEDIATE, HIDDEN),
            f"{mlp}.up_proj.weight": random(INTERMEDIATE, HIDDEN),
            f"{mlp}.down_proj.weight": random(HIDDEN, INTERMEDIATE),
            f"{layer}.input_layernorm.weight": torch.ones(HIDDEN),
            f"{layer}.post_attention_layernorm.weight": torch.ones(HIDDEN),
        }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
