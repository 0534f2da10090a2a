"""`chat.py`: turns compute only new tokens; answers equal an uncached chat's."""

import runpy
import shutil
import sys

import pytest
from chatting.turns import Branch
from support.paths import EXAMPLES

import jkv

pytestmark = pytest.mark.one_end

TEMPLATE = (
    "{% for m in messages %}{{ '> ' if m.role == 'user' else '' }}{{ m.content }}\n"
    "{% endfor %}"
)
LINES = ["The with statement", "/branch", "and the try", "/switch 1", "and the for"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The bundled model with a chat template."""
    folder = tmp_path_factory.mktemp("models") / "pydoc"
    shutil.copytree(EXAMPLES / "models" / "pydoc", folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.mark.usefixtures("scanned_layers")
def test_a_conversation(folder, tmp_path, monkeypatch, capsys):
    """Turns, branches, undo, files and mistakes in one session.

    Each answer equals that of a branch without cached tokens.
    """
    chats, path = [], tmp_path / "conversation"
    lines = [
        *LINES,
        f"/save {path}",
        "/undo",
        f"/load {path}",
        *("/load nowhere", "/switch 9", "/dance", "/save", "", "word " * 50),
    ]
    script = _run(folder, lines, monkeypatch, chats)
    (chat,) = chats
    output = capsys.readouterr().out
    first, second, third = chat.branches
    assert [len(branch.messages) for branch in chat.branches] == [2, 4, 4]
    assert third.messages[:2] == second.messages[:2] == first.messages
    assert third.messages[2]["content"] == "and the for"
    held = jkv.context_lengths(chat.cache)
    for branch in chat.branches:
        assert held[branch.seq_id] == len(branch.tokens)
    for words in (
        "(branch 2 of",
        "No such file",
        "/switch requires a number from 1 to 3",
        "unknown command /dance; use one of /undo, /branch",
        "/save requires a file name",
        "none computed)",
        "(no room: CONTEXT_FULL; /undo",
    ):
        assert words in output, words
    jkv.check(chat.cache)

    # Only the new message, and the last token of the previous answer.
    kept = [line for line in output.splitlines() if "tokens computed" in line]
    assert "0 kept" in kept[0] and "0 kept" not in "".join(kept[1:])
    for branch, line in ((second, "and the try"), (third, "and the for")):
        fresh = Branch(_open(chat), messages=branch.messages[:2])
        chat.add(fresh)
        chat.take_turn(line)
        assert chat.branch.messages == branch.messages
        script["answer"](chat, "/undo")
        assert not chat.branch.tokens
        chat.cache, _ = jkv.free(chat.cache, [chat.branch.seq_id])


@pytest.mark.further
@pytest.mark.usefixtures("scanned_layers")
def test_a_rolling_conversation(folder, monkeypatch, capsys):
    """A chat continues past four contexts, and keeps its first tokens."""
    chats = []
    # The rest after an undo is recomputed, rolling as before.
    lines = ["The with statement", *["and the try"] * 6, "/undo", "and the try"]
    options = ("--context", "64", "--roll", "16", "--max-new-tokens", "40")
    _run(folder, lines, monkeypatch, chats, *options)
    (chat,) = chats
    output = capsys.readouterr().out
    assert "CONTEXT_FULL" not in output and "oldest dropped" in output
    assert "back to" in output
    assert len(chat.branch.tokens) > 4 * 64 - 64, output
    seq_id = chat.branch.seq_id
    assert int(jkv.context_lengths(chat.cache)[seq_id]) <= 64
    assert int(jkv.next_positions(chat.cache)[seq_id]) == len(chat.branch.tokens)
    jkv.check(chat.cache)


def _open(chat):
    chat.cache, opened = jkv.allocate(chat.cache, [0])
    return int(opened.seq_ids[0])


def _run(folder, lines, monkeypatch, chats, *options):
    """Run the script on lines until they end; append its chats to `chats`."""
    typed = iter(lines)

    def read(_):
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    from chatting import turns

    class Watched(turns.Chat):
        def __init__(self, options):
            super().__init__(options)
            chats.append(self)

    monkeypatch.setattr("builtins.input", read)
    monkeypatch.setattr(turns, "Chat", Watched)
    # Short enough for a sequence whose padded width exceeds the context.
    sizes = "--context 80 --branches 4 --max-new-tokens 12".split()
    argv = ["chat.py", "--model", str(folder), *sizes, *options]
    monkeypatch.setattr(sys, "argv", argv)
    return runpy.run_path(str(EXAMPLES / "chat.py"), run_name="__main__")


def test_a_missing_model_is_reported(tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit) as ended:
        _run(tmp_path, [], monkeypatch, [])
    assert ended.value.code == 1
    (output,) = capsys.readouterr().err.splitlines()
    assert output.startswith("error: ") and "config.json" in output
