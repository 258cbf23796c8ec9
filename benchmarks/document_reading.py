"""Document readers: tiny models shaped as Donut, TrOCR and Florence-2, trained on drawn tables.

    python -m benchmarks.document_reading
    python -m benchmarks.document_reading --reader donut --steps 1000

Models and processors are transformers' own classes. The models are toys, which know a few words in a table of
fixed cells: their counts say how drafts meet a kind of document, not how well a published reader does.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Any

import torch
import transformers as hf
import typer
from PIL import Image, ImageDraw
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from tqdm import trange
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from mmspec.evaluation.speed.record import ratio_interval
from mmspec.open_types import Processor
from mmspec.pipelines.vision_language import VisionLanguagePipeline
from mmspec.targets.admission import decoder_of

__all__ = ["READERS", "Reader", "Table", "draw", "smaller", "tables", "tokenizer_of_tables", "train"]

Table = Sequence[Sequence[str]]
CELL = CELL_HEIGHT, CELL_WIDTH = 12, 24
ROWS, COLUMNS = 4, 5
SIZE = ROWS * CELL_HEIGHT, COLUMNS * CELL_WIDTH
BOX = dict(zip(("height", "width"), SIZE, strict=True))
ITEMS = ["pens", "ink", "glue", "tape", "pins", "files", "cards", "clips", "nails", "bolts", "keys", "mugs"]
UNITS = ["boxes", "bags", "rolls", "sets"]
TASK, QUESTION, OCR = "<s_cord-v2>", "<s_docvqa>", "<OCR>"
FIELDS = [f"<{end}s_{name}>" for name in ("nm", "cnt", "price", "question", "answer") for end in ("", "/")]
SPECIAL = ["<s>", "<pad>", "</s>", "<unk>", "<image>", "<sep/>", TASK, QUESTION, *FIELDS]
START, PAD, END = 0, 1, 2  # of BART
PLACES, WIDTH, HIDDEN = 96, 64, 128
IDS: dict[str, Any] = dict(bos_token_id=START, pad_token_id=PAD, eos_token_id=END, decoder_start_token_id=END)
DECODER: dict[str, Any] = IDS | dict(
    d_model=WIDTH, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=HIDDEN, dropout=0.0,
    init_std=0.1, max_position_embeddings=PLACES, tie_word_embeddings=False, forced_eos_token_id=None,
)  # fmt: skip


def tables(seed: int) -> Iterator[Table]:
    """Yield tables of one to four rows: item, count, unit, "at", price. The unit of all rows is the same."""
    rng = random.Random(seed)
    while True:
        unit, rows = rng.choice(UNITS), rng.randint(1, ROWS)
        yield [
            [rng.choice(ITEMS), str(rng.randint(2, 9)), unit, "at", str(rng.randint(2, 19))]
            for _ in range(rows)
        ]


def draw(table: Table) -> Image.Image:
    """Draw a table with PIL's default font, one word in each cell."""
    image = Image.new("RGB", SIZE[::-1], "white")
    pen = ImageDraw.Draw(image)
    for row, words in enumerate(table):
        for column, word in enumerate(words):
            pen.text((column * CELL_WIDTH, row * CELL_HEIGHT), word, fill="black")
    return image


def plain_text(table: Table) -> str:
    """The words of a table, a line for each row."""
    return "\n".join(map(" ".join, table))


def tagged_text(table: Table) -> str:
    """The fields of a table as Donut writes receipts."""
    return "<sep/>".join(
        f"<s_nm>{item}</s_nm><s_cnt>{number} {unit}</s_cnt><s_price>{at} {price}</s_price>"
        for item, number, unit, at, price in table
    )


def tokenizer_of_tables() -> PreTrainedTokenizerFast:
    """A byte-pair encoding of the words of tables, with the special tokens of the three models."""
    encoding = Tokenizer(models.BPE())
    encoding.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    encoding.decoder = decoders.ByteLevel()
    texts = [plain_text(table) for table in islice(tables(0), 400)]
    trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=SPECIAL, show_progress=False)
    encoding.train_from_iterator([*texts, *ITEMS, "what is the text in image?"], trainer)
    encoding.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", START), ("</s>", END)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=encoding, bos_token="<s>", pad_token="<pad>", eos_token="</s>", unk_token="<unk>",
        model_input_names=["input_ids", "attention_mask"], extra_special_tokens={"image_token": "<image>"},
    )  # fmt: skip


