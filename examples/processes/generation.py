"""The program of each process; all processes run it on the devices of all."""

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
from .sequences import Sequences, take_steps


def run_process(options: argparse.Namespace) -> None:
    """Join the other processes and generate; the first process prints the results."""
    join(options)
    jkv.keep_compiled_programs()
    mesh = make_mesh(options.tensor_parallel)
    texts = continue_prompts(options, mesh)
    if jax.process_index() == 0:
        for text in texts:
            print(text, end="\n\n")
        sys.stdout.flush()


def continue_prompts(options: argparse.Namespace, mesh: jax.sharding.Mesh) -> list[str]:
    """Return prompts with completions, computed on a mesh with axes "dp" and "tp"."""
    with answering_errors():
        model, params = pretrained.load(options.model, mesh=mesh)
        tokenizer = pretrained.load_tokenizer(options.model)
    folder = pathlib.Path(options.state)
    prompts = [each.ids for each in tokenizer.encode_batch([*options.prompts])]
    saved = load_state(folder, mesh)
    if saved is None:
        num_ranks = mesh.shape["dp"]
        sequences = Sequences.deal(prompts, num_ranks, options.max_new_tokens)
        saved = open_sequences(model, params, mesh, sequences), sequences, 0
    cache, sequences, num_steps = saved
    for found, prompt in zip(sequences.collect(len(prompts)), prompts, strict=True):
        if found[: len(prompt)] != prompt:
            fail(BAD_VALUE, f"{folder} has the state of other prompts")
    report(f"go on after {num_steps} steps" if num_steps else "begin")

    everywhere = NamedSharding(mesh, PartitionSpec())

    @functools.partial(jax.jit, donate_argnames="cache")
    def take_window(
        params: pretrained.Params, cache: jkv.Cache, sequences: Sequences
    ) -> tuple[jkv.Cache, Sequences]:
        on_rank = functools.partial(
            take_steps, model, params, model.config.stop_tokens[0], options.save_every
        )
        cache, sequences = jkv.over_pools(on_rank)(cache, sequences)
        # Gather the sequences of all ranks in each process.
        return cache, jax.lax.with_sharding_constraint(sequences, everywhere)

    while np.any(np.asarray(sequences.lengths) < sequences.limits):
        cache, sequences = take_window(params, cache, sequences)
        sequences = jax.tree.map(np.asarray, sequences)
        num_steps += options.save_every
        save_state(folder, cache, sequences, num_steps)
        report(f"saved after {num_steps} steps")
    return [tokenizer.decode(ids) for ids in sequences.collect(len(prompts))]


def open_sequences(
    model: pretrained.Decoder,
    params: pretrained.Params,
    mesh: jax.sharding.Mesh,
    sequences: Sequences,
) -> jkv.Cache:
    """Return a cache with opened sequences on each rank."""
    _, each, longest = sequences.tokens.shape
    config = jkv.CacheConfig.for_context_length(
        longest,
        max_sequences=each,
        dtype=params["embedding"].dtype,
        **model.cache_fields,
    )
    cache = jkv.init(config, mesh=mesh, heads="tp", pools="dp")
    return jkv.over_pools(jkv.allocate)(cache, np.zeros_like(sequences.lengths))[0]


def report(text: str) -> None:
    """Print a message in the first process."""
    if jax.process_index() == 0:
        print(text, flush=True)
