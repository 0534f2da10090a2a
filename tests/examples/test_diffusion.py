"""Block diffusion in one jit: tokens equal transformers' DiffusionGemma.

A random tiny model; both sides use the example's denoiser.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from denoising.checkpoint import load
from denoising.loop import Sizes, denoise, keep_surest, make_cache
from test_pretrained_parity import HAS_TRANSFORMERS

import jkv

pytestmark = pytest.mark.one_end
SAMPLES, BLOCKS, STEPS, CANVAS, VOCABULARY = 8, 2, 3, 6, 128
PROMPT = np.random.default_rng(0).integers(1, VOCABULARY, 21).astype(np.int32)


def make_folder(folder):
    """Write a random checkpoint; return its model in float32."""
    import torch
    import transformers

    text = dict(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        global_head_dim=16,
        num_global_key_value_heads=1,
        max_position_embeddings=128,
        sliding_window=8,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        final_logit_softcapping=5.0,
        num_experts=6,
        top_k_experts=3,
        moe_intermediate_size=8,
    )
    vision = dict(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        patch_size=4,
        position_embedding_size=16,
    )
    config = transformers.DiffusionGemmaConfig(
        text_config=text,
        vision_config=vision,
        canvas_length=CANVAS,
        image_token_id=125,
    )
    kind = transformers.DiffusionGemmaForBlockDiffusion
    torch.manual_seed(0)
    model = kind(config)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "vision" in name or not tensor.is_floating_point():
                continue
            if name.endswith(("norm.weight", "layer_scalar", "scale")):
                tensor.copy_(1 + 0.3 * torch.randn(tensor.shape))
            elif name.endswith(("weight", "proj")):
                is_table = "embed_tokens" in name
                spread = 0.1 if is_table else 1.5 / math.sqrt(tensor.shape[-1])
                tensor.copy_(spread * torch.randn(tensor.shape))
    model.save_pretrained(folder)
    return kind.from_pretrained(folder, dtype="float32").eval()


def denoise_with_transformers(model, key):
    """Return the samples by transformers, one at a time, each with its own cache."""
    import torch
    import transformers

    found = []
    with torch.no_grad():
        for sample in range(SAMPLES):
            cache = transformers.DynamicCache(config=model.config.get_text_config())
            new, tokens = [], torch.tensor(PROMPT)[None].long()
            for block_key in jax.random.split(key, BLOCKS):

                def draw(number, block_key=block_key, sample=sample):
                    drawn = jax.random.randint(
                        jax.random.fold_in(block_key, number),
                        (SAMPLES * CANVAS,),
                        0,
                        VOCABULARY,
                    )
                    return np.asarray(drawn).reshape(SAMPLES, CANVAS)[sample]

                canvas, logits = draw(0), None
                for number in range(STEPS):
                    out = model(
                        input_ids=tokens,
                        cache=cache,
                        decoder_input_ids=torch.tensor(canvas)[None].long(),
                        self_conditioning_logits=logits,
                    )
                    tokens, logits = None, out.logits  # the prompt is computed once
                    canvas = np.asarray(
                        keep_surest(
                            jnp.asarray(logits[0].numpy()),
                            jnp.asarray(draw(number + 1)),
                            (number + 1) * CANVAS // STEPS,
                            1,
                        )
                    )
                new.extend(canvas.tolist())
                tokens = torch.tensor(canvas)[None].long()
            found.append(new)
    return found


@pytest.mark.further
@pytest.mark.skipif(not HAS_TRANSFORMERS, reason="no transformers")
def test_samples_of_one_prompt_equal_transformers(tmp_path):
    reference = make_folder(tmp_path)
    denoiser = load(tmp_path)
    sizes = Sizes(SAMPLES, BLOCKS, STEPS, len(PROMPT) + BLOCKS * CANVAS)
    cache = make_cache(denoiser, sizes, len(PROMPT), dtype="float32")
    key = jax.random.key(5)
    cache, tokens = denoise(denoiser, cache, PROMPT, key, sizes)
    assert tokens.tolist() == denoise_with_transformers(reference, key)
    # The prompt's full block is stored once; later blocks belong to one sample each.
    group = cache.metadata.leader  # of full attention
    ids = np.flatnonzero(jkv.context_lengths(cache)).tolist()
    blocks = [jkv.block_ids(cache, seq_id, group=group) for seq_id in ids]
    owned = {int(row[0]) for row in blocks}
    assert len(owned) == 1 and len({int(row[1]) for row in blocks}) == SAMPLES


def test_the_most_confident_tokens_are_kept():
    logits = jnp.log(
        jnp.array([[[0.9, 0.1], [0.4, 0.6], [0.2, 0.8]], [[0.5, 0.5]] * 3])
    )
    noise = jnp.full((6,), 7)
    kept = keep_surest(logits.reshape(6, 2), noise, 2, 2)
    assert kept.tolist() == [0, 7, 1, 0, 0, 7]
