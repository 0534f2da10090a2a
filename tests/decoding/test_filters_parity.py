"""Logits filters keep the same tokens as transformers' filters."""

import numpy as np
import pytest
from test_sampling import FILTERS, filter_logits, random_logits, random_seen

from jkv.decoding import Sampling

pytestmark = [
    pytest.mark.one_end,
    pytest.mark.filterwarnings("default"),  # warnings of torch and transformers
]


@pytest.mark.parametrize("options", FILTERS.values(), ids=FILTERS)
def test_filters_equal_hugging_face(options):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    penalty = options.get("repetition_penalty", 1.0)
    processors = [
        transformers.RepetitionPenaltyLogitsProcessor(penalty),
        transformers.TemperatureLogitsWarper(options["temperature"]),
        transformers.TopPLogitsWarper(options.get("top_p", 1.0)),
        transformers.MinPLogitsWarper(options.get("min_p", 0.0)),
    ]
    if "top_k" in options:
        processors.insert(2, transformers.TopKLogitsWarper(options["top_k"]))
    for logits, seen in zip(random_logits(), random_seen(), strict=True):
        prompt = torch.tensor(np.flatnonzero(seen))[None]
        scores = torch.tensor(np.asarray(logits))[None]
        for processor in processors:
            scores = processor(prompt, scores)
        expected = np.asarray(scores)[0]
        filtered = filter_logits(logits[None], Sampling(**options), seen=seen[None])[0]
        np.testing.assert_array_equal(np.isinf(filtered), np.isinf(expected))
        np.testing.assert_allclose(
            filtered, expected - expected.max(), rtol=1e-5, atol=1e-5
        )
