"""The program of each process, the same in all, on the devices of all of them."""

import argparse
import functools
import pathlib
import sys

import jax
import numpy as np
import pretrained
from generating.exiting import BAD_VALUE, answering_errors, fail
from jax.sharding import NamedSharding, PartitionSpec

import jkv

from .joining import join, make_mesh
from .keeping import load_state, save_state
from .texts import Texts, take_steps


def run_process(options: argparse.Namespace) -> None:
    """Join the other processes, continue the texts with them, and print the texts."""
    join(options)
    jkv.keep_compiled_programs()
    mesh = make_mesh(options.tensor_parallel)
    texts = continue_texts(options, mesh)
    if jax.process_index() == 0:
        for text in texts:
            print(text, end="\n\n")
        sys.stdout.flush()


def continue_texts(options: argparse.Namespace, mesh: jax.sharding.Mesh) -> list[str]:
    """Continue all prompts on a mesh with the axes "dp" and "tp"."""
    with answering_errors():
        model, params = pretrained.load(options.model, mesh=mesh)
        tokenizer = pretrained.load_tokenizer(options.model)
    folder = pathlib.Path(options.state)
    prompts = [each.ids for each in tokenizer.encode_batch([*options.prompts])]
    saved = load_state(folder, mesh)
    if saved is None:
        num_ranks = mesh.shape["dp"]
        texts = Texts.deal(prompts, num_ranks, options.max_new_tokens)
        saved = open_texts(model, params, mesh, texts), texts, 0
    cache, texts, num_steps = saved
    for found, prompt in zip(texts.collect(len(prompts)), prompts, strict=True):
        if found[: len(prompt)] != prompt:
            fail(BAD_VALUE, f"{folder} has the state of other prompts")
    say(f"go on after {num_steps} steps" if num_steps else "begin")

    everywhere = NamedSharding(mesh, PartitionSpec())

    @functools.partial(jax.jit, donate_argnames="cache")
    def take_window(
        params: pretrained.Params, cache: jkv.Cache, texts: Texts
    ) -> tuple[jkv.Cache, Texts]:
        on_rank = functools.partial(
            take_steps, model, params, model.config.stop_tokens[0], options.save_every
        )
        cache, texts = jkv.over_pools(on_rank)(cache, texts)
        # Here the processes meet: each gets the texts of all.
        return cache, jax.lax.with_sharding_constraint(texts, everywhere)

    while np.any(np.asarray(texts.lengths) < texts.limits):
        cache, texts = take_window(params, cache, texts)
        texts = jax.tree.map(np.asarray, texts)
        num_steps += options.save_every
        save_state(folder, cache, texts, num_steps)
        say(f"saved after {num_steps} steps")
    return [tokenizer.decode(ids) for ids in texts.collect(len(prompts))]


def open_texts(
    model: pretrained.Decoder,
    params: pretrained.Params,
    mesh: jax.sharding.Mesh,
    texts: Texts,
) -> jkv.Cache:
    """Return a cache with a sequence for each text of a rank."""
    _, each, longest = texts.tokens.shape
    config = jkv.CacheConfig.for_context_length(
        longest,
        max_sequences=each,
        dtype=params["embedding"].dtype,
        **model.cache_fields,
    )
    cache = jkv.init(config, mesh=mesh, heads="tp", pools="dp")
    return jkv.over_pools(jkv.allocate)(cache, np.zeros_like(texts.lengths))[0]


def say(text: str) -> None:
    """Tell the user, once for all processes."""
    if jax.process_index() == 0:
        print(text, flush=True)
