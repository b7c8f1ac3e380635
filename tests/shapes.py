"""Small shapes of the two families, for the tests of the model."""

from dataclasses import replace

import torch

from model.gpt import GPT, IGNORED, GPTConfig

GPT2 = GPTConfig(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=4,
    vocab_size=97,
    max_position_embeddings=80,
    normalization="layernorm",
    position_embedding="learned",
    activation="gelu",
    bias=True,
    tied_embeddings=True,
)
LLAMA = GPTConfig(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=4,
    num_query_groups=2,
    ffn_hidden_size=80,
    vocab_size=97,
    rope_theta=500000.0,
)
STYLES = {"gpt2": GPT2, "llama": LLAMA, "llama-tied": replace(LLAMA, tied_embeddings=True)}


def make(config, seed=0):
    torch.manual_seed(seed)
    return GPT(replace(config, init_std=0.2))


def batch(*shape, vocab_size=97, seed=1):
    generator = torch.Generator().manual_seed(seed)
    tokens, targets = torch.randint(vocab_size, (2, *shape), generator=generator)
    targets[..., ::5] = IGNORED
    return tokens, targets


def gradients(model):
    return {name: parameter.grad for name, parameter in model.named_parameters()}
