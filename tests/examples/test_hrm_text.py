"""HRM-Text: logits and greedy tokens of prefix-LM prompts equal to transformers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pretrained import hrm_text
from test_pretrained_parity import HAS_TRANSFORMERS

import jkv
from jkv.decoding import Prompts

pytestmark = pytest.mark.one_end
LENGTH, PREFIX, NEW = 12, 9, 5


@pytest.mark.further
@pytest.mark.skipif(not HAS_TRANSFORMERS, reason="no transformers")
def test_prefix_prompts_equal_transformers(tmp_path):
    import torch
    import transformers

    config = transformers.HrmTextConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        head_dim=8,
        max_position_embeddings=64,
        H_cycles=2,
        L_cycles=2,
        initializer_range=0.2,
        rope_parameters={"rope_theta": 10_000.0, "rope_type": "default"},
    )
    torch.manual_seed(0)
    reference = transformers.HrmTextForCausalLM(config).eval()
    with torch.no_grad():
        reference.model.z_L_init.normal_()
    reference.save_pretrained(tmp_path)

    def run(tokens):
        """Return the logits of a whole sequence whose first tokens are the prefix."""
        marks = (np.arange(len(tokens)) < PREFIX).astype(np.int64)
        with torch.no_grad():
            return (
                reference(
                    torch.tensor(tokens)[None],
                    token_type_ids=torch.tensor(marks)[None],
                    use_cache=False,
                )
                .logits[0]
                .numpy()
            )

    tokens = np.random.default_rng(0).integers(0, 64, LENGTH).tolist()
    ends = [PREFIX - 1] * PREFIX + [-1] * (LENGTH - PREFIX)
    model, params = hrm_text.load(tmp_path)
    sizes = dict(num_blocks=8, block_size=4, max_sequences=1, dtype="float32")
    cache = jkv.init(model.cache_config(32, **sizes))
    cache, opened = jkv.allocate(cache, [0])
    mask = jkv.SpanMask(jnp.array(ends))
    cache, batch = jkv.append(cache, opened.seq_ids, LENGTH, capacity=LENGTH, mask=mask)
    call = jax.jit(model, static_argnames="all_rows")
    logits, _ = call(params, jnp.array(tokens), cache, batch, all_rows=True)
    np.testing.assert_allclose(logits, run(tokens), atol=2e-4)

    answer = list(tokens)
    for _ in range(NEW):
        answer.append(int(np.argmax(run(answer)[-1])))
    _, result = jkv.jitted.generate(
        model,
        params,
        jkv.init(model.cache_config(32, **sizes)),
        Prompts.of([tokens], spans=[ends]),
        max_new_tokens=NEW,
    )
    assert result.tokens[0].tolist() == answer[LENGTH:]


def test_other_checkpoints_are_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ValueError, match="must hold an hrm_text checkpoint"):
        hrm_text.load(tmp_path)