@dataclass(frozen=True)
class Reader:
    """A document reader.

    Attributes:
        model, processor: of transformers.
        prompt: text of the prompt.
        text_of: what the model shall write about a table.
        learning_rate: peak of the training.
    """

    model: PreTrainedModel
    processor: Processor
    prompt: str
    text_of: Callable[[Table], str]
    learning_rate: float = 3e-3

    def inputs(self, images: Sequence[Image.Image]) -> dict[str, Tensor]:
        """The arguments of `generate` for images [B], as in the examples of transformers."""
        if self.model.main_input_name == "input_ids":
            return dict(self.processor(images=images, text=[self.prompt] * len(images), return_tensors="pt"))
        inputs = {"pixel_values": self.processor(images=images, return_tensors="pt").pixel_values}
        if self.prompt:
            how: dict[str, Any] = {"add_special_tokens": False, "return_tensors": "pt"}
            ids = self.processor.tokenizer([self.prompt] * len(images), **how).input_ids
            inputs["decoder_input_ids"] = ids
        return inputs


def with_decoder(vision: Any, decoder: Any) -> PreTrainedModel:
    """An encoder of images and a decoder of text."""
    config = hf.VisionEncoderDecoderConfig.from_encoder_decoder_configs(vision, decoder)
    return _ready(hf.VisionEncoderDecoderModel(config))


def _ready(model: PreTrainedModel) -> PreTrainedModel:
    for name, weight in model.named_parameters():
        if "position" in name or name.endswith(("row_embeddings.weight", "column_embeddings.weight")):
            torch.nn.init.normal_(weight)  # large positions are learned sooner than where words are
    model.generation_config = hf.GenerationConfig(**IDS, max_length=PLACES)
    return model.eval()


def donut(tokenizer: PreTrainedTokenizerFast) -> Reader:
    """A Swin transformer and the decoder of an MBart."""
    vision = hf.DonutSwinConfig(
        image_size=SIZE, patch_size=CELL, embed_dim=WIDTH, depths=[2], num_heads=[4], window_size=4,
        mlp_ratio=2.0, drop_path_rate=0.0, initializer_range=0.1,
    )  # fmt: skip
    decoder = hf.MBartConfig(
        vocab_size=len(tokenizer), is_decoder=True, add_cross_attention=True, is_encoder_decoder=False,
        **DECODER,
    )  # fmt: skip
    images = hf.DonutImageProcessor(size=BOX, do_thumbnail=False)
    return Reader(with_decoder(vision, decoder), hf.DonutProcessor(images, tokenizer), TASK, tagged_text)


def trocr(tokenizer: PreTrainedTokenizerFast) -> Reader:
    """A vision transformer and a TrOCR, which needs no prompt."""
    vision = hf.ViTConfig(
        image_size=SIZE, patch_size=CELL, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=HIDDEN, initializer_range=0.1,
    )  # fmt: skip
    model = with_decoder(vision, hf.TrOCRConfig(vocab_size=len(tokenizer), **DECODER))
    return Reader(model, hf.TrOCRProcessor(hf.ViTImageProcessor(size=BOX), tokenizer), "", plain_text)


def florence(tokenizer: PreTrainedTokenizerFast) -> Reader:
    """A Florence-2, whose encoder reads the features of the image and the words of the task."""
    text = dict(
        model_type="bart", vocab_size=len(tokenizer), encoder_layers=1, encoder_attention_heads=4,
        encoder_ffn_dim=HIDDEN, **DECODER,
    )  # fmt: skip
    vision = dict(
        embed_dim=[32, WIDTH, WIDTH, WIDTH], num_heads=[2, 4, 4, 4], num_groups=[2, 4, 4, 4],
        depths=[1, 1, 1, 1], patch_stride=[4, 3, 1, 1], projection_dim=WIDTH, window_size=5,
        drop_path_rate=0.0, initializer_range=0.1,
    )  # fmt: skip
    config = hf.Florence2Config(
        text_config=text, vision_config=vision, image_token_id=tokenizer.image_token_id,
        tie_word_embeddings=False,
    )  # fmt: skip
    images = hf.CLIPImageProcessor(size=BOX, do_center_crop=False)
    images.image_seq_length = 1 + ROWS * 2 * COLUMNS  # the mean, and two for each cell
    model = _ready(hf.Florence2ForConditionalGeneration(config))
    return Reader(model, hf.Florence2Processor(images, tokenizer), OCR, plain_text, learning_rate=1e-3)


READERS: Mapping[str, Callable[[PreTrainedTokenizerFast], Reader]] = {
    each.__name__: each for each in (donut, trocr, florence)
}


