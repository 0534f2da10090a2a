"""Pydantic's schemas of types are supported; matching strings are valid.

A separate suite, `schemas`.
"""

import collections
import datetime
import decimal
import enum
import ipaddress
import json
import pathlib
import random
import re
import typing
import uuid

import pytest
from support.grammar.random_schemas import draw_text
from test_draws import LARGE, compile_schema, exact

pydantic = pytest.importorskip("pydantic")
jsonschema = pytest.importorskip("jsonschema")


class Color(enum.StrEnum):
    red = "red"
    green = "green"


class Tree(pydantic.BaseModel):
    value: int
    children: list["Tree"] = []


class Cat(pydantic.BaseModel):
    kind: typing.Literal["cat"]
    lives: int = 9


class Dog(pydantic.BaseModel):
    kind: typing.Literal["dog"]
    age: float | None = None


class Pair(typing.NamedTuple):
    left: int
    right: str


Field = pydantic.Field
TYPES = [
    *(bool, int, float, str, bytes, decimal.Decimal, typing.Any),
    *(datetime.date, datetime.time, datetime.datetime, datetime.timedelta),
    *(uuid.UUID, pydantic.UUID4, pathlib.Path, pydantic.FilePath),
    *(ipaddress.IPv4Address, ipaddress.IPv6Address, ipaddress.IPv4Network),
    *(pydantic.AnyUrl, pydantic.HttpUrl, pydantic.PostgresDsn, pydantic.FileUrl),
    *(list, list[int], tuple, tuple[int, str], tuple[int, ...], collections.deque[int]),
    *(set[int], set[str], frozenset[str], set[Color], typing.Sequence[int]),
    *(
        dict,
        dict[str, int],
        dict[int, str],
        dict[Color, int],
        typing.Mapping[str, bool],
    ),
    *(int | None, int | str, typing.Literal["a", 1, True], Color, Pair, Tree),
    typing.Annotated[Cat | Dog, Field(discriminator="kind")],
    *(pydantic.PositiveInt, pydantic.NegativeFloat, pydantic.FiniteFloat),
    pydantic.conint(ge=3, lt=100, multiple_of=5),
    pydantic.confloat(gt=0.5, le=2.5, multiple_of=0.25),
    pydantic.constr(min_length=2, max_length=10, pattern="^[a-z]+$"),
    pydantic.conlist(int, min_length=2, max_length=4),
    pydantic.conset(int, min_length=1, max_length=3),
    pydantic.condecimal(max_digits=5, decimal_places=2),
    *(pydantic.PastDate, pydantic.SecretStr, pydantic.Json, pydantic.Json[list[int]]),
    *(pydantic.Base64Str, pydantic.Base64Bytes, pydantic.ByteSize, pydantic.JsonValue),
    *(re.Pattern, pydantic.ImportString, pydantic.StrictInt),
    typing.Annotated[str, Field(max_length=500)],
    typing.Annotated[str, Field(pattern=r"^#(?:[0-9a-fA-F]{3}){1,2}$")],
]


@pytest.mark.parametrize("kind", TYPES, ids=str)
def test_pydantic_types(kind):
    model = pydantic.create_model("Model", field=(kind, ...), more=(kind | None, None))
    schema = model.model_json_schema()
    automaton, rng = compile_schema(schema), random.Random(0)
    judge = jsonschema.Draft202012Validator(exact(json.dumps(schema)))
    for _ in range(20):
        text = draw_text(automaton, rng)
        assert LARGE.search(text) or judge.is_valid(exact(text)), text
