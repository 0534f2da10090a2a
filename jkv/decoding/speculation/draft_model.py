"""DraftModel: a smaller model whose layers live in the target's cache."""

import dataclasses
from typing import TYPE_CHECKING, Any

import jax

from jkv.arguments import explains_class
from jkv.config.cache_config import CacheConfig
from jkv.config.grouped_config import GroupedConfig, LayerGroups, as_grouped
from jkv.config.state_config import StateConfig
from jkv.decoding.model.drafter import check_sizes, own_layers, rejoin, static
from jkv.decoding.model.steps import Model, call_model, check_model
from jkv.state import Batch, Cache
from jkv.status import UsageError
from jkv.verbs.attending import plan_attention

if TYPE_CHECKING:
    from jkv.decoding.speculation.draft_step import DraftStep


@explains_class
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class DraftModel:
    """Speculative decoding with a smaller draft model, in the target's cache.

    Draft tokens are drawn with the sampling options of the sequence. Each is accepted
    with probability min(1, p / q), where p is the model's and q the draft model's; a
    rejected one is replaced by a draw from max(0, p - q), normalised (Leviathan et al.,
    "Fast Inference from Transformers via Speculative Decoding", 2023; Chen et al.,
    "Accelerating Large Language Model Decoding with Speculative Sampling", 2023). The
    distribution of completions is independent of the draft model, and greedy
    completions are equal. With a temperature the drawn tokens depend on the positions
    of verification and so on the rest of the batch: the same seed may give another
    completion of the same distribution.

    The draft model computes every token that the model computes, prompts included, so
    prefix cache hits serve both.

    Attributes:
      model: a `Model` with the same vocabulary; static.
      params: its weights.
      config: the sizes of its cache, with the model's `max_sequences`,
        `max_context_length` and `block_size`; static. `jkv.with_drafter` adds its
        layers to the model's configuration.
      num_tokens: draft tokens of a sequence in a step; static.
      cost: time of a step with drafting, relative to a plain step; static.

    Raises:
      ValueError: for a number out of its range.

    Example:
      >>> import jax, jkv
      >>> from jkv.decoding import DraftModel
      >>> def count_on(params, tokens, cache, batch, *, all_rows=False):
      ...     logits = 9 * jax.nn.one_hot(tokens + 1, 100)
      ...     return (logits if all_rows else logits[batch.last_rows]), cache
      >>> config = jkv.CacheConfig.toy()
      >>> draft = DraftModel(model=count_on, params=None, config=config, num_tokens=3)
      >>> cache = jkv.init(jkv.with_drafter(config, draft))
      >>> cache, result = jkv.generate(count_on, None, cache, [[5, 6, 7]],
      ...     max_new_tokens=6, row_counts=(8,), speculate=draft)
      >>> result.tokens.tolist(), int(result.statistics.accepted_tokens)
      ([[8, 9, 10, 11, 12, 13]], 3)
    """

    model: Model = dataclasses.field(metadata={"static": True})
    params: Any
    config: CacheConfig | StateConfig | GroupedConfig = dataclasses.field(
        metadata={"static": True}
    )
    num_tokens: int = static(4)
    cost: float = static(2.0)

    aux_layers = ()

    def __post_init__(self) -> None:
        check_sizes(self.num_tokens, self.cost)
        check_model(self.model, None)
        if not isinstance(self.config, CacheConfig | StateConfig | GroupedConfig):
            raise UsageError(
                f"config must be a jkv.CacheConfig or jkv.GroupedConfig, the sizes of "
                f"the draft model's layers, got {self.config!r:.60}"
            )

    @property
    def groups(self) -> tuple[CacheConfig | StateConfig, ...]:
        """The sizes of its layers."""
        return as_grouped(self.config).groups

    @property
    def layer_groups(self) -> tuple[LayerGroups, ...]:
        """The groups of each of its layers."""
        return as_grouped(self.config).layer_groups

    def update(
        self,
        cache: Cache,
        batch: Batch,
        tokens: jax.Array,
        hidden: jax.Array,
        previous: jax.Array,
    ) -> Cache:
        """Run the draft model over the rows of a step."""
        del hidden, previous
        return self._call(cache, batch, tokens)[0]

    def draft(
        self, cache: Cache, step: "DraftStep"
    ) -> tuple[Cache, jax.Array, jax.Array]:
        """Draft tokens one by one, each in the slot of the token before it."""

        def compute(
            cache: Cache, index: jax.Array, tokens: jax.Array
        ) -> tuple[Cache, jax.Array]:
            row = plan_attention(cache, step.batch.row(index))
            return self._call(cache, row, tokens)

        cache = step.decode(compute, cache)
        return cache, *step.drafted

    def _call(
        self, cache: Cache, batch: Batch, tokens: jax.Array
    ) -> tuple[Cache, jax.Array]:
        """Run the model on its own layers; return the cache and its logits."""
        own = own_layers(cache, self)
        logits, own, _ = call_model(self.model, self.params, tokens, own, batch)
        return rejoin(own, cache), logits
