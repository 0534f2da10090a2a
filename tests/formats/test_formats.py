"""A format known only to one table: packed, with several scales per row.

It replaces int4: two numbers per byte, and a scale for eight of them. Numbers are
multiplied by the scale before attention, as there is no factor for a whole token.
"""

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.jax_versions import few
from support.small_caches import small_config
from support.tolerances import assert_close, is_close

import jkv
from jkv.attention.backend import DEFAULT, Call, DeviceType, Pools, Requests
from jkv.attention.reference import Reference
from jkv.attention.xla.interface import SideBySide, Xla
from jkv.formats.format import Element, Format, Formats, name_parts
from jkv.formats.table import FORMATS

FOUR_BITS = np.dtype(jnp.int4)
GROUP = 8


@dataclasses.dataclass(frozen=True)
class Packed(Format):
    """Numbers from -7 to 7, the second of each pair in the upper half of a byte."""

    is_quantized: ClassVar[bool] = True
    stored_as = np.dtype(np.uint8)

    def width_of(self, size):
        return 2 * size

    def arrays(self, width):
        return {
            "pool": Element((width // 2,), self.stored_as, self.stored_as),
            "scales": Element((width // GROUP,), *[np.dtype(np.float32)] * 2),
        }

    def prepare(self, rows):
        return jax.lax.stop_gradient(rows).astype(jnp.float32)

    def put(self, rows):
        grouped = rows.reshape(*rows.shape[:-1], -1, GROUP)
        scales = jnp.max(jnp.abs(grouped), axis=-1) / 7
        numbers = jnp.round(grouped / jnp.where(scales > 0, scales, 1)[..., None])
        numbers = (numbers.astype(jnp.int32) + 8).reshape(*rows.shape[:-1], -1, 2)
        pool = numbers[..., 0] + 16 * numbers[..., 1]
        return {"pool": pool.astype(jnp.uint8), "scales": scales}

    def get(self, stored):
        pool = stored["pool"].astype(jnp.int32)
        numbers = jnp.stack([pool % 16, pool // 16], axis=-1) - 8
        numbers = numbers.reshape(*pool.shape[:-1], -1).astype(jnp.float32)
        return numbers * jnp.repeat(stored["scales"], GROUP, axis=-1), None


PACKED = Packed(FOUR_BITS)
BYTES, FLOATS = FORMATS[np.dtype(jnp.int8)], FORMATS[np.dtype(jnp.float32)]


def make_call(of_keys, of_values, keys, values):
    """Return three requests of one or several rows, over rows stored in the formats."""
    arrays = name_parts("key", of_keys.put(of_keys.prepare(keys)))
    if values is not None:
        arrays |= name_parts("value", of_values.put(of_values.prepare(values)))
    fields = {name.replace("_pool", "s"): array for name, array in arrays.items()}
    return Call(
        queries=jnp.cos(jnp.arange(8 * 4 * 32.0)).reshape(8, 4, 32),
        pools=Pools(
            **{"values": None, "key_scales": None, "value_scales": None} | fields,
            head_dim=32,
            value_dim=16,
            formats=Formats(of_keys, of_values),
        ),
        layer=jnp.int32(1),
        requests=Requests(
            jnp.array([[4, 0, 2], [1, 5, 7], [3, 99, -1]]),
            *map(jnp.array, ([0, 1, 2], [0, 5, 6], [5, 1, 2], [9, 12, 2])),
        ),
        scale=jnp.float32(0.3),
        window=jnp.int32(7),
        sinks=None,
        soft_cap=None,
        max_query_length=None,
    )


def draw_rows(width, seed):
    random = np.random.default_rng(seed)
    return jnp.asarray(random.standard_normal((2, 8, 2, 4, width)), jnp.float32)


KINDS = {
    "packed": (PACKED, PACKED),
    "packed values": (BYTES, PACKED),
    "packed keys": (PACKED, FLOATS),
    "latent": (PACKED, None),
}


@pytest.mark.one_end
@pytest.mark.parametrize("kind", few(KINDS, "packed values", "latent"))
def test_attention_reads_the_stored_encoding(kind):
    """Keys and values in different formats equal floats of the same numbers."""
    of_keys, of_values = KINDS[kind]
    device = DeviceType(DEFAULT, None)

    @jax.jit
    def attend_by_all(keys, values):
        kept = of_keys.read(of_keys.put(keys))
        if of_values is None:
            call, rest = make_call(of_keys, of_keys, keys, None), kept[..., :16]
        else:
            call = make_call(of_keys, of_values, keys, values)
            rest = of_values.read(of_values.put(values))
        exact = dataclasses.replace(call, by_position=True)
        wanted = Reference().attend(make_call(FLOATS, FLOATS, kept, rest), device)
        given = Reference().attend(make_call(FLOATS, FLOATS, keys, values), device)
        backends = Reference(), Xla(), SideBySide()
        found = [backend.attend(call, device) for backend in backends]
        return wanted, given, [*found, Xla().attend(exact, device)]

    wanted, given, found = attend_by_all(draw_rows(32, 0), draw_rows(16, 1))
    assert not is_close(given[0], wanted[0])
    for output, lse in found:
        assert_close(output, wanted[0])
        assert_close(lse, wanted[1])


@pytest.mark.one_end
def test_a_cache_uses_a_format_of_the_table(monkeypatch, tmp_path):
    """Written, attended to, forked, read, saved and loaded without other changes."""
    monkeypatch.setitem(FORMATS, FOUR_BITS, PACKED)
    sizes = dict(num_kv_heads=2, head_dim=32, value_head_dim=16)
    config = small_config(dtype=FOUR_BITS, **sizes)
    random = np.random.default_rng(0)
    queries, *rows = (
        jnp.asarray(random.standard_normal((6, heads, width)), jnp.float32)
        for heads, width in ((4, 32), (2, 32), (2, 16))
    )

    @functools.partial(jax.jit, static_argnums=0)
    def run(config, queries, *rows):
        cache, opened = jkv.allocate(jkv.init(config), [0, 0])
        cache, batch = jkv.append(cache, opened.seq_ids, [5, 1], capacity=6)
        cache = jkv.write(cache, 0, batch, *rows)
        cache, forked = jkv.fork(jkv.commit(cache, batch), [0])
        found = jkv.read(cache, 0, forked.seq_ids[0])
        return cache, jkv.attend(cache, 0, batch, queries), found, batch

    cache, output, found, batch = run(config, queries, *rows)
    kept = jax.jit(lambda rows: [PACKED.read(PACKED.put(each)) for each in rows])(rows)
    plain = small_config(dtype="float32", **sizes)
    other, expected, wanted, _ = run(plain, queries, *kept)
    assert_close(output, expected)
    assert (
        0
        < cache.storage[0].arrays["key_pool"].nbytes * 8
        == (other.storage[0].arrays["key_pool"].nbytes)
    )
    jkv.check(cache)
    jkv.save(tmp_path / "cache", cache)
    loaded = jkv.load(tmp_path / "cache")
    jkv.check(loaded)
    again = jax.jit(lambda cache: jkv.read(cache, 0, 2))(loaded)
    for one, other, third in zip(found, wanted, again, strict=True):
        np.testing.assert_array_equal(one, other)
        np.testing.assert_array_equal(one, third)
    with pytest.raises(NotImplementedError, match="kernels support .*, not int4"):
        jkv.attend(cache, 0, batch, queries, implementation="pallas")
