"""Generation under other libraries' models, compared to each library's own loop.

    .venv-under-lalamo/bin/python benchmarks/adapters.py [--quick]

Run it in the environment of each library (`tools/environments.py`). It measures the
library that is installed: a random decoder of 128 to 153 million parameters in float32,
8 prompts of 32 tokens, 64 new tokens, greedy. The library generates by its own compiled
loop, jkv by `jkv.jitted.generate` through the adapter in `examples/under`. Contenders
alternate in one process. What the first calls of each take above later ones, tracing
and compiling, is reported apart. One-time costs of the process are paid before.
"""

import argparse
import dataclasses
import importlib.metadata
import importlib.util
import os
import pathlib
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

# A cached program would not be compiled.
os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)
os.environ["KERAS_BACKEND"] = "jax"
sys.path += [str(pathlib.Path(__file__).parents[1] / n) for n in ("examples", "tests")]

import harness
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.compilation_cache import compilation_cache

import jkv

# EasyDeL sets XLA_FLAGS that newer versions of XLA do not know.
jax.devices()

RESULTS = pathlib.Path(__file__).parent / "results" / "adapters.json"
PROMPTS, PROMPT_LENGTH, NEW_TOKENS = 8, 32, 64
CONTEXT = PROMPT_LENGTH + NEW_TOKENS + 8  # gemma's cache must not be full
Loop = Callable[[Sequence[Sequence[int]]], np.ndarray]


class Sizes(NamedTuple):
    """Sizes of a decoder."""

    layers: int = 12
    width: int = 768
    inner: int = 3072
    heads: int = 12
    kv_heads: int = 4
    dim: int = 64
    vocabulary: int = 32_000


class Contest(NamedTuple):
    """A library's loop, and its model adapted to the cache."""

    package: str
    own: Loop  # tokens i32[PROMPTS, NEW_TOKENS]
    model: jkv.Model
    params: Any
    mesh: jax.sharding.Mesh | None = None  # of the weights


class Numbers:
    """A tokenizer whose texts are token ids, for samplers that take texts."""

    def encode(self, text: str, **_: Any) -> list[int]:
        """Return the ids."""
        return [int(word) for word in text.split()]

    def decode(self, ids: Any) -> str:
        """Return the text of the ids."""
        return " ".join(str(each) for each in np.asarray(ids).ravel())

    def pad_id(self) -> int:
        """Return the id of padding."""
        return 0

    def bos_id(self) -> int:
        """Return the id of no token: prompts are used as they are."""
        return 0

    def eos_id(self) -> int:
        """Return an id that is never sampled."""
        return -1


def under_keras_hub(sizes: Sizes) -> Contest:
    """Return Llama by KerasHub, and its `generate`."""
    import keras
    import keras_hub
    from under.keras_hub import paged

    keras.utils.set_random_seed(0)
    backbone = keras_hub.models.LlamaBackbone(
        vocabulary_size=sizes.vocabulary,
        num_layers=sizes.layers,
        num_query_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        hidden_dim=sizes.width,
        intermediate_dim=sizes.inner,
    )
    causal_lm = keras_hub.models.LlamaCausalLM(backbone=backbone, preprocessor=None)
    causal_lm.compile(sampler="greedy")

    def own(prompts: Sequence[Sequence[int]]) -> np.ndarray:
        length = PROMPT_LENGTH + NEW_TOKENS
        tokens = np.zeros((len(prompts), length), np.int32)
        tokens[:, :PROMPT_LENGTH] = prompts
        mask = np.zeros_like(tokens)
        mask[:, :PROMPT_LENGTH] = 1
        inputs = {"token_ids": tokens, "padding_mask": mask}
        found = causal_lm.generate(inputs, stop_token_ids=None)["token_ids"]
        return np.asarray(found)[:, PROMPT_LENGTH:]

    return Contest("keras-hub", own, *paged(causal_lm))


def under_gemma(sizes: Sizes) -> Contest:
    """Return a Gemma by google-deepmind/gemma, and its sampler loop."""
    from gemma.gm.nn import _config, _modules
    from gemma.gm.nn._transformer import Transformer
    from gemma.gm.text import _prefill, _sampler_loop, _sampling
    from gemma.gm.utils import _types
    from under.gemma import paged

    config = _config.TransformerConfig(
        num_embed=sizes.vocabulary,
        embed_dim=sizes.width,
        hidden_dim=sizes.inner,
        num_heads=sizes.heads,
        head_dim=sizes.dim,
        num_kv_heads=sizes.kv_heads,
        final_logit_softcap=None,
        use_post_attn_norm=True,
        use_post_ffw_norm=True,
        attention_types=(_modules.AttentionType.GLOBAL,) * sizes.layers,
        use_qk_norm=True,
    )
    transformer = Transformer(config=config, dtype=jnp.float32)
    params = transformer.init(jax.random.key(0), jnp.ones((1, 4), jnp.int32))["params"]
    no_images = _types.InputConfig(
        support_images=False, num_tokens_per_image=0, special_tokens=object
    )
    loop = _sampler_loop.SamplerLoop(
        model=transformer,
        end_tokens=(-1,),
        forbidden_tokens=None,
        sampling=_sampling.Greedy(),
        cache_length=CONTEXT,
        special_tokens=object,
    )

    def own(prompts: Sequence[Sequence[int]]) -> np.ndarray:
        state = _prefill.prefill(
            model=transformer,
            params=params,
            input=_types.Input(
                text=jnp.asarray(prompts, jnp.int32),
                images=None,
                config=no_images,
            ),
            last_state=None,
            cache_length=CONTEXT,
            max_out_length=NEW_TOKENS,
            pad_length=None,
            rng=jax.random.key(0),
            sharding=None,
        )
        found = loop.sample(
            params=params, init_state=state, max_new_tokens=jnp.asarray(NEW_TOKENS)
        )
        return np.asarray(found.predicted_tokens)

    return Contest("gemma", own, paged(transformer), params)


