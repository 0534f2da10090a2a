"""Training data of a drafter: a model's own conversations and hidden states.

Prompts are sampled from the model at the start of a user's turn (Xu et al., "Magpie:
Alignment Data Synthesis from Scratch by Prompting Aligned LLMs with Nothing", 2024).
Their completions alternate between greedy decoding and sampling.
"""

from functools import partial
from typing import IO

import jax
import jax.numpy as jnp
import numpy as np
import pretrained
from pretrained.layers import scale_to_unit

import jkv

from .eagle3_head import EPSILON, Texts

RUNNING = 64  # maximum running sequences
TEXTS_READ = 8  # sequences per forward pass for hidden states
PROMPT_TOKENS, MARK = 40, "QUESTION"


def write_texts(
    model: pretrained.Decoder,
    params: pretrained.Params,
    folder: str,
    num_texts: int,
    num_new: int,
    least: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Generate sequences, i32[N, T], with the ends of prompt and sequence, i32[N, 2].

    Prompts are sampled after the tokens that the chat template writes before a user's
    message; without any, after a stop token. Equal and empty prompts of a chat are
    dropped, so that N may be below `num_texts`.

    Raises:
        ValueError: for a model with neither, or if N is below `least`.
    """
    tokenizer, begin = pretrained.load_tokenizer(folder), model.config.stop_tokens[:1]
    encode = partial(tokenizer.encode, add_special_tokens=False)
    if chats := pretrained.has_chat_template(folder):
        opening = pretrained.render_chat(folder, MARK).partition(MARK)[0]
        begin = encode(opening).ids or begin
    if not begin:
        raise ValueError(
            f"{folder} must have a chat template with text before a user's message, or "
            "a stop token (eos_token_id in config.json), to sample prompts after"
        )
    begin = list(begin)
    prompts = _roll_out(model, params, [begin] * num_texts, PROMPT_TOKENS, 0.8)
    if chats:
        made = dict.fromkeys(tokenizer.decode(each).strip() for each in prompts)
        questions = [each for each in made if each]
        prompts = [encode(pretrained.render_chat(folder, q)).ids for q in questions]
    else:
        prompts = [begin + each for each in prompts]
    if len(prompts) < least:
        raise ValueError(
            f"{folder}: {len(prompts)} of {num_texts} sampled prompts are different "
            f"and not empty, and training needs {least}; raise num_texts (--texts)"
        )
    temperatures = 0.7 * (np.arange(len(prompts), dtype=np.float32) % 2)
    completions = _roll_out(model, params, prompts, num_new, temperatures)
    texts = [a + b for a, b in zip(prompts, completions, strict=True)]
    ends = np.array([[*map(len, pair)] for pair in zip(prompts, texts, strict=True)])
    tokens = np.zeros((len(texts), ends.max()), np.int32)
    for row, each in zip(tokens, texts, strict=True):
        row[: len(each)] = each
    return tokens, ends


def read_texts(
    model: pretrained.Decoder,
    params: pretrained.Params,
    tokens: np.ndarray,
    ends: np.ndarray,
    layers: list[int],
    file: IO[bytes],
) -> Texts:
    """Compute the target's outputs for sequences of `write_texts`.

    Inputs of `layers` and the last hidden states are memory-mapped to `file`, f16.

    Raises:
        ValueError: if all completions are empty.
    """
    num, length = tokens.shape
    shape = num, length, len(layers) + 1, model.config.hidden_size
    hidden = np.memmap(file, np.float16, "w+", shape=shape)
    best, every = np.zeros_like(tokens), (*layers, model.config.num_layers)
    for end in range(TEXTS_READ, num + TEXTS_READ, TEXTS_READ):
        rows = slice(max(min(end, num) - TEXTS_READ, 0), min(end, num))
        best[rows], hidden[rows] = _read_rows(model, params, tokens[rows], every)
    row = np.arange(length)
    trained = row < ends[:, 1:] - 1
    counted = trained & (row >= ends[:, :1] - 1)
    if not counted.any():
        raise ValueError("all completions are empty: there is nothing to learn from")
    return Texts(tokens, best, hidden, trained, counted)


def _roll_out(
    model: pretrained.Decoder,
    params: pretrained.Params,
    prompts: list[list[int]],
    num_new: int,
    temperature: np.ndarray | float,
) -> list[list[int]]:
    """Sample completions of prompts, at most `num_new` tokens each."""
    length = max(map(len, prompts)) + num_new
    config = model.cache_config(length, max_sequences=RUNNING, dtype=jnp.float32)
    _, result = jkv.jitted.generate(
        model,
        params,
        jkv.init(config),
        prompts,
        max_new_tokens=num_new,
        max_running=RUNNING,
        stop_tokens=model.config.stop_tokens,
        sampling=jkv.Sampling(temperature=temperature, seeds=np.arange(len(prompts))),
    )
    found = zip(np.asarray(result.tokens), np.asarray(result.lengths), strict=True)
    return [tokens[:count].tolist() for tokens, count in found]


@partial(jax.jit, static_argnames=("model", "layers"))
def _read_rows(
    model: pretrained.Decoder,
    params: pretrained.Params,
    tokens: jax.Array,
    layers: tuple[int, ...],
) -> tuple[jax.Array, jax.Array]:
    """Return most likely next tokens, i32[N, T], and hidden states f16[N, T, L, E].

    All but the last layer's are scaled to mean square 1, the head's first operation.
    """
    num, length = tokens.shape
    config = model.cache_config(length, max_sequences=num, dtype=jnp.float32)
    cache, opened = jkv.allocate(jkv.init(config), jnp.zeros((num,), jnp.int32))
    cache, batch = jkv.append(cache, opened.seq_ids, length, capacity=num * length)
    logits, _, hidden = model(
        params, tokens.reshape(-1), cache, batch, all_rows=True, aux_layers=layers
    )
    best = jnp.argmax(logits, axis=-1).astype(jnp.int32).reshape(num, length)
    hidden = hidden.reshape(num, length, len(layers), -1)
    aux, last = scale_to_unit(hidden[:, :, :-1], EPSILON), hidden[:, :, -1:]
    return best, jnp.concatenate([aux, last], axis=2).astype(jnp.float16)
