"""Templates of the Hub render correctly and have no access beyond that."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from tercet.frontend.errors import BadRequestError
from tercet.frontend.model.chat_template import TemplateManager
from tercet.frontend.model.prompts import ChatPrompt
from tercet.frontend.model.template_files import operator_template

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
PARTS = (
    "{% for m in messages %}{% for part in m.content %}{{ '(' + part.type + ' ' + part.text + ')' }}{% endfor %}"
    "{% endfor %}"
)


def prompt(*messages: tuple[str, Any], **options: Any) -> ChatPrompt:
    return ChatPrompt(messages=[{"role": role, "content": content} for role, content in messages], **options)


def render(source: str, *messages: tuple[str, Any], **options: Any) -> str:
    return TemplateManager(source, {"bos_token": "<s>"}).render(prompt(*messages, **options))


def test_a_chat_is_rendered_with_and_without_a_prompt_for_the_answer() -> None:
    assert render(CHATML, ("user", "hi")) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert render(CHATML, ("user", "hi"), add_generation_prompt=False) == "<|im_start|>user\nhi<|im_end|>\n"


def test_special_tokens_and_blocks_are_as_the_hub_has_them() -> None:
    source = "{{ bos_token }}\n  {% for m in messages %}\n{{ m.content }}\n  {% endfor %}\n"
    assert render(source, ("user", "a"), ("user", "b")) == "<s>\na\nb\n"


def test_parts_are_one_text_where_the_template_wants_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert "user\nab<|im_end|>" in render(CHATML, ("user", parts))


def test_text_is_one_part_where_the_template_wants_parts() -> None:
    assert render(PARTS, ("user", "a")) == "(text a)"


@pytest.mark.parametrize(
    ("source", "role"),
    [
        ("{{ messages[0].role }}", "system"),
        ("{% if messages[0].role == 'developer' %}D{% else %}{{ messages[0].role }}{% endif %}", "D"),
        ("{# developer #}{{ messages[0].role }}", "system"),
    ],
)
def test_a_developer_is_the_system_unless_the_template_knows_developers(source: str, role: str) -> None:
    assert render(source, ("developer", "x")) == role


def test_tojson_does_not_escape() -> None:
    said = {"role": "user", "content": "<é>&'"}
    assert render("{{ messages[0] | tojson }}", ("user", "<é>&'")) == json.dumps(said, ensure_ascii=False)
    assert render("{{ {'a': 1} | tojson(indent=2) }}", ("user", "x")) == '{\n  "a": 1\n}'


def test_loop_controls_generation_blocks_and_the_date_are_known() -> None:
    source = "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}"
    assert render(source, ("user", "a"), ("user", "b")) == "a"
    assert render("{% generation %}{{ messages[0].content }}{% endgeneration %}!", ("user", "a")) == "a!"
    assert render("{{ strftime_now('%Y') | length }}", ("user", "a")) == "4"


def test_what_a_template_refuses_is_told_in_its_words() -> None:
    with pytest.raises(BadRequestError, match="roles must alternate") as error:
        render("{{ raise_exception('roles must alternate') }}", ("user", "a"))
    assert error.value.param == "messages"


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{% for i in range(10**9) %}x{% endfor %}",
        "{{ messages[0].content / 0 }}",
        "{{ messages[99].content.x }}",
    ],
)
def test_a_template_that_misbehaves_ends_one_request_and_tells_nothing(attack: str) -> None:
    with pytest.raises(BadRequestError, match=r"cannot render these messages\.$"):
        render(attack, ("user", "a"))


@pytest.mark.parametrize(
    "source",
    [
        "{% for %}",
        "{% for a in b %}" * 25 + "{% endfor %}" * 25,
        "{% if a %}" * 150 + "{% endif %}" * 150,
        "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
        "{{ 1" + "+1" * 20_000 + " }}",
    ],
    ids=["of no grammar", "loops", "conditions", "brackets", "a sum"],
)
def test_a_template_that_does_not_parse_is_refused_at_once(source: str) -> None:
    with pytest.raises(ValueError, match="does not parse"):
        TemplateManager(source, {})


def test_every_text_of_a_client_is_escaped_and_nothing_else() -> None:
    seen: list[str] = []

    def escape(text: str) -> str:
        seen.append(text)
        return f"[{text}]"

    chat = ChatPrompt(messages=[{"role": "user", "content": "hi", "name": "me", "extra": [{"deep": "er"}]}])
    text = TemplateManager(CHATML, {}).render(chat, escape)
    assert sorted(seen) == ["deep", "er", "hi", "me"]
    assert text == "<|im_start|>user\n[hi]<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("source", [CHATML, CHATML.replace("message['content']", "(message['content'] | trim)")])
def test_the_final_message_is_gone_on_with_to_its_last_space(source: str) -> None:
    text = render(
        source, ("user", "hi"), ("assistant", "the quick "), continue_final_message=True, add_generation_prompt=False
    )
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nthe quick "


def test_a_template_that_leaves_the_final_message_out_cannot_go_on_with_it() -> None:
    with pytest.raises(BadRequestError) as error:
        render("{{ messages[0].content }}", ("user", "hi"), ("assistant", "x"), continue_final_message=True)
    assert error.value.param == "continue_final_message"


def test_allowed_variables_reach_the_template() -> None:
    source = "{% if enable_thinking %}think{% endif %}"
    assert render(source, ("user", "a"), kwargs={"enable_thinking": True}) == "think"
    assert "enable_thinking" in TemplateManager(source, {}).variables


@pytest.mark.parametrize(
    ("source", "settable"),
    [
        ("{{ a }}{# b #}c {{ 'd' }}{{ messages[0].e }}{{ bos_token }}{{ namespace() }}", {"a"}),
        ("{% set a = a | default(1) %}{% for b in c %}{{ b }}{% endfor %}", {"a", "c"}),
        ("{% if a %}{% set b = 1 %}{% endif %}{{ b }}", {"a"}),
        ("{% if a %}{% set b = 1 %}{% endif %}{% if b is defined %}{{ b }}{% endif %}", {"a", "b"}),
        ("{% macro f(x) %}{{ x }}{{ y }}{% endmacro %}{{ f(1) }}{{ tools }}{{ documents }}", {"y", "documents"}),
    ],
)
def test_variables_are_names_that_the_template_reads_before_it_sets_them(source: str, settable: set[str]) -> None:
    assert TemplateManager(source, {"bos_token": "<s>"}).variables == settable


def test_variables_are_a_clients_text() -> None:
    source = "{{ reasoning_effort }}{{ thinking_budget + 1 }}{% if enable_thinking is true %}!{% endif %}"
    chat = prompt(("user", "a"), kwargs={"reasoning_effort": "low", "thinking_budget": 7, "enable_thinking": True})
    assert TemplateManager(source, {}).render(chat, lambda text: f"[{text}]") == "[low]8!"


@pytest.mark.parametrize(
    ("config", "jinja", "found"),
    [
        ({}, None, None),
        ({"chat_template": "field"}, None, "field"),
        ({"chat_template": "field"}, b"file", "file"),
        ({"chat_template": [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}]}, None, "d"),
        ({"chat_template": [{"name": "rag", "template": "r"}]}, None, None),
    ],
)
def test_the_template_comes_from_its_file_or_from_the_config(
    config: dict[str, Any], jinja: bytes | None, found: str | None
) -> None:
    files = {"tokenizer_config.json": json.dumps(config).encode()}
    if jinja is not None:
        files["chat_template.jinja"] = jinja
    template = TemplateManager.from_files(files)
    assert (template and template.render(prompt(("user", "x")))) == found


def test_special_tokens_may_be_objects() -> None:
    config = {"chat_template": "{{ bos_token }}{{ eos_token }}", "bos_token": {"content": "<b>"}, "eos_token": "<e>"}
    template = TemplateManager.from_files({"tokenizer_config.json": json.dumps(config).encode()})
    assert template is not None
    assert template.render(prompt(("user", "x"))) == "<b><e>"


def test_special_tokens_may_stand_in_the_map_and_further_ones_have_names() -> None:
    source = "{{ bos_token }}{{ eos_token }}{{ image_token }}"
    config = {"chat_template": source, "eos_token": "</s>", "extra_special_tokens": {"image_token": "<image>"}}
    special_map = {"bos_token": {"content": "<s>"}}
    prompt = ChatPrompt(messages=[{"role": "user", "content": "x"}])

    def rendered(**files: object) -> str:
        texts = {name.replace("__", "."): json.dumps(value).encode() for name, value in files.items()}
        template = TemplateManager.from_files(texts)
        assert template is not None
        return template.render(prompt)

    assert rendered(tokenizer_config__json=config, special_tokens_map__json=special_map) == "<s></s><image>"
    table = {**config, "added_tokens_decoder": {}}
    assert rendered(tokenizer_config__json=table, special_tokens_map__json=special_map) == "</s><image>"


def test_a_further_token_cannot_take_the_place_of_the_messages() -> None:
    config = {"chat_template": "{{ messages[0].content }}", "extra_special_tokens": {"messages": "x", "a b": "y"}}
    template = TemplateManager.from_files({"tokenizer_config.json": json.dumps(config).encode()})
    assert template is not None
    assert template.render(ChatPrompt(messages=[{"role": "user", "content": "hi"}])) == "hi"


def test_the_template_for_tools_may_be_a_file_of_its_own() -> None:
    files = {"chat_template.jinja": b"plain", "additional_chat_templates/tool_use.jinja": b"{{ tools | length }} tools"}
    template = TemplateManager.from_files(files)
    assert template is not None
    chat = [{"role": "user", "content": "x"}]
    assert template.render(ChatPrompt(messages=chat)) == "plain"
    assert template.render(ChatPrompt(messages=chat, tools=[{"type": "function"}])) == "1 tools"


CHAT = [{"role": "user", "content": "x"}]
LISTED = [{"name": "default", "template": "listed"}, {"name": "rag", "template": "rag of tokenizer_config"}]


def render_files(
    files: dict[str, bytes], name: str | None = None, *, tools: bool = False, override: str | None = None
) -> str:
    template = TemplateManager.from_files(files, override)
    assert template is not None
    kwargs = {} if name is None else {"chat_template": name}
    return template.render(ChatPrompt(messages=CHAT, tools=[{"type": "function"}] if tools else None, kwargs=kwargs))


def test_further_templates_are_chosen_by_name() -> None:
    files = {
        "tokenizer_config.json": json.dumps({"chat_template": LISTED}).encode(),
        "additional_chat_templates/tool_use.jinja": b"for tools",
        "additional_chat_templates/short.jinja": b"short {{ messages | length }}",
    }
    assert [render_files(files, name) for name in (None, "default", "rag")] == [
        "listed",
        "listed",
        "rag of tokenizer_config",
    ]
    assert [render_files(files, name) for name in ("short", "tool_use")] == ["short 1", "for tools"]
    assert [render_files(files, name, tools=True) for name in (None, "default", "short")] == [
        "for tools",
        "listed",
        "short 1",
    ]
    files |= {"chat_template.jinja": b"file", "additional_chat_templates/rag.jinja": b"rag of a file"}
    assert [render_files(files, name) for name in (None, "rag")] == ["file", "rag of a file"]
    with pytest.raises(BadRequestError, match="has no chat template 'RAG', only default, rag") as caught:
        render_files(files, "RAG")
    assert caught.value.param == "chat_template_kwargs.chat_template"


def test_named_templates_are_those_of_transformers(tmp_path: Path) -> None:
    saved = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"x": 0}, unk_token="x")))
    saved.chat_template = {"default": "plain", "tool_use": "for tools", "rag": "with documents"}
    for number, save_jinja_files in enumerate((True, False)):
        directory = tmp_path / str(number)
        saved.save_pretrained(directory, save_jinja_files=save_jinja_files)
        names = [path.relative_to(directory) for path in directory.rglob("*") if path.suffix in (".jinja", ".json")]
        files = {str(name): (directory / name).read_bytes() for name in names}
        loaded = PreTrainedTokenizerFast.from_pretrained(directory)
        for name in (None, "default", "tool_use", "rag"):
            assert render_files(files, name) == loaded.apply_chat_template(CHAT, chat_template=name, tokenize=False)
        assert render_files(files, tools=True) == loaded.apply_chat_template(CHAT, tools=[{}], tokenize=False)


def test_a_template_in_chat_template_json_is_read() -> None:
    files = {"chat_template.json": json.dumps({"chat_template": "b"}).encode()}
    assert render_files(files) == "b"
    assert TemplateManager.from_files({"tokenizer_config.json": b'{"chat_template": [3, {"name": "a"}]}'}) is None


def test_an_operators_template_takes_the_place_of_all() -> None:
    files = {"chat_template.jinja": b"plain", "additional_chat_templates/tool_use.jinja": b"for tools"}
    assert [render_files(files, tools=tools, override="mine") for tools in (False, True)] == ["mine", "mine"]
    assert render_files({"special_tokens_map.json": b'{"bos_token": "<s>"}'}, override="{{ bos_token }}") == "<s>"


def test_an_operators_template_is_read_or_refused_in_one_line(tmp_path: Path) -> None:
    assert operator_template(None) is None
    path = tmp_path / "mine.jinja"
    path.write_text("{{ messages[0].content }}")
    assert operator_template(path) == "{{ messages[0].content }}"
    for content, fault in ((b"{% if %}", "does not parse"), (b"\xff", "not UTF-8"), (b"{% x %}\n", "does not parse")):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=fault) as caught:
            operator_template(path)
        assert str(caught.value).startswith(f"--chat-template {path}: ")
        assert "\n" not in str(caught.value)
    for place in (tmp_path, tmp_path / "none", Path("/dev/zero")):
        with pytest.raises(ValueError, match=f"--chat-template {place}: "):
            operator_template(place)
