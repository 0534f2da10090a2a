"""Tests of statuses: their order, and the exception of the same name."""

import numpy as np
import pytest
from support.small_caches import small_cache

import jkv
from jkv import Status

pytestmark = pytest.mark.one_end


def i32(*values):
    return np.array(values, np.int32)


def test_values_are_in_the_order_of_the_contract():
    assert [status.name for status in sorted(Status)] == [
        "OK",
        "OUT_OF_BLOCKS",
        "OUT_OF_SEQUENCES",
        "CONTEXT_FULL",
        "BATCH_FULL",
        "INVALID_SEQUENCE",
        "INVALID_ARGUMENT",
    ]
    assert Status.OK == 0 and jkv.NO_SEQUENCE == -1


@pytest.mark.parametrize("status", list(Status)[1:])
def test_raises_the_exception_of_the_same_name(status):
    error = getattr(jkv, status.name.title().replace("_", ""))
    with pytest.raises(jkv.CacheError, match="1 of 3") as caught:
        jkv.raise_for_status(i32(0, status, 0))
    assert type(caught.value) is error


def test_raises_nothing_without_a_refusal():
    assert jkv.raise_for_status(i32()).size == 0
    answer = jkv.allocate(small_cache(), [0, 5])
    assert jkv.raise_for_status(answer) is answer
    assert jkv.raise_for_status(answer[1]) is answer[1]
