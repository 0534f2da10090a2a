"""Arguments of a loop, passed unchanged through all of its layers.

`Prompts` has the prompts and their options, `GenerationConfig` lengths and step sizes,
`DecodingOptions` the decoding options. Loops also take their fields as keyword
arguments.
"""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, TypeVar

import jax

from jkv.decoding.model.drafter import Drafter, check_drafter
from jkv.decoding.model.steps import GenerationConfig, GenerationFields
from jkv.decoding.sampling.draws import GREEDY, Choice, Sampling, check_sampling
from jkv.decoding.sampling.next_token import as_logits_processor, with_variants
from jkv.decoding.sequences.prompts import PromptFields, Prompts, Stops
from jkv.logits_processors import LogitsProcessor
from jkv.metadata.requests import IntegerRows
from jkv.signatures import set_defaults
from jkv.state import Cache
from jkv.status import UsageError

if TYPE_CHECKING:  # imported where tokens are dropped
    from jkv.decoding.scheduler.shortening import Shortening

Value = TypeVar("Value")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class DecodingOptions:
    """Decoding options: a pytree; its arrays are arguments of the program.

    Attributes:
      sampling: sampling options, scalars or one value for each sequence; greedy by
        default.
      logits_processor: a logits processor (`LogitsProcessor`) that masks tokens; None
        allows all. With `speculate`, a token that it forces becomes a draft token that
        is never rejected.
      speculate: a drafter for speculative decoding, such as `PromptLookup` or
        `DraftModel`; None is off. The model must take `all_rows`. With several pools
        each drafts for its own sequences.

    Example:
      >>> import jkv
      >>> from jkv.decoding import DecodingOptions
      >>> DecodingOptions(jkv.Sampling(temperature=0.7)).speculate is None
      True
    """

    sampling: Sampling = GREEDY
    logits_processor: LogitsProcessor | None = None
    speculate: Drafter | None = None

    def check(self) -> "DecodingOptions":
        """Check the options; return them with the processor's leaves as arrays."""
        check_sampling(self.sampling)
        if self.speculate is not None:
            check_drafter(self.speculate)
        return dataclasses.replace(
            self, logits_processor=as_logits_processor(self.logits_processor)
        )

    def choice(self, num_rows: int | None = None) -> Choice:
        """Return the sampling options and processor, for `num_rows` rows at a time."""
        return Choice(self.sampling, self.logits_processor, num_rows)


class DecodingFields(TypedDict, total=False):
    """The fields of `DecodingOptions` as keyword arguments of a loop."""

    sampling: Sampling
    logits_processor: LogitsProcessor | None
    speculate: Drafter | None


class LoopFields(PromptFields, GenerationFields, DecodingFields, total=False):
    """All keyword arguments of a loop."""


set_defaults(DecodingFields, DecodingOptions)
set_defaults(LoopFields, Prompts.of, GenerationConfig, DecodingOptions)


class Arguments(NamedTuple):
    """Checked arguments of a loop."""

    prompts: Prompts
    stops: Stops
    config: GenerationConfig
    options: DecodingOptions

    @classmethod
    def of(
        cls,
        loop: str,
        prompts: IntegerRows | Prompts,
        config: GenerationConfig | None,
        options: DecodingOptions | None,
        fields: Mapping[str, Any],
        kind: Any = LoopFields,
    ) -> "Arguments":
        """Return checked arguments; keywords replace the values that are None."""
        check_names(loop, fields, kind)
        if config is None and "max_new_tokens" not in fields:
            raise UsageError(f"{loop}() needs max_new_tokens or generation_config")
        config = take(config, GenerationConfig, GenerationFields, fields)
        options = take(options, DecodingOptions, DecodingFields, fields).check()
        if isinstance(prompts, Prompts):
            take(prompts, Prompts, PromptFields, fields)
        else:
            prompts = Prompts.of(prompts, **select(PromptFields, fields))
        prompts, stops = prompts.divide(config.max_new_tokens)
        prompts = with_variants(prompts, options.logits_processor)
        return cls(prompts, stops, config, options)

    def find_shortening(self, cache: Cache) -> "Shortening":
        """Return how sequences drop tokens, for a config that shortens them."""
        if self.options.speculate is not None:
            raise UsageError(
                "speculate is not supported with press and roll; omit one of them"
            )
        if self.config.roll is not None and self.prompts.spans is not None:
            raise UsageError("spans are not supported with roll; omit one of them")
        from jkv.decoding.scheduler.shortening import Shortening

        return Shortening.of(cache, self.config)


def check_names(loop: str, fields: Mapping[str, Any], kind: Any) -> None:
    """Refuse keyword arguments that a `TypedDict` does not have."""
    for name in fields:
        if name in kind.__annotations__:
            continue
        if name in LoopFields.__annotations__:
            raise UsageError(f"{name} is not supported by {loop}(); omit it")
        raise UsageError(f"{loop}() got an unexpected keyword argument {name!r}")


def select(kind: Any, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that a `TypedDict` has."""
    return {name: fields[name] for name in fields if name in kind.__annotations__}


def take(
    given: Value | None, kind: type[Value], names: Any, fields: Mapping[str, Any]
) -> Value:
    """Return a given value, or make one from its keyword arguments."""
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
