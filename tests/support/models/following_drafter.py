"""A one-layer drafter that reads the small attention model's hidden states."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jkv
from jkv.drafters import find_previous
from support.models.small_attention_model import DIM, HEADS, VOCABULARY

WIDTH = HEADS * DIM
AUX_LAYERS = (1, 2)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Following:
    """Draft from each token and the target's hidden states of the previous row.

    After the first draft token it uses its own hidden states.
    """

    params: Any
    config: Any = dataclasses.field(metadata={"static": True})
    num_tokens: int = dataclasses.field(default=3, metadata={"static": True})
    cost: float = dataclasses.field(default=1.0, metadata={"static": True})
    layer: int = dataclasses.field(default=2, metadata={"static": True})

    aux_layers = AUX_LAYERS

    @property
    def groups(self):
        return (self.config,)

    def update(self, cache, batch, tokens, hidden, previous):
        before = find_previous(batch, hidden, previous)
        return self._run(cache, batch, tokens, before)[0]

    def draft(self, cache, step):
        def compute(carry, j, tokens):
            cache, hidden = carry
            cache, out = self._run(cache, step.batch.row(j), tokens, hidden)
            logits = out @ self.params["head"] + 4 * repeat(step, tokens)
            return (cache, out @ self.params["own"]), logits

        cache, _ = step.decode(compute, (cache, step.previous))
        return cache, *step.drafted

    def _run(self, cache, batch, tokens, previous):
        x = mix(self.params, tokens, previous, jnp)
        keys, values, queries = (
            (x @ self.params[name]).reshape(len(tokens), 1, WIDTH) for name in "kvq"
        )
        cache = jkv.write(cache, self.layer, batch, keys, values)
        attended = jkv.attend(cache, self.layer, batch, queries)
        return cache, jnp.tanh(x + attended[:, 0])


def repeat(step, tokens):
    """Predict the token that followed last time, so that some drafts are right."""
    texts, lengths = step.tokens()
    place = jnp.arange(texts.shape[1], dtype=jnp.int32)[None]
    was_here = (texts == tokens[:, None]) & (place < lengths[:, None] - 1)
    last = jnp.max(jnp.where(was_here, place, -1), axis=1)
    after = jnp.take_along_axis(texts, last[:, None] + 1, axis=1)[:, 0]
    return jax.nn.one_hot(jnp.where(last >= 0, after, -1), VOCABULARY)


def mix(params, tokens, previous, xp=np):
    return xp.tanh(params["embedding"][tokens] + previous @ params["into"])


def following_params(seed=0):
    rng = np.random.default_rng(seed)
    aux = WIDTH * len(AUX_LAYERS)

    def draw(*shape):
        return rng.standard_normal(shape, np.float32) / np.float32(shape[-2] ** 0.5)

    return dict(
        embedding=draw(VOCABULARY, WIDTH),
        into=draw(aux, WIDTH),
        own=draw(WIDTH, aux),
        head=draw(WIDTH, VOCABULARY),
        **{name: draw(WIDTH, WIDTH) for name in "kvq"},
    )


def make_following(kind=Following, **sizes):
    config = jkv.CacheConfig(
        num_layers=1, num_kv_heads=1, head_dim=WIDTH, dtype="float32", **sizes
    )
    return kind(params=following_params(), config=config)
