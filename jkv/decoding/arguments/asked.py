"""What a loop is asked for: values that go whole through all of its layers.

`Prompts` are the texts and what holds for each of them, `Steps` how much is done and in
which sizes, `How` how tokens are chosen. A loop takes their fields by name, too.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple, TypedDict, TypeVar

import jax

from jkv.decoding.model.steps import OfSteps, Steps
from jkv.decoding.sampling.draws import Choice
from jkv.decoding.sampling.options import GREEDY, Sampling, check_sampling
from jkv.decoding.speculation.loop import Speculation
from jkv.decoding.speculation.options import check_speculation
from jkv.decoding.steering.rows import as_steering, with_variants
from jkv.decoding.texts.prompts import OfPrompts, Prompts, Stops
from jkv.metadata.requests import Texts
from jkv.signatures import set_defaults
from jkv.status import UsageError
from jkv.steering import Steering

Value = TypeVar("Value")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class How:
    """How tokens are chosen: a pytree, whose arrays are arguments of a program.

    Attributes:
      sampling: from what the model says, each field one number or one for each
        sequence; greedy by default.
      steering: which tokens texts may have, see `Steering`; None leaves them all. A
        token that steering says is the only one is guessed without fail, if `speculate`
        is given.
      speculate: how to guess tokens, of which a step checks several: a `PromptLookup`
        or a `DraftModel`; None does not. The model must take `all_rows`. With several
        pools each guesses for its own; the cache of a draft lies on the whole mesh.

    Example:
      >>> import jkv
      >>> from jkv.decoding import How
      >>> How(jkv.Sampling(temperature=0.7)).speculate is None
      True
    """

    sampling: Sampling = GREEDY
    steering: Steering | None = None
    speculate: Speculation | None = None

    def check(self) -> "How":
        """Return it with a steering that loops can index, or refuse it in words."""
        check_sampling(self.sampling)
        if self.speculate is not None:
            check_speculation(self.speculate)
        return dataclasses.replace(self, steering=as_steering(self.steering))

    def choice(self, num_rows: int | None = None) -> Choice:
        """Return what chooses tokens, for so many rows at a time."""
        return Choice(self.sampling, self.steering, num_rows)


class OfHow(TypedDict, total=False):
    """The fields of `How`, as arguments of a loop."""

    sampling: Sampling
    steering: Steering | None
    speculate: Speculation | None


class Fields(OfPrompts, OfSteps, OfHow, total=False):
    """The fields of `Prompts`, `Steps` and `How`, as arguments of a loop."""


set_defaults(OfHow, How)
set_defaults(Fields, Prompts.of, Steps, How)


class Asked(NamedTuple):
    """What a loop was asked for, checked."""

    prompts: Prompts
    stops: Stops
    steps: Steps
    how: How

    @classmethod
    def of(
        cls,
        loop: str,
        prompts: Texts | Prompts,
        steps: Steps | None,
        how: How | None,
        fields: Mapping[str, Any],
        kind: Any = Fields,
    ) -> "Asked":
        """Take what a loop was given; of what is None, fields by name make a value."""
        check_names(loop, fields, kind)
        if steps is None and "max_new_tokens" not in fields:
            raise UsageError(f"{loop}() needs max_new_tokens, or steps=Steps(...)")
        steps = take(steps, Steps, OfSteps, fields)
        how = take(how, How, OfHow, fields).check()
        if isinstance(prompts, Prompts):
            take(prompts, Prompts, OfPrompts, fields)
        else:
            prompts = Prompts.of(prompts, **select(OfPrompts, fields))
        prompts, stops = prompts.divide(steps.max_new_tokens)
        return cls(with_variants(prompts, how.steering), stops, steps, how)


def check_names(loop: str, fields: Mapping[str, Any], kind: Any) -> None:
    """Refuse arguments by name that a loop has not, where a `TypedDict` has its own."""
    for name in fields:
        if name not in kind.__annotations__:
            raise UsageError(f"{loop}() got an unexpected keyword argument {name!r}")


def select(kind: Any, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of the fields that a `TypedDict` has."""
    return {name: fields[name] for name in fields if name in kind.__annotations__}


def take(
    given: Value | None, kind: type[Value], names: Any, fields: Mapping[str, Any]
) -> Value:
    """Return a value that was given, alone, or make one of the fields that it has."""
    named = select(names, fields)
    if given is None:
        return kind(**named)
    if not isinstance(given, kind):
        raise UsageError(f"expected a {kind.__name__}, got {given!r:.60}")
    if named:
        raise UsageError(
            f"got a {kind.__name__} and the keywords {', '.join(named)}; set them on "
            f"the {kind.__name__}, or pass keywords only"
        )
    return given
