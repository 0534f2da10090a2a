"""Chat templates with constructs of published ones, rendered like `transformers`.

The templates here are small and our own.
"""

import json

import pretrained
import pytest
from pretrained.chat_template import _compile
from pretrained.template_reading import read_form

pytestmark = pytest.mark.one_end

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tells it.",
            "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
        },
    }
]
ARGUMENTS = '{"at": "Zürich <b>", "days": 3}'
CALLED = {"id": "call_1", "type": "function"}
CALLED["function"] = {"name": "weather", "arguments": ARGUMENTS}
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Why <é>?\n"},
]
WITH_CALL = [
    *CHAT,
    {"role": "assistant", "content": None, "tool_calls": [CALLED]},
    {"role": "tool", "tool_call_id": "call_1", "content": "sun"},
]
WITH_THOUGHTS = [
    *CHAT,
    {"role": "assistant", "content": "So.", "reasoning_content": "Hm."},
    {"role": "user", "content": "And?"},
]

EACH = "{% for m in messages %}"
CALLS = "{% for c in m.tool_calls or [] %}{% set f = c.function %}"
END = "{% endfor %}"

# Constructs of published templates, by model.
TEMPLATES = {
    "marked for training": EACH
    + "{%- if m.role == 'assistant' -%}{%- generation -%}<{{ m.content or 'called' }}>"
    + "{%- endgeneration -%}{%- else -%}[{{ m.role }}]{{ m.content | trim }}"
    + "{%- endif -%}"
    + END,
    "a scope of its own in a mark": "{% set ns = namespace(n=0) %}{% set x = 1 %}"
    + EACH
    + "{% generation %}{% set x = 2 %}{% set ns.n = ns.n + x %}{% endgeneration %}"
    + "{{ x }}"
    + END
    + "{{ ns.n }}",
    "JSON in every form": EACH
    + "{{ m.content | tojson(ensure_ascii=True) }}{{ tools | tojson(indent=2) }}"
    + "{{ m.tool_calls | default([]) | tojson(ensure_ascii=False) }}"
    + "{{ m.role | tojson(separators=(',', ':'), sort_keys=True) }}"
    + END,
    "arguments as an object": EACH
    + CALLS
    + "{% for k, v in f.arguments.items() %}{{ k }}"
    + "={{ v if v is string else v | tojson }}"
    + "{% endfor %}{{ f.arguments | tojson }}{{ f.arguments is mapping }}"
    + END * 2,
    "arguments by a filter": EACH
    + CALLS
    + "{% for k, v in f.arguments | items %}{{ k ~ v }}{% endfor %}"
    + "{% for k, v in f.arguments | dictsort %}{{ k }}{% endfor %}"
    + END * 2,
    "macros and loops that end": "{% macro say(text) %}({{ text | upper }})"
    + "{% endmacro %}"
    + EACH
    + "{% if loop.index0 > 2 %}{% break %}{% endif %}"
    + "{% if m.role == 'system' %}{% continue %}{% endif %}"
    + "{{ say(m.role) }}{{ loop.last }}{{ messages[loop.index0 - 1].role }}"
    + END,
    "roles that are picked": "{% set users = messages | selectattr('role', 'equalto',"
    + " 'user') | list %}{{ users | length }}{{ users[-1].content.split('\\n')[0] }}"
    + "{{ messages[::-1] | map(attribute='role') | join(',') }}"
    + "{{ messages[1:] | rejectattr('role', 'in', ['user']) | list | length }}",
    "thoughts": EACH
    + "{% if m.reasoning_content is defined and m.reasoning_content is not none %}"
    + "<think>{{ m.reasoning_content.strip() }}</think>{% endif %}"
    + "{% if m.thinking %}{{ m.thinking }}{% endif %}"
    + END,
    "tokens and undefined names": "{{ bos_token }}{% if documents %}no{% endif %}"
    + "{% if enable_thinking is defined and not enable_thinking %}quiet{% endif %}"
    + "{{ builtin_tools | default('none') }}{% if tools is none %}no tools{% endif %}"
    + "{% if add_generation_prompt %}<{{ eos_token }}>{% endif %}",
}


