"""A grammar: the tokens that a text may have next, as arrays on the device.

Symbols: S states of all variants, C classes of tokens, R distinct sets of allowed
tokens, V tokens of the vocabulary, K rows of a call. Rows of a table, which agree in
most places, are lists of pieces of 16 entries; equal pieces are kept once.

A row of the state is one i32, the state of the automaton. Two states stand behind those
of the language: a text that took a token which was not allowed is lost (nothing is
allowed any more), one that took an end token has ended.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jkv.steering.protocol import Steering

PIECE = 16  # entries of a piece; with 8 or 32 tables are larger


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Grammar(Steering):
    """What steers texts into a language; made by `jkv.grammar`, arrays alone.

    A token is allowed exactly if some text of the language that the vocabulary can
    spell goes on with it; an end token, if the text so far is in the language.
    """

    class_of_token: jax.Array  # u8, u16 or i32 [G, V], for each of the G variants
    # u8, u16 or i32[Q, 16], states behind tokens of 16 classes.
    transition_pieces: jax.Array
    # u8, u16 or i32[T], pieces of each state, one state after the other.
    transitions: jax.Array
    # i32[S + 2], where each state's pieces begin in `transitions`.
    row_of_state: jax.Array
    variant_of_state: jax.Array  # i32[S + 2]
    # u32[P, 16], which of 512 tokens are allowed: of them token t is bit t % 32 of word
    # t // 32.
    mask_pieces: jax.Array
    masks: jax.Array  # u8, u16 or i32[R, ceil(V / 512)], the pieces of each set
    mask_of_state: jax.Array  # i32[S + 2], which set each state allows
    # i32[S + 2], the only token that a state allows; -1 for several.
    forced_token: jax.Array
    starts: jax.Array  # i32[G], where texts of each variant begin
    end_tokens: jax.Array  # i32[E]
    # V, static, since a row of bits is longer.
    vocabulary_size: int = dataclasses.field(metadata={"static": True})

    @property
    def num_variants(self) -> int:
        """Languages that a text can be steered into: one, more after `join`."""
        return self.starts.shape[-1]

    @property
    def num_end_tokens(self) -> int:
        """End tokens of the vocabulary."""
        return self.end_tokens.shape[-1]

    @property
    def num_states(self) -> int:
        """States of all variants, S."""
        return self.row_of_state.shape[-1] - 2

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self))

    def begin(self, variants: jax.Array, prompts: jax.Array) -> jax.Array:
        """Return the state of texts that begin, i32[N]; prompts do not count.

        Args:
          variants: i32[N]; of -1 (not steered) the state is the first variant's.
          prompts: i32[N, P].
        """
        del prompts
        return self.starts.at[jnp.maximum(variants, 0)].get(mode="clip")

    def steer(self, state: jax.Array, logits: jax.Array) -> jax.Array:
        """Return the logits with -inf for every token that is not allowed.

        Args:
          state: i32[K].
          logits: f32[K, V], or wider: what the vocabulary does not know is not allowed.

        Raises:
          ValueError: fewer logits than tokens in the vocabulary.
        """
        width = logits.shape[1]
        if width < self.vocabulary_size:
            raise ValueError(
                f"logits of {width} tokens, but the grammar's vocabulary has "
                f"{self.vocabulary_size}: make it of the tokens that the model knows, "
                f"as vocabulary_of(tokenizer, end_tokens, size={width}) does"
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
        """Return the state after one more token of each text, i32[K].

        Args:
          state: i32[K].
          tokens: i32[K]; -1 leaves a row as it is.
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
        """Return which texts took an end token, bool[K]."""
        return state == self.num_states + 1

    def forced(self, state: jax.Array) -> jax.Array:
        """Return the only token of each text, i32[K]; -1 where several are allowed."""
        return self.forced_token[state]
