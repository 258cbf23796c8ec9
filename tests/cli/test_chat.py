"""`mmspec chat`: one answer, a conversation on standard input, and a text model."""

from typer.testing import CliRunner

from mmspec import MMSpecPipeline
from mmspec.cli.application import app
from tests.tiny_models import VOCABULARY_SIZE, tiny_llama, tiny_tokenizer

SHORT = ("--max-new-tokens", "6")


def chat(*arguments, lines=""):
    result = CliRunner().invoke(app, ["chat", *map(str, arguments), *SHORT], input=lines)
    assert result.exit_code == 0, result.output
    return result.stdout.splitlines()


def test_one_answer_is_that_of_the_pipeline(tiny_folder, images):
    answer = chat(tiny_folder, "what is there ?", "--image", images[0])
    content = [{"type": "image", "image": images[0]}, {"type": "text", "text": "what is there ?"}]
    pipe = MMSpecPipeline.from_pretrained(tiny_folder)
    output = pipe([{"role": "user", "content": content}], max_new_tokens=6, temperature=0.0)
    assert "\n".join(answer) == output.text[0].rstrip("\n")


def test_lines_of_standard_input_are_turns_of_one_conversation(tiny_folder):
    first, second = chat(tiny_folder, lines="what is there ?\n\nhow many ?\n")
    pipe = MMSpecPipeline.from_pretrained(tiny_folder)
    messages = [{"role": "user", "content": "what is there ?"}]
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "how many ?"}]
    output = pipe(messages, max_new_tokens=6, temperature=0.0)
    assert second == output.text[0]
    assert chat(tiny_folder, lines="") == []


def test_a_text_model_needs_no_image(tmp_path):
    tiny_llama(vocab=VOCABULARY_SIZE).save_pretrained(tmp_path)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for one in messages %}{{ one['content'] }} {% endfor %}"
    tokenizer.save_pretrained(tmp_path)
    (answer,) = chat(tmp_path, "what is there ?")
    assert answer
