"""Log-probabilities of given texts, in the forms that clients request."""

import json

import numpy as np
import pytest
from served.replying.scoring import grow
from support.paths import EXAMPLES

pytestmark = [
    pytest.mark.one_end,
    pytest.mark.slow,
    pytest.mark.usefixtures("nothing_is_left"),
]

GREEDY = {"model": "pydoc", "temperature": 0}
CHAT = [{"role": "user", "content": "The with"}]
TEXTS = ["The with statement is", "The with statement was", "Every class", "The with"]


@pytest.fixture(scope="module")
def judged():
    """Function that returns `transformers`' log-softmax, f32[P, V]."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        EXAMPLES / "models" / "pydoc", dtype=torch.float32
    )

    def judge(ids):
        with torch.no_grad():
            return torch.log_softmax(model(torch.tensor([ids])).logits[0], -1).numpy()

    return judge


def check(found, ids, judged, num_top, text_of):
    """Check the logprobs of a prompt and of the token after it."""
    expected = judged(ids)
    assert len(found.tokens) == len(ids) + 1
    assert found.token_logprobs[0] is None and found.top_logprobs[0] is None
    own = [expected[i - 1, ids[i]] for i in range(1, len(ids))]
    np.testing.assert_allclose(found.token_logprobs[1:-1], own, atol=2e-5)
    for i in range(len(ids)):
        likely = np.argsort(-expected[i], kind="stable")[:num_top]
        reported = found.top_logprobs[i + 1]
        for token in likely:
            assert reported[text_of(token)] == pytest.approx(
                expected[i, token], abs=2e-5
            )
        # The most likely token has the same value in both lists.
        if i + 1 < len(ids) and ids[i + 1] == likely[0]:
            assert found.token_logprobs[i + 1] == max(reported.values())
    assert found.token_logprobs[-1] == max(found.top_logprobs[-1].values())


@pytest.mark.parametrize("num_top", [1, 3])
def test_prompts_are_scored_like_transformers(client, served, judged, num_top):
    prompts = [served.tokenizer.encode(text).ids for text in TEXTS]
    before = served.engine.stats().num_windows
    found = client.completions.create(
        prompt=prompts, max_tokens=1, logprobs=num_top, echo=True, seed=1, **GREEDY
    )
    # The token after each is the argmax, without the engine.
    assert served.engine.stats().num_windows == before
    for choice, ids, text in zip(found.choices, prompts, TEXTS, strict=True):
        check(choice.logprobs, ids, judged, num_top, served.spelling.find_text)
        assert choice.text.startswith(text)
        assert "".join(choice.logprobs.tokens) == choice.text
        starts = choice.logprobs.text_offset
        for start, token in zip(starts, choice.logprobs.tokens, strict=True):
            assert choice.text[start:].startswith(token)
    assert found.usage.completion_tokens == len(prompts)


def test_scoring_without_and_with_new_tokens(client, served):
    ids = served.tokenizer.encode("The with").ids
    request = dict(prompt=ids, echo=True, logprobs=1, model="pydoc")
    none = client.completions.create(max_tokens=0, **request).choices[0]
    assert none.text == "The with" and none.finish_reason == "length"
    assert len(none.logprobs.tokens) == len(ids)
    plain = client.completions.create(
        prompt=ids, max_tokens=6, logprobs=0, **GREEDY
    ).choices[0]
    for options in ({"temperature": 0}, {"temperature": 1.0, "seed": 3}):
        whole = client.completions.create(max_tokens=6, **request, **options).choices[0]
        pieces = client.completions.create(
            max_tokens=6, stream=True, **request, **options
        )
        tokens, logprobs, tops = [], [], []
        for piece in pieces:
            reported = piece.choices[0].logprobs
            tokens += reported.tokens
            logprobs += reported.token_logprobs
            tops += reported.top_logprobs
        assert tokens == whole.logprobs.tokens
        assert logprobs[1:] == pytest.approx(whole.logprobs.token_logprobs[1:])
        assert [list(top or ()) for top in tops] == [
            list(top or ()) for top in whole.logprobs.top_logprobs
        ]
    greedy = client.completions.create(max_tokens=6, **request, temperature=0)
    assert greedy.choices[0].text == "The with" + plain.text
    reported = greedy.choices[0].logprobs
    assert reported.token_logprobs[len(ids) :] == pytest.approx(
        plain.logprobs.token_logprobs, abs=1e-4
    )
    # Without echo the prompt has no logprobs.
    bare = client.completions.create(prompt=ids, max_tokens=6, logprobs=2, **GREEDY)
    assert bare.choices[0].text == plain.text
    assert all(len(top) == 2 for top in bare.choices[0].logprobs.top_logprobs)


def test_chats_return_top_logprobs(client, served, judged):
    ids = served.tokenizer.encode("The with").ids
    request = dict(messages=CHAT, logprobs=True, top_logprobs=3, max_tokens=5, **GREEDY)
    whole = client.chat.completions.create(n=2, **request)
    first, second = (choice.logprobs.content for choice in whole.choices)
    assert first == second and len(first) == 5
    tokens = []
    for reported in first:
        expected = judged([*ids, *tokens])[-1]
        likely = np.argsort(-expected, kind="stable")[:3]
        assert [t.token for t in reported.top_logprobs] == [
            served.spelling.find_text(token) for token in likely
        ]
        found = [top.logprob for top in reported.top_logprobs]
        np.testing.assert_allclose(found, expected[likely], atol=1e-4)
        assert reported.bytes == reported.top_logprobs[0].bytes
        tokens.append(int(likely[0]))
    pieces = client.chat.completions.create(stream=True, **request)
    streamed = [part for p in pieces for part in p.choices[0].logprobs.content]
    assert [[t.token for t in part.top_logprobs] for part in streamed] == [
        [t.token for t in part.top_logprobs] for part in first
    ]


def test_scoring_many_and_invalid_prompts(client, post):
    found = client.completions.create(
        prompt=[[5, i] for i in range(150)],
        max_tokens=1,
        logprobs=1,
        echo=True,
        **GREEDY,
    )
    assert len(found.choices) == 150
    for prompt in ([5, 3072], [5, -1]):
        body = {"prompt": prompt, "max_tokens": 1, "logprobs": 1, "echo": True}
        status, reply = post(json.dumps(body).encode())
        assert status == 400 and "model has 3072" in reply["error"]["message"]


def test_prompt_logprobs_need_a_scorer(served):
    from served.asking.showing import read_request
    from served.mistakes import Refused

    bare = served._replace(scorer=None)
    for fields in ({"logprobs": 1}, {"logprobs": 0, "echo": True}):
        body = json.dumps({"prompt": "a", **fields}).encode()
        with pytest.raises(Refused, match="recurrent states or runs in several"):
            read_request(bare, body, is_chat=False)
    read_request(bare, b'{"prompt": "a", "logprobs": 0}', is_chat=False)


@pytest.mark.parametrize("seed", range(5))
def test_sequences_share_common_prefixes(seed):
    """Every sequence is its path of segments, and no two siblings start alike."""
    chance = np.random.default_rng(seed)
    sequences = [
        tuple(chance.integers(0, 3, chance.integers(1, 8)).tolist()) for _ in range(30)
    ]
    segments, parents, paths = grow(sequences)
    for sequence in sequences:
        path = paths[sequence]
        assert sum((tuple(segments[s]) for s in path), ()) == sequence
        assert [parents[s] for s in path] == [-1, *path[:-1]]
    begun = [(parents[s], segments[s][0]) for s in range(len(segments))]
    assert len(set(begun)) == len(begun)
    assert sum(map(len, segments)) == len(
        {
            sequence[:end]
            for sequence in sequences
            for end in range(1, len(sequence) + 1)
        }
    )