def render(tmp_path, template, messages, tools=(), variables=None):
    (tmp_path / "chat_template.jinja").write_text(template, encoding="utf-8")
    settings = {"bos_token": {"content": "<s>"}, "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    return pretrained.render_chat(tmp_path, messages, tools, variables)


def with_objects(messages):
    """Return the messages as `transformers` takes them, with arguments as objects."""
    read = json.loads(json.dumps(messages))
    for message in read:
        for call in message.get("tool_calls", ()):
            function = call["function"]
            function["arguments"] = json.loads(function["arguments"])
    return read


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_render_like_transformers(tmp_path, name):
    chat_templates = pytest.importorskip("transformers.utils.chat_template_utils")
    template = TEMPLATES[name]
    for messages in (CHAT, WITH_CALL, WITH_THOUGHTS):
        for tools in ([], TOOLS):
            for variables in ({}, {"enable_thinking": False}):
                (expected,), _ = chat_templates.render_jinja_template(
                    [with_objects(messages)],
                    tools=tools or None,
                    chat_template=template,
                    add_generation_prompt=True,
                    bos_token="<s>",
                    eos_token="</s>",
                    **variables,
                )
                found = render(tmp_path, template, messages, tools, variables)
                assert found == expected


@pytest.mark.parametrize(
    "call, expected",
    [
        ("{{ f.name + ':' + f.arguments }}", f"weather:{ARGUMENTS}"),
        ("{{ f.name ~ f.arguments }}", f"weather{ARGUMENTS}"),
        ("{{ f.arguments + '.' }}", f"{ARGUMENTS}."),
        ("{{ f.arguments }}", ARGUMENTS),
        ("{{ f.arguments | string }}", ARGUMENTS),
        ("{{ f.arguments | tojson }}", ARGUMENTS),
        ("{{ f.arguments.at }}{{ f.arguments['days'] }}", "Zürich <b>3"),
    ],
)
def test_arguments_are_a_string_if_the_template_expects_one(tmp_path, call, expected):
    template = EACH + CALLS + call + END * 2
    assert render(tmp_path, template, WITH_CALL) == expected


@pytest.mark.parametrize("given", ["", None, "null", "{}", {}])
def test_a_call_may_have_no_arguments(tmp_path, given):
    template = EACH + CALLS + "{{ f.arguments | tojson }}" + END * 2
    called = {"function": {"name": "f", "arguments": given}}
    messages = [{"role": "assistant", "content": "", "tool_calls": [called]}]
    assert render(tmp_path, template, messages) in ("{}", '"null"')


def test_truncated_arguments_stay_a_string(tmp_path):
    called = {"function": {"name": "f", "arguments": '{"at": "Zü'}}
    messages = [{"role": "assistant", "content": "", "tool_calls": [called]}]
    template = EACH + CALLS + "{{ f.name + f.arguments }}" + END * 2
    assert render(tmp_path, template, messages) == 'f{"at": "Zü'


@pytest.mark.parametrize(
    "content, expected",
    [
        (
            "{% if m.content is none %}nothing{% else %}{{ m.content }}{% endif %}",
            "nothing",
        ),
        ("{% if m.content is not none %}{{ m.content + '.' }}{% endif %}", ""),
        ("{{ m.content }}", ""),  # null would print its name
        ("{{ m.content | trim }}|", "|"),
        ("{{ '<' + m.content + '>' }}", "<>"),  # null would raise
        ("{% if 'x' in m.content %}x{% endif %}", ""),
        ("{{ m.content.split('x')[-1] }}", ""),
    ],
)
def test_a_message_without_content_is_null_or_empty(tmp_path, content, expected):
    template = EACH + "{% if m.role == 'assistant' %}" + content + "{% endif %}" + END
    assert render(tmp_path, template, WITH_CALL) == expected


PARTS = "{% for p in m.content %}{{ p.text }}{% endfor %}"


@pytest.mark.parametrize(
    "content, takes",
    [
        (PARTS, "parts"),
        ("{% for p in m['content'] if p['type'] == 'text' %}x{% endfor %}", "parts"),
        ("{% set c = m.content %}{% for p in c %}{{ p.text }}{% endfor %}", "parts"),
        ("{{ m.content | map(attribute='text') | join }}", "parts"),
        ("{{ (m.content | selectattr('type', 'equalto', 'text') | first).text }}",)
        + ("parts",),
        ("{{ m['content'][0]['text'] }}", "parts"),
        (
            "{% macro say(c) %}{% for p in c %}{{ p.text }}{% endfor %}{% endmacro %}"
            "{{ say(m.content) }}",
            "parts",
        ),
        ("{% if m.content is string %}{{ m.content }}{% else %}" + PARTS, "text"),
        ("{% if m.content is not string %}" + PARTS + "{% else %}{{ m.content }}",)
        + ("text",),
        ("{% if m.content is iterable and m.content is not mapping %}x", "text"),
        ("{% for line in m.content.split('\\n') %}{{ line }}{% endfor %}", "text"),
        ("{% if m.content[0] == '<' %}x{% else %}{{ m.content }}", "text"),
        ("{{ m.content }}", "text"),
    ],
)
def test_the_message_form_follows_from_the_template(content, takes, tmp_path):
    """A template takes parts if it iterates over a content or tests its type."""
    content += "{% endif %}" * (content.count("{% if") - content.count("{% endif"))
    form = read_form(EACH + content + END, _compile("").environment)
    assert form.takes_parts == (takes == "parts")
    assert "type" not in render(tmp_path, EACH + content + END, CHAT)


@pytest.mark.parametrize(
    "template",
    [
        "{% if messages[0].content == 'divide' %}{{ 1 // 0 }}"
        "{% else %}{{ messages[0].content }}{% endif %}",
        EACH + "{{ m.content.text }}{{ raise_exception('no text') }}" + END,
        EACH + "{% if m.content is string %}{{ m.content + 1 }}{% else %}"
        "{{ m.content }}{% endif %}" + END,
    ],
)
def test_a_failing_template_is_not_retried_in_another_form(template, tmp_path):
    messages = [{"role": "user", "content": "divide"}]
    with pytest.raises(ValueError, match="zero|no text|concatenate"):
        render(tmp_path, template, messages)
    if "divide" in template:
        messages[0]["content"] = "add"
        assert render(tmp_path, template, messages) == "add"


TOKENS = ("bos", "eos", "unk", "sep", "pad", "cls", "mask", "image", "custom")
SHOWN = "".join(f"{{{{ {name}_token }}}}|" for name in TOKENS)
ADDED = {"0": {"content": "<a>", "special": True}}
OBJECT = {"__type": "AddedToken", "content": "<b>", "special": True}


@pytest.mark.parametrize(
    "config, special",
    [
        ({"bos_token": "<a>", "eos_token": OBJECT}, None),
        ({"sep_token": "<a>", "cls_token": "<b>", "mask_token": "<c>"}, None),
        ({"bos_token": "<a>", "image_token": "<b>", "custom_token": "<c>"}, None),
        ({"extra_special_tokens": {"image_token": "<b>"}, "unk_token": "<c>"}, None),
        ({"extra_special_tokens": ["<b>"], "add_bos_token": True}, None),
        ({"bos_token": None}, {"bos_token": "<a>", "eos_token": {"content": "<b>"}}),
        ({"bos_token": "<a>", "pad_token": "<c>"}, {"bos_token": "<b>"}),
        ({"bos_token": "<a>", "added_tokens_decoder": ADDED}, {"bos_token": "<b>"}),
        ({"added_tokens_decoder": ADDED}, {"bos_token": "<b>", "eos_token": "<c>"}),
        (None, {"bos_token": "<b>", "mask_token": "<c>"}),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_special_tokens_equal_transformers(config, special, tmp_path):
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models

    model = models.WordLevel({"<a>": 0, "<b>": 1, "<c>": 2}, unk_token="<a>")
    Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text(SHOWN)
    for name, settings in (
        ("tokenizer_config", config),
        ("special_tokens_map", special),
    ):
        if settings is not None:
            (tmp_path / f"{name}.json").write_text(json.dumps(settings))
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    chat = [{"role": "user", "content": "?"}]
    expected = theirs.apply_chat_template(chat, tokenize=False)
    assert pretrained.render_chat(tmp_path, chat) == expected


@pytest.mark.parametrize("has_default", [True, False])
def test_named_templates_are_read_from_files(has_default, tmp_path):
    """The files replace all templates of tokenizer_config.json, as in transformers."""
    settings = {"chat_template": [{"name": "default", "template": "config"}]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    chat = [{"role": "user", "content": "?"}]
    assert pretrained.render_chat(tmp_path, chat) == "config"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    if has_default:
        (tmp_path / "chat_template.jinja").write_text("default")
        assert pretrained.render_chat(tmp_path, chat) == "default"
    else:
        with pytest.raises(ValueError, match="has no chat template"):
            pretrained.render_chat(tmp_path, chat)
    assert pretrained.render_chat(tmp_path, chat, TOOLS) == "tools"


def test_null_content_is_not_the_string_none(tmp_path):
    template = EACH + "{% if m.content is none %}-{% else %}{{ m.content }}{% endif %}"
    messages = [{"role": "user", "content": "None of it."}, WITH_CALL[2]]
    assert render(tmp_path, template + END, messages) == "None of it.-"


def test_strings_become_parts_if_the_template_takes_only_parts(tmp_path):
    template = EACH + "{{ m.content[0].text + '|' }}" + END
    assert render(tmp_path, template, CHAT) == "Be brief.|Why <é>?\n|"


def test_a_message_without_content_has_an_empty_part(tmp_path):
    """Templates access the first part of each message."""
    template = EACH + "{{ m.content[0].type }}:" + PARTS + "|" + END
    assert render(tmp_path, template, WITH_CALL) == (
        "text:Be brief.|text:Why <é>?\n|text:|text:sun|"
    )


def test_unknown_roles_and_fields(tmp_path):
    developer = [
        {"role": "developer", "content": "a", "refusal": None, "tool_calls": []}
    ]
    template = EACH + "{{ m.role }} {{ m.refusal is defined }} {{ m.keys() | length }}"
    assert render(tmp_path, template + END, developer) == "system False 2"
    template += "{% if m.role == 'developer' %}!{% endif %}"
    assert render(tmp_path, template + END, developer) == "developer False 2!"


@pytest.mark.parametrize(
    "template, words",
    [
        ("{{ raise_exception('no aliens') }}", "no aliens"),
        ("{% for m in %}", "Expected"),
        ("{{ messages[9].content }}", "no element 9"),
        ("{{ 1 + messages }}", "unsupported operand"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ messages | nothing }}", "nothing"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ strftime_now(1) }}", "must be str"),
    ],
)
def test_template_errors_are_reported(tmp_path, template, words):
    with pytest.raises(ValueError, match=words):
        render(tmp_path, template, CHAT)


def test_templates_can_read_the_date(tmp_path):
    assert render(tmp_path, "{{ strftime_now('%Y')[:2] }}", CHAT) == "20"


NAMES = "{% for t in tools %}{{ t.function.name }}{% endfor %}"


@pytest.mark.parametrize(
    "template, expected",
    [
        (EACH + "{{ m.content }}" + END, False),
        ("{% if tools %}You may call tools.{% endif %}", False),
        (NAMES, True),
        ("{% for t in tools or [] %}{{ t | tojson }}{% endfor %}", True),
        ("{{ raise_exception('one role is too few') }}", True),
        ([{"name": "default", "template": ""}], False),
        ([{"name": "default", "template": ""}, {"name": "tool_use"}], True),
    ],
)
def test_templates_without_tools_are_detected(tmp_path, template, expected):
    if isinstance(template, list) and expected:
        template[1]["template"] = NAMES
    settings = {"chat_template": template}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert pretrained.can_show_tools(tmp_path) == expected
