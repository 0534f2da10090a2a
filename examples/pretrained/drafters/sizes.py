"""A drafter's target, and the sizes that follow from it."""

from typing import Any, NamedTuple

import jkv

from ..caches import attention_fields
from ..config import DecoderConfig
from ..model import Decoder


class Target(NamedTuple):
    """A target model with its parameters and the configuration of its cache."""

    model: Decoder
    params: dict[str, Any]
    config: jkv.CacheConfig | jkv.GroupedConfig

    @property
    def blocks(self) -> jkv.CacheConfig:
        """The configuration of its first group of attention layers."""
        if isinstance(self.config, jkv.CacheConfig):
            return self.config
        return self.config.block_groups[0]

    @property
    def dtype(self) -> Any:
        """The storage dtype of its keys."""
        return self.blocks.dtype

    def size_layers(self, drafting: DecoderConfig) -> jkv.CacheConfig:
        """Return a drafter's cache configuration, with the target's limits."""
        fields = attention_fields(drafting, drafting.num_layers)
        if drafting.hides_first:
            fields["value_head_dim"] = fields.get("value_head_dim", fields["head_dim"])
            fields["head_dim"] += jkv.drafters.HIDDEN_DIM
        return jkv.CacheConfig.for_context_length(
            self.config.max_context_length,
            max_sequences=self.config.max_sequences,
            block_size=self.config.block_size,
            dtype=self.dtype,
            pruning=self.blocks.pruning,
            **fields,
        )

    def check_hidden_size(self, size: int) -> None:
        """Check the width of the hidden states that a drafter reads.

        Raises:
            ValueError: if it is not the target's.
        """
        own = self.model.config.hidden_size
        if size != own:
            raise ValueError(
                f"the drafter reads hidden states of width {size}, the target has "
                f"{own}; take a drafter made for this target"
            )

    def check_layers(self, layers: tuple[int, ...]) -> None:
        """Check the layers that a drafter reads the inputs of.

        Raises:
            ValueError: for a layer outside 0..L, where L is the target's final norm.
        """
        count = self.model.config.num_layers
        if not all(0 <= layer <= count for layer in layers):
            raise ValueError(
                f"the drafter reads the inputs of layers {layers}, the target has "
                f"{count} layers; take a drafter made for this target"
            )
