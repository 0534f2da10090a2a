"""A compiled grammar: the arrays of an automaton over token ids.

Symbols: S states of all variants, C classes of tokens, R distinct sets of allowed
tokens, V tokens of the vocabulary, K rows of a call. Table rows, most of which are
similar, are lists of pieces of 16 entries; equal pieces are stored once.

The state of a sequence is one i32, the automaton's state. Two states follow those of
the language: `S`, the rejecting state after a token that was not allowed, and `S + 1`,
the ended state after an end token.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jkv.logits_processors.protocol import LogitsProcessor

PIECE = 16  # entries per piece; 8 and 32 give larger tables


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Grammar(LogitsProcessor):
    """A logits processor that masks tokens outside a language; made by `jkv.grammar`.

    A token is allowed exactly if some string of the language that the vocabulary can
    spell continues with it; an end token, if the string so far is in the language.
    """

    class_of_token: jax.Array  # u8, u16 or i32 [G, V], for each of the G variants
    # u8, u16 or i32[Q, 16], next states after the tokens of 16 classes.
    transition_pieces: jax.Array
    # u8, u16 or i32[T], piece numbers of each state, state after state.
    transitions: jax.Array
    # i32[S + 2], start of each state's pieces in `transitions`.
    row_of_state: jax.Array
    variant_of_state: jax.Array  # i32[S + 2]
    # u32[P, 16], allowed tokens of 512: token t is bit t % 32 of word t // 32.
    mask_pieces: jax.Array
    masks: jax.Array  # u8, u16 or i32[R, ceil(V / 512)], piece numbers
    mask_of_state: jax.Array  # i32[S + 2], row of `masks`
    # i32[S + 2], the only token allowed in a state; -1 for several.
    forced_token: jax.Array
    starts: jax.Array  # i32[G], initial state of each variant
    end_tokens: jax.Array  # i32[E]
    # V; static, since the bits of `masks` are padded to 512.
    vocabulary_size: int = dataclasses.field(metadata={"static": True})

    @property
    def num_variants(self) -> int:
        """Number of languages, G; more than one after `join`."""
        return self.starts.shape[-1]

    @property
    def num_end_tokens(self) -> int:
        """Number of end tokens, E."""
        return self.end_tokens.shape[-1]

    @property
    def num_states(self) -> int:
        """Number of states of all variants, S."""
        return self.row_of_state.shape[-1] - 2

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self))

    def begin(self, variants: jax.Array, prompts: jax.Array) -> jax.Array:
        """Return the initial state of each sequence, i32[N]; prompts are ignored.

        Args:
          variants: i32[N]; -1 (unconstrained) returns the first variant's state.
          prompts: i32[N, P].
        """
        del prompts
        return self.starts.at[jnp.maximum(variants, 0)].get(mode="clip")

    def process(self, state: jax.Array, logits: jax.Array) -> jax.Array:
        """Set the logits of tokens that are not allowed to -inf.

        Args:
          state: i32[K].
          logits: f32[K, V], or wider: ids outside the vocabulary are not allowed.

        Raises:
          ValueError: if there are fewer logits than tokens in the vocabulary.
        """
        width = logits.shape[1]
        if width < self.vocabulary_size:
            raise ValueError(
                f"logits must cover the grammar's {self.vocabulary_size} tokens, got "
                f"{width}; compile it for the model's vocabulary, by "
                f"vocabulary_of(tokenizer, end_tokens, size={width})"
            )
        words = self.mask_pieces[self.masks[self.mask_of_state[state]]]
        words = words.reshape(len(words), words.shape[1] * PIECE)
        missing = max(0, -(-width // 32) - words.shape[1])
        words = jnp.pad(words, ((0, 0), (0, missing)))
        shifts = jnp.arange(32, dtype=jnp.uint32)[None, None]
        bits = (words[:, :, None] >> shifts) & jnp.uint32(1)
        allowed = bits.reshape(len(words), words.shape[1] * 32)[:, :width] == 1
        return jnp.where(allowed, logits, -jnp.inf)

    def advance(self, state: jax.Array, tokens: jax.Array) -> jax.Array:
        """Return the state after accepting one token per sequence, i32[K].

        Args:
          state: i32[K].
          tokens: i32[K]; -1 leaves a row unchanged.
        """
        variants = self.variant_of_state[state]
        columns = self.class_of_token.at[variants, tokens].get(mode="clip")
        piece, lane = jnp.divmod(columns.astype(jnp.int32), PIECE)
        pieces = self.transitions[self.row_of_state[state] + piece]
        reached = self.transition_pieces[pieces, lane].astype(jnp.int32)
        is_known = tokens < self.vocabulary_size
        reached = jnp.where(is_known, reached, self.num_states)
        return jnp.where(tokens < 0, state, reached)

    def ended(self, state: jax.Array) -> jax.Array:
        """Return True for sequences after an end token, bool[K]."""
        return state == self.num_states + 1

    def forced(self, state: jax.Array) -> jax.Array:
        """Return the only allowed token of each sequence, i32[K]; -1 for several."""
        return self.forced_token[state]
