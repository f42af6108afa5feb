from __future__ import annotations

from pathlib import Path

import pytest

from gateway.chat_template import ChatTemplate, ChatTemplateError, read_chat_template

USER = [{"role": "user", "content": "hi"}]


def test_unknown_names_render_as_nothing_and_special_tokens_are_there() -> None:
    assert ChatTemplate("{{ bos_token }}{{ nothing }}{{ messages[0].content }}", {"bos_token": "<s>"}).render(USER) == "<s>hi"


def test_loop_controls_generation_blocks_and_tojson_work_as_in_transformers() -> None:
    source = "{% for m in messages %}{% generation %}{{ m | tojson }}{% endgeneration %}{% break %}{% endfor %}{{ strftime_now('%Y') | length }}"
    assert ChatTemplate(source).render([{"role": "user", "content": "<ü>"}]) == '{"role": "user", "content": "<ü>"}4'


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ raise_exception.__globals__ }}",
        "{{ messages.append({'role': 'user'}) }}",
        "{{ self.__init__.__globals__ }}",
        "{{ namespace(_x=1) }}",
        "{% set n = namespace(a=1) %}{% set n.__class__ = 2 %}",
        "{{ dict.__class__ }}",
        "{{ lipsum.__globals__['os'] }}",
        "{{ '{0.__class__.__mro__}'.format('') }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
    ],
)
def test_a_hostile_template_cannot_escape(source: str) -> None:
    try:
        rendered = ChatTemplate(source).render(USER)
    except ChatTemplateError:
        return
    assert rendered == "", "what the sandbox forbids is undefined, which renders as nothing"


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(2000) %}{{ messages[0].content * 1000 }}{% endfor %}",
        "{{ 'a' * 1000000000 }}",
        "{{ [0] * 1000000000 }}",
        "{{ 9 ** 999999 }}",
        "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}",
        "{{ range(10 ** 9) | list }}",
        "{{ 'a'.ljust(1000000000) }}",
        "{{ 'a' | center(1000000000) }}",
        "{{ '%1000000000d' | format(1) }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_what_a_template_makes_is_bounded(source: str) -> None:
    with pytest.raises(ChatTemplateError):
        ChatTemplate(source, max_rendered_chars=1_000_000).render(USER)


def test_a_template_that_does_not_compile_is_refused_at_start() -> None:
    with pytest.raises(ChatTemplateError, match="does not compile"):
        ChatTemplate("{% for %}")


def test_the_file_goes_before_the_config_and_lists_have_a_default(tmp_path: Path) -> None:
    config = {"chat_template": [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]}
    assert read_chat_template(tmp_path, config) == "D"
    assert read_chat_template(tmp_path, {}) is None
    (tmp_path / "chat_template.jinja").write_text("J")
    assert read_chat_template(tmp_path, config) == "J"
