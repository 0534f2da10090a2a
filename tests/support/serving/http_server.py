"""A small served model, for tests of `examples/serve_http.py`."""

import argparse
import json
import shutil
import socket
import threading
import time
from types import SimpleNamespace

import jax.numpy as jnp
import pretrained
import pytest
import uvicorn
from served import loading
from served.endpoints.connections import make_config

from support.paths import EXAMPLES

# A prompt of this token alone has NaN logits.
POISON = 3071
# A token of the tokenizer that the model lacks.
IMAGE = "<image>"

SIZES = "--context 96 --max-running 4 --max-new-tokens 64 --blocks 12 --rows 8"
SIZES += " --scan-layers"  # halves compile time
TEMPLATE = (
    "{% for m in messages %}{{ m.content }}"
    "{% if m.role == 'alien' %}{{ raise_exception('unknown role') }}{% endif %}"
    "{% endfor %}"
)


class Poisonable(pretrained.Decoder):
    """The bundled model, with NaN logits for one prompt."""

    def __call__(self, params, tokens, cache, batch):
        logits, cache = super().__call__(params, tokens, cache, batch)
        rows = batch.last_rows
        last = jnp.take(tokens, rows, mode="fill", fill_value=0)
        place = jnp.take(batch.positions, rows, mode="fill", fill_value=-1)
        is_poison = (last == POISON) & (place == 0)
        return jnp.where(is_poison[:, None], jnp.nan, logits), cache


def load_served(folder, sizes=SIZES):
    """Load the bundled model as the servers do, from a copy with a chat template."""

    def load(*arguments, **options):
        model, params = pretrained.load(*arguments, **options)
        return Poisonable(model.config), params

    shutil.copytree(EXAMPLES / "models" / "pydoc", folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    add_a_token(folder / "tokenizer.json")
    parser = argparse.ArgumentParser()
    loading.add_options(parser)
    options = parser.parse_args([*sizes.split(), "--model", str(folder)])
    # Stored executables are keyed by the model's name, which does not cover this model.
    changes = dict(load=load, keep_programs=lambda _: None)
    with pytest.MonkeyPatch.context() as patch:
        changed = SimpleNamespace(**vars(pretrained) | changes)
        patch.setattr(loading, "pretrained", changed)
        served = loading.load(
            options, max_waiting=100, max_grammars=3, max_rules=3, tool_tags=("=", ";")
        )
    served.engine.warm_up()
    return served


def add_a_token(path):
    """Add a token that the model has no row for, as Gemma 3's text part has."""
    tokenizer = json.loads(path.read_text())
    added = dict(tokenizer["added_tokens"][0], content=IMAGE, id=POISON + 1)
    tokenizer["added_tokens"].append(added)
    path.write_text(json.dumps(tokenizer))


def start_server(app, bounds=None):
    """Start uvicorn in a thread; return the server, the thread and the address."""
    listening = socket.create_server(("127.0.0.1", 0), backlog=500)
    server = uvicorn.Server(make_config(app, bounds, log_level="critical"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    while not server.started:
        time.sleep(0.01)
    return server, thread, f"http://127.0.0.1:{listening.getsockname()[1]}"
