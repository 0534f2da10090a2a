"""Logits processors in all loops, compared with plain Python.

Random automata mask tokens, force them and end sequences. The model is that of
`test_generation`, in its shapes.
"""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.compiled_hlo import host_operations
from support.decoding import plain_beam_search
from support.decoding.plain_queue import Call, PlainCompletions
from support.grammar.automata import DEAD, Automata, PlainAutomaton, make_automata
from support.small_caches import small_config
from test_beam_search import NEW_TOKENS as MOST
from test_beam_search import (
    NUM_BEAMS,
    STOPS,
    assert_found,
    beam_search,
    checked_model,
    found_wrong,
)
from test_draft_model import DRAFT, table_model
from test_generation import (
    CONTEXT,
    VOCABULARY,
    assert_as_before,
    attention_model,
    attention_params,
    completions,
    dense_logits,
    fresh_cache,
    padded,
    per_row,
    reasons,
)

import jkv
from jkv import decoding
from jkv.decoding import DraftModel, PromptLookup
from jkv.decoding.sampling.next_token import mark_refused
from jkv.grammar import Vocabulary, from_regex

pytestmark = pytest.mark.one_end

PROMPTS, SAMPLES, NEW_TOKENS, RUNNING, ROW_COUNTS = 4, 2, 20, 3, (32,)
STATIC = ("model", "max_new_tokens", "num_samples", "max_running", "row_counts")
LOOKUP = PromptLookup(num_tokens=3, min_ngram=1, cost=1.0)
generate = jax.jit(jkv.generate, static_argnames=STATIC)


def random_prompts(rng):
    """Return prompts with a small vocabulary, so that tokens recur."""
    return [rng.integers(3, 9, n).tolist() for n in rng.integers(1, 10, PROMPTS)]


def play_alone(prompts, limits, sampling, plain, biases=0):
    """Complete each prompt alone, with a dense model and plain-Python processors."""
    call = Call(
        prompts=prompts,
        limits=limits.tolist(),
        num_samples=SAMPLES,
        max_new_tokens=NEW_TOKENS,
        stop_tokens=[2],
        stop_sequences=[],
        sampling=sampling,
        nan_every=0,
        block_size=4,
        max_context_length=CONTEXT,
        num_blocks=64,
    )

    def find_logits(sequences):
        return np.stack([*map(dense_logits, sequences)]) + biases

    return PlainCompletions(call, find_logits, plain)


