"""Best-of-n and self-consistency, compared with plain Python."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv.decoding import select_best

pytestmark = pytest.mark.one_end
PROMPTS, SAMPLES, MOST = 40, 6, 4


def random_result(rng):
    """Draw short results over three tokens: many are equal, some empty, some NaN."""
    count = PROMPTS * SAMPLES
    lengths = rng.integers(0, MOST + 1, count).astype(np.int32)
    is_token = np.arange(MOST) < lengths[:, None]
    tokens = np.where(is_token, rng.integers(0, 3, (count, MOST)), -1)
    logprobs = -rng.integers(1, 4, (count, MOST)).astype(np.float32)
    logprobs[rng.random(count) < 0.1] = np.nan
    empty = jkv.Generation.empty(jnp.zeros(count, jnp.int32), MOST)
    return empty._replace(
        tokens=tokens.astype(np.int32),
        lengths=lengths,
        logprobs=np.where(is_token, logprobs, 0.0),
    )


def plain_choice(result, prompt, by, answers):
    rows = range(prompt * SAMPLES, (prompt + 1) * SAMPLES)

    def mean(row):
        length = result.lengths[row]
        found = result.logprobs[row].sum() / length if length else np.nan
        return -np.inf if np.isnan(found) else found

    if by == "mean_logprob":
        return max(rows, key=mean)
    chosen = {row: tuple(np.atleast_1d(answers[row]).tolist()) for row in rows}
    votes = collections.Counter(answer for answer in chosen.values() if answer[0] >= 0)
    return max(rows, key=lambda row: (votes.get(chosen[row], 0), mean(row)))


@pytest.mark.parametrize("answers", ["tokens", "numbers", None])
def test_equals_the_choice_in_plain_python(answers):
    """Ties choose the first."""
    rng = np.random.default_rng(7)
    result = random_result(rng)
    given = {
        "tokens": None,
        "numbers": rng.integers(-1, 3, PROMPTS * SAMPLES).astype(np.int32),
        None: None,
    }[answers]
    by = "majority" if answers else "mean_logprob"
    plain = result.tokens if given is None else given
    choose = jax.jit(
        lambda result, given: select_best(result, SAMPLES, by=by, answers=given)
    )
    expected = [plain_choice(result, prompt, by, plain) for prompt in range(PROMPTS)]
    assert choose(result, given).tolist() == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(num_samples=7), "num_samples must divide the 240 sequences"),
        (dict(num_samples=6, by="likelihood"), 'by must be "mean_logprob" or'),
        (
            dict(num_samples=6, by="majority", answers=jnp.zeros(6, jnp.int32)),
            r"answers must be int32\[N\] or int32\[N, A\] with N = 240",
        ),
    ],
)
def test_invalid_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        select_best(random_result(np.random.default_rng(0)), **options)
