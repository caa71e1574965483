"""Chat templates: the environment that checkpoints expect, and what is refused."""

from __future__ import annotations

import pytest

from cukern.engine.chat import ChatTemplate
from cukern.engine.tokenizer import Tokenizer
from cukern.models import demo_checkpoint

USER = [{"role": "user", "content": "Hi"}]

# The shape of Qwen3's own template: thinking is switched off by an empty thought.
THINKING = """{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""


def render(source, messages=USER, **options):
    return ChatTemplate(source, {"eos_token": "<eos>"}).render(messages, **options)


def test_demo_template():
    template = Tokenizer(demo_checkpoint()).chat_template
    assert template.render(USER) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert template.render(USER, add_generation_prompt=False) == "<|im_start|>user\nHi<|im_end|>\n"


def test_enable_thinking():
    start = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert render(THINKING) == start
    assert render(THINKING, enable_thinking=True) == start
    assert render(THINKING, enable_thinking=False) == start + "<think>\n\n</think>\n\n"


def test_environment_of_hugging_face():
    assert render("{% if true %}\n    {% if true %}\nx\n    {% endif %}\n{% endif %}\n") == "x\n"  # trim and lstrip
    assert render("{{ messages[0] | tojson }}") == '{"role": "user", "content": "Hi"}'
    assert render("{{ '<é>' | tojson }}") == '"<é>"'  # neither HTML nor ASCII escapes
    assert render("{{ {'a': 1} | tojson(indent=2) }}") == '{\n  "a": 1\n}'
    assert len(render("{{ strftime_now('%Y-%m-%d') }}")) == 10
    assert render("{{ eos_token }}") == "<eos>"
    assert render("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "1"
    assert render("{% generation %}{{ messages[0].content }}{% endgeneration %}") == "Hi"
    assert render("{{ tools[0].name }}", tools=[{"name": "clock"}]) == "clock"


def test_template_refuses_by_raise_exception():
    with pytest.raises(ValueError, match="chat template: roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% if %}", "chat template line 1"),
        ("{{ messages[0].content.nothing.here }}", "nothing"),
        ("{{ 1 + messages[0].content }}", "TypeError"),
        ("{{ 'a'.index('b') }}", "chat template failed: ValueError: substring not found"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "chat template failed: RecursionError"),
        ("{{ messages.append(1) }}", "safe|unsafe|not"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
    ],
)
def test_faulty_or_unsafe_template_is_a_value_error(source, message):
    with pytest.raises(ValueError, match=message):
        render(source)


def test_messages_are_checked():
    with pytest.raises(TypeError, match="messages must be a list"):
        render(THINKING, "Hi")
    with pytest.raises(TypeError, match="messages must be a list"):
        render(THINKING, USER[0])
    with pytest.raises(TypeError, match=r"messages\[1\] must be a mapping"):
        render(THINKING, [*USER, "Hi"])
    with pytest.raises(ValueError, match=r"messages\[0\] needs a 'role'"):
        render(THINKING, [{"content": "Hi"}])
    with pytest.raises(ValueError, match=r"messages\[0\] \(role 'user'\) needs 'content'"):
        render(THINKING, [{"role": "user"}])
    with pytest.raises(ValueError, match="at least one message"):
        render(THINKING, [])


def test_messages_are_not_changed():
    messages = [{"role": "user", "content": "Hi"}]
    render(THINKING, messages)
    assert messages == [{"role": "user", "content": "Hi"}]


def test_where_the_template_comes_from(tmp_path):
    config = {"chat_template": "config", "eos_token": {"content": "<e>"}}
    assert ChatTemplate.from_folder(tmp_path, config).render(USER) == "config"
    named = {"chat_template": [{"name": "tool", "template": "tool"}, {"name": "default", "template": "named"}]}
    assert ChatTemplate.from_folder(tmp_path, named).render(USER) == "named"
    (tmp_path / "chat_template.jinja").write_text("file {{ eos_token }}")
    assert ChatTemplate.from_folder(tmp_path, config).render(USER) == "file <e>"


def test_a_template_file_that_is_no_text_is_named(tmp_path):
    (tmp_path / "chat_template.jinja").write_bytes(b"ab\xff")
    with pytest.raises(ValueError, match=r"chat_template\.jinja is not UTF-8 text \(invalid start byte at byte 2\)"):
        ChatTemplate.from_folder(tmp_path, {})
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "chat_template.jinja").mkdir()
    with pytest.raises(
        ValueError, match=r"chat_template\.jinja cannot be read \(.*\): make it a text file, or remove it"
    ):
        ChatTemplate.from_folder(tmp_path, {})


def test_checkpoint_without_a_template(tmp_path):
    with pytest.raises(ValueError, match="no chat checkpoint"):
        ChatTemplate.from_folder(tmp_path, {}).render(USER)
    with pytest.raises(ValueError, match="must be a string"):
        ChatTemplate.from_folder(tmp_path, {"chat_template": 3})