def run_alone(prompts, limits, sampling, automata, variants):
    """Complete each prompt alone, with its automaton."""
    plain = [
        PlainAutomaton(automata, variants[i // SAMPLES], prompts[i // SAMPLES])
        for i in range(PROMPTS * SAMPLES)
    ]
    return play_alone(prompts, limits, sampling, plain)


def test_processed_sequences_equal_plain_python():
    """Batching, samples, preemption, prefix hits, lookup, forced tokens, both ends."""
    rng = np.random.default_rng(3)
    seen, preemptions, accepted, ended = set(), 0, 0, 0
    for game in range(5):
        automata = make_automata(game, 3, VOCABULARY)
        prompts, variants = random_prompts(rng), rng.integers(-1, 3, PROMPTS)
        temperature = np.float32(rng.choice([0.0, 1.0], PROMPTS * SAMPLES))
        sampling = per_row(PROMPTS * SAMPLES, temperature=temperature)
        limits = rng.integers(1, NEW_TOKENS + 1, PROMPTS)
        alone = run_alone(prompts, limits, sampling, automata, variants)
        cache = fresh_cache([64, 9, 12, 8][game % 4], 8, prefix_caching=True)
        for _ in range(2):  # the second call hits the cached blocks of the first
            found_wrong.clear()
            after, result = generate(
                checked_model,
                attention_params(),
                cache,
                padded(prompts, PROMPTS),
                max_new_tokens=NEW_TOKENS,
                limits=np.int32(limits),
                stop_tokens=np.int32([2]),
                sampling=sampling,
                num_samples=SAMPLES,
                max_running=RUNNING,
                row_counts=ROW_COUNTS,
                speculate=LOOKUP,
                logits_processor=automata,
                variants=np.int32(variants),
            )
            jax.effects_barrier()
            assert not found_wrong, found_wrong[0]
            assert_as_before(after, cache)
            assert completions(result) == alone.new
            assert reasons(result) == [reason.name for reason in alone.reasons]
            for found, new in zip(result.logprobs, alone.logprobs, strict=True):
                np.testing.assert_allclose(found[: len(new)], new, atol=2e-5)
            seen |= {*reasons(result)}
            ended += sum(map(has_ended, alone.automata, alone.new))
            preemptions += int(result.statistics.preemptions)
            accepted += int(result.statistics.accepted_tokens)
            cache = after
    assert {"STOP", "LENGTH", "NOTHING_ALLOWED"} <= seen
    assert preemptions > 3 and accepted > 20
    assert ended > 5, ended


def has_ended(automaton, new):
    """Return True if an automaton, not a stop token, ended the sequence."""
    return new[-1:] != [2] and automaton.has_ended(new)


@pytest.mark.further
def test_greedy_speculation_preserves_processed_sequences():
    """The draft's logits are processed, too."""
    rng = np.random.default_rng(5)
    accepted = drafted = 0
    generate = jax.jit(jkv.generate, static_argnames=STATIC)
    greedy = per_row(PROMPTS)
    for game in range(3):
        automata = make_automata(game, 3, VOCABULARY)
        prompts, variants = random_prompts(rng), rng.integers(-1, 3, PROMPTS)
        limits = rng.integers(1, NEW_TOKENS + 1, PROMPTS)
        _, result = generate(
            checked_model,
            attention_params(),
            fresh_cache([64, 9, 12][game], 8, DRAFT),
            padded(prompts, PROMPTS),
            max_new_tokens=NEW_TOKENS,
            limits=np.int32(limits),
            stop_tokens=np.int32([2]),
            sampling=greedy,
            max_running=2,
            row_counts=(32,),
            speculate=DRAFT,
            logits_processor=automata,
            variants=np.int32(variants),
        )
        # `run_alone` makes two samples, which are equal.
        two = per_row(PROMPTS * SAMPLES)
        alone = run_alone(prompts, limits, two, automata, variants)
        assert completions(result) == alone.new[::SAMPLES]
        assert reasons(result) == [reason.name for reason in alone.reasons[::SAMPLES]]
        accepted += int(result.statistics.accepted_tokens)
        drafted += int(result.statistics.draft_tokens)
    assert drafted > 30 and accepted > 0.4 * drafted


@pytest.mark.further
def test_sampled_speculation_preserves_the_processed_distribution():
    vocabulary, count, length = 5, 4096, 3
    wanted, drafted = np.float32(
        1.5 * np.random.default_rng(8).standard_normal((2, vocabulary, vocabulary))
    )
    follows = np.full((1, 3, vocabulary), -1, np.int32)
    follows[0, 0, [1, 3, 4]] = [1, 0, 2]
    follows[0, 1, [0, 1]] = [2, 0]
    follows[0, 2, [0, 2, 3]] = 2, 1, 0
    no_end = np.zeros((1, 3), bool)
    automata = Automata(
        follows=follows, ends=no_end, only=np.full((1, 3), -1, np.int32)
    )
    config = small_config(
        num_layers=1,
        num_kv_heads=1,
        head_dim=4,
        num_blocks=2 * count,
        block_size=4,
        max_sequences=count,
        max_context_length=8,
    )
    draft = DraftModel(
        model=table_model, params=drafted, config=config, num_tokens=2, cost=1.0
    )
    cache = jkv.init(jkv.with_drafter(config, draft))
    # The automaton starts in state 0, as the prompt's only token is 0.
    _, result = jax.jit(
        lambda cache, draft, automata: jkv.generate(
            table_model,
            wanted,
            cache,
            np.zeros((count, 1), np.int32),
            max_new_tokens=length,
            sampling=jkv.Sampling(temperature=0.8),
            speculate=draft,
            logits_processor=automata,
        )
    )(cache, draft, automata)
    assert int(result.statistics.accepted_tokens) > count / 4

    def spread(token, state, chance, completion):
        """Return the probability of each completion."""
        if len(completion) == length:
            return {completion: chance}
        allowed = follows[0, state] >= 0
        weights = np.where(allowed, np.exp(wanted[token].astype(float) / 0.8), 0)
        weights /= weights.sum()
        found = {}
        for next_token in allowed.nonzero()[0].tolist():
            found |= spread(
                next_token,
                follows[0, state, next_token],
                chance * weights[next_token],
                (*completion, next_token),
            )
        return found

    chances = spread(0, 0, 1.0, ())
    counted = collections.Counter(map(tuple, np.asarray(result.tokens).tolist()))
    assert counted.keys() <= chances.keys()
    for completion, chance in chances.items():
        error = 4.5 * np.sqrt(chance * (1 - chance) / count)
        assert abs(counted[completion] / count - chance) < error, completion


@pytest.mark.further  # the engine covers both
def test_step_windows_and_added_prompts():
    """`begin`, `add_prompts` and `decode` process logits like `generate`."""
    rng = np.random.default_rng(7)
    automata = make_automata(1, 3, VOCABULARY)
    cache, state = fresh_cache(12, 8), None
    limits = np.full(PROMPTS, NEW_TOKENS)
    sampling = per_row(PROMPTS * SAMPLES)
    fixed = dict(num_samples=SAMPLES, max_running=RUNNING, row_counts=ROW_COUNTS)
    begin = jax.jit(decoding.begin, static_argnames=STATIC)
    decode = jax.jit(decoding.decode, static_argnames="model")
    add = jax.jit(decoding.add_prompts)
    for _ in range(2):
        prompts, variants = random_prompts(rng), rng.integers(-1, 3, PROMPTS)
        if state is None:
            state = begin(
                attention_model,
                attention_params(),
                cache,
                padded([], PROMPTS),
                max_new_tokens=NEW_TOKENS,
                stop_tokens=np.int32([2]),
                logits_processor=automata,
                variants=np.int32([0, -1, 2, 1]),
                **fixed,
            )
        state = add(
            cache,
            state,
            np.arange(PROMPTS, dtype=np.int32),
            padded(prompts, PROMPTS),
            logits_processor=automata,
            variants=np.int32(variants),
        )
        while state.is_running.any():
            cache, state = decode(
                attention_model,
                attention_params(),
                cache,
                state,
                sampling=sampling,
                num_steps=np.int32(5),
                logits_processor=automata,
            )
        alone = run_alone(prompts, limits, sampling, automata, variants)
        assert completions(state.result) == alone.new
        assert reasons(state.result) == [reason.name for reason in alone.reasons]
    with pytest.raises(ValueError, match="begun with logits_processor"):
        decode(attention_model, attention_params(), cache, state)


def test_extend_continues_from_the_processor_state():
    automata = make_automata(2, 3, VOCABULARY)
    prompts = [[3, 1, 4], [6], [5, 3, 5, 8]]
    variants = np.int32([0, -1, 2])
    extend = jax.jit(
        jkv.extend, static_argnames=("model", "max_new_tokens", "chunk_size")
    )
    most = 4

    def go_on(cache, ids, tokens, state):
        return extend(
            attention_model,
            attention_params(),
            cache,
            ids,
            tokens,
            max_new_tokens=most,
            stop_tokens=np.int32([2]),
            chunk_size=12,
            logits_processor=automata,
            variants=variants,
            processor_state=state,
        )

    cache, opened = jkv.allocate(fresh_cache(64, 8), [0] * 3)
    tokens = np.full((3, 4), -1, np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    plain = [
        PlainAutomaton(automata, variant, prompt)
        for variant, prompt in zip(variants, prompts, strict=True)
    ]
    found, state, ended = [[], [], []], None, [False] * 3
    for _ in range(3):
        cache, result = go_on(cache, opened.seq_ids, tokens, state)
        state = result.processor_state
        for i, new in enumerate(completions(result)):
            found[i] += new
            ended[i] |= reasons(result)[i] != "LENGTH"
            tokens[i] = [new[-1] if new and not ended[i] else -1, -1, -1, -1]
    for i, prompt in enumerate(prompts):
        completion = []
        while len(completion) < 3 * most and plain[i].allowed(completion).any():
            logits = dense_logits(prompt + completion)
            completion.append(
                int(np.argmax(np.where(plain[i].allowed(completion), logits, -np.inf)))
            )
            if completion[-1] == 2 or plain[i].has_ended(completion):
                break
        assert found[i] == completion
    # A new state would start from the given tokens.
    with pytest.raises(ValueError, match="as `begin` makes it"):
        go_on(cache, opened.seq_ids, tokens, {"at": jnp.zeros(3, jnp.int32)})


def test_processed_beams_equal_plain_python():
    rng = np.random.default_rng(2)
    seen = set()
    for game in range(6):
        automata = make_automata(game + 20, 3, VOCABULARY)
        # One of them allows a first token, and none after it.
        automata.follows[2][automata.follows[2] >= 0] = DEAD
        prompts, variants = random_prompts(rng), rng.integers(-1, 3, PROMPTS)
        found_wrong.clear()
        cache = fresh_cache(*[(64, 12), (14, 8)][game % 2])
        after, result = beam_search(
            checked_model,
            attention_params(),
            cache,
            padded(prompts, PROMPTS),
            num_beams=NUM_BEAMS,
            max_new_tokens=MOST,
            stop_tokens=np.array(STOPS, np.int32),
            num_return=NUM_BEAMS,
            chunk_size=8,
            logits_processor=automata,
            variants=np.int32(variants),
        )
        jax.effects_barrier()
        assert not found_wrong, found_wrong[0]
        assert_as_before(after, cache)
        for i, prompt in enumerate(prompts):
            plain = PlainAutomaton(automata, variants[i], prompt)
            reason = jkv.FinishReason(int(result.reasons[i]))
            seen.add(reason.name)
            wanted = search_alone(plain, prompt)
            if reason == jkv.FinishReason.NOTHING_ALLOWED:
                # The current beams.
                is_there = result.scores[i] > -np.inf
                assert not wanted and is_there.any()
                np.testing.assert_array_equal(result.lengths[i], is_there)
                continue
            assert_found(jax.tree.map(np.asarray, result), i, pad_completions(wanted))
    assert {"STOP", "NOTHING_ALLOWED"} <= seen


def pad_completions(found):
    """Pad completions with empty ones to the number that a search returns."""
    return found + [(-np.inf, [])] * (NUM_BEAMS - len(found))


def search_alone(plain, prompt):
    """Return the beams of one prompt in plain Python."""

    def next_logprobs(tokens):
        logits = dense_logits(tokens).astype(np.float64)
        logits[~plain.allowed(tokens[len(prompt) :])] = -np.inf
        if logits.max() == -np.inf:
            return logits
        shifted = logits - logits.max()
        return shifted - np.log(np.exp(shifted).sum())

    return plain_beam_search.search(
        next_logprobs,
        prompt,
        num_beams=NUM_BEAMS,
        max_new_tokens=MOST,
        stop_tokens=STOPS,
        has_ended=plain.has_ended,
        num_end_tokens=4,
    )


def test_masked_rows_differ_from_nan_rows():
    logits = np.zeros((4, 5), np.float32)
    logits[0] = -np.inf
    logits[1] = [-np.inf, np.nan, -np.inf, -np.inf, -np.inf]
    logits[2] = [-np.inf, 1, -np.inf, -np.inf, -np.inf]
    # Sampling from NaN logits may choose a masked token.
    tokens, logprobs = np.int32([0, 0, 1, 3]), np.float32([np.nan, np.nan, 0, -1])
    for rows in (slice(0, 4), slice(2, 4)):
        found = mark_refused(logits[rows], tokens[rows], logprobs[rows])
        expected = np.float32([-np.inf, np.nan, 0, -1])[rows]
        np.testing.assert_array_equal(found, expected)


@jax.tree_util.register_static
class AsksHost(jkv.LogitsProcessor):
    """A mask computed by a host callback."""

    def begin(self, variants, prompts):
        del prompts
        return variants

    def process(self, state, logits):
        del state
        return jax.pure_callback(lambda given: given, logits, logits)

    def advance(self, state, tokens):
        del tokens
        return state


@pytest.mark.further
def test_constrained_decoding_stays_on_the_device():
    def lower(logits_processor, **options):
        def run(params, cache, logits_processor):
            return jkv.generate(
                attention_model,
                params,
                cache,
                np.int32([[3, 4], [5, -1]]),
                max_new_tokens=4,
                row_counts=(4,),
                logits_processor=logits_processor,
                **options,
            )

        given = attention_params(), fresh_cache(16, 8)
        return jax.jit(run).lower(*given, logits_processor)

    tokens = [bytes([65 + i]) for i in range(VOCABULARY - 1)]
    grammar = from_regex("[A-F]{2,}", Vocabulary([*tokens, None], [VOCABULARY - 1]))
    assert host_operations(lower(grammar).compile().as_text()) == []
    everything = dict(num_samples=2, max_running=3, speculate=LOOKUP)
    everything |= dict(sampling=jkv.Sampling(temperature=1.0, top_k=3, top_p=0.9))
    assert host_operations(lower(grammar, **everything).as_text()) == []
    # `host_operations` detects a callback.
    assert host_operations(lower(AsksHost()).as_text())


def test_processed_logits_reuse_the_logits_buffer():
    """The output aliases the model's logits."""
    num_tokens, num_sequences = 2**12, 8
    words = [b"%d" % i for i in range(num_tokens - 1)]
    grammar = from_regex("[0-4]+", Vocabulary([*words, None], [num_tokens - 1]))

    def model(params, tokens, cache, batch):
        del params
        return jax.nn.one_hot(tokens + 1, num_tokens)[batch.last_rows], cache

    def measure(logits_processor):
        def run(cache, logits_processor):
            return jkv.generate(
                model,
                None,
                cache,
                np.full((num_sequences, 2), 3, np.int32),
                max_new_tokens=4,
                row_counts=(2 * num_sequences,),
                logits_processor=logits_processor,
            )

        compiled = (
            jax.jit(run)
            .lower(fresh_cache(16, num_sequences), logits_processor)
            .compile()
        )
        return compiled.memory_analysis().temp_size_in_bytes

    more, logits = measure(grammar) - measure(None), 4 * num_sequences * num_tokens
    assert more < logits / 2


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Wrong(jkv.LogitsProcessor):
    """A processor with one invalid result."""

    how: str = dataclasses.field(metadata={"static": True})

    def begin(self, variants, prompts):
        del prompts
        count = 1 if self.how == "rows" else len(variants)
        return 3 if self.how == "no array" else jnp.zeros((count,), jnp.int32)

    def process(self, state, logits):
        del state
        if self.how == "shape":
            return logits[:, :-1]
        return logits.astype(jnp.bfloat16) if self.how == "dtype" else logits

    def advance(self, state, tokens):
        del tokens
        return state.astype(jnp.float32) if self.how == "state" else state + 1

    def ended(self, state):
        return state if self.how == "ended" else state > 5


@pytest.mark.parametrize(
    "how, message",
    [
        (
            "rows",
            "begin must be .N, .* N = 2, a row for each sequence, got int32.1",
        ),
        ("no array", "begin must be an array, .* got int"),
        ("shape", "process must be float32.*, got float32"),
        ("dtype", "process must be float32.*, got bfloat16"),
        ("state", "`advance` returns must be as `begin` makes it, int32.*got float32"),
        ("ended", "ended must be bool.*, got int32"),
    ],
)
def test_wrong_processor_results_are_reported(how, message):
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(
            lambda cache: jkv.generate(
                attention_model,
                attention_params(),
                cache,
                [[1, 2], [3, 4]],
                max_new_tokens=2,
                logits_processor=Wrong(how),
            ),
            fresh_cache(),
        )


@jax.tree_util.register_static
class NoLogitsProcessor:
    """A class without the methods."""


def test_invalid_logits_processors_are_refused():
    cache = fresh_cache()

    def generate(**options):
        return jkv.generate(
            attention_model,
            attention_params(),
            cache,
            [[1, 2], [3]],
            max_new_tokens=2,
            **options,
        )

    with pytest.raises(ValueError, match="methods begin, process, advance"):
        generate(logits_processor=NoLogitsProcessor())
    automata = make_automata(0, 3, VOCABULARY)
    for wrong in (3, [0, -2]):
        with pytest.raises(ValueError, match=r"-1 \(none\) or below 3"):
            generate(logits_processor=automata, variants=wrong)
    with pytest.raises(ValueError, match="pass logits_processor="):
        generate(variants=1)
    # If the values are unknown at trace time, the sequence is refused.
    found = jax.jit(
        lambda variants: generate(logits_processor=automata, variants=variants)[1]
    )(jnp.int32([3, -1]))
    assert reasons(found) == ["UNKNOWN_VARIANT", "LENGTH"]