def under_lalamo(sizes: Sizes) -> Contest:
    """Return a Qwen-like decoder by lalamo, and its `generate_tokens`."""
    from lalamo.initializer import RandomInitializer
    from lalamo.models.language_model import (
        GenerationConfig,
        LanguageModel,
        LanguageModelConfig,
    )
    from lalamo.module import ForwardPassMode, Keychain
    from lalamo.utils.sharding import ShardingConfig
    from support.models.lalamo_models import FLOAT32, OPTIONS, make_config
    from under.lalamo import paged

    fields = sizes._asdict()
    windows = (None,) * fields.pop("layers")
    config = make_config(windows, **fields, context=CONTEXT)
    sharding = ShardingConfig.replicated()
    fresh = RandomInitializer(jnp.float32, sharding, key=jax.random.key(0))
    decoder = config.init(fresh)
    greedy = GenerationConfig(temperature=0.0)
    model_config = LanguageModelConfig(
        token_codec_config=None, decoder_config=config, generation_config=greedy
    )
    language_model = LanguageModel(
        config=model_config,
        sharding_config=sharding,
        token_codec=None,
        decoder=decoder,
    )
    keychain = Keychain.init(0, sharding_config=sharding)
    single = type(OPTIONS).for_inference(ForwardPassMode.SINGLE_TOKEN)
    single = dataclasses.replace(single, embedding_forward_pass_config=FLOAT32)

    def own(prompts: Sequence[Sequence[int]]) -> np.ndarray:
        found = language_model.generate_tokens(
            jnp.asarray(prompts, jnp.int32),
            max_output_length=NEW_TOKENS,
            prefill_forward_pass_config=OPTIONS,
            decode_forward_pass_config=single,
            keychain=keychain,
        )
        return np.asarray(found.token_ids)

    model, params = paged(decoder, forward_pass_config=OPTIONS)
    mesh = jax.tree.leaves(params)[0].sharding.mesh
    return Contest("lalamo", own, model, params, mesh)


def under_tunix(sizes: Sizes) -> Contest:
    """Return Qwen 3 by google-tunix, and its sampler."""
    from flax import nnx
    from tunix.generate.sampler import CacheConfig, Sampler
    from tunix.models.qwen3 import model as qwen3
    from under.tunix import paged

    config = qwen3.ModelConfig(
        num_layers=sizes.layers,
        embed_dim=sizes.width,
        hidden_dim=sizes.inner,
        num_heads=sizes.heads,
        num_kv_heads=sizes.kv_heads,
        head_dim=sizes.dim,
        rope_theta=10_000,
        norm_eps=1e-6,
        vocab_size=sizes.vocabulary,
        use_tied_embedding=True,
    )
    module = qwen3.Qwen3(config, rngs=nnx.Rngs(0))
    cached = sizes.layers, sizes.kv_heads, sizes.dim
    tokenizer = Numbers()
    sampler = Sampler(module, tokenizer, CacheConfig(CONTEXT, *cached))

    def own(prompts: Sequence[Sequence[int]]) -> np.ndarray:
        found = sampler(
            input_strings=[tokenizer.decode(prompt) for prompt in prompts],
            max_generation_steps=NEW_TOKENS,
            max_prompt_length=PROMPT_LENGTH,
            temperature=0.0,
        )
        return np.stack([np.asarray(tokens) for tokens in found.tokens])

    return Contest("google-tunix", own, *paged(module))


def under_easydel(sizes: Sizes) -> Contest:
    """Return Llama by EasyDeL, and its `generate`."""
    import easydel
    import transformers
    from flax import nnx
    from under.easydel import paged

    config = easydel.LlamaConfig(
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.width,
        intermediate_size=sizes.inner,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        head_dim=sizes.dim,
        max_position_embeddings=256,
        attn_mechanism="vanilla",
        attn_dtype=jnp.float32,
    )
    with config.mesh:
        causal_lm = easydel.LlamaForCausalLM(
            config=config,
            dtype=jnp.float32,
            param_dtype=jnp.float32,
            rngs=nnx.Rngs(0),
        )

    greedy = transformers.GenerationConfig(
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=sizes.vocabulary + 1,
    )

    def own(prompts: Sequence[Sequence[int]]) -> np.ndarray:
        with config.mesh:
            found = causal_lm.generate(jnp.asarray(prompts, jnp.int32), greedy)
        return np.asarray(found.sequences)[:, PROMPT_LENGTH:]

    return Contest("easydel", own, *paged(causal_lm), mesh=config.mesh)


