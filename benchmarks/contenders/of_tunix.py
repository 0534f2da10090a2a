"""google-tunix's own sampler, in the environment of `make tunix`."""

import dataclasses
import functools
import json
import pathlib
import warnings
from typing import Any

import jax.numpy as jnp
from tunix.generate import sampler
from tunix.models.llama3 import model as llama3
from tunix.models.llama3.params import create_model_from_safe_tensors

from contenders.workloads import Workload


class Numbers:
    """A tokenizer for lists of token ids."""

    def __init__(self, vocabulary: int) -> None:
        """Set an end token outside the vocabulary."""
        self._end = vocabulary

    def encode(self, text: list[int]) -> list[int]:
        """Return the ids."""
        return text

    def decode(self, tokens: list[int]) -> str:
        """Return an empty string; it is not used."""
        del tokens
        return ""

    def bos_id(self) -> int:
        """Return 0, for none."""
        return 0

    def eos_id(self) -> int:
        """Return the end token."""
        return self._end

    def pad_id(self) -> int:
        """Return the padding of prompts."""
        return -1


class Shortened(sampler.Sampler):
    """The sampler with buffers of one length, for any number of new tokens.

    Its programs are compiled for the buffers' length. Here the loop ends after
    `num_new` tokens, as if all sequences had ended.
    """

    num_new = 1

    def init_sample_state(self, tokens: Any, **options: Any) -> Any:
        """Initialize the state with an earlier last step."""
        state = super().init_sample_state(tokens, **options)
        # The prompt's step generates the first token.
        last = tokens.shape[1] + self.num_new - 1
        return dataclasses.replace(state, total_sampling_steps=last)


class Vanilla:
    """Static batches, each running until its longest sequence has ended.

    A cache row holds the longest prompt and the longest completion; the batch size is
    the number of rows that fit into the common cache size.
    """

    def __init__(self, workload: Workload) -> None:
        """Load the checkpoint."""
        warnings.simplefilter("ignore", DeprecationWarning)  # raised inside tunix
        self.workload = workload
        self.width = max(map(len, workload.prompts))
        length = self.width + max(workload.limits)
        rows = min(workload.cache_tokens // length, workload.num_running)
        self.prompts_at_a_time = rows // workload.num_samples
        model = load(pathlib.Path(workload.folder))
        sizes = model.config
        self.sampler = Shortened(
            model,
            Numbers(sizes.vocab_size),
            sampler.CacheConfig(
                cache_size=length,
                num_layers=sizes.num_layers,
                num_kv_heads=sizes.num_kv_heads,
                head_dim=sizes.head_dim,
            ),
        )

    def prepare(self) -> None:
        """Compile, also for the last batch, which may be smaller."""
        last = len(self.workload.prompts) - 1
        for first in (0, last - last % self.prompts_at_a_time):
            self._continue(first, 1)

    def run(self) -> dict[str, Any]:
        """Continue all prompts."""
        steps = 0
        for first in range(0, len(self.workload.prompts), self.prompts_at_a_time):
            most = max(self.workload.limits[first : first + self.prompts_at_a_time])
            self._continue(first, most)
            steps += most
        rows = self.prompts_at_a_time * self.workload.num_samples
        counts = {"num_steps": steps, "running": rows}
        return {"tokens": self.workload.num_tokens, **counts}

    def _continue(self, first: int, num_new: int) -> None:
        prompts = self.workload.prompts[first : first + self.prompts_at_a_time]
        self.sampler.num_new = num_new
        output = self.sampler(
            [prompt for prompt in prompts for _ in range(self.workload.num_samples)],
            max_generation_steps=max(self.workload.limits),
            max_prompt_length=self.width,
            temperature=1.0,
            top_p=1.0,
            seed=0,
        )
        for tokens in output.tokens:
            assert (tokens[:num_new] >= 0).all() and (tokens[num_new:] < 0).all()


def load(folder: pathlib.Path) -> llama3.Llama3:
    """Load a Hugging Face Llama as tunix's, in float32."""
    given = json.loads((folder / "config.json").read_text())
    config = llama3.ModelConfig(
        num_layers=given["num_hidden_layers"],
        vocab_size=given["vocab_size"],
        embed_dim=given["hidden_size"],
        hidden_dim=given["intermediate_size"],
        num_heads=given["num_attention_heads"],
        head_dim=given["head_dim"],
        num_kv_heads=given["num_key_value_heads"],
        rope_theta=given["rope_theta"],
        norm_eps=given["rms_norm_eps"],
        weight_tying=given["tie_word_embeddings"],
    )
    # tunix's model does not pass `rope_theta`.
    llama3.apply_rope = functools.partial(
        llama3.apply_rope, rope_theta=given["rope_theta"]
    )
    return create_model_from_safe_tensors(str(folder), config, dtype=jnp.float32)
