"""google-deepmind/gemma: windows, soft caps and norms, compared with its own cache."""

import jax
import jax.numpy as jnp
from gemma.gm.nn import _config, _modules
from gemma.gm.nn._transformer import Transformer
from support.models.adapted_models import (
    DIM,
    HEADS,
    KV_HEADS,
    VOCABULARY,
    WIDTH,
    WINDOW,
    assert_serves,
    assert_short,
    continue_by,
    shake,
)
from under import gemma as adapter

CONTEXT = 32
LOCAL, GLOBAL = _modules.AttentionType.LOCAL_SLIDING, _modules.AttentionType.GLOBAL
CONFIG = _config.TransformerConfig(
    num_embed=VOCABULARY,
    embed_dim=WIDTH,
    hidden_dim=48,
    num_heads=HEADS,
    head_dim=DIM,
    num_kv_heads=KV_HEADS,
    final_logit_softcap=5.0,
    use_post_attn_norm=True,
    use_post_ffw_norm=True,
    attention_types=(LOCAL, GLOBAL),
    attn_logits_soft_cap=2.0,
    sliding_window_size=WINDOW,
    use_qk_norm=True,
)


def test_generation_equals_the_librarys():
    transformer = Transformer(config=CONFIG, dtype=jnp.float32)
    params = transformer.init(jax.random.key(0), jnp.ones((1, 4), jnp.int32))["params"]
    params = shake(params, 1.0)

    def step(cache, tokens, start):
        if cache is None:
            cache = CONFIG.init_cache(1, jnp.float32, cache_length=CONTEXT)
        positions = start + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        mask = jnp.arange(CONTEXT)[None, None] <= positions[..., None]
        out = transformer.apply(
            {"params": params},
            tokens,
            positions=positions,
            cache=cache,
            attention_mask=mask,
        )
        return out.cache, out.logits[0, -1]

    assert_serves(adapter.paged(transformer), params, continue_by(step))
    assert_short("gemma")
