"""A drafter's target, and the sizes that follow from it."""

from typing import Any, NamedTuple

import jkv

from ..caches import attention_fields
from ..config import DecoderConfig
from ..model import Decoder
from ..settings import Settings


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

    def check_vocab_size(self, size: int) -> None:
        """Check the vocabulary of a drafter without a draft vocabulary.

        Raises:
            ValueError: if its size is not the target's.
        """
        own = self.model.config.vocab_size
        if size != own:
            raise ValueError(
                f"the drafter has a vocabulary of {size} tokens (vocab_size), the "
                f"target {own}; take a drafter made for this target"
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

    def read_layers(
        self,
        settings: Settings,
        key: str,
        default: tuple[int, ...] = (),
        shift: int = 0,
    ) -> tuple[int, ...]:
        """Return the layers that a drafter reads the inputs of.

        Args:
            settings: the drafter's config.json.
            key: its list of layers.
            default: the layers of a file without this list.
            shift: added to the file's numbers, 1 for layers that are listed by outputs.

        Raises:
            ValueError: for no list, or a layer outside 0..L, where L is the target's
                final norm.
        """
        listed, count = settings.ints(key), self.model.config.num_layers
        if listed == [] or (listed is None and not default):
            raise ValueError(
                f"config.json: {key!r} must list one or more layers of the target, got "
                f"{listed}"
            )
        layers = default if listed is None else tuple(n + shift for n in listed)
        least = 0 if listed is None else shift
        if not all(least <= layer <= count for layer in layers):
            raise ValueError(
                f"the drafter reads the inputs of layers {layers} ({key}), the target "
                f"has {count} layers; take a drafter made for this target"
            )
        return layers

    def find_own_layers(self, settings: Settings) -> dict[str, Any]:
        """Return the config.json of a model of the drafter's own layers.

        In speculators' format this is a part of the drafter's config.json.

        Raises:
            ValueError: if that part is missing.
        """
        is_nested = "speculators_model_type" in settings.raw
        default = None if is_nested else settings.raw
        given = dict(settings.part("transformer_layer_config", default))
        given.pop("architectures", None)
        vocab_size = self.model.config.vocab_size
        return given | dict(vocab_size=vocab_size, tie_word_embeddings=False)
