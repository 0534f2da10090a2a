"""Slash commands; each returns a line to print."""

import dataclasses
import json

import jkv

from .turns import Branch, Chat


def undo(chat: Chat, _: str) -> str:
    """Remove the last turn; its tokens are truncated from the sequence."""
    branch = chat.branch
    if not branch.lengths:
        raise ValueError("nothing to undo")
    chat.cut(branch.lengths.pop())
    del branch.messages[-2:]
    return f"back to {len(branch.tokens)} tokens"


def branch(chat: Chat, _: str) -> str:
    """Continue in a copy that shares the blocks of the history."""
    old = chat.branch
    before = int(jkv.num_free_blocks(chat.cache))
    cache, forked = jkv.fork(chat.cache, [old.seq_id])
    jkv.raise_for_status(forked.status)
    taken = before - int(jkv.num_free_blocks(cache))
    chat.cache = cache
    chat.add(dataclasses.replace(old, seq_id=int(forked.seq_ids[0])))
    return (
        f"branch {len(chat.branches)} of {len(old.tokens)} tokens took {taken} blocks"
    )


def switch(chat: Chat, number: str) -> str:
    """Switch to another branch."""
    if not number.isdigit() or not 1 <= int(number) <= len(chat.branches):
        raise ValueError(f"/switch requires a number from 1 to {len(chat.branches)}")
    chat.branch = chat.branches[int(number) - 1]
    last = chat.branch.messages[-1]["content"] if chat.branch.messages else ""
    return f"branch {number}, {len(chat.branch.tokens)} tokens: ...{last[-60:]!r}"


def save(chat: Chat, path: str) -> str:
    """Save keys and values to a file, and the history to FILE.json."""
    if not path:
        raise ValueError("/save requires a file name")
    jkv.save(path, chat.cache, [chat.branch.seq_id])
    with open(f"{path}.json", "w", encoding="utf-8") as file:
        json.dump(dataclasses.asdict(chat.branch), file)
    return f"{len(chat.branch.tokens)} tokens in {path}"


def load(chat: Chat, path: str) -> str:
    """Load a saved conversation as a new branch."""
    if not path:
        raise ValueError("/load requires a file name")
    with open(f"{path}.json", encoding="utf-8") as file:
        branch = Branch(**json.load(file))
    chat.cache, opened = jkv.load(path, chat.cache)
    jkv.raise_for_status(opened.status)
    chat.add(dataclasses.replace(branch, seq_id=int(opened.seq_ids[0])))
    return f"branch {len(chat.branches)}, {len(branch.tokens)} tokens, none computed"


COMMANDS = {each.__name__: each for each in (undo, branch, switch, save, load)}
