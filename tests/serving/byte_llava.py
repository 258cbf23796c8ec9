"""A tiny LLaVA whose byte-level tokenizer can write JSON, which the words of the reference models cannot."""

from __future__ import annotations

from transformers import CLIPImageProcessor, CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaProcessor
from transformers import LlavaForConditionalGeneration as Llava

from mmspec.pipelines import VisionLanguagePipeline
from tests.pipelines.byte_level import byte_level_tokenizer
from tests.tiny_models.vision_language import TEXT, TOWER
from tests.tiny_models.weights import randomise

VOCABULARY, IMAGE = 300, "<image>"
TEMPLATE = """\
{% for tool in tools or [] %}<tool_call>{{ tool | tojson }}{% endfor %}
{%- for m in messages %}{{ m.role }}: {% if m.content is string %}{{ m.content }}
{%- else %}{% for part in m.content or [] %}
{%- if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}
{%- for call in m.tool_calls or [] %}{{ call.function.arguments | tojson }}{% endfor %}
{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"""


def byte_llava(accelerator: str = "copy") -> VisionLanguagePipeline:
    """The pipeline of a model with random weights, whose chat template takes images and Hermes tools."""
    tokenizer = byte_level_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [IMAGE]})
    processor = LlavaProcessor(
        CLIPImageProcessor(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}),
        tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    )
    text = TEXT | {"vocab_size": VOCABULARY, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 0}
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**TOWER, projection_dim=32),
        text_config=LlamaConfig(**text),
        image_token_index=tokenizer.convert_tokens_to_ids(IMAGE),
        image_seq_length=4,
    )
    model = randomise(Llava(config), 5, silent_ids=range(len(tokenizer), VOCABULARY))
    return VisionLanguagePipeline(model, processor, accelerator=accelerator)
