"""The words of `kvloom generate`: where a prompt comes from, and what is refused before or after it was sent."""

import os
import threading

import pytest

from cp_client.cli import main
from cp_wire import errors
from cp_wire.pb import coordinator_pb2 as pb
from tests.cp_client.fake_coordinator import DEADLINE_S


def test_the_sources_of_a_prompt(fake, target, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text("from a file — ü", encoding="utf-8")
    for words in (["--token-ids", "1,2,3"], ["--file", str(file)], ["--file", str(file), "--chat"], ["--chat", "hi"]):
        assert main(["generate", "--target", target, *words]) == 0
    ids, text, chat_file, chat = fake.requests
    assert list(ids.tokens.ids) == [1, 2, 3]
    assert text.text == chat_file.chat.messages[0].content == "from a file — ü"
    assert chat.chat.messages[0] == pb.ChatMessage(role="user", content="hi")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--token-ids", "1,x"], "1,x"),
        (["--token-ids", "1,-1"], "token_ids is -1"),
        (["--token-ids", "1", "--chat"], "--chat"),
        (["--token-ids", "1", "hi"], "not allowed with"),
        ([], "required"),
        (["--file", "/nonexistent/prompt"], "no such file"),
        (["--max-tokens", "many", "hi"], "many"),
        (["--max-tokens", str(2**63), "hi"], "max_tokens is 9223372036854775808"),
    ],
)
def test_l4_refused_on_the_command_line(fake, target, capsys, words, said):
    try:
        status = main(["generate", "--target", target, *words])
    except SystemExit as stopped:
        status = stopped.code
    assert status == 2
    assert said in capsys.readouterr().err
    assert fake.requests == []


@pytest.mark.parametrize("bias", ["5", "5=", "=1", "x=1", "5=y", "1.5=2"])
def test_a_bias_is_an_id_and_a_number(bias, capsys):
    with pytest.raises(SystemExit):
        main(["generate", "--target", "127.0.0.1:1", "--logit-bias", bias, "hi"])
    assert f"{bias!r} is not a token id and a number such as 42=-1.5" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["much", ""])
def test_a_piped_prompt_is_called_empty_only_if_it_is(fake, target, capsys, tmp_path, content):
    """A pipe has no size, and what was read from it is there no second time."""
    fake.script = [errors.InvalidRequest("prompt", "70000 tokens", "at most 4095 tokens")]
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=(content,), daemon=True)
    writer.start()
    assert main(["generate", "--target", target, "--file", str(pipe)]) == 2
    writer.join(DEADLINE_S)
    said = "prompt is 70000 tokens" if content else f"--file {pipe} is empty"
    assert capsys.readouterr().err == f"kvloom: {said}: at most 4095 tokens\n"


@pytest.mark.parametrize("field", ["prompt", "text"])
def test_an_empty_prompt_is_named_as_it_was_given(fake, target, capsys, tmp_path, field):
    fake.script = [errors.InvalidRequest(field, "empty", "it must be at least 1 token")]
    file = tmp_path / "nothing.txt"
    file.touch()
    for words, name in ((["--", ""], "PROMPT"), (["--file", str(file)], f"--file {file}")):
        assert main(["generate", "--target", target, *words]) == 2
        assert capsys.readouterr().err == f"kvloom: {name} is empty: it must be at least 1 token\n"
    assert main(["generate", "--target", target, "much"]) == 2
    assert capsys.readouterr().err == f"kvloom: {field} is empty: it must be at least 1 token\n"
