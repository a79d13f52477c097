"""GPT-2 in plain Flax linen, with the parameter names of the Hugging Face checkpoint.

Radford et al., "Language Models are Unsupervised Multitask Learners" (2019).
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import linen as nn

VOCAB_ALIGNMENT = 64
# Finite, so that no row of a softmax is NaN; its exponential is exactly 0.
MASKED = -1e30


@dataclass(frozen=True)
class Config:
    """Sizes of a GPT-2. Field names are those of the Hugging Face config.json.

    Attributes:
      vocab_size: token ids of the tokenizer.
      n_positions: longest context in tokens.
      n_embd: width.
      n_layer: blocks.
      n_head: attention heads of n_embd / n_head each.
      dropout: rate after the embeddings, in attention and on both residual branches.
      layer_norm_epsilon, initializer_range: as published.
    """

    vocab_size: int = 50257
    n_positions: int = 1024
    n_embd: int = 768
    n_layer: int = 12
    n_head: int = 12
    dropout: float = 0.0
    layer_norm_epsilon: float = 1e-5
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        if self.n_embd % self.n_head:
            raise ValueError(
                f"n_embd is {self.n_embd}; it must be a multiple of n_head {self.n_head}"
            )

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding: vocab_size rounded up, so that the logits product is aligned."""
        return -(-self.vocab_size // VOCAB_ALIGNMENT) * VOCAB_ALIGNMENT


PRESETS = {
    "tiny": Config(n_positions=128, n_embd=64, n_layer=2, n_head=2),
    "small": Config(n_positions=256, n_embd=192, n_layer=2, n_head=3),
    "gpt2": Config(),
    "gpt2-medium": Config(n_embd=1024, n_layer=24, n_head=16),
    "gpt2-large": Config(n_embd=1280, n_layer=36, n_head=20),
    "gpt2-xl": Config(n_embd=1600, n_layer=48, n_head=25),
}


def _dense(config: Config, features: int, name: str, residual: bool = False) -> nn.Dense:
    """A dense layer. Those that write to the residual stream start smaller, by 1/√(2·n_layer)."""
    stddev = config.initializer_range * ((2 * config.n_layer) ** -0.5 if residual else 1.0)
    return nn.Dense(features, kernel_init=nn.initializers.normal(stddev), name=name)


def _embed(table: nn.Embed, tokens: jax.Array) -> jax.Array:
    """Rows of the table. On a mesh with Explicit axes JAX must be told: sharded as the tokens."""
    spec = jax.typeof(tokens).sharding.spec
    if all(axis is None for axis in spec):
        return table(tokens)
    out = jax.sharding.PartitionSpec(*spec, None)
    return table.embedding.at[tokens].get(out_sharding=out)


class Attention(nn.Module):
    """Causal multi-head self-attention, (B, T, n_embd) to the same."""

    config: Config

    @nn.compact
    def __call__(self, x: jax.Array, deterministic: bool) -> jax.Array:
        c = self.config
        batch, length, width = x.shape
        heads = (batch, length, c.n_head, width // c.n_head)
        qkv = _dense(c, 3 * width, "c_attn")(x)
        q, k, v = (part.reshape(heads) for part in jnp.split(qkv, 3, axis=-1))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * (width // c.n_head) ** -0.5
        causal = jnp.tril(jnp.ones((1, 1, length, length), bool))
        weights = nn.softmax(jnp.where(causal, scores, MASKED))
        weights = nn.Dropout(c.dropout)(weights, deterministic)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape)
        return _dense(c, width, "c_proj", residual=True)(mixed)


class MLP(nn.Module):
    """Two dense layers with the tanh approximation of GELU ("gelu_new") between them."""

    config: Config

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = _dense(self.config, 4 * x.shape[-1], "c_fc")(x)
        x = nn.gelu(x, approximate=True)
        return _dense(self.config, x.shape[-1] // 4, "c_proj", residual=True)(x)


class Block(nn.Module):
    """Layer norm before attention and before the MLP, each added to the residual stream."""

    config: Config

    @nn.compact
    def __call__(self, x: jax.Array, deterministic: bool) -> jax.Array:
        c = self.config
        drop = nn.Dropout(c.dropout, deterministic=deterministic)
        y = nn.LayerNorm(c.layer_norm_epsilon, name="ln_1")(x)
        x = x + drop(Attention(c, name="attn")(y, deterministic))
        y = nn.LayerNorm(c.layer_norm_epsilon, name="ln_2")(x)
        return x + drop(MLP(c, name="mlp")(y))


class Blocks(nn.Module):
    """The stack; its own module so that parameters are called h/0, h/1, …"""

    config: Config

    @nn.compact
    def __call__(self, x: jax.Array, deterministic: bool) -> jax.Array:
        for i in range(self.config.n_layer):
            x = Block(self.config, name=str(i))(x, deterministic)
        return x


class GPT2(nn.Module):
    """Token ids, int32 (B, T), to fp32 logits (B, T, padded_vocab_size).

    Logits of the padding are -1e30, so it has no probability. Dropout needs
    `deterministic=False` and `rngs={"dropout": key}`. Ids outside the vocabulary are not
    detected here: JAX clamps or wraps them.
    """

    config: Config

    def setup(self) -> None:
        c = self.config
        init = nn.initializers.normal(c.initializer_range)
        self.wte = nn.Embed(c.padded_vocab_size, c.n_embd, embedding_init=init)
        self.wpe = nn.Embed(c.n_positions, c.n_embd, embedding_init=init)
        self.drop = nn.Dropout(c.dropout)
        self.h = Blocks(c)
        self.ln_f = nn.LayerNorm(c.layer_norm_epsilon)

    def __call__(self, tokens: jax.Array, deterministic: bool = True) -> jax.Array:
        return self.logits(self.hidden(tokens, deterministic))

    def hidden(self, tokens: jax.Array, deterministic: bool = True) -> jax.Array:
        """The normalised output of the last block, fp32 (B, T, n_embd)."""
        length = tokens.shape[1]
        if length > self.config.n_positions:
            raise ValueError(
                f"tokens has length {length}; the model has n_positions {self.config.n_positions}"
            )
        x = _embed(self.wte, tokens) + self.wpe(jnp.arange(length)[None])
        x = self.h(self.drop(x, deterministic), deterministic)
        return self.ln_f(x)

    def logits(self, x: jax.Array) -> jax.Array:
        """Scores of the next token from `hidden`; the head shares the token embedding."""
        scores = x @ self.wte.embedding.T
        known = jnp.arange(scores.shape[-1])[None, None] < self.config.vocab_size
        return jnp.where(known, scores, MASKED)
