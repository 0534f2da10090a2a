"""Generate: read prompts, run an engine, print completions."""

import argparse
import dataclasses
import sys
import time
from typing import Any, NamedTuple

import jax
import numpy as np
import pretrained
from rich.console import Console
from rich.progress import Progress
from tokenizers import Tokenizer

import jkv
from jkv.decoding import GenerationConfig, spread_seeds
from jkv.serving import Engine, StopSizes

from . import output, prompts
from .exiting import answering_errors
from .options import SAMPLING

# Fewer steps per window show tokens sooner; more have less overhead.
STEPS_A_WINDOW = 4


class Task(NamedTuple):
    """Prompts, model and options of a run."""

    model: pretrained.Decoder
    params: pretrained.Params
    tokenizer: Tokenizer
    prompts: list[list[int]]  # token ids, B of them
    padded: np.ndarray  # i32[B, P], padded with -1
    max_new_tokens: int
    sampling: jkv.Sampling
    config: jkv.CacheConfig | jkv.GroupedConfig
    mesh: jax.sharding.Mesh | None  # None on one device


def generate(options: argparse.Namespace) -> None:
    """Run the command."""
    jkv.keep_compiled_programs()
    console = Console(stderr=True)
    with answering_errors():
        task = prepare(options)
    began = time.perf_counter()
    with console.status("compiling"):
        engine = make_engine(task, options.num_samples)
        engine.warm_up()
    started = time.perf_counter()
    numbers = submit(task, engine, options)

    total = len(task.prompts) * options.num_samples
    streams = total == 1 and not options.json
    shown = output.Shown(task.tokenizer, task.prompts, options)
    with Progress(console=console, transient=True, disable=streams) as bar:
        progress = bar.add_task("tokens", total=total * task.max_new_tokens)
        while not engine.is_idle:
            for event in engine.step():
                bar.advance(progress, len(event.tokens))
                if streams:
                    shown.advance(event)
                elif event.reason:
                    found = engine.results(event.request_id, wait=False)
                    prompt = numbers.index(event.request_id)
                    shown.show(prompt, found[event.sample])
    sys.stdout.flush()
    reasons = [each.reason for n in numbers for each in engine.results(n)]
    output.show_closing_line(
        engine.stats(),
        task.config.block_size,
        reasons,
        seconds_before=started - began,
        seconds=time.perf_counter() - started,
    )


def make_engine(task: Task, num_samples: int) -> Engine:
    """Return an engine that runs all sequences at once."""
    stop_tokens = task.model.config.stop_tokens
    return Engine(
        task.model,
        task.params,
        jkv.init(task.config, mesh=task.mesh, heads=task.mesh and "tp"),
        max_running=len(task.prompts) * num_samples,
        num_ahead=0,
        max_new_tokens=task.max_new_tokens,
        max_prompt_tokens=task.padded.shape[1],
        max_samples=num_samples,
        num_steps=STEPS_A_WINDOW,
        stop_tokens=stop_tokens,
        stop_sizes=StopSizes(len(stop_tokens), 0, 0),
        detokenize=task.tokenizer.decode,
        max_results=len(task.prompts),
        result_seconds=float("inf"),
        kept_programs=pretrained.keep_programs(task.model),
    )


def submit(task: Task, engine: Engine, options: argparse.Namespace) -> list[int]:
    """Submit all prompts; each sample has its own seed."""
    numbers, n = [], options.num_samples
    seeds = spread_seeds(task.sampling.seeds, n * len(task.prompts))
    for i, ids in enumerate(task.prompts):
        mine = seeds[i * n : (i + 1) * n]
        numbers.append(
            engine.submit(
                ids,
                n=n,
                sampling=dataclasses.replace(task.sampling, seeds=mine),
                stop_strings=options.stop,
            )
        )
    return numbers


def prepare(options: argparse.Namespace) -> Task:
    """Read prompts and model, and choose the cache's size.

    Raises:
        OSError: if a file cannot be read.
        ValueError: if prompts, model or options are invalid.
    """
    for name in ("max_new_tokens", "num_samples"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1")
    if not all(options.stop):
        raise ValueError("--stop must not be empty")
    texts = prompts.read_texts(options.prompts, options.file)
    sampling = choose_sampling(options)
    # Refuse invalid dtypes before the model is loaded.
    dtypes = dict(dtype=options.kv_dtype, value_dtype=options.value_dtype)
    jkv.CacheConfig.toy(**{name: each for name, each in dtypes.items() if each})
    several = options.tensor_parallel != 1
    mesh = pretrained.make_mesh(options.tensor_parallel) if several else None
    model, params = pretrained.load(
        options.model,
        mesh=mesh,
        scan_layers=options.scan_layers,
        loop_layers=pretrained.prefers_loops(mesh),
    )
    tokenizer = pretrained.load_tokenizer(options.model)
    if options.chat:
        texts = [pretrained.render_chat(options.model, text) for text in texts]
    context = model.config.max_context_length
    ids = prompts.encode(
        tokenizer,
        texts,
        vocabulary=model.config.vocab_size,
        context=context,
        has_special_tokens=options.chat,
    )
    padded = prompts.pad(ids, context)
    # One token beyond the context, so that CONTEXT_FULL is reported.
    room = context - min(map(len, ids)) + 2
    max_new_tokens = min(options.max_new_tokens, room)
    config = model.cache_config(
        min(context, padded.shape[1] + max_new_tokens),
        step_tokens=min(GenerationConfig.chunk_size, padded.size),
        max_sequences=len(ids) * options.num_samples,
        dtype=options.kv_dtype or params["embedding"].dtype,
        value_dtype=options.value_dtype,
    )
    return Task(
        model, params, tokenizer, ids, padded, max_new_tokens, sampling, config, mesh
    )


def choose_sampling(options: argparse.Namespace) -> jkv.Sampling:
    """Return the sampling parameters of the command line, checkpoint, or defaults."""
    chosen: dict[str, Any] = SAMPLING | pretrained.read_sampling(options.model)
    given = {name: getattr(options, name) for name in SAMPLING}
    chosen |= {name: value for name, value in given.items() if value is not None}
    return jkv.Sampling(**chosen)
