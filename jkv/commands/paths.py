"""Which path the attention of a model takes on a card, and why: `doctor --model`.

Nothing is allocated and nothing runs: the library's own choice is asked, with the
shapes that a cache of the model has.
"""

import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jkv.attention.cards import Card, find_card
from jkv.attention.choice import PlainReasons, explain_choice
from jkv.attention.kernel.tiles.table import TABLE
from jkv.config.cache_config import CacheConfig
from jkv.config.huggingface import read_sizes
from jkv.formats.table import FORMATS
from jkv.making.initialization import init
from jkv.verbs.attention_plan import pools_of

# Fields of `CacheConfig` that the choice depends on.
OF_HEADS = ("num_kv_heads", "head_dim", "value_head_dim", "values_in_keys")

# Sizes that a model may be given by, instead of a folder.
FIELDS = ("num_layers", *OF_HEADS[:3], "dtype")

# Of a prompt or the engine, and of what keeps float32 for the sake of its gradient.
GENERATING, SCORING = "generate, Engine", "score"


class Layers(NamedTuple):
    """Layers of a model whose attention goes one way."""

    number: int
    heads: dict[str, Any]  # fields of `CacheConfig`
    dtype: Any  # of the model


def print_paths(model: str, card: str | None, *, block_size: int) -> None:
    """Say for each kind of call whether a kernel serves it, and else why not.

    The model is a folder, its config.json, or sizes such as
    "num_kv_heads=8,head_dim=128,dtype=bfloat16"; the card such as "gfx942" or "sm_90",
    None for that at hand or else all that kernels were compiled for.
    """
    all_layers, num_states, notes = read_model(model)
    for note in notes:
        print(f"note: {note}")
    cards = find_cards(card)
    if card is None and len(cards) > 1:
        print("no GPU is at hand: XLA serves all here; of cards the kernels know")
    for one in cards:
        print(f"{one.target}:")
        for layers in all_layers:
            print(f"  {describe(layers, block_size)}")
            for line in tell_ways(layers, block_size, one):
                print(f"    {line}")
        if num_states:
            print(f"  {num_states} layers with a state: no kernel, XLA folds them")


def read_model(model: str) -> tuple[list[Layers], int, list[str]]:
    """Read a model's layers from its config.json, or from sizes in a text.

    Returned with them are the number of layers that keep a state instead, and notes.
    """
    is_text = re.fullmatch(r"\w+=[^,/]+(,\w+=[^,/]+)*", model)
    if is_text and not Path(model).exists():
        return [_read_text(model)], 0, []
    sizes = read_sizes(model, {}, with_states=True)
    number, dtype = sizes.fields["num_layers"], sizes.fields["dtype"]
    num_states = sum(layer.state is not None for layer in sizes.layers or ())
    if not number:
        return [], num_states, sizes.notes
    if sizes.layer_heads is None:
        heads = {name: sizes.fields[name] for name in OF_HEADS if name in sizes.fields}
        return [Layers(number, heads, dtype)], num_states, sizes.notes
    layers = [
        Layers(sizes.layer_heads.count(each), each.as_fields(), dtype)
        for each in dict.fromkeys(sizes.layer_heads)
    ]
    return layers, num_states, sizes.notes


def find_cards(card: str | None) -> list[Card]:
    """Return each card to ask for; refuse a name that is none."""
    known = sorted({name for family in TABLE.values() for name in family.targets})
    if card is not None:
        if not re.fullmatch(r"gfx[0-9a-f]+|sm_\d+", card):
            raise ValueError(
                f"{card!r} is no card; give one such as {', '.join(known)}"
            )
        known = [card]
    else:
        for here in map(find_card, ("rocm", "cuda")):
            if here.target is not None:
                return [here]
    return [Card("rocm" if name.startswith("gfx") else "cuda", name) for name in known]


def tell_ways(layers: Layers, block_size: int, card: Card) -> Iterator[str]:
    """Yield how calls of each kind go, by what rows are stored as, and why."""
    widths = layers.heads["head_dim"], layers.heads.get("value_head_dim") or 0
    quantized = [
        dtype
        for dtype, kept in FORMATS.items()
        if kept.is_quantized and not any(width % kept.width_of(1) for width in widths)
    ]
    alike: dict[PlainReasons, list[str]] = {}
    for stored in dict.fromkeys([jnp.dtype(layers.dtype), *quantized]):
        reasons = ask(layers, stored, block_size, card)
        # Nothing differentiates what is generated.
        alike.setdefault(reasons._replace(derivative=None), []).append(stored.name)
    ways = [(GENERATING, names, reasons) for reasons, names in alike.items()]
    float32 = jnp.dtype(jnp.float32)
    reasons = ask(layers, float32, block_size, card)
    ways.append((SCORING, [float32.name], reasons))
    for calls, names, (forward, derivative) in ways:
        how = "the kernel, with exact= too" if forward is None else "the plain path"
        line = f"{calls}, kept in {', '.join(names)}: {how}"
        if calls == SCORING:
            back = "a kernel" if derivative is None else "the plain path"
            line += f"; its gradient: {back}"
        yield line
        for reason in dict.fromkeys((forward, derivative)):
            if reason is not None:
                yield f"  because {reason}"


def ask(layers: Layers, stored: Any, block_size: int, card: Card) -> PlainReasons:
    """Ask the library how attention to a cache of these layers goes."""
    queries: Any = jax.ShapeDtypeStruct(
        (1, layers.heads["num_kv_heads"], layers.heads["head_dim"]),
        jnp.dtype(layers.dtype),
    )
    config = CacheConfig(
        num_layers=layers.number,
        num_blocks=1,
        block_size=block_size,
        max_sequences=1,
        max_context_length=block_size,
        dtype=stored,
        **layers.heads,
    )
    (storage,) = jax.eval_shape(functools.partial(init, config)).storage
    return explain_choice(queries, pools_of(storage), card)


def describe(layers: Layers, block_size: int) -> str:
    number, heads, dtype = layers
    dims = str(heads["head_dim"])
    if heads.get("value_head_dim") not in (None, heads["head_dim"]):
        dims += f" for keys and {heads['value_head_dim']} for values"
    return (
        f"{number} layers, {heads['num_kv_heads']} kv heads of {dims}, "
        f"{jnp.dtype(dtype).name}, blocks of {block_size}"
    )


def _read_text(text: str) -> Layers:
    fields: dict[str, Any] = {"num_layers": 1, "dtype": "bfloat16"}
    for name, value in (part.split("=", 1) for part in text.split(",")):
        if name not in FIELDS:
            raise ValueError(f"{name!r} is no size of a model: {', '.join(FIELDS)}")
        fields[name] = value if name == "dtype" else int(value)
    missing = {"num_kv_heads", "head_dim"} - fields.keys()
    if missing:
        raise ValueError(f"{text!r} has no {' and no '.join(sorted(missing))}")
    heads = {name: fields[name] for name in OF_HEADS if name in fields}
    return Layers(fields["num_layers"], heads, fields["dtype"])
