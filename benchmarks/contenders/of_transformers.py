"""transformers contenders: padded batches, continuous batching, a static cache."""

from typing import Any

import torch
import transformers
from transformers import CompileConfig, ContinuousBatchingConfig

from contenders.workloads import Workload


class Transformers:
    """The checkpoint in transformers, in float32."""

    def __init__(self, workload: Workload) -> None:
        """Load the checkpoint."""
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        self.workload = workload
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            workload.folder, dtype=torch.float32
        ).eval()
        config = self.model.generation_config
        config.eos_token_id, config.pad_token_id = None, 0
        config.do_sample, config.temperature, config.top_k = True, 1.0, 0


class Padded(Transformers):
    """Static batches, each running until its longest sequence has ended."""

    def prepare(self) -> None:
        """Run one step."""
        self._continue(0, 1)

    def run(self) -> dict[str, Any]:
        """Continue all prompts."""
        width = self.workload.num_running // self.workload.num_samples
        steps = 0
        for first in range(0, len(self.workload.prompts), width):
            most = max(self.workload.limits[first : first + width])
            self._continue(first, most)
            steps += most
        return {"tokens": self.workload.num_tokens, "num_steps": steps}

    def _continue(self, first: int, num_new: int, **options: Any) -> None:
        width = self.workload.num_running // self.workload.num_samples
        prompts = self.workload.prompts[first : first + width]
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        tokens = self.model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=num_new,
            num_return_sequences=self.workload.num_samples,
            **options,
        )
        assert tokens.shape[1] == longest + num_new


class Continuous(Transformers):
    """Continuous batching with an equally large cache."""

    def prepare(self) -> None:
        """Run one step."""
        self._continue([(self.workload.prompts[0], 1)])

    def run(self) -> dict[str, Any]:
        """Continue all prompts."""
        pairs = zip(self.workload.prompts, self.workload.limits, strict=True)
        requests = [pair for pair in pairs for _ in range(self.workload.num_samples)]
        return {"tokens": self._continue(requests)}

    def _continue(self, requests: list[tuple[list[int], int]]) -> int:
        page = 256
        config = ContinuousBatchingConfig(
            page_size=page,
            num_blocks=max(self.workload.cache_tokens // page, 8),
            max_batch_tokens=512,
            max_requests_per_batch=self.workload.num_running,
        )
        num_tokens = 0
        with self.model.continuous_batching_context_manager(
            continuous_batching_config=config
        ) as manager:
            for prompt, limit in requests:
                manager.add_request(prompt, max_new_tokens=limit)
            for _ in requests:
                result = manager.get_result(timeout=600)
                if result is None or result.error:
                    raise RuntimeError(result and result.error)
                num_tokens += len(result.generated_tokens)
        return num_tokens


class Static(Padded):
    """One sequence with a static cache, eagerly, the default on a CPU."""

    options: dict[str, Any] = {}

    def prepare(self) -> None:
        """Run it completely, since programs depend on the full length."""
        self.run()

    def run(self) -> dict[str, Any]:
        """Continue the prompt."""
        (most,) = self.workload.limits
        self._continue(0, most, cache_implementation="static", **self.options)
        return {"tokens": self.workload.num_tokens, "num_steps": most}


class OneThread(Static):
    """`Static` with one thread, which avoids busy-waiting."""

    def prepare(self) -> None:
        """Set one thread."""
        torch.set_num_threads(1)
        super().prepare()


class Compiled(Static):
    """`Static` with `torch.compile`, which `generate` skips on a CPU by default.

    The second run compiles again.
    """

    def prepare(self) -> None:
        """Compile."""
        config = CompileConfig(mode="default")
        config._compile_all_devices = True
        self.options = {"compile_config": config}
        super().prepare()
        super().prepare()