def smaller(model: PreTrainedModel) -> PreTrainedModel:
    """Copy a model as its draft model: with one layer of the decoder, which alone can be trained."""
    draft = copy.deepcopy(model).requires_grad_(False)
    decoder = decoder_of(draft)
    decoder.layers = decoder.layers[:1].requires_grad_(True)
    return draft


def train(reader: Reader, model: PreTrainedModel, steps: int, seed: int, batch: int = 16) -> None:
    """Train a model on what the reader shall write, first about short tables."""
    tokenizer, stream = reader.processor.tokenizer, tables(seed)
    weights = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(weights, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, reader.learning_rate, total_steps=steps, pct_start=0.1
    )
    model.train()
    for step in (bar := trange(steps, desc=f"training {type(reader.processor).__name__}")):
        longest = 1 + min(ROWS - 1, 2 * ROWS * step // steps)
        some = [next(stream)[:longest] for _ in range(batch)]
        inputs = reader.inputs([draw(table) for table in some])
        prompt = inputs.pop("decoder_input_ids", torch.full((batch, 1), END))
        texts = [tokenizer(reader.text_of(table), add_special_tokens=False).input_ids for table in some]
        ends = pad_sequence([torch.tensor([*text, END]) for text in texts], True, PAD)
        tokens = torch.cat([prompt, ends], 1)
        logits = model(**inputs, decoder_input_ids=tokens[:, :-1]).logits[:, prompt.shape[1] - 1 :]
        loss = cross_entropy(logits.flatten(0, 1), ends.flatten(), ignore_index=PAD)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        schedule.step()
        bar.set_postfix(loss=f"{loss.item():.3f}")
    model.eval()


def until_end(tokens: list[int]) -> list[int]:
    """The tokens before the end token."""
    return tokens[: tokens.index(END)] if END in tokens else tokens


@torch.inference_mode()
def measure(reader: Reader, draft: PreTrainedModel, measured: Sequence[Table]) -> Iterator[str]:
    """Yield a line of results for each accelerator, on tables that training did not show."""
    import jiwer  # tests of the readers do without it

    images, decode = [draw(table) for table in measured], reader.processor.tokenizer.decode
    inputs = reader.inputs(images)
    begun = inputs["decoder_input_ids"].shape[1] if "decoder_input_ids" in inputs else 1
    expected = [until_end(row[begun:]) for row in reader.model.generate(**inputs).tolist()]
    texts = [reader.text_of(table) for table in measured]
    pipe = VisionLanguagePipeline(reader.model, reader.processor, accelerator="none")
    for name, drafter in (("none", None), ("copy", None), ("draft_model", draft)):
        options = {} if name == "none" else {"length": "fixed"}  # whatever the load of the machine
        pipe.set_accelerator(name, drafter=drafter, **options)
        output = pipe([reader.prompt] * len(images), images=images)
        new, rounds = [count - 1 for count in output.stats.new_tokens], output.stats.rounds
        ends = ratio_interval(new, rounds)
        interval = "" if ends is None else f" ({ends[0]:.2f} to {ends[1]:.2f})"
        tokens = list(map(until_end, output.tokens))
        same = sum(one == other for one, other in zip(tokens, expected, strict=True))
        written = list(map(decode, tokens))
        right = max(0.0, 1 - jiwer.cer(texts, written))
        yield (
            f"| {type(reader.processor).__name__} | {name} | {output.stats.acceptance_length:.2f}{interval} "
            f"| {same / len(images):.0%} | {right:.1%} |"
        )


def main(
    reader: Annotated[list[str], typer.Option(help="Readers to train.")] = list(READERS),  # noqa: B006
    steps: Annotated[int, typer.Option(min=1, help="Training steps of a reader.")] = 2000,
    draft_steps: Annotated[int, typer.Option(min=1, help="Training steps of its draft model.")] = 500,
    samples: Annotated[int, typer.Option(min=1, help="Tables to measure.")] = 40,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the weights and the tables.")] = 0,
) -> None:
    """Train the readers and print tokens per forward pass."""
    torch.set_num_threads(1)
    tokenizer = tokenizer_of_tables()
    lines = []
    for name in reader:
        torch.manual_seed(seed)
        made = READERS[name](tokenizer)
        train(made, made.model, steps, seed + 1)
        draft = smaller(made.model)
        train(made, draft, draft_steps, seed + 2)
        lines += measure(made, draft, list(islice(tables(seed + 3), samples)))
    print("| processor | accelerator | tokens per forward pass | as `generate` | characters right |")
    print("|---|---|---|---|---|", *lines, sep="\n")
    print(f"The models are toys, trained for {steps} steps on tables of {len(ITEMS)} words.")


if __name__ == "__main__":
    typer.run(main)