CONTESTS = {
    "keras_hub": under_keras_hub,
    "gemma": under_gemma,
    "lalamo": under_lalamo,
    "tunix": under_tunix,
    "easydel": under_easydel,
}


def generate_by_jkv(contest: Contest, sizes: Sizes) -> Loop:
    """Return jkv's loop over the adapted model; the cache is donated and emptied."""
    config = jkv.CacheConfig(
        num_layers=sizes.layers,
        num_kv_heads=sizes.kv_heads,
        head_dim=sizes.dim,
        num_blocks=PROMPTS * -(-CONTEXT // 16),
        block_size=16,
        max_sequences=PROMPTS,
        max_context_length=CONTEXT,
        dtype="float32",
    )
    # A cache elsewhere moves to the mesh of the weights in the first call, and the
    # second call compiles again.
    cache = jkv.init(config, mesh=contest.mesh)

    def run(prompts: Sequence[Sequence[int]]) -> np.ndarray:
        nonlocal cache
        cache, found = jkv.jitted.generate(
            contest.model, contest.params, cache, prompts, max_new_tokens=NEW_TOKENS
        )
        return np.asarray(found.tokens)

    return run


def measure_compiling(loop: Loop, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Return the seconds of two calls above those of the next two, CPU and wall."""
    seconds = []
    for _ in range(4):
        began = time.process_time(), time.perf_counter()
        tokens = loop(prompts)
        taken = time.process_time() - began[0], time.perf_counter() - began[1]
        seconds.append(taken)
    cpu, wall = np.sum(seconds[:2], axis=0) - np.sum(seconds[2:], axis=0)
    return {"compile CPU s": float(cpu), "compile s": float(wall), "tokens": tokens}


def run(quick: bool) -> dict[str, Any]:
    """Measure the installed library, and return the run."""
    found = [name for name in CONTESTS if importlib.util.find_spec(name)]
    if len(found) != 1:
        raise SystemExit(
            f"run it in the environment of one of {', '.join(CONTESTS)} "
            f"(tools/environments.py), found {found}"
        )
    (name,) = found
    sizes = Sizes(layers=2, width=64, inner=128, heads=4, kv_heads=2, dim=16)
    sizes = sizes if quick else Sizes()
    contest = CONTESTS[name](sizes)
    # EasyDeL caches compiled programs in the user's folder.
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    rng = np.random.default_rng(0)
    shape = PROMPTS, PROMPT_LENGTH
    prompts = rng.integers(2, sizes.vocabulary, shape).tolist()
    jax.jit(lambda x: x @ x)(jnp.ones((8, 8))).block_until_ready()
    loops = {"own loop": contest.own, "jkv": generate_by_jkv(contest, sizes)}
    firsts = {}
    for label, loop in loops.items():
        harness.progress(f"first calls: {label}")
        firsts[label] = measure_compiling(loop, prompts)
    tokens = [first.pop("tokens") for first in firsts.values()]
    cases = [
        harness.Case(name=label, prepare=lambda: prompts, run=loop)
        for label, loop in loops.items()
    ]
    samples = harness.interleave(cases, rounds=5 if quick else 9, warmup=1)
    num_params = sum(leaf.size for leaf in jax.tree.leaves(contest.params))
    version = importlib.metadata.version(contest.package)
    rows = [
        {
            "library": f"{contest.package} {version}",
            "contender": label,
            "parameters": num_params,
            **firsts[label],
            **samples[label].row(1.0),
            "tokens/s": PROMPTS * NEW_TOKENS / samples[label].median,
            "time by own": samples[label].ratio_to(samples["own loop"]),
            "equal tokens": float(np.mean(tokens[0] == tokens[1])),
        }
        for label in loops
    ]
    title = f"under {contest.package}" + ", quick" * quick
    return {"benchmark": title, "machine": harness.machine(), "rows": rows}


def main() -> None:
    """Measure, print a table, and save the run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--quick", action="store_true", help="a tiny model, not saved")
    quick = parser.parse_args().quick
    found = run(quick)
    print(harness.header(found["benchmark"], found["machine"]))
    columns = [*("library", "contender", "parameters", "compile CPU s", "compile s")]
    columns += ["median", "p10", "p90", "tokens/s", "time by own", "equal tokens"]
    print(harness.table(found["rows"], dict(zip(columns, columns, strict=True))))
    if not quick:
        harness.save(RESULTS, found)


if __name__ == "__main__":
    main()
