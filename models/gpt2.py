"""GPT-2 in plain Flax linen, with the parameter names of the Hugging Face checkpoint.

Radford et al., "Language Models are Unsupervised Multitask Learners" (2019).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from flax import linen as nn

VOCAB_ALIGNMENT = 64
# Finite, so that no row of a softmax is NaN; its exponential is exactly 0.
MASKED = -1e30
# By the names that config.json uses; several of them mean the same function.
ACTIVATIONS = {
    **dict.fromkeys(("gelu_new", "gelu_pytorch_tanh", "gelu_fast"), nn.gelu),
    "gelu": partial(nn.gelu, approximate=False),
    "relu": nn.relu,
    **dict.fromkeys(("silu", "swish"), nn.silu),
    "tanh": jnp.tanh,
}


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
      n_inner: width inside the MLP; None is 4 · n_embd.
      activation_function: of the MLP, one of `ACTIVATIONS`.
      scale_attn_weights: whether scores are divided by the root of a head's width.
      scale_attn_by_inverse_layer_idx: whether scores of block i are divided by i + 1 as well.
      tie_word_embeddings: whether the output head is the token embedding.
    """

    vocab_size: int = 50257
    n_positions: int = 1024
    n_embd: int = 768
    n_layer: int = 12
    n_head: int = 12
    dropout: float = 0.0
    layer_norm_epsilon: float = 1e-5
    initializer_range: float = 0.02
    n_inner: int | None = None
    activation_function: str = "gelu_new"
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False
    tie_word_embeddings: bool = True

    def __post_init__(self) -> None:
        for name in ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head", "n_inner"):
            size = getattr(self, name)
            if not (name == "n_inner" and size is None or type(size) is int and size > 0):
                raise ValueError(f"{name} is {size!r}; it must be a positive integer")
        if self.activation_function not in ACTIVATIONS:
            raise ValueError(
                f"activation_function is {self.activation_function!r}; "
                f"it must be one of {', '.join(ACTIVATIONS)}"
            )
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
    """Causal multi-head self-attention, (B, T, n_embd) to the same.

    With `positions`, int32 (B, T), keys and values of all positions are those of the collection
    "cache", each (B, n_head, positions, n_embd / n_head), after those of x are written into it.
    """

    config: Config
    layer: int

    @nn.compact
    def __call__(
        self, x: jax.Array, deterministic: bool, positions: jax.Array | None = None
    ) -> jax.Array:
        c = self.config
        batch, length, width = x.shape
        heads = (batch, length, c.n_head, width // c.n_head)
        qkv = _dense(c, 3 * width, "c_attn")(x)
        q, k, v = (part.reshape(heads) for part in jnp.split(qkv, 3, axis=-1))
        if positions is None:
            order = "bkhd"
            visible = jnp.tril(jnp.ones((1, 1, length, length), bool))
        else:
            # In the cache a head's keys are contiguous: a step of decoding reads all of them.
            order = "bhkd"
            k, v = self._remember("key", k, positions), self._remember("value", v, positions)
            visible = jnp.arange(k.shape[2])[None, None, None] <= positions[:, None, :, None]
        scale = (width // c.n_head) ** -0.5 if c.scale_attn_weights else 1.0
        if c.scale_attn_by_inverse_layer_idx:
            scale /= self.layer + 1
        scores = jnp.einsum(f"bqhd,{order}->bhqk", q, k) * scale
        weights = nn.softmax(jnp.where(visible, scores, MASKED))
        weights = nn.Dropout(c.dropout)(weights, deterministic)
        mixed = jnp.einsum(f"bhqk,{order}->bqhd", weights, v).reshape(x.shape)
        return _dense(c, width, "c_proj", residual=True)(mixed)

    def _remember(self, name: str, new: jax.Array, positions: jax.Array) -> jax.Array:
        """The cached array `name` with `new`, (B, T, n_head, d), written at `positions`."""
        rows = jnp.arange(len(new))[:, None]
        every = self.get_variable("cache", name).at[rows, :, positions].set(new)
        self.put_variable("cache", name, every)
        return every


class MLP(nn.Module):
    """Two dense layers with the activation between them."""

    config: Config

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        c, width = self.config, x.shape[-1]
        x = _dense(c, c.n_inner or 4 * width, "c_fc")(x)
        x = ACTIVATIONS[c.activation_function](x)
        return _dense(c, width, "c_proj", residual=True)(x)


class Block(nn.Module):
    """Layer norm before attention and before the MLP, each added to the residual stream."""

    config: Config
    layer: int

    @nn.compact
    def __call__(
        self, x: jax.Array, deterministic: bool, positions: jax.Array | None = None
    ) -> jax.Array:
        c = self.config
        drop = nn.Dropout(c.dropout, deterministic=deterministic)
        y = nn.LayerNorm(c.layer_norm_epsilon, name="ln_1")(x)
        x = x + drop(Attention(c, self.layer, name="attn")(y, deterministic, positions))
        y = nn.LayerNorm(c.layer_norm_epsilon, name="ln_2")(x)
        return x + drop(MLP(c, name="mlp")(y))


class Blocks(nn.Module):
    """The stack; its own module so that parameters are called h/0, h/1, …"""

    config: Config

    @nn.compact
    def __call__(
        self, x: jax.Array, deterministic: bool, positions: jax.Array | None = None
    ) -> jax.Array:
        for i in range(self.config.n_layer):
            x = Block(self.config, i, name=str(i))(x, deterministic, positions)
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
        if not c.tie_word_embeddings:
            self.lm_head = nn.Embed(c.padded_vocab_size, c.n_embd, embedding_init=init)

    def __call__(self, tokens: jax.Array, deterministic: bool = True) -> jax.Array:
        return self.logits(self.hidden(tokens, deterministic))

    def hidden(
        self,
        tokens: jax.Array,
        deterministic: bool = True,
        positions: jax.Array | None = None,
    ) -> jax.Array:
        """The normalised output of the last block, fp32 (B, T, n_embd).

        With `positions`, int32 (B, T), tokens also see the earlier ones that the mutable
        collection "cache" remembers (models.decode makes one), and are added to it.
        """
        length = tokens.shape[1]
        if length > self.config.n_positions:
            raise ValueError(
                f"tokens has length {length}; the model has n_positions {self.config.n_positions}"
            )
        places = jnp.arange(length)[None] if positions is None else positions
        x = _embed(self.wte, tokens) + self.wpe(places)
        x = self.h(self.drop(x, deterministic), deterministic, positions)
        return self.ln_f(x)

    def logits(self, x: jax.Array) -> jax.Array:
        """Scores of the next token from `hidden`."""
        head = self.wte if self.config.tie_word_embeddings else self.lm_head
        # Not x @ head.T: XLA takes that four times as long for a single token.
        scores = jnp.einsum("btc,vc->btv", x, head.embedding)
        known = jnp.arange(scores.shape[-1])[None, None] < self.config.vocab_size
        return jnp.where(known, scores, MASKED)
