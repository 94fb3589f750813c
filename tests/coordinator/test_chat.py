"""Chat templates: what they can do, what they can reach, what they may cost."""

import pytest

from coordinator.chat import ChatTemplate
from coordinator.text_errors import TextRefused

TALK = [("system", "Be brief."), ("user", "Hi <b>"), ("assistant", "Hello"), ("user", "Why?")]


def render(source: str, messages: list[tuple[str, str]] | None = None) -> str:
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}).render(TALK if messages is None else messages)


def test_messages_specials_and_the_assistant_s_turn() -> None:
    source = (
        "{{ bos_token }}{% for m in messages %}\n[{{ m.role }}] {{ m['content'] | trim }}{{ eos_token }}\n{% endfor %}\n"
        "{% if add_generation_prompt %}\n[assistant]{% endif %}"
    )
    expected = "<s>[system] Be brief.</s>\n[user] Hi <b></s>\n[assistant] Hello</s>\n[user] Why?</s>\n[assistant]"
    assert render(source) == expected


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ messages[0].content.split(' ')[1].upper() }}{{ 'xay'.strip('xy') }}", "BRIEF.a"),
        ("{%- set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "4"),
        ("{% for m in messages[1:] %}{% if loop.index0 == 1 %}{% break %}{% endif %}{{ m.role }}{% endfor %}", "user"),
        ("{{ messages[1].content | tojson }}", '"Hi <b>"'),
        ("{{ [1, 2] | tojson(indent=1) }}", "[\n 1,\n 2\n]"),
        ("{{ tools is defined }}{{ nothing }}", "False"),
        ("{% macro turn(m) %}<{{ m.role }}>{% endmacro %}{{ turn(messages[3]) }}", "<user>"),
    ],
)
def test_what_templates_commonly_use(source: str, expected: str) -> None:
    assert render(source) == expected


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for i in range(9999) %}{% for j in range(9999) %}x{% endfor %}{% endfor %}", "ran out of fuel"),
        ("{{ 'x' * 1000000000 }}", "ran out of fuel"),
        (
            "{% set ns = namespace(s='xxxxxxxx') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
            "ran out of fuel",
        ),
        ("{% for i in range(90000) %}{{ messages }}{% endfor %}", "ran out of fuel"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion limit"),
        ("{% include '/etc/hostname' %}", "non-existing template"),
        ("{{ messages[0].absent.deeper }}", "undefined"),
    ],
)
def test_a_template_that_fails_or_costs_too_much_is_refused(source: str, sentence: str) -> None:
    with pytest.raises(TextRefused, match=sentence) as caught:
        render(source)
    assert caught.value.field == "chat" and "\n" not in str(caught.value)


@pytest.mark.parametrize("source", ["{{ messages.__class__ }}", "{{ bos_token.__class__.__mro__ is defined }}"])
def test_no_attribute_of_python_objects_is_reachable(source: str) -> None:
    try:
        assert render(source) in ("", "False")
    except TextRefused as refused:
        assert "undefined" in str(refused) or "unknown" in str(refused)


def test_text_of_a_message_is_never_a_template() -> None:
    assert render("{{ messages[0].content }}", [("user", "{{ 7 * 7 }}{% for")]) == "{{ 7 * 7 }}{% for"


def test_the_budget_grows_with_the_conversation() -> None:
    source = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    talk = [("user", "x" * 1000)] * 4096
    assert len(render(source, talk)) == 4096 * (1000 + len("user: \n"))
    assert len(render(source, [("user", "x" * (8 << 20))])) == (8 << 20) + len("user: \n")


def test_a_template_that_does_not_compile_is_refused() -> None:
    with pytest.raises(TextRefused, match=r"syntax error.*a chat template that compiles; send text or token ids"):
        ChatTemplate("{% for %}", {})
