"""Small language models that generate, and prompts for them."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel


def llama() -> PreTrainedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.5,  # so that tokens differ
        eos_token_id=7,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


def gpt2() -> PreTrainedModel:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=96,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=64,
        initializer_range=0.5,
        bos_token_id=1,
        eos_token_id=7,
        pad_token_id=0,
    )
    return GPT2LMHeadModel(config).eval()


def prompts(rank: int, rows: int = 2) -> Tensor:
    """Longer ones on higher ranks."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(8, 96, (rows, 4 + 3 * rank), generator=generator)
