"""JkvRollout: a rollout engine for tunix's trainers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.rl.rollout.base_rollout import BaseRollout, RolloutConfig, RolloutOutput

import jkv
from jkv.decoding.model.runner import spread_row_counts
from jkv.decoding.model.steps import Exact, ExactShape
from jkv.decoding.sequences.results import Statistics
from jkv.integrations.tunix import weights
from jkv.integrations.tunix.paged_model import PagedModel, Params
from jkv.integrations.tunix.pool import CallSizes, Pool
from jkv.integrations.tunix.prompts import (
    Repeats,
    Scorer,
    check_sequences,
    find_repeats,
    find_width,
    pad_left,
    pad_right,
)
from jkv.integrations.tunix.rollout_options import (
    CallOptions,
    check_options,
    read_options,
)


class JkvRollout(BaseRollout):
    """A tunix rollout engine with a paged cache and continuous batching in one jit.

    Pass the class to `ClusterConfig(rollout_engine=...)`, or a `functools.partial` of
    it with the arguments after `rollout_config`. A repeated prompt is computed once,
    and its samples are forked from it. The weights are the trainer's arrays if it
    shares its mesh with the rollout.

    A call samples with the key of `RolloutConfig.seed` and the number of previous
    calls: a run is reproducible from its seed, and its calls sample independently.

    Args:
      rollout_actor: a tunix model: Qwen3, Llama3, Gemma or Gemma3.
      tokenizer: as for tunix's own sampler.
      mesh: devices of the rollouts; None for the model's.
      rollout_config: options of the run, validated here; its `data_type` is the dtype
        of the weights. Each call gets its own.
      block_size: tokens per block of the cache.
      num_blocks: blocks of the cache; None for as many as the running sequences need.
        With fewer, sequences wait.
      max_running: most sequences running at one time, others wait; None for all of a
        call.
      chunk_size: most prompt tokens per step.
      cache_dtype: of keys and values, such as "int8"; None for the model's.
      prefix_caching: cache prompts until the weights change, for prefix hits in later
        calls. If False, the cache's memory is free between calls.
      exact: as in `jkv.generate`: (W, R) or True for log-probabilities that are
        bit-identical here and in `score`, for any batch. At most W sequences run at one
        time, and `chunk_size` is ignored.

    Attributes:
      statistics: `jkv.decoding.Statistics` of the last call, None before the first.

    Raises:
      ValueError: for an unsupported model, or options of other engines.
    """

    def __init__(
        self,
        rollout_actor: nnx.Module,
        tokenizer: Any,
        mesh: Mesh | None = None,
        rollout_config: RolloutConfig | None = None,
        *,
        block_size: int = 16,
        num_blocks: int | None = None,
        max_running: int | None = None,
        chunk_size: int = 512,
        cache_dtype: Any | None = None,
        prefix_caching: bool = True,
        exact: ExactShape = False,
    ) -> None:
        if rollout_config is not None:
            check_options(rollout_config)
        if not isinstance(tokenizer, TokenizerAdapter):
            tokenizer = TokenizerAdapter(tokenizer)
        self._tokenizer = tokenizer
        dtype = None if rollout_config is None else rollout_config.data_type
        self._module = weights.put_module(rollout_actor, mesh, dtype)
        graph, state = nnx.split(self._module)
        self._model = PagedModel(graph)
        self._version = weights.Version()
        kept = dict(block_size=block_size, prefix_caching=prefix_caching)
        config = self._model.configure(state, cache_dtype, **kept)
        self._pool = Pool(config, num_blocks, mesh)
        shape = Exact.of(exact)
        if shape is not None:
            most = shape.num_requests
            max_running = most if max_running is None else min(max_running, most)
        self._exact: ExactShape = shape or False
        self._scorer = Scorer(config, self.pad_id(), self._exact)
        self._max_running = max_running
        self._chunk_size = chunk_size
        self._row_multiple = 1 if mesh is None or mesh.empty else mesh.size
        self._num_calls = 0
        static = "model", "max_new_tokens", "num_samples", "max_running", "row_counts"
        self._run: Any = jax.jit(
            jkv.generate,
            static_argnames=(*static, "exact"),
            donate_argnames="cache",
            out_shardings=self._pool.sharding,
        )
        self.statistics: Statistics | None = None

    def generate(
        self, prompts: list[str], rollout_config: RolloutConfig, **kwargs: Any
    ) -> RolloutOutput:
        """Generate completions of prompts.

        Args:
          prompts: strings; equal ones are computed once.
          rollout_config: lengths, sampling and end tokens.
          kwargs: none.

        Returns:
          In the order of the prompts: texts and tokens without end tokens, prompts
          padded on the left, and log-probabilities of the logits divided by the
          temperature, if requested. No logits.

        Raises:
          ValueError: for options of other engines, a prompt without tokens, or a cache
            too small for one sequence.
          FloatingPointError: if the model's logits are NaN.
        """
        if kwargs:
            raise ValueError(f"{', '.join(kwargs)} not supported; omit them")
        request = read_options(rollout_config, self.eos_id())
        sequences = [self._tokenize(prompt) for prompt in prompts]
        check_sequences(sequences)
        repeats = find_repeats(sequences)
        result = self._continue(sequences, repeats, request)
        tokens, logprobs = _cut(result, repeats)
        width = find_width(sequences, request.max_prompt_length)
        return RolloutOutput(
            text=[self._tokenizer.decode(row.tolist()) for row in tokens],
            logits=[],
            tokens=tokens,
            left_padded_prompt_tokens=pad_left(sequences, width, self.pad_id()),
            logprobs=logprobs if request.wants_logprobs else None,
        )

    def get_per_token_logps(
        self, prompt_tokens: jax.Array, completion_tokens: jax.Array
    ) -> jax.Array:
        """Return log-probabilities of completions at temperature 1.

        They equal those of tunix's own engine up to rounding, except after a sampled
        padding token: tunix masks such a token out of attention, jkv attends to it, as
        `generate` did. Repeated prompts are computed once (`jkv.score`). Values after
        the first padding token at a completion's end are 0.

        Args:
          prompt_tokens: i32[B, P], padded on the left.
          completion_tokens: i32[B, C], padded on the right.

        Returns:
          f32[B, C].

        Raises:
          ValueError: for a prompt without tokens.
        """
        params = Params(nnx.state(self._module), 1.0)
        return self._scorer.score_all(
            self._model, params, prompt_tokens, completion_tokens
        )

    def score(
        self,
        model: nnx.Module,
        prompt_tokens: jax.Array,
        completion_tokens: jax.Array,
        *,
        temperature: jax.Array | float = 1.0,
        num_samples: int = 1,
    ) -> jax.Array:
        """Return log-probabilities of completions for a loss, inside its jit.

        Differentiable with respect to the variables of `model`, once and in reverse
        mode (`jkv.score`). With `exact` they are bit-identical to those of `generate`
        for the same weights: an importance ratio is exactly 1.

        Args:
          model: the trainer's, with the layers of the rollout's.
          prompt_tokens: i32[B, P], padded on the left.
          completion_tokens: i32[B, C], padded on the right.
          temperature: divisor of the logits, as in the call of `generate`.
          num_samples: static; number of adjacent completions of each prompt, which is
            computed once.

        Returns:
          f32[B, C], 0 in the padding at a completion's end, and first without a prompt.
        """
        graph, state = nnx.split(model)
        paged, params = PagedModel(graph), Params(state, temperature)
        return self._scorer.score(
            paged, params, prompt_tokens, completion_tokens, num_samples
        )

    def update_params(
        self, params: Any, filter_types: tuple[Any, ...] | None = None
    ) -> None:
        """Set new weights and invalidate prompts cached under the old ones.

        Args:
          params: state of the trainer's model, on any mesh and of any float dtype.
          filter_types: variables in `params`, such as `(nnx.Param,)`; None for all.

        Raises:
          ValueError: if they do not match the model's weights.
        """
        weights.update(self._module, params, filter_types)
        self._version.forget()

    def pad_id(self) -> int:
        """Return the padding token of prompts."""
        return int(self._tokenizer.pad_id())

    def eos_id(self) -> int:
        """Return the end-of-sequence token."""
        return int(self._tokenizer.eos_id())

    def model(self) -> nnx.Module:
        """Return the model; the trainer's own if they share a mesh."""
        return self._module

    def _tokenize(self, text: str) -> list[int]:
        """Return the tokens of a prompt, with a BOS token as in tunix's sampler."""
        beginning = self._tokenizer.bos_id()
        tokens = list(self._tokenizer.encode(text))
        return list(
            self._tokenizer.dedup_bos_ids([beginning] * bool(beginning) + tokens)
        )

    def _continue(
        self, sequences: list[list[int]], repeats: Repeats, request: CallOptions
    ) -> jkv.Generation:
        """Run the queue and return its result on the host."""
        width = find_width(sequences, request.max_prompt_length)
        prompts = pad_right([sequences[prompt] for prompt in repeats.first], width)
        running = len(sequences)
        if self._max_running is not None:
            running = min(self._max_running, running)
        shape: dict[str, Any] = dict(exact=self._exact)
        if not self._exact:
            chunk_size = min(self._chunk_size, prompts.size)
            shape = dict(row_counts=count_rows(running, chunk_size, self._row_multiple))
        sizes = CallSizes(
            prompts.shape[1], request.max_new_tokens, repeats.num_samples, running
        )
        state = nnx.state(self._module)
        cache, result = self._run(
            self._model,
            Params(state, jnp.float32(request.temperature)),
            self._pool.lend(sizes),
            prompts,
            max_new_tokens=request.max_new_tokens,
            stop_tokens=np.array(request.stop_tokens, np.int32),
            sampling=self._choose_sampling(request),
            num_samples=repeats.num_samples,
            max_running=running,
            **shape,
            salts=np.int32(self._version.look_at(state)),
        )
        self._pool.take_back(cache)
        result = jax.device_get(result)
        self.statistics = result.statistics
        return result

    def _choose_sampling(self, request: CallOptions) -> jkv.Sampling:
        """Return this call's sampling parameters; the model applies the temperature."""
        key = jax.random.fold_in(request.key, self._num_calls)
        self._num_calls += 1
        seed = jax.random.bits(key, (), jnp.uint32)
        return jkv.Sampling(
            temperature=jnp.float32(not request.is_greedy),
            top_p=jnp.float32(request.top_p),
            top_k=jnp.int32(request.top_k),
            seeds=jax.lax.bitcast_convert_type(seed, jnp.int32),
        )


def count_rows(running: int, chunk_size: int, multiple: int) -> tuple[int, ...]:
    """Return the row counts of a step, multiples of the mesh size."""
    counts = spread_row_counts(running, chunk_size)
    return tuple(sorted({-(-count // multiple) * multiple for count in counts}))


def _cut(
    result: jkv.Generation, repeats: Repeats
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return tokens and log-probabilities per prompt, without end tokens."""
    has_nan = result.reasons == jkv.FinishReason.NAN_LOGITS
    if has_nan.any():
        raise FloatingPointError(
            f"logits of prompts[{repeats.prompts[has_nan][0]}] are NaN; check the "
            f"weights, for example for a learning rate that is too large"
        )
    lengths = result.lengths - (result.reasons == jkv.FinishReason.STOP)
    tokens: list[Any] = [None] * len(repeats.prompts)
    logprobs: list[Any] = [None] * len(repeats.prompts)
    for sequence, prompt in enumerate(repeats.prompts):
        tokens[prompt] = result.tokens[sequence, : lengths[sequence]]
        logprobs[prompt] = result.logprobs[sequence, : lengths[sequence]]
    return tokens, logprobs
