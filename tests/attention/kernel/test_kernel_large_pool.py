"""The plain path past 2**31 elements: distinct values on both sides of the boundary.

The kernel's addresses are checked in the lowered code (`test_kernel_lowering.py`).
"""

import jax
import numpy as np
import pytest

from jkv.attention import paged_attention

# One layer of one head: 4 GiB of float16, 32 bytes past the range of i32.
HEAD_DIM, BLOCK_SIZE = 16, 128
NUM_BLOCKS = 2**31 // (HEAD_DIM * BLOCK_SIZE) + 1
# Blocks at the start, and around elements 2**31, 2**30 and 2**29.
MARKED = [0, 1, *(2**n // 2048 + k for n in (29, 30, 31) for k in (-1, 0))]


def available_memory():
    """Return the available memory in bytes, as Linux reports it."""
    try:
        with open("/proc/meminfo") as file:
            lines = dict(line.split(":") for line in file)
    except OSError:
        return 0
    return int(lines["MemAvailable"].split()[0]) * 1024


@pytest.mark.slow
@pytest.mark.skipif(available_memory() < 10 * 2**30, reason="takes 5 GB of memory")
@pytest.mark.one_end
def test_blocks_past_two_to_the_31_elements_are_read():
    """Decode and prefill; values are part of the keys, so one pool suffices."""
    pool = make_pool()
    assert pool.size > 2**31
    num_requests = len(MARKED)
    for query_length in (1, 3):
        num_rows = num_requests * query_length
        output = paged_attention(
            np.ones((num_rows, 1, HEAD_DIM), np.float16),
            pool,
            None,
            np.int32(0),
            np.array(MARKED, np.int32)[:, None],
            None,
            np.arange(num_requests, dtype=np.int32) * query_length,
            np.full(num_requests, query_length, np.int32),
            np.full(num_requests, BLOCK_SIZE, np.int32),
            value_head_dim=HEAD_DIM,
            implementation="xla",
        )
        places = np.arange(1, num_requests + 1)
        expected = np.repeat(places, query_length)[:, None, None]
        np.testing.assert_array_equal(output, np.broadcast_to(expected, output.shape))


def make_pool():
    """Create a pool of zeros in which marked blocks hold their index, from 1 on.

    Untouched pages of zeros use no memory, and JAX does not copy host arrays that start
    at a multiple of 64 bytes.
    """
    shape = 1, NUM_BLOCKS, 1, BLOCK_SIZE, HEAD_DIM
    size = int(np.prod(shape))
    pages = np.zeros(size + 32, np.float16)
    first = -pages.ctypes.data % 64 // pages.itemsize
    pool = pages[first : first + size].reshape(shape)
    pool[0, MARKED] = np.arange(1, 1 + len(MARKED))[:, None, None, None]
    return jax.device_put(pool)
