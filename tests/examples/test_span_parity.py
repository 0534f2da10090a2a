"""Images and prefix-LM prompts: logits and greedy tokens equal transformers'.

Random tiny models, with given rows as image embeddings.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pretrained
import pytest
from support.checkpoints import checkpoint_fixtures as fixtures
from test_pretrained_parity import HAS_TRANSFORMERS

import jkv
from jkv.decoding import Prompts

pytestmark = [
    pytest.mark.one_end,
    pytest.mark.skipif(not HAS_TRANSFORMERS, reason="no transformers"),
]
NEW, LENGTH = 6, 20


@dataclasses.dataclass
class Case:
    """A model family: its text checkpoint, and how its class marks tokens."""

    text: str  # a checkpoint of `fixtures`
    family: str  # of class names in transformers
    mark: str  # argument with a number per token
    images: list[range]  # rows given as embeddings
    spans: list[range]  # rows that attend to each other
    numbers: tuple[int, int] = (0, 1)  # of tokens outside and inside a span
    vision: dict[str, Any] = dataclasses.field(default_factory=dict)
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    text_settings: dict[str, Any] = dataclasses.field(default_factory=dict)


TWO_IMAGES = [range(2, 6), range(9, 13)]
PREFIX = [range(14)]
GEMMA4_VISION = dict(num_key_value_heads=2, head_dim=8, position_embedding_size=16)
# Ids within its small vocabulary that no prompt contains.
GEMMA4_IDS = dict(image_token_id=125, video_token_id=126, audio_token_id=127)
CASES = {
    "gemma3": Case("gemma3", "Gemma3", "token_type_ids", TWO_IMAGES, TWO_IMAGES),
    "gemma4": Case(
        "gemma4",
        "Gemma4",
        "mm_token_type_ids",
        TWO_IMAGES,
        TWO_IMAGES,
        vision=GEMMA4_VISION,
        config=GEMMA4_IDS,
        text_settings=dict(use_bidirectional_attention="vision"),
    ),
    "gemma4_moe": Case(
        "gemma4_moe",
        "Gemma4",
        "mm_token_type_ids",
        TWO_IMAGES,
        [],
        vision=GEMMA4_VISION,
        config=GEMMA4_IDS,
        text_settings=dict(use_bidirectional_attention=None),
    ),
    "paligemma": Case(
        "gemma",
        "PaliGemma",
        "token_type_ids",
        [range(6)],
        PREFIX,
        numbers=(1, 0),
        config=dict(projection_dim=32),
    ),
    # Its windows are longer than its prefixes.
    "paligemma2": Case(
        "gemma2",
        "PaliGemma",
        "token_type_ids",
        [range(4)],
        [range(7)],
        numbers=(1, 0),
        config=dict(projection_dim=32),
    ),
}


def make_folder(case: Case, folder) -> Any:
    """Write a random vision-language checkpoint; return its model in float32."""
    import torch
    import transformers

    text = transformers.AutoConfig.from_pretrained(
        fixtures.FIXTURES / case.text, **case.text_settings
    )
    vision = fixtures.VISION | case.vision
    if case.family == "Gemma4":
        del vision["image_size"]
    config = getattr(transformers, f"{case.family}Config")(
        text_config=text,
        vision_config=vision,
        tie_word_embeddings=text.tie_word_embeddings,
        **case.config,
    )
    model = getattr(transformers, f"{case.family}ForConditionalGeneration")(config)
    plain = transformers.AutoModelForCausalLM.from_pretrained(
        fixtures.FIXTURES / case.text, dtype="float32"
    )
    model.model.language_model.load_state_dict(plain.model.state_dict())
    model.lm_head.load_state_dict(plain.lm_head.state_dict())
    model.to(torch.float16).save_pretrained(folder)
    return type(model).from_pretrained(folder, dtype="float32").eval()


def run_transformers(case: Case, model, tokens, given) -> np.ndarray:
    """Return the logits of a whole sequence, f32[n, V]."""
    import torch

    vocabulary = model.get_input_embeddings().weight.shape[0]
    ids = torch.tensor(tokens)[None].long()
    is_given = ids >= vocabulary
    embeddings = model.get_input_embeddings()(ids.masked_fill(is_given, 0))
    embeddings[is_given] = torch.tensor(given)[ids[is_given] - vocabulary]
    marks = torch.full(ids.shape, case.numbers[0])
    for span in case.spans or case.images:
        marks[0, list(span)] = case.numbers[1]
    more = {}
    text = model.config.get_text_config()
    if getattr(text, "hidden_size_per_layer_input", None):
        # As the class does for images: ids are replaced by padding.
        language_model = model.model.language_model
        padded = ids.masked_fill(is_given, 0)
        embedded = model.get_input_embeddings()(padded)
        pad = language_model.embed_tokens.weight[0] * 1.0
        embedded = torch.where(is_given[..., None], embedded[0, 0] * 0 + pad, embedded)
        inputs = language_model.get_per_layer_inputs(padded, embedded)
        more = {"per_layer_inputs": inputs}
    with torch.no_grad():
        logits = model(
            inputs_embeds=embeddings,
            attention_mask=torch.ones_like(ids),
            **{case.mark: marks},
            **more,
        ).logits[0]
    return logits.numpy()


@pytest.mark.further
@pytest.mark.parametrize(
    "name", ["gemma3", "gemma4", "gemma4_moe", "paligemma", "paligemma2"]
)
def test_logits_and_tokens_equal_transformers(name, tmp_path):
    case = CASES[name]
    reference = make_folder(case, tmp_path)
    model, params = pretrained.load(tmp_path)
    vocabulary = model.config.vocab_size
    rng = np.random.default_rng(3)
    tokens = rng.integers(1, 120, LENGTH)
    rows = [row for image in case.images for row in image]
    tokens[rows] = vocabulary + np.arange(len(rows))
    given = rng.normal(size=(len(rows), model.config.hidden_size)).astype(np.float32)
    params = params | {"given_rows": jnp.asarray(given)}
    ends = np.full(LENGTH, -1, np.int32)
    for span in case.spans:
        ends[list(span)] = span[-1]

    cache = jkv.init(
        model.cache_config(48, num_blocks=32, max_sequences=4, dtype="float32")
    )
    cache, opened = jkv.allocate(cache, [0])
    mask = jkv.SpanMask(jnp.asarray(ends)) if case.spans else jkv.CausalMask()
    cache, batch = jkv.append(cache, [0], LENGTH, capacity=LENGTH, mask=mask)
    logits, cache = jax.jit(model, static_argnames="all_rows")(
        params, jnp.asarray(tokens, jnp.int32), cache, batch, all_rows=True
    )
    expected = run_transformers(case, reference, tokens, given)
    np.testing.assert_allclose(logits, expected, atol=2e-4)
    if case.spans:
        causal = dataclasses.replace(case, spans=[], images=[])
        away = run_transformers(causal, reference, tokens, given)
        assert np.abs(away - expected).max() > 0.1

    text = list(tokens)
    for _ in range(NEW):
        found = run_transformers(case, reference, text, given)[-1]
        text.append(int(np.argmax(found)))
    prompts = Prompts.of(
        [tokens.tolist()] * 2,
        spans=[ends.tolist()] * 2,
        extra_ids=len(rows),
    )
    _, result = jax.jit(
        jkv.generate, static_argnums=0, static_argnames="max_new_tokens"
    )(
        model,
        params,
        jkv.init(
            model.cache_config(48, num_blocks=32, max_sequences=4, dtype="float32")
        ),
        prompts,
        max_new_tokens=NEW,
    )
    assert result.tokens.tolist() == [text[LENGTH:]] * 2
