"""Continue prompts: read them, generate some steps at a time, and show the texts."""

import argparse
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import llama
import numpy as np
from rich.console import Console
from rich.progress import Progress
from tokenizers import Tokenizer

import jkv
from jkv import decoding
from jkv.commands.compiled_programs import keep_compiled_programs

from . import output, prompts
from .options import SAMPLING

# `jkv.generate` in windows, so that the host sees the tokens between steps. The model
# is compiled for the second alone.
static = ("model", "max_new_tokens", "num_samples")
donated = ("cache", "state")
enqueue = jax.jit(decoding.begin, static_argnames=static)
decode = jax.jit(decoding.decode, static_argnames="model", donate_argnames=donated)

# Fewer steps a call show text sooner, more spend less time between calls.
STEPS_A_CALL = 4

Progressed = tuple[jkv.Cache, decoding.GenerationState]


class Task(NamedTuple):
    """What is to be done."""

    model: llama.Llama
    params: llama.Params
    tokenizer: Tokenizer
    prompts: list[list[int]]  # token ids, B of them
    padded: np.ndarray  # i32[B, P], the same as an array
    max_new_tokens: int
    sampling: jkv.Sampling
    config: jkv.CacheConfig


def generate(options: argparse.Namespace) -> None:
    """Do what the command line says."""
    keep_compiled_programs()
    console = Console(stderr=True)
    try:
        task = prepare(options)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    began = time.perf_counter()
    with console.status("compiling, and reading the prompts"):
        cache, state = begin(task, options.num_samples)
        num_first, started = int(state.result.lengths.sum()), time.perf_counter()

    total = len(task.prompts) * options.num_samples
    streams = total == 1 and not options.json
    stream = output.TextStream(task.tokenizer, task.prompts[0], is_chat=options.chat)
    with Progress(console=console, transient=True, disable=streams) as bar:
        progress = bar.add_task("tokens", total=total * task.max_new_tokens)
        for progressed in go_on(task, cache, state):
            cache, state = progressed
            bar.update(progress, completed=int(state.result.lengths.sum()))
            if streams:
                row = np.asarray(state.result.tokens[0])
                has_ended = not state.is_running.any()
                fresh = stream.advance(row[row >= 0].tolist(), has_ended=has_ended)
                print(fresh, end="", flush=True)
    seconds = time.perf_counter() - started

    if not streams:
        texts = output.describe(
            task.tokenizer, task.prompts, state.result, is_chat=options.chat
        )
        output.show_all(texts, as_json=options.json)
    sys.stdout.flush()
    num_later = int(state.result.lengths.sum()) - num_first
    output.show_closing_line(
        cache,
        state.result,
        seconds_before=started - began,
        tokens_per_second=num_later / seconds,
    )


def begin(task: Task, num_samples: int) -> Progressed:
    """Do the first step: all that has to be compiled."""
    cache = jkv.init(task.config)
    state = enqueue(
        task.model,
        task.params,
        cache,
        task.padded,
        max_new_tokens=task.max_new_tokens,
        num_samples=num_samples,
        stop_tokens=jnp.array(task.model.config.stop_tokens, jnp.int32),
    )
    return advance(task, cache, state, num_steps=1)


def go_on(
    task: Task, cache: jkv.Cache, state: decoding.GenerationState
) -> Iterator[Progressed]:
    """Yield what there is, and after every few steps what has come, to the end."""
    yield cache, state
    while state.is_running.any():
        cache, state = advance(task, cache, state, num_steps=STEPS_A_CALL)
        yield cache, state


def advance(
    task: Task, cache: jkv.Cache, state: decoding.GenerationState, *, num_steps: int
) -> Progressed:
    """Do some steps; cache and state are donated."""
    return decode(
        task.model,
        task.params,
        cache,
        state,
        sampling=task.sampling,
        num_steps=num_steps,
    )


def prepare(options: argparse.Namespace) -> Task:
    """Read prompts and model, and size the cache.

    Raises:
        OSError: when a file cannot be read.
        ValueError: for anything else that is wrong with prompts, model or options.
    """
    for name in ("max_new_tokens", "num_samples"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1")
    texts = prompts.read_texts(options.prompts, options.file)
    sampling = choose_sampling(options)
    model, params = llama.load(options.model)
    tokenizer = llama.load_tokenizer(options.model)
    if options.chat:
        texts = [llama.render_chat(options.model, text) for text in texts]
    context = model.config.max_context_length
    ids = prompts.encode(
        tokenizer,
        texts,
        vocabulary=model.config.vocab_size,
        context=context,
        has_special_tokens=options.chat,
    )
    padded = prompts.pad(ids, context)
    # One token more than the context takes: then that is given as the reason.
    room = context - min(map(len, ids)) + 2
    max_new_tokens = min(options.max_new_tokens, room)
    config = jkv.CacheConfig.for_context_length(
        min(context, padded.shape[1] + max_new_tokens),
        max_sequences=len(ids) * options.num_samples,
        dtype=options.kv_dtype or params["embedding"].dtype,
        **model.cache_fields,
    )
    return Task(model, params, tokenizer, ids, padded, max_new_tokens, sampling, config)


def choose_sampling(options: argparse.Namespace) -> jkv.Sampling:
    """Take the command line's values, else the checkpoint's, else our own."""
    chosen: dict[str, Any] = SAMPLING | llama.read_sampling(options.model)
    given = {name: getattr(options, name) for name in SAMPLING}
    chosen |= {name: value for name, value in given.items() if value is not None}
    return jkv.Sampling(**chosen)
