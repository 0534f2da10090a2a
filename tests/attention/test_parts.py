"""Parts of blocks: the joined results of several devices equal those of one."""

import jax
import numpy as np
import pytest
from support.attention.attention_workloads import make_operands
from support.attention.plain_attention import attend_loop
from support.jax_versions import dealt
from support.tolerances import assert_close, is_close
from test_attention import BATCHES, SMALL, arguments, case, small_operands

from jkv.attention import paged_attention

# Three parts of four tokens: not a power of two, and some rows see none of a part.
NUM_PARTS, BLOCK_SIZE, LAYER = 3, 12, 1
WAYS = {
    "reference": ("reference", None),
    "plain, small calls": (None, None),
    "small calls, window": (None, 6),
    "loops, window": ("xla", 6),
    "loops": ("xla", None),
    "kernel": ("pallas", None),
    "kernel, window": ("pallas", 6),
}


def join(outputs, logs):
    """Join the parts in float64."""
    outputs, logs = np.float64(outputs), np.float64(logs)
    weights = np.exp(logs)
    total = weights.sum(axis=0)
    summed = (outputs * weights[..., None]).sum(axis=0)
    return summed / np.where(total > 0, total, 1)[..., None], np.log(total)


@pytest.mark.newest_further
@pytest.mark.parametrize("way", dealt(WAYS, turn=5, share=7))
def test_joined_parts_equal_the_whole(way):
    """Decode, chunks and mixed batches, with a pool per part."""
    implementation, window = WAYS[way]

    @jax.jit
    def attend(part, *positional):
        return paged_attention(
            *positional,
            block_part=(part, NUM_PARTS),
            window=window,
            soft_cap=3.0,
            return_lse=True,
            implementation=implementation,
        )

    sees_nothing = 0
    for seed, batch in enumerate(BATCHES):
        operands = small_operands(batch, seed, SMALL, group=2, block_size=BLOCK_SIZE)
        expected, logs = attend_loop(operands, LAYER, window=window, soft_cap=3.0)
        positional, found = arguments(operands, dtype=SMALL.queries), []
        for part in range(NUM_PARTS):
            size = BLOCK_SIZE // NUM_PARTS
            mine = slice(part * size, (part + 1) * size)
            pools = [pool[:, :, :, mine] for pool in positional[1:3]]
            found.append(attend(np.int32(part), positional[0], *pools, *positional[3:]))
        outputs, lses = (np.stack(arrays) for arrays in zip(*found, strict=True))
        assert outputs.dtype == SMALL.queries and np.isfinite(outputs).all()
        with np.errstate(divide="ignore"):
            output, lse = join(outputs, lses)
        used = len(expected)
        assert_close(output[:used].astype(SMALL.queries), expected)
        assert_close(lse[:used].astype(np.float32), logs)
        assert not outputs[:, used:].any() and np.isneginf(lses[:, used:]).all()
        sees_nothing += np.isneginf(lses[:, :used]).sum()
        # Swapping two parts changes the result.
        with np.errstate(divide="ignore"):
            wrong, _ = join(outputs[[0, 0, 2]], lses[[0, 0, 2]])
        assert batch == "idle" or not is_close(
            wrong[:used].astype(SMALL.queries), expected
        )
    assert sees_nothing > 0


@pytest.mark.one_end
def test_invalid_parts_are_refused():
    operands = make_operands(case().workload("decode"))
    positional = arguments(operands)
    for part, words in (
        ((3, 3), "0 <= i < n"),
        ((0, 0), "static int n >= 1"),
        ((0, np.float32(2)), "static int n"),
    ):
        with pytest.raises(ValueError, match=words):
            paged_attention(*positional, block_part=part)
    with pytest.raises(ValueError, match="sinks must be None with block_part"):
        paged_attention(*positional, block_part=(0, 2), sinks=np.zeros(2, np.float32))
